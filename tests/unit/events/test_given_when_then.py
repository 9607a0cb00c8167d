"""Entities and reactions tried without a server, and workers whose waits cost no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fencepost.events import (
    App,
    AsyncContext,
    Context,
    DefinitionError,
    InvariantError,
    Recorded,
    Retry,
)
from fencepost.store.settings import SqliteSettings
from fencepost.testing.events import given, given_app, sim_app
from tests.unit.events.shop import Order, Placed, Reserved, Stock, make_app


def test_an_action_is_held_to_what_it_emits() -> None:
    done = given(Stock, Reserved(order="1", quantity=98)).when(Stock.reserve, "2", quantity=2)

    done.then(Reserved(order="2", quantity=2))
    assert done.state.left == 0
    with pytest.raises(AssertionError, match="expected"):
        done.then()
    with pytest.raises(AssertionError, match="not refused"):
        done.refused()


def test_a_refusal_is_held_to_its_reason() -> None:
    done = given(Stock, Reserved(order="1", quantity=99)).when(Stock.reserve, "2", quantity=2)

    done.refused("not enough left")
    with pytest.raises(AssertionError, match="not enough left"):
        done.then(Reserved(order="2", quantity=2))
    with pytest.raises(AssertionError):
        done.refused("another reason")


@pytest.mark.parametrize("is_async", [False, True])
def test_reactions_are_held_to_what_they_would_store(is_async: bool) -> None:
    app = make_app("shop", is_async=is_async)

    done = given_app(app, {"stock/tea": [Reserved(order="1", quantity=90)]}).when(
        "orders/2", Placed(sku="tea", quantity=10)
    )

    assert done.targets == ["stock/tea"]
    done.then({"stock/tea": [Reserved(order="orders/2", quantity=10)]})
    with pytest.raises(AssertionError, match="stored"):
        done.then({})


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reaction_that_fails_stores_nothing(is_async: bool) -> None:
    app = make_app("shop", is_async=is_async)

    done = given_app(app).when("orders/2", Placed(sku="tea", quantity=1_000))

    done.fails(InvariantError)
    with pytest.raises(AssertionError, match="raised"):
        done.then({})


def test_a_call_whose_await_was_forgotten_is_a_failure() -> None:
    app = App("shop", entities=[Order, Stock])

    @app.reaction(Placed)
    async def reserve(event: Recorded[Placed], context: AsyncContext) -> None:
        await context.load(Stock, event.data.sku)
        context.do(Stock.reserve, event.data.sku, order="1", quantity=1)  # type: ignore[unused-coroutine]

    done = given_app(app).when("orders/2", Placed(sku="tea", quantity=1))

    done.fails(DefinitionError)
    assert str(done.error) == "reserve calls context.do(...) without await"


def test_a_plain_function_that_returns_a_coroutine_is_a_failure() -> None:
    app = App("shop", entities=[Order, Stock])

    async def later(event: Recorded[Placed], context: AsyncContext) -> None:
        await context.append("notes", event.data)

    @app.reaction(Placed)
    def note(event: Recorded[Placed], context: AsyncContext) -> Any:
        return later(event, context)

    given_app(app).when("orders/2", Placed(sku="tea", quantity=1)).fails(DefinitionError)


async def test_a_worker_whose_retries_wait_for_days_settles_at_once(tmp_path: Path) -> None:
    """Time is the clock's: it jumps to each retry, and the waits are those of the backoff."""
    day_ms = 86_400_000
    app = App("patient", entities=[Order])
    tried: list[int] = []
    retry = Retry(3, "linear", base_ms=day_ms, cap_ms=7 * day_ms, jitter=0.0)

    @app.reaction(Placed, retry=retry)
    def send(event: Recorded[Placed], context: Context) -> None:
        tried.append(context.attempt)
        if context.attempt < 4:
            raise OSError("the post is closed")

    async with sim_app(app, SqliteSettings(folder=tmp_path)) as simulated:
        began_ms = simulated.clock.now_ms()
        await simulated.opened.do(Order.place, "7", sku="tea")
        await simulated.settle()

        assert tried == [1, 2, 3, 4]
        waited_ms = simulated.clock.now_ms() - began_ms
        assert (1 + 2 + 3) * day_ms <= waited_ms < (1 + 2 + 3) * day_ms + 60_000
