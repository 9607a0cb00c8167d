"""A shop on events: orders reserve stock, parcels are sent, and nothing of it happens twice.

Start a server (`fencepost serve`), then run `python examples/shop.py`, from anywhere. It starts two
workers as an operator would (`fencepost events run shop:app`), places orders, kills a worker in the
middle of its work, repairs an event that no carrier could handle, and closes the books of what is
done. FENCEPOST_URL names another server; the projection's database is `shop.db` in this folder.
"""

# %% What can happen in the shop
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    Context,
    Entity,
    Event,
    NonRetryableError,
    OpenApp,
    Period,
    Recorded,
    Retry,
    Transaction,
    action,
    applies,
    invariant,
)


class Placed(Event):
    sku: str
    quantity: int
    country: str


class Rejected(Event):
    reason: str


class Completed(Event):
    pass


class Delivered(Event):
    quantity: int


class Reserved(Event):
    order: str
    quantity: int
    country: str


class Sent(Event):
    order: str


class Served(Event):
    country: str


# %% The things that it happens to: what they are now, and what they may do
class Order(Entity, stream="orders/{id}"):
    status: str = "new"

    @action
    @invariant(lambda order: order.status == "new", "it was placed before")
    def place(self, sku: str, quantity: int, country: str) -> Placed:
        return Placed(sku=sku, quantity=quantity, country=country)

    @action
    def reject(self, reason: str) -> Rejected:
        return Rejected(reason=reason)

    @action
    def complete(self) -> Completed:
        return Completed()

    @applies
    def placed(self, _: Placed) -> Self:
        return self.replace(status="placed")

    @applies
    def ended(self, event: Rejected | Completed) -> Self:
        return self.replace(status=type(event).__name__.lower())


class Stock(Entity, stream="stock/{id}"):
    left: int = 0

    @action
    def deliver(self, quantity: int) -> Delivered:
        return Delivered(quantity=quantity)

    @action
    @invariant(lambda stock, quantity: stock.left >= quantity, "not enough left")
    def reserve(self, order: str, quantity: int, country: str) -> Reserved:
        return Reserved(order=order, quantity=quantity, country=country)

    @applies
    def delivered(self, event: Delivered) -> Self:
        return self.replace(left=self.left + event.quantity)

    @applies
    def reserved(self, event: Reserved) -> Self:
        return self.replace(left=self.left - event.quantity)


class Shipment(Entity, stream="shipments/{id}"):
    sent: int = 0

    @action
    def send(self, order: str) -> Sent:
        return Sent(order=order)

    @applies
    def was_sent(self, _: Sent) -> Self:
        return self.replace(sent=self.sent + 1)


class Carrier(Entity, stream="carriers/{id}"):
    countries: tuple[str, ...] = ()

    @action
    def serve(self, country: str) -> Served:
        return Served(country=country)

    @applies
    def served(self, event: Served) -> Self:
        return self.replace(countries=(*self.countries, event.country))


# %% What follows from it. Each reaction's events and the ack of its own are one commit.
app = App(
    "shop",
    entities=[Order, Stock, Shipment, Carrier],
    settings=AppSettings(lease_ms=2_000),  # so that the work of a dead worker waits for 2 s only
)


@app.reaction(Placed, to=lambda event: f"stock/{event.data.sku}")
def reserve(event: Recorded[Placed], context: Context) -> None:
    """One order after the other for each kind of goods, so that the last piece is sold once."""
    number, placed = number_of(event), event.data
    stock = context.load(Stock, placed.sku).state
    if stock.left < placed.quantity:
        context.do(Order.reject, number, reason="sold out")
        return
    context.do(
        Stock.reserve,
        placed.sku,
        order=number,
        quantity=placed.quantity,
        country=placed.country,
    )


@app.reaction(Reserved, to="parcels", retry=Retry(1, "fixed", base_ms=50, on_exhausted="park"))
def send(event: Recorded[Reserved], context: Context) -> None:
    """A parcel that cannot be sent is set aside for an operator; the others go on."""
    if event.data.country not in context.load(Carrier, "post").state.countries:
        raise NonRetryableError(f"the post does not go to {event.data.country}")
    context.do(Shipment.send, event.data.order, order=event.data.order)
    context.do(Order.complete, event.data.order)


@app.projection("sales", schema="create table {sales} (sku text, quantity integer, country text)")
def sold(event: Recorded[Reserved], db: Transaction) -> None:
    """Rows for the accountant; they and how far they are: one transaction of shop.db."""
    sku = event.stream.removeprefix("stock/")
    db.execute(
        "insert into {sales} values (?, ?, ?)", (sku, event.data.quantity, event.data.country)
    )


# %% Orders that are completed go into a file, and then out of the server
def archive(period: Period) -> None:
    names = " ".join(event.name for event in period.events)
    folder = Path("archive")
    folder.mkdir(exist_ok=True)
    (folder / period.key.replace("/", "-")).write_text(f"{names}\n")


app.books(Order, then="retire", final=Completed, archive=archive)


def number_of(event: Recorded[Placed]) -> str:
    return event.stream.removeprefix("orders/")


# %% A day in the shop
URL = os.environ.get("FENCEPOST_URL", "http://127.0.0.1:4437")
ORDERS = 60
DATABASE = "shop.db"


def start_worker(name: str) -> subprocess.Popen[bytes]:
    """A worker in a process of its own, once it runs."""
    command = [sys.executable, "-m", "fencepost", "events", "run", "shop:app", "--url", URL]
    worker = subprocess.Popen(
        [*command, "--worker", name, "--projections", DATABASE],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stderr=subprocess.PIPE,
    )
    assert worker.stderr is not None
    print(worker.stderr.readline().decode().strip())  # worker anna runs the reactions of shop
    return worker


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.1)


def main() -> None:
    workers = [start_worker("anna"), start_worker("ben")]
    try:
        with fencepost.connect(URL) as client, app.open(client, projections=DATABASE) as shop:
            trade(shop, workers)
    finally:
        for worker in workers:
            worker.terminate()
            worker.communicate()


def trade(shop: OpenApp, workers: list[subprocess.Popen[bytes]]) -> None:
    shop.do(Carrier.serve, "post", country="PT")
    shop.do(Stock.deliver, "tea", quantity=ORDERS)
    shop.do(Stock.deliver, "coffee", quantity=5)
    for number in range(ORDERS):
        sku = "coffee" if number % 6 == 0 else "tea"
        country = "AQ" if number == 1 else "PT"  # the post does not go to Antarctica yet
        shop.do(Order.place, str(number), sku=sku, quantity=1, country=country)
        if number == ORDERS // 2:
            workers[0].kill()  # its leases end, and ben goes on

    def ended() -> int:
        return sum(1 for _ in shop.query(names=["Completed", "Rejected"]))

    until(lambda: ended() == ORDERS - 1)
    print(f"{ORDERS - 1} orders are through, although a worker was killed")

    # An operator looks at what was set aside, repairs the cause, and gives it out again.
    [parked] = list(shop.group.parked())
    print("parked:", parked.error)
    shop.do(Carrier.serve, "post", country="AQ")
    shop.group.replay([(parked.target, parked.position)])
    until(lambda: ended() == ORDERS)

    # Every parcel was sent once, the stock is right, and so is the table.
    sent = [event.data.order for event in shop.query(names=["Sent"])]
    assert len(sent) == len(set(sent)) == ORDERS - 5
    assert (shop.load(Stock, "tea").state.left, shop.load(Stock, "coffee").state.left) == (10, 0)
    rows = "select sku, sum(quantity) from sales group by sku order by sku"
    until(lambda: shop.projections.read(rows) == [("coffee", 5), ("tea", 50)])
    print("sold:", shop.projections.read(rows))

    # The books of completed orders: archived, and gone once nothing waits for them any more.
    retired = 0
    while retired < ORDERS - 5:
        retired += sum(done.outcome == "retired" for done in shop.books.close_due())
    print(f"{retired} orders are in {Path('archive').absolute()}")


if __name__ == "__main__":
    main()
