"""Reactions on real servers: targets, order, one commit for effects and ack, retries, settling."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    AsyncContext,
    Breadcrumb,
    ConcurrencyError,
    Context,
    Entity,
    Event,
    NonRetryableError,
    Recorded,
    Retry,
    SettleTimeoutError,
    applies,
)
from tests.engines import engine as engine
from tests.integration.events_support import Opening, listed
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import NO_WAIT, Order, Placed, Reserved, Stock, make_app

_numbers = itertools.count()


def fresh(word: str) -> str:
    """A name that no other test of this server has."""
    return f"{word}{next(_numbers)}"


_begins = [-1]


@pytest.fixture(autouse=True)
def begin(server_process: ServerProcess) -> None:
    """Apps of a test begin behind what tests before it have stored."""
    with fencepost.connect(server_process.url) as client:
        _begins.append(client.log_head())


def here() -> AppSettings:
    """The settings of an app that sees the events of this test alone."""
    return AppSettings(start=_begins[-1])


def watching(app: App) -> list[Breadcrumb]:
    """Everything that the app reports from now on."""
    seen: list[Breadcrumb] = []
    for kind in ("committed", "claimed", "acked", "failed", "blocked", "parked", "lost", "settled"):
        app.hook(kind)(seen.append)
    return seen


def kinds(seen: list[Breadcrumb], *wanted: str) -> list[str]:
    return [crumb.kind for crumb in seen if crumb.kind in wanted]


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
        [parked] = await _parked(shop)
        assert "not enough left" in parked.error


def _is_async(opened: Any) -> bool:
    return type(opened).__name__ == "AsyncOpenApp"


async def _parked(shop: Any) -> list[Any]:
    """What is set aside, from either client."""
    found = shop.group.parked()
    return await listed(found) if _is_async(shop) else list(found)


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

        [parked] = await _parked(shop)
        assert (parked.position, parked.attempts) == (placed[3].events[0].position, 2)
        assert (await shop.load(Stock, tea)).state.left == 100 - 1 - 2 - 3 - 5

        await shop.group.replay(filter={})
        await shop.settle()

        [again] = await _parked(shop)
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
        assert len(await _parked(shop)) == 1


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


async def test_a_resolver_that_changes_between_correlation_and_match_strands_nothing(
    opening: Opening,
) -> None:
    name, handled = fresh("shop"), list[tuple[int, str]]()

    def version(prefix: str) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(Placed, to=lambda event: f"{prefix}/{event.data.sku}")
        def note(event: Recorded[Placed], context: Context) -> None:
            handled.append((event.data.quantity, context.target))

        return app

    old, new = version("old"), version("new")
    tea = fresh("tea")
    async with opening(old) as shop:
        for quantity in (1, 2, 3):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)
        await _correlate(shop)
    async with opening(new) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea, quantity=4)

        await shop.settle()

        assert sorted(handled) == [
            (1, f"old/{tea}"),
            (2, f"old/{tea}"),
            (3, f"old/{tea}"),
            (4, f"new/{tea}"),
        ]
        stats = await shop.group.stats()
        assert (stats["ready"], stats["blocked"]) == (0, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda n: f"old/{n % 3}", lambda n: f"new/{n % 4}"),
        (lambda n: f"shard/{n % 3}", lambda n: f"shard/{n % 4}"),
        pytest.param(
            lambda n: "early" if n < 6 else "late",
            lambda _: "late",
            marks=pytest.mark.xfail(
                strict=True,
                reason="a target that has gone past an event of another one leaves it (ADR 0024)",
            ),
        ),
    ],
    ids=["other names", "other shards", "all to one"],
)
async def test_a_changed_resolver_leaves_each_event_to_one_of_many_targets(
    opening: Opening, before: Callable[[int], str], after: Callable[[int], str]
) -> None:
    """Targets share a source, so each sees the events of the others, and must leave them alone."""
    name = fresh("shop")

    def version(resolver: Callable[[int], str]) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(Placed, to=lambda event: resolver(event.data.quantity))
        def note(event: Recorded[Placed], context: Context) -> None:
            context.append(f"{name}-notes", Reserved(order="", quantity=event.data.quantity))

        return app

    async with opening(version(before)) as shop:
        for quantity in range(12):
            await shop.do(Order.place, fresh("o"), sku=fresh("tea"), quantity=quantity)
        await _correlate(shop)
    async with opening(version(after)) as shop:
        await shop.settle()

        noted = await listed(shop.query(stream=f"{name}-notes"))
        assert sorted(event.data["quantity"] for event in noted) == list(range(12))
        assert (await shop.group.stats())["blocked"] == 0


@pytest.mark.xfail(
    strict=True,
    reason="a new target with older work handles what it meets, even if the old one has (ADR 0024)",
)
async def test_a_changed_resolver_handles_nothing_again_while_older_work_waits(
    opening: Opening,
) -> None:
    name = fresh("shop")

    def version(resolver: Callable[[int], str], *, fails: bool) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(Placed, to=lambda event: resolver(event.data.quantity))
        def note(event: Recorded[Placed], context: Context) -> None:
            if fails and context.target == "even":
                raise NonRetryableError("not yet")
            context.append(f"{name}-notes", Reserved(order="", quantity=event.data.quantity))

        return app

    async with opening(version(lambda n: ("even", "odd")[n % 2], fails=True)) as shop:
        for quantity in range(3):
            await shop.do(Order.place, fresh("o"), sku=fresh("tea"), quantity=quantity)
        await shop.settle()
    async with opening(version(lambda _: "even", fails=False)) as shop:
        await shop.group.unblock(filter={})
        await shop.settle()

        noted = await listed(shop.query(stream=f"{name}-notes"))
        assert sorted(event.data["quantity"] for event in noted) == [0, 1, 2]


async def _correlate(shop: Any) -> None:
    """Correlate as a worker does, and handle nothing."""
    from fencepost.events.reactions import Correlating, make_group

    app = shop.app
    with fencepost.connect(str(_url(shop))) as client:
        driver = client._driver
        await asyncio.to_thread(driver.run, make_group(driver.settings, app.name, _begins[-1]))
        correlating = Correlating(driver.settings, app.name, app.registry)
        await asyncio.to_thread(driver.run, correlating.to_head())


def _url(shop: Any) -> str:
    address = shop.deciding.settings.address
    return f"http://{address.host}:{address.port}"


async def test_a_worker_of_the_old_code_blocks_nothing_that_newer_code_can_handle(
    opening: Opening,
) -> None:
    """A deploy rolls: a newer program writes events that older workers meet."""
    name, folder = fresh("shop"), fresh("o")
    handled: list[str] = []

    class Shipped(Event):
        pass

    class Parcel(Entity, stream="orders/{id}"):
        sent: bool = False

        @applies
        def shipped(self, event: Placed | Shipped) -> Self:
            return self.replace(sent=isinstance(event, Shipped))

    def declared(entity: Any) -> App:
        app = App(name, entities=[entity], settings=here())

        @app.reaction(Placed, retry=Retry(1, "fixed", base_ms=0, on_exhausted="park"))
        def look(event: Recorded[Placed], context: Context) -> None:
            if event.stream == f"orders/{folder}":
                context.load(entity, folder)
                handled.append(entity.__name__)

        return app

    async with opening(declared(Order)) as old, opening(declared(Parcel)) as new:
        await new.commit(f"orders/{folder}", [Placed(sku="tea", quantity=1), Shipped()])
        with pytest.raises(SettleTimeoutError):
            await old.settle(timeout=0.5)
        await new.settle()

        assert handled == ["Parcel"]
        assert await _parked(new) == []


async def test_a_new_reaction_sees_what_comes_and_in_an_app_of_its_own_what_was(
    opening: Opening,
) -> None:
    """As docs/guides/reactions.md says of deploys: what old workers took is past for it."""
    name, folder = fresh("shop"), fresh("o")
    seen: dict[str, list[int]] = {"old": [], "new": [], "own": []}

    def declared(app_name: str, *reactions: str) -> App:
        app = App(app_name, entities=[Order], settings=here())
        for reaction in reactions:

            @app.reaction(Placed, name=reaction)
            def note(event: Recorded[Placed], context: Context, by: str = reaction) -> None:
                if event.stream == f"orders/{folder}":
                    seen[by].append(event.version)

        return app

    async with opening(declared(name, "old")) as old, opening(declared(name, "old", "new")) as new:
        await old.do(Order.place, folder, sku="a")
        await old.settle()
        await old.do(Order.place, folder, sku="b")
        await new.settle()
        await old.do(Order.place, folder, sku="c")
        await old.settle()  # in a deploy that rolls

    alone = App(f"{name}.own", entities=[Order])

    @alone.reaction(Placed)
    def own(event: Recorded[Placed], context: Context) -> None:
        if event.stream == f"orders/{folder}":
            seen["own"].append(event.version)

    async with opening(alone) as shop:
        await shop.settle()

    assert seen == {"old": [0, 1, 2], "new": [1], "own": [0, 1, 2]}


async def test_a_worker_runs_until_it_is_stopped(opening: Opening) -> None:
    app = make_app(fresh("shop"), settings=here())
    tea = fresh("tea")
    seen = watching(app)
    done = threading.Event()
    app.hook("acked")(lambda _crumb: done.set())
    async with opening(app) as shop:
        stopping: Any = asyncio.Event() if _is_async(shop) else threading.Event()
        working = asyncio.create_task(shop.work(worker="ann", stopping=stopping))

        await shop.do(Order.place, fresh("o"), sku=tea, quantity=2)
        assert await asyncio.to_thread(done.wait, 60)
        stopping.set()
        await asyncio.wait_for(working, 60)

        assert (await shop.load(Stock, tea)).state.left == 98
        assert {crumb.worker for crumb in seen if crumb.kind == "claimed"} == {"ann"}
        assert (await shop.group.stats())["leased"] == 0


async def test_a_lease_is_renewed_while_its_handler_works_and_while_its_worker_ends(
    opening: Opening, server_process: ServerProcess
) -> None:
    app = App(fresh("shop"), entities=[Order], settings=AppSettings(lease_ms=1_000))
    order = fresh("o")
    handled: list[int] = []
    began, gate = threading.Event(), threading.Event()

    @app.reaction(Placed)
    def wait(event: Recorded[Placed], context: Context) -> None:
        if event.stream == f"orders/{order}":
            began.set()
            assert gate.wait(60)
            handled.append(event.position)

    with fencepost.connect(server_process.url) as looking:

        def row() -> Any:
            [found] = looking.group(app.name).streams(match=f"orders/{order}")
            return found

        async with opening(app) as shop:
            await shop.do(Order.place, order, sku="tea")
            stopping: Any = asyncio.Event() if _is_async(shop) else threading.Event()
            working = asyncio.create_task(shop.work(worker="ann", stopping=stopping))
            try:
                assert await asyncio.to_thread(began.wait, 60)
                first_ms = (await asyncio.to_thread(row)).lease_until_ms
                stopping.set()
                # Longer than two leases: without a renewal another worker had taken it.
                async with asyncio.timeout(60):
                    while (await asyncio.to_thread(row)).lease_until_ms < first_ms + 2_000:
                        claimed = await asyncio.to_thread(looking.group(app.name).claim, "bob")
                        assert f"orders/{order}" not in [one.target for one in claimed.leases]
            finally:
                gate.set()
                await asyncio.wait_for(working, 60)
            ended = await asyncio.to_thread(row)

    assert len(handled) == 1
    assert (ended.state, ended.lost) == ("idle", 0)


async def test_an_async_handler_whose_lease_is_lost_is_cancelled(
    server_process: ServerProcess,
) -> None:
    app = App(fresh("shop"), entities=[Order], settings=AppSettings(lease_ms=1_000))
    order = fresh("o")
    runs: list[str] = []
    ended: list[str] = []

    @app.reaction(Placed)
    async def hang(event: Recorded[Placed], context: AsyncContext) -> None:
        if event.stream != f"orders/{order}":
            return
        runs.append(event.stream)
        if len(runs) > 1:
            return
        await shop.group.reset([event.stream])  # an operator takes the target away
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with fencepost.connect_async(server_process.url) as client, app.open(client) as shop:
        await shop.do(Order.place, order, sku="tea")

        await asyncio.wait_for(shop.settle(), 60)

    assert ended == ["cancelled"]


async def test_a_worker_serves_its_lane_alone_and_the_group_knows_priorities(
    opening: Opening,
) -> None:
    app = App(fresh("shop"), entities=[Order], settings=here())
    tea = fresh("tea")
    handled: list[str] = []
    done = threading.Event()

    def declare(name: str, lane: str, priority: int) -> None:
        @app.reaction(Placed, name=name, to=f"{tea}/{name}", lane=lane, priority=priority)
        def note(event: Recorded[Placed], context: Context) -> None:
            if event.data.sku == tea:
                handled.append(name)
                if len(handled) == 3:
                    done.set()

    declared = [
        ("later", "fast", 0),
        ("urgent", "fast", 9),
        ("soon", "fast", 5),
        ("slow", "slow", 99),
    ]
    for name, lane, priority in declared:
        declare(name, lane, priority)
    async with opening(app) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea)
        stopping: Any = asyncio.Event() if _is_async(shop) else threading.Event()
        working = asyncio.create_task(shop.work(lane="fast", streams=1, stopping=stopping))

        assert await asyncio.to_thread(done.wait, 60)
        stopping.set()
        await asyncio.wait_for(working, 60)

        assert sorted(handled) == ["later", "soon", "urgent"]
        found = shop.group.streams(match=f"{tea}/*")
        rows = await listed(found) if _is_async(shop) else list(found)
        assert {(row.target, row.lane, row.priority) for row in rows} == {
            (f"{tea}/{name}", lane, priority) for name, lane, priority in declared
        }
        assert [row.lane for row in rows if row.at < row.work_to] == ["slow"]
        await shop.settle()
        assert handled[3:] == ["slow"]


async def test_effects_of_a_lost_lease_are_refused(
    opening: Opening, server_process: ServerProcess
) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea, order = fresh("tea"), fresh("o")
    seen = watching(app)
    runs = 0

    @app.reaction(Placed)
    def reserve(event: Recorded[Placed], context: Context) -> None:
        nonlocal runs
        if event.stream != f"orders/{order}":
            return
        runs += 1
        context.do(Stock.reserve, event.data.sku, order=event.stream, quantity=1)
        if runs == 1:  # an operator takes the target away while its handler works
            operator.group(app.name).reset([event.stream])

    with fencepost.connect(server_process.url) as operator:
        async with opening(app) as shop:
            await shop.do(Order.place, order, sku=tea)
            seen.clear()

            await shop.settle()

            assert runs == 2
            assert (await shop.load(Stock, tea)).state.left == 99
    ours = [crumb for crumb in seen if crumb.target == f"orders/{order}"]
    assert kinds(ours, "claimed", "committed", "acked", "lost") == [
        "claimed",
        "lost",
        "claimed",
        "committed",
        "acked",
    ]
    assert seen[-1].kind == "settled"


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
