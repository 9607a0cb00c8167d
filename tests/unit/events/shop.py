"""A small shop for tests of events: orders, and the stock that they reserve."""

from __future__ import annotations

from typing import Self

from fencepost.events import (
    App,
    AppSettings,
    AsyncContext,
    Context,
    Entity,
    Event,
    Recorded,
    Retry,
    action,
    applies,
    invariant,
)

NO_WAIT = Retry(2, "fixed", base_ms=0, jitter=0.0)


class Placed(Event):
    sku: str
    quantity: int


class Reserved(Event):
    order: str
    quantity: int


class Order(Entity, stream="orders/{id}"):
    sku: str = ""
    placed_count: int = 0

    @action
    def place(self, sku: str, quantity: int = 1) -> Placed:
        return Placed(sku=sku, quantity=quantity)

    @action
    def place_twice(self, sku: str) -> list[Placed]:
        return [Placed(sku=sku, quantity=1), Placed(sku=sku, quantity=2)]

    @action
    def place_nothing(self) -> None:
        return None

    @applies
    def placed(self, event: Placed) -> Self:
        return self.replace(sku=event.sku, placed_count=self.placed_count + 1)


class Stock(Entity, stream="stock/{id}"):
    left: int = 100

    @action
    @invariant(lambda stock, quantity: stock.left >= quantity, "not enough left")
    def reserve(self, order: str, quantity: int) -> Reserved:
        return Reserved(order=order, quantity=quantity)

    @applies
    def reserved(self, event: Reserved) -> Self:
        return self.replace(left=self.left - event.quantity)


def make_app(
    name: str,
    *,
    is_async: bool = False,
    retry: Retry = NO_WAIT,
    settings: AppSettings | None = None,
) -> App:
    """An app whose orders reserve stock: one target for each kind of goods."""
    app = App(name, entities=[Order, Stock], settings=settings)
    reaction = app.reaction(Placed, to=lambda event: f"stock/{event.data.sku}", retry=retry)
    if is_async:

        @reaction
        async def reserve_async(event: Recorded[Placed], context: AsyncContext) -> None:
            await context.do(
                Stock.reserve, event.data.sku, order=event.stream, quantity=event.data.quantity
            )

    else:

        @reaction
        def reserve(event: Recorded[Placed], context: Context) -> None:
            context.do(
                Stock.reserve, event.data.sku, order=event.stream, quantity=event.data.quantity
            )

    return app
