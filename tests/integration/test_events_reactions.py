"""Reactions on real servers: targets, order, one commit for effects and ack, retries, settling."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import fencepost
from fencepost.events import (
    App,
    AsyncContext,
    ConcurrencyError,
    Context,
    NonRetryableError,
    Recorded,
    Retry,
    SettleTimeoutError,
)
from tests.engines import engine as engine
from tests.integration.events_support import (
    Opening,
    fresh,
    here,
    kinds,
    listed,
    parked_events,
    watching,
)
from tests.integration.events_support import begin as begin
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import NO_WAIT, Order, Placed, Reserved, Stock, make_app


async def test_a_reaction_acts_on_another_entity(opening: Opening) -> None:
    app = make_app(fresh("shop"), settings=here())
    tea = fresh("tea")
    async with opening(app) as shop:
        placed = await shop.using(correlation="c-1").do(
            Order.place, fresh("o"), sku=tea, quantity=2
        )

        await shop.settle()

        assert (await shop.load(Stock, tea)).state.left == 98
        [reserved] = await listed(shop.query(stream=f"stock/{tea}"))
        assert reserved.data == Reserved(order=placed.stream, quantity=2)
        assert (reserved.correlation, reserved.causation) == (
            "c-1",
            str(placed.events[0].position),
        )
        assert (await shop.settle()).leases == 0


async def test_async_handlers_work_as_well(
    server_process: ServerProcess,
) -> None:
    app = make_app(fresh("shop"), settings=here(), is_async=True)
    tea = fresh("tea")
    async with fencepost.connect_async(server_process.url) as client, app.open(client) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea, quantity=3)

        await shop.settle()

        assert (await shop.load(Stock, tea)).state.left == 97
    with fencepost.connect(server_process.url) as plain, app.open(plain) as shop:
        shop.do(Order.place, fresh("o"), sku=tea, quantity=3)  # a program that acts need not work
        with pytest.raises(TypeError, match="is async: work with an async client"):
            shop.settle()
        with pytest.raises(TypeError, match="is async: work with an async client"):
            shop.work()


async def test_events_of_many_streams_come_to_their_target_in_order(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    handled: dict[str, list[int]] = {}
    guard = threading.Lock()
    skus = [fresh("sku") for _ in range(3)]

    @app.reaction(Placed, to=lambda event: event.data.sku)
    def note(event: Recorded[Placed], context: Context) -> None:
        with guard:
            handled.setdefault(context.target, []).append(event.data.quantity)

    async with opening(app) as shop:
        for n in range(36):
            await shop.do(Order.place, fresh("o"), sku=skus[n % 3], quantity=n)

        await shop.settle(events=4, streams=2)

        assert handled == {sku: list(range(i, 36, 3)) for i, sku in enumerate(skus)}


async def test_a_target_may_be_a_stream_of_its_own_events_and_of_others(opening: Opening) -> None:
    app = make_app(fresh("shop"), settings=here())
    tea = fresh("tea")
    seen: list[tuple[str, str]] = []

    @app.reaction(Reserved)
    def note(event: Recorded[Reserved], context: Context) -> None:
        seen.append((context.target, event.stream))

    async with opening(app) as shop:
        for n in range(4):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=n + 1)
            await shop.settle()

        assert seen == [(f"stock/{tea}", f"stock/{tea}")] * 4
        assert (await shop.load(Stock, tea)).state.left == 90


async def test_the_second_event_of_a_lease_sees_what_the_first_one_did(opening: Opening) -> None:
    app = make_app(fresh("shop"), settings=here(), retry=Retry(0, on_exhausted="park"))
    tea = fresh("tea")
    async with opening(app) as shop:
        for quantity in (60, 30, 20, 10):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)

        await shop.settle()

        assert (await shop.load(Stock, tea)).state.left == 0  # 20 did not fit, 10 did
        [parked] = await parked_events(shop)
        assert "not enough left" in parked.error


async def test_a_failed_reaction_is_tried_again_and_then_blocks(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    seen = watching(app)
    attempts: list[int] = []

    @app.reaction(Placed, retry=NO_WAIT)
    def fail(event: Recorded[Placed], context: Context) -> None:
        context.do(Stock.reserve, event.data.sku, order="x", quantity=1)
        attempts.append(context.attempt)
        raise RuntimeError("boom")

    tea = fresh("tea")
    async with opening(app) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea)

        await shop.settle()

        assert attempts == [1, 2, 3]
        assert kinds(seen, "failed", "blocked", "acked") == ["failed", "failed", "blocked"]
        assert (await shop.load(Stock, tea)).state.left == 100
        assert await shop.group.unblock(filter={}) == 1
        await shop.settle()
        assert attempts == [1, 2, 3, 1, 2, 3]


async def test_what_fails_is_said_in_the_log_and_to_hooks(
    opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who has set up nothing sees why, where and what becomes of it."""
    app = App(fresh("shop"), entities=[Order], settings=here())
    seen = watching(app)
    order = fresh("o")

    @app.reaction(Placed, retry=Retry(1, "fixed", base_ms=0, on_exhausted="park"))
    def parks(event: Recorded[Placed], context: Context) -> None:
        if event.stream == f"orders/{order}" and event.data.sku == "tea":
            raise RuntimeError("no tea")
        if event.data.sku == "race":
            raise ConcurrencyError(event.stream, 1, 2, ())

    @app.reaction(Placed, to=lambda event: f"stock/{event.data.sku}")
    def blocks(event: Recorded[Placed], context: Context) -> None:
        if event.stream == f"orders/{order}" and event.data.sku == "tea":
            raise NonRetryableError("no stock")

    with caplog.at_level("WARNING", logger="fencepost.events"):
        async with opening(app) as shop:
            done = await shop.do(Order.place, order, sku="tea")
            await shop.do(Order.place, order, sku="race")

            await shop.settle()

    where = f"for orders/{order} at position {done.events[0].position}"
    said = [record.getMessage() for record in caplog.records if "position" in record.message]
    assert sorted(said) == [
        f"the reaction blocks failed {where}, the target stock/tea is blocked: "
        "NonRetryableError: no stock",
        f"the reaction parks failed {where}, it is parked: RuntimeError: no tea",
        f"the reaction parks failed {where}, it is tried again in 0.0 s: RuntimeError: no tea",
    ]
    told = {(crumb.kind, crumb.error) for crumb in seen}
    assert told >= {
        ("blocked", "NonRetryableError: no stock"),
        ("failed", "RuntimeError: no tea"),
        ("parked", "RuntimeError: no tea"),
    }


async def test_a_permanent_failure_is_not_tried_again(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order], settings=here())
    attempts: list[int] = []

    @app.reaction(Placed, retry=Retry(5, on_exhausted="park"))
    def fail(event: Recorded[Placed], context: Context) -> None:
        attempts.append(context.attempt)
        raise NonRetryableError("never")

    async with opening(app) as shop:
        order = fresh("o")
        await shop.do(Order.place, order, sku="tea")
        await shop.do(Order.place, order, sku="coffee")

        await shop.settle()

        assert attempts == [1, 1]  # the second event was not held up


async def test_an_event_that_fails_behind_others_keeps_their_effects(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea = fresh("tea")
    failing = True
    attempts: list[int] = []

    @app.reaction(Placed, to="one", retry=Retry(1, base_ms=0))
    def reserve(event: Recorded[Placed], context: Context) -> None:
        attempts.append(event.data.quantity)
        context.do(Stock.reserve, event.data.sku, order=event.stream, quantity=1)
        if failing and event.data.quantity == 2:
            raise RuntimeError("boom")

    async with opening(app) as shop:
        for quantity in (1, 2, 3):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)

        await shop.settle()

        assert (await shop.load(Stock, tea)).state.left == 99
        assert attempts == [1, 2, 2], "its first attempt counts, behind the other event"
        failing = False
        await shop.group.unblock(filter={})
        await shop.settle()
        assert (await shop.load(Stock, tea)).state.left == 97


async def test_an_effect_that_the_server_refuses_fails_its_own_event_alone(
    opening: Opening,
) -> None:
    """The events of a lease are one commit: what is refused must not be laid on another of them."""
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea = fresh("tea")
    retry = Retry(1, base_ms=0, on_exhausted="park")

    @app.reaction(Placed, to="one", retry=retry)
    def reserve(event: Recorded[Placed], context: Context) -> None:
        context.do(Stock.reserve, event.data.sku, order=event.stream, quantity=event.data.quantity)
        if event.data.quantity == 4:
            context.append("no//stream", Reserved(order="", quantity=0))

    async with opening(app) as shop:
        placed = [
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)
            for quantity in (1, 2, 3, 4, 5)
        ]
        await shop.settle()

        [parked] = await parked_events(shop)
        assert (parked.position, parked.attempts) == (placed[3].events[0].position, 2)
        assert (await shop.load(Stock, tea)).state.left == 100 - 1 - 2 - 3 - 5

        await shop.group.replay(filter={})
        await shop.settle()

        [again] = await parked_events(shop)
        assert again.position == parked.position, "the worker lives, and the event is parked again"
        assert (await shop.load(Stock, tea)).state.left == 100 - 1 - 2 - 3 - 5


async def test_attempts_are_counted_for_each_event(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    attempts: list[tuple[int, int]] = []

    @app.reaction(Placed, to="one", retry=Retry(5, base_ms=0))
    def reserve(event: Recorded[Placed], context: Context) -> None:
        attempts.append((event.data.quantity, context.attempt))
        if event.data.quantity == 2 and context.attempt < 3:
            raise RuntimeError("boom")

    async with opening(app) as shop:
        for quantity in (1, 2, 3):
            await shop.do(Order.place, fresh("o"), sku=fresh("tea"), quantity=quantity)

        await shop.settle()

        assert attempts == [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]


async def test_a_parked_event_is_replayed_with_its_effects(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea = fresh("tea")
    broken = True

    @app.reaction(Placed, to="one", retry=Retry(0, on_exhausted="park"))
    def reserve(event: Recorded[Placed], context: Context) -> None:
        if broken and event.data.quantity == 2:
            raise RuntimeError("boom")
        context.do(Stock.reserve, event.data.sku, order=event.stream, quantity=event.data.quantity)

    async with opening(app) as shop:
        for quantity in (1, 2, 3):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)
        await shop.settle()
        assert (await shop.load(Stock, tea)).state.left == 96

        broken = False
        assert await shop.group.replay(filter={}) == 1
        await shop.settle()

        assert (await shop.load(Stock, tea)).state.left == 94
        assert (await shop.group.stats())["parked"] == 0


async def test_a_replay_that_fails_leaves_nothing_for_the_next_one_to_see(
    opening: Opening,
) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea = fresh("tea")
    fails = {1, 2}
    seen: list[int] = []

    @app.reaction(Placed, to="till", retry=Retry(0, on_exhausted="park"))
    def reserve(event: Recorded[Placed], context: Context) -> None:
        if event.data.sku == tea:
            seen.append(context.load(Stock, tea).state.left)
            context.do(Stock.reserve, tea, order=event.stream, quantity=event.data.quantity)
            if event.data.quantity in fails:
                raise RuntimeError("boom")

    async with opening(app) as shop:
        for quantity in (1, 2):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)
        await shop.settle()
        fails.remove(2)
        seen.clear()
        await shop.group.replay(filter={})
        await shop.settle()

        assert seen == [100, 100]
        assert (await shop.load(Stock, tea)).state.left == 98
        assert len(await parked_events(shop)) == 1


async def test_long_reactions_are_stored_before_their_lease_is_through(opening: Opening) -> None:
    """So a worker that dies has little to do again."""
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    seen = watching(app)
    order, tea = fresh("o"), fresh("tea")

    @app.reaction(Placed)
    def slow(event: Recorded[Placed], context: Context) -> None:
        if event.data.sku == tea:
            context.do(Stock.reserve, tea, order=event.stream, quantity=1)
            time.sleep(0.15)

    async with opening(app) as shop:
        await shop.commit(f"orders/{order}", [Placed(sku=tea, quantity=1) for _ in range(5)])
        seen.clear()

        await shop.settle()

        stored = [crumb.events for crumb in seen if crumb.kind == "committed"]
        assert sum(stored) == 5
        assert len(stored) > 1


async def test_workers_that_note_targets_at_once_are_not_in_each_others_way(
    opening: Opening,
) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    folder, tea = fresh("o"), fresh("tea")

    @app.reaction(Placed, to=lambda event: f"stock/{event.data.sku}")
    def reserve(event: Recorded[Placed], context: Context) -> None:
        if event.data.sku.startswith(tea):
            context.do(Stock.reserve, event.data.sku, order=event.stream, quantity=1)

    async with opening(app) as shop:
        for number in range(4):
            events = [Placed(sku=f"{tea}-{n}", quantity=1) for n in range(100)]
            await shop.commit(f"orders/{folder}-{number}", events)

        await asyncio.gather(*(shop.settle() for _ in range(6)))

        effects = await listed(shop.query(stream=f"stock/{tea}-*"))
        assert len(effects) == 400
        assert len({(event.stream, event.causation) for event in effects}) == 400


async def test_settle_waits_for_retries_and_gives_up_in_time(opening: Opening) -> None:
    app = App(fresh("shop"), entities=[Order], settings=here())
    attempts: list[int] = []

    @app.reaction(Placed, retry=Retry(5, "fixed", base_ms=50, jitter=0.0))
    def fail(event: Recorded[Placed], context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) < 3:
            raise RuntimeError("not yet")

    async with opening(app) as shop:
        await shop.do(Order.place, fresh("o"), sku="tea")

        await shop.settle()

        assert attempts == [1, 2, 3]

    slow = App(fresh("shop"), entities=[Order], settings=here())

    @slow.reaction(Placed, retry=Retry(5, "fixed", base_ms=60_000))
    def fail_slowly(event: Recorded[Placed], context: Context) -> None:
        raise RuntimeError("not yet")

    async with opening(slow) as shop:
        with pytest.raises(SettleTimeoutError):
            await shop.settle(timeout=0.1)


async def test_a_chain_of_reactions_is_settled_and_keeps_its_correlation(opening: Opening) -> None:
    app = make_app(fresh("shop"), settings=here())
    tea = fresh("tea")

    @app.reaction(Reserved, to="reports")
    def report(event: Recorded[Reserved], context: Context) -> None:
        context.append(f"reports/{tea}", Placed(sku="report", quantity=event.data.quantity))

    async with opening(app) as shop:
        await shop.using(correlation=tea).do(Order.place, fresh("o"), sku=tea, quantity=2)

        await shop.settle()

        chain = await listed(shop.query(correlation=tea))
        assert [event.stream.split("/")[0] for event in chain] == ["orders", "stock", "reports"]
        assert [event.causation for event in chain][1:] == [
            str(event.position) for event in chain[:2]
        ]


async def test_an_unreadable_event_stops_its_own_stream_alone(
    opening: Opening, server_process: ServerProcess
) -> None:
    app = make_app(fresh("shop"), settings=here(), retry=Retry(0))
    tea, bad = fresh("tea"), fresh("o")
    seen = watching(app)
    with fencepost.connect(server_process.url) as client:
        odd = {"name": "Placed", "data": {"sku": 4}, "schema": 1}
        client.stream(f"orders/{bad}").append(odd, auto_create=True)
    async with opening(app) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea, quantity=2)

        await shop.settle()

        assert (await shop.load(Stock, tea)).state.left == 98
        blocked = [crumb.target for crumb in seen if crumb.kind == "blocked"]
        assert f"orders/{bad}" in blocked


async def test_what_a_plain_do_inside_a_reaction_stores_carries_the_correlation(
    server_process: ServerProcess,
) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea = fresh("tea")

    @app.reaction(Placed)
    async def reserve(event: Recorded[Placed], context: AsyncContext) -> None:
        await shop.do(Stock.reserve, tea, order=context.effect_key, quantity=1)

    async with fencepost.connect_async(server_process.url) as client, app.open(client) as shop:
        placed = await shop.do(Order.place, fresh("o"), sku=tea)
        await shop.settle()

        [event] = await listed(shop.query(stream=f"stock/{tea}"))
        assert event.correlation == placed.events[0].correlation
        assert event.causation == str(placed.events[0].position)
        assert event.data.order == f"{app.name}/{placed.stream}/{placed.events[0].position}"
