"""The events of `fencepost demo`: orders take goods from a shelf while a worker of them is killed.

examples/shop.py is a whole shop. Here is as much as fits into a few seconds: each order is answered
by a reaction whose event and ack are one commit, so the shelf ends where it must.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Self

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    Context,
    Entity,
    Event,
    Recorded,
    action,
    applies,
)

ORDERS = 120
SECONDS_MAX = 60.0
WORKER = "runs the reactions"


class Ordered(Event):
    goods: str


class Taken(Event):
    order: str


class Order(Entity, stream="demo-shop/orders/{id}"):
    goods: str = ""

    @action
    def place(self, goods: str) -> Ordered:
        return Ordered(goods=goods)


class Shelf(Entity, stream="demo-shop/shelves/{id}"):
    taken: int = 0

    @action
    def take(self, order: str) -> Taken:
        return Taken(order=order)

    @applies
    def was_taken(self, _: Taken) -> Self:
        return self.replace(taken=self.taken + 1)


app = App("demo-shop", entities=[Order, Shelf], settings=AppSettings(lease_ms=1_000))


@app.reaction(Ordered, to=lambda event: f"shelves/{event.data.goods}")
def take(event: Recorded[Ordered], context: Context) -> None:
    context.do(Shelf.take, event.data.goods, order=event.stream)


class Sold(NamedTuple):
    """What came of the orders."""

    taken: int
    different: int


def sell(url: str, log: Path) -> Sold:
    """Place orders while two workers answer them, one of which is killed half-way."""
    with log.open("a") as errors:
        workers = [_start(url, name, errors.fileno()) for name in ("first", "second")]
        try:
            with fencepost.connect(url) as client, app.open(client) as shop:
                for number in range(ORDERS):
                    shop.do(Order.place, str(number), goods=f"goods-{number % 3}")
                    if number == ORDERS // 2:
                        _wait_until_it_works(log)
                        workers[0].kill()
                ends = time.monotonic() + SECONDS_MAX
                while (
                    len(taken := [one.data.order for one in shop.query(names=["Taken"])]) < ORDERS
                ):
                    if time.monotonic() > ends:
                        break
                    time.sleep(0.1)
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()
    return Sold(len(taken), len(set(taken)))


def _start(url: str, name: str, errors: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fencepost", "events", "run", "fencepost.cli.demo_shop:app"]
    return subprocess.Popen([*command, "--url", url, "--worker", name], stderr=errors)


def _wait_until_it_works(log: Path) -> None:
    ends = time.monotonic() + SECONDS_MAX
    while f"worker first {WORKER}" not in log.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
