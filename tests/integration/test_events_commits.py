"""Commits and queries of events: expected versions, races, correlation, selections."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest

import fencepost
from fencepost.client.errors import InvalidArgumentError
from fencepost.events import (
    NO_STREAM,
    STREAM_EXISTS,
    App,
    AppSettings,
    ConcurrencyError,
    DefinitionError,
    Entity,
    Event,
    EventInvalidError,
    InvariantError,
    UnknownEventError,
    action,
    applies,
)
from tests.engines import engine as engine
from tests.integration.events_support import Opening, listed
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import Order, Placed, Reserved, Stock, make_app

_numbers = itertools.count()


def fresh(word: str) -> str:
    """A name that no other test of this server has."""
    return f"{word}{next(_numbers)}"


def tea(quantity: int = 1) -> Placed:
    return Placed(sku="tea", quantity=quantity)


@pytest.fixture
def app() -> App:
    return make_app(fresh("shop"))


async def test_committed_events_say_where_they_lie(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("orders/")

        stored = await shop.commit(path, [tea(1), tea(2)])

        assert [event.version for event in stored] == [0, 1]
        assert stored[1].position == stored[0].position + 1
        found = await listed(shop.query(stream=path))
        assert [(e.position, e.version, e.data) for e in found] == [
            (e.position, e.version, e.data) for e in stored
        ]


async def test_the_four_expectations(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("orders/")

        with pytest.raises(ConcurrencyError) as missing:
            await shop.commit(path, [tea()], STREAM_EXISTS)
        with pytest.raises(ConcurrencyError):
            await shop.commit(path, [tea()], 0)
        await shop.commit(path, [tea()], NO_STREAM)
        await shop.commit(path, [tea()], STREAM_EXISTS)
        await shop.commit(path, [tea()], 1)
        await shop.commit(path, [tea()])
        with pytest.raises(ConcurrencyError) as again:
            await shop.commit(path, [tea(9)], NO_STREAM)
        with pytest.raises(ConcurrencyError) as stale:
            await shop.commit(path, [tea(9)], 1)

        assert (missing.value.stream, missing.value.last_version) == (path, -1)
        assert (again.value.expected_version, again.value.last_version) == ("no_stream", 3)
        assert (stale.value.expected_version, stale.value.last_version) == (1, 3)
        assert stale.value.events == (tea(9),)
        assert [e.version for e in await listed(shop.query(stream=path))] == [0, 1, 2, 3]


async def test_what_is_no_event_action_or_entity_is_named(app: App, opening: Opening) -> None:
    placed = Placed(sku="tea", quantity=1)
    async with opening(app) as shop:
        with pytest.raises(InvalidArgumentError, match=r"a list of events: \[event\]"):
            await shop.commit("orders/none", placed)
        with pytest.raises(InvalidArgumentError, match="is no event"):
            await shop.commit("orders/none", [{"name": "Placed"}])
        with pytest.raises(DefinitionError, match=r"Order\.placed is no @action"):
            await shop.do(Order.placed, "none", placed)
        with pytest.raises(DefinitionError, match="is no class of entities"):
            await shop.load("orders", "none")
        with pytest.raises(InvalidArgumentError, match="needs its zone"):
            await shop.load(Order, "none", as_of=datetime.now())


@pytest.mark.parametrize("expected", ["no_stream", True, -2, 1.5])
async def test_what_no_stream_can_be_expected_to_be_is_refused(
    app: App, opening: Opening, expected: Any
) -> None:
    async with opening(app) as shop:
        with pytest.raises(InvalidArgumentError, match="expected is ANY, NO_STREAM"):
            await shop.commit("orders/none", [tea()], expected)
        with pytest.raises(InvalidArgumentError, match="expected is a version"):
            shop.using(expected=expected)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"names": "Placed"}, "names is a list"),
        ({"names": Placed}, "names is a list"),
        ({"stream": Order}, "stream is a path"),
        ({"after": datetime.now(UTC)}, "after is a position"),
        ({"before": "7"}, "before is a position"),
        ({"created_after": "2026-01-01"}, "a time is a datetime"),
    ],
)
async def test_what_a_query_does_not_take_is_named(
    app: App, opening: Opening, named: Any, said: str
) -> None:
    async with opening(app) as shop:
        with pytest.raises(InvalidArgumentError, match=said):
            await asyncio.to_thread(shop.query, **named)
        with pytest.raises(InvalidArgumentError, match="a time is a datetime"):
            await shop.load(Order, "none", as_of="2026-01-01")


class Hidden(Event):
    pass


class Odd(Entity, stream="odd/{id}"):
    """Decides what would keep it from being loaded."""

    @action
    def hide(self):  # type: ignore[no-untyped-def]
        return Hidden()

    @action
    def place(self) -> Placed:
        return tea()

    @applies
    def placed(self, event: Placed) -> Self:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("action", ["hide", "place"])
async def test_an_event_with_which_its_entity_cannot_be_loaded_is_not_stored(
    opening: Opening, action: str
) -> None:
    """One whose class the app does not know, or whose fold fails."""
    name = fresh("o")
    async with opening(App(fresh("odd"), entities=[Odd])) as odd:
        with pytest.raises(DefinitionError):
            await odd.do(getattr(Odd, action), name)
        with pytest.raises(DefinitionError, match="the app does not know"):
            await odd.commit(f"odd/{name}", [Hidden()])

        assert (await odd.load(Odd, name)).version == -1


async def test_queries_take_the_class_of_an_event_for_its_name(app: App, opening: Opening) -> None:
    path = fresh("by-class")
    async with opening(app) as shop:
        stored = await shop.commit(path, [Placed(sku="tea", quantity=1)])

        found = await listed(shop.query(stream=path, names=[Placed]))

        assert [event.position for event in found] == [stored[0].position]
        assert await listed(shop.query(stream=path, names=[Reserved])) == []


async def test_no_events_are_no_request(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("orders/")

        assert await shop.commit(path, [], STREAM_EXISTS) == []
        assert await listed(shop.query(stream=path)) == []


async def test_of_sixteen_first_writes_one_wins(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("orders/")

        outcomes = await asyncio.gather(
            *(shop.commit(path, [tea(n)], NO_STREAM) for n in range(16)), return_exceptions=True
        )

        lost = [found for found in outcomes if isinstance(found, ConcurrencyError)]
        won = [found for found in outcomes if isinstance(found, list)]
        assert (len(won), len(lost)) == (1, 15)
        assert [e.data for e in await listed(shop.query(stream=path))] == [won[0][0].data]


@pytest.mark.parametrize("path", ["orders/\0", "/", "orders//x"])
async def test_a_bad_name_of_a_stream_is_refused(app: App, opening: Opening, path: str) -> None:
    async with opening(app) as shop:
        with pytest.raises(fencepost.FencepostError):
            await shop.commit(path, [tea()])


async def test_an_invalid_event_is_not_stored(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("orders/")

        with pytest.raises(EventInvalidError):
            await shop.commit(path, [tea(), Placed(sku=3, quantity=1)])  # type: ignore[arg-type]

        assert await listed(shop.query(stream=path)) == []


async def test_queries_select_by_stream_glob_name_correlation_and_direction(
    app: App, opening: Opening
) -> None:
    async with opening(app) as shop:
        folder = fresh("q")
        one = await shop.commit(f"{folder}/a", [tea(1), tea(2)], correlation=f"{folder}-c")
        two = await shop.commit(f"{folder}/b", [Reserved(order="o", quantity=3)])
        three = await shop.commit(f"{folder}/a", [tea(4)], correlation=f"{folder}-c", causation="x")
        everything = [*one, *two, *three]

        def positions(found: list[Any]) -> list[int]:
            return [event.position for event in found]

        glob = f"{folder}/*"
        query = shop.query
        assert positions(await listed(query(stream=glob))) == positions(everything)
        assert positions(await listed(query(stream=glob, backward=True))) == positions(
            everything[::-1]
        )
        assert positions(await listed(query(stream=f"{folder}/b"))) == positions(two)
        assert positions(await listed(query(stream=glob, names=["Reserved"]))) == positions(two)
        assert positions(await listed(query(correlation=f"{folder}-c"))) == positions(
            [*one, *three]
        )
        assert positions(await listed(query(stream=glob, limit=2))) == positions(one)
        assert positions(await listed(query(stream=glob, backward=True, limit=1))) == positions(
            three
        )
        after, before = one[0].position, three[0].position
        assert positions(await listed(query(stream=glob, after=after, before=before))) == positions(
            [one[1], *two]
        )
        found = await listed(query(stream=f"{folder}/a", names=["Placed"], backward=True, limit=1))
        assert (found[0].correlation, found[0].causation) == (f"{folder}-c", "x")


async def test_a_query_ends_at_its_limit_behind_many_pages(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("many")
        await shop.commit(path, [tea(n) for n in range(2_500)])

        for backward, expected in ((False, range(1_500)), (True, range(2_499, 999, -1))):
            query = shop.query(stream=path, limit=1_500, backward=backward)
            found = [event.version for event in await listed(query)]

            assert found == list(expected)


async def test_queries_select_by_time(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        path = fresh("orders/")
        await shop.commit(path, [tea(1)])
        [event] = await listed(shop.query(stream=path))
        assert event.created is not None
        tick = timedelta(milliseconds=1)

        async def found(**times: datetime) -> int:
            return len(await listed(shop.query(stream=path, **times)))

        assert await found(created_after=event.created) == 1
        assert await found(created_before=event.created + tick) == 1
        assert await found(created_before=event.created) == 0
        assert await found(created_after=datetime.now(UTC) + timedelta(hours=1)) == 0


async def test_an_action_commits_at_the_version_that_it_decided_on(
    app: App, opening: Opening
) -> None:
    async with opening(app) as shop:
        name = fresh("o")

        first = await shop.do(Order.place, name, sku="tea", quantity=2)
        second = await shop.do(Order.place_twice, name, "coffee")
        nothing = await shop.do(Order.place_nothing, name)

        assert (first.version, second.version, nothing.version) == (0, 2, 2)
        assert [event.data.sku for event in second.events] == ["coffee", "coffee"]
        assert nothing.events == []
        loaded = await shop.load(Order, name)
        assert (loaded.state.sku, loaded.state.placed_count, loaded.version) == ("coffee", 3, 2)


async def test_a_refused_action_is_decided_on_the_state_of_today(
    app: App, opening: Opening
) -> None:
    async with opening(app) as one, opening(app) as other:
        name = fresh("tea")
        await one.do(Stock.reserve, name, order="o", quantity=90)
        await other.commit(f"stock/{name}", [Reserved(order="back", quantity=-50)])

        await one.do(Stock.reserve, name, order="p", quantity=20)  # the cached state has 10 left

        with pytest.raises(InvariantError, match="not enough"):
            await one.do(Stock.reserve, name, order="q", quantity=200)
        assert (await other.load(Stock, name)).state.left == 40


async def test_a_conflict_is_decided_again_unless_the_version_is_pinned(
    app: App, opening: Opening
) -> None:
    async with opening(app) as one, opening(app) as other:
        name = fresh("o")
        await one.do(Order.place, name, sku="tea")
        await other.do(Order.place, name, sku="coffee")

        again = await one.do(Order.place, name, sku="cocoa")  # its cache is at version 0

        assert again.version == 2
        with pytest.raises(ConcurrencyError) as stale:
            await one.using(expected=1).do(Order.place, name, sku="mate")
        assert (stale.value.expected_version, stale.value.last_version) == (1, 2)
        assert (await one.using(expected=2).do(Order.place, name, sku="mate")).version == 3
        with pytest.raises(ConcurrencyError):
            await other.using(expected=-1).do(Order.place, name, sku="mate")


async def test_conflicts_are_decided_again_so_often_and_then_are_the_callers(
    opening: Opening, server_process: ServerProcess
) -> None:
    """The state that lost is dropped: the next call decides once, on what the other one wrote."""
    rivals = 100
    decided: list[int] = []

    class Contended(Entity, stream="contended/{id}"):
        count: int = 0

        @action
        def place(self, name: str) -> Placed:
            decided.append(self.count)
            if len(decided) <= rivals:
                rival.stream(f"contended/{name}").append(
                    {"name": "Placed", "data": {"sku": "tea", "quantity": 1}}
                )
            return tea()

        @applies
        def placed(self, event: Placed) -> Self:
            return self.replace(count=self.count + 1)

    app = App(fresh("app"), entities=[Contended], settings=AppSettings(conflicts_max=3))
    name = fresh("o")
    with fencepost.connect(server_process.url) as rival:
        async with opening(app) as shop:
            await shop.commit(f"contended/{name}", [tea()])
            with pytest.raises(ConcurrencyError) as lost:
                await shop.do(Contended.place, name, name=name)
            assert decided == [1, 2, 3, 4]
            assert (lost.value.last_version, lost.value.events) == (4, (tea(),))

            rivals = 0
            done = await shop.do(Contended.place, name, name=name)

            assert (decided, done.version) == ([1, 2, 3, 4, 5], 5)


async def test_many_writers_of_one_entity_lose_nothing(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        name = fresh("tea")

        await asyncio.gather(
            *(shop.do(Stock.reserve, name, order=str(n), quantity=1) for n in range(20))
        )

        loaded = await shop.load(Stock, name)
        assert (loaded.state.left, loaded.version) == (80, 19)


async def test_events_carry_the_correlation_that_was_given(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        name = fresh("o")

        with_options = shop.using(correlation="abc", causation="click", meta={"user": "ann"})
        done = await with_options.do(Order.place, name, sku="tea")
        alone = await shop.do(Order.place, name, sku="tea")

        [event, other] = await listed(shop.query(stream=done.stream))
        assert (event.correlation, event.causation, event.meta["user"]) == ("abc", "click", "ann")
        assert other.correlation == alone.events[0].correlation
        assert len(other.correlation) == 32


async def test_an_entity_is_loaded_as_it_was(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        name = fresh("o")
        first = await shop.do(Order.place, name, sku="tea")
        await shop.do(Order.place, name, sku="coffee")
        [stored, _] = await listed(shop.query(stream=first.stream))

        then = await shop.load(Order, name, as_of=first.events[0].position)
        before = await shop.load(Order, name, as_of=stored.created)
        now = await shop.load(Order, name, as_of=datetime.now(UTC) + timedelta(hours=1))

        assert (then.state.sku, then.version) == ("tea", 0)
        assert (before.state.sku, before.version) == ("", -1)
        assert (now.state.sku, now.version) == ("coffee", 1)


async def test_an_entity_that_never_was_has_its_defaults(app: App, opening: Opening) -> None:
    async with opening(app) as shop:
        loaded = await shop.load(Order, fresh("o"))

        assert (loaded.state, loaded.version) == (Order(), -1)


async def test_a_stream_with_a_strange_event_says_where_it_lies(
    app: App, opening: Opening, server_process: ServerProcess
) -> None:
    unknown, invalid = fresh("o"), fresh("o")
    with fencepost.connect(server_process.url) as client:
        client.stream(f"orders/{unknown}").append({"name": "Odd", "data": {}}, auto_create=True)
        bad = {"name": "Placed", "data": {"sku": 4}, "schema": 1}
        client.stream(f"orders/{invalid}").append(bad, auto_create=True)

    async with opening(app) as shop:
        with pytest.raises(UnknownEventError, match="unknown event 'Odd'"):
            await shop.load(Order, unknown)
        with pytest.raises(EventInvalidError, match="version 0"):
            await shop.do(Order.place, invalid, sku="tea")
        with pytest.raises(EventInvalidError, match="position"):
            await listed(shop.query(stream=f"orders/{invalid}"))
