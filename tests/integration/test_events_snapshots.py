"""Snapshots and the cache: shortcuts that change no result and delay no action."""

from __future__ import annotations

import itertools
from typing import Any, Self

import httpx
import pytest

import fencepost
from fencepost.events import App, AppSettings, Entity, Event, action, applies
from fencepost.events.loading import Loaded, snapshot_path
from tests.engines import engine as engine
from tests.integration.events_support import Opening
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import Order, Placed

_numbers = itertools.count()


class Added(Event):
    amount: int


class Counter(Entity, stream="counters/{id}"):
    total: int = 0

    @action
    def add(self, amount: int) -> Added:
        return Added(amount=amount)

    @applies
    def added(self, event: Added) -> Self:
        return self.replace(total=self.total + event.amount)


class CounterOfOtherFold(Entity, stream="counters/{id}", snapshot=2):
    doubled: int = 0

    @applies
    def added(self, event: Added) -> Self:
        return self.replace(doubled=self.doubled + 2 * event.amount)


def counter_of_next_fold() -> type[Entity]:
    """The same class in the next program, whose fold has changed."""

    class Counter(Entity, stream="counters/{id}", snapshot=2):
        total: int = 0

        @applies
        def added(self, event: Added) -> Self:
            return self.replace(total=self.total + 4 * event.amount)

    return Counter


def counting(kind: type[Entity] = Counter, **settings: Any) -> App:
    return App(f"counting{next(_numbers)}", entities=[kind], settings=AppSettings(**settings))


def fresh() -> str:
    return f"c{next(_numbers)}"


def kept(url: str, path: str) -> list[Any]:
    """The snapshots of a stream."""
    with fencepost.connect(url) as client:
        try:
            return list(client.stream(snapshot_path(path)).read())
        except fencepost.StreamNotFoundError:
            return []


async def test_a_snapshot_is_written_after_so_many_events_and_read_by_others(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(counting(snapshot_every=5)) as counters:
        for n in range(12):
            await counters.do(Counter.add, name, amount=n)
        assert counters.snapshot_failures == 0

    found = kept(server_process.url, f"counters/{name}")
    assert [one["data"]["version"] for one in found][-1] == 9
    async with opening(counting(snapshot_every=5)) as counters:
        loaded: Loaded[Counter] = await counters.load(Counter, name)
        assert (loaded.state.total, loaded.version, loaded.snapshot) == (66, 11, 9)
        await counters.do(Counter.add, name, amount=100)
        assert (await counters.load(Counter, name)).state.total == 166


async def test_a_snapshot_of_another_fold_is_passed_over(opening: Opening) -> None:
    name = fresh()
    async with opening(counting(snapshot_every=2)) as counters:
        for _ in range(4):
            await counters.do(Counter.add, name, amount=1)

    async with opening(counting(CounterOfOtherFold)) as counters:
        loaded = await counters.load(CounterOfOtherFold, name)

        assert (loaded.state.doubled, loaded.snapshot) == (8, -1)


async def test_a_snapshot_of_another_class_is_passed_over_and_one_is_kept(
    opening: Opening, server_process: ServerProcess
) -> None:
    """Two entities may look at one stream, as if the other one were not there."""

    class Tripled(Counter, stream="counters/{id}"):
        @applies
        def added(self, event: Added) -> Self:
            return self.replace(total=self.total + 3 * event.amount)

    name = fresh()
    async with opening(counting(snapshot_every=2)) as counters:
        for _ in range(8):
            await counters.do(Counter.add, name, amount=1)
    async with opening(counting(Tripled)) as counters:
        loaded = await counters.load(Tripled, name)
    async with opening(counting(counter_of_next_fold())) as counters:
        again = await counters.load(counters.app.registry.entities[0], name)

    assert (loaded.state.total, loaded.snapshot) == (24, -1)
    assert (again.state.total, again.snapshot) == (32, -1)
    path = snapshot_path(f"counters/{name}")
    async with httpx.AsyncClient() as client:
        answer = await client.head(f"{server_process.url}/v1/stream/{path}")
    assert answer.headers["Stream-Retention-Messages"] == "1"


async def test_a_snapshot_that_cannot_be_read_is_passed_over(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(counting(snapshot_every=2)) as counters:
        for _ in range(4):
            await counters.do(Counter.add, name, amount=1)
    with fencepost.connect(server_process.url) as client:
        stream = client.stream(snapshot_path(f"counters/{name}"))
        stream.append({"name": "$snapshot", "data": {"entity": "Counter"}})
        stream.append("nonsense")

    async with opening(counting()) as counters:
        assert (await counters.load(Counter, name)).state.total == 4


async def test_a_snapshot_can_be_thrown_away(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(counting(snapshot_every=2)) as counters:
        for _ in range(4):
            await counters.do(Counter.add, name, amount=1)
    with fencepost.connect(server_process.url) as client:
        client.stream(snapshot_path(f"counters/{name}")).delete()

    async with opening(counting()) as counters:
        assert (await counters.load(Counter, name)).state.total == 4


async def test_a_snapshot_that_cannot_be_written_is_counted_and_delays_nothing(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    with fencepost.connect(server_process.url) as client:
        client.create(snapshot_path(f"counters/{name}"), content_type="text/plain")

    async with opening(counting(snapshot_every=2)) as counters:
        for _ in range(4):
            await counters.do(Counter.add, name, amount=1)
        await counters.close()

        assert counters.snapshot_failures > 0
        assert (await counters.load(Counter, name)).state.total == 4


async def test_without_snapshots_none_are_written(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(counting(snapshot_every=None)) as counters:
        for _ in range(4):
            await counters.do(Counter.add, name, amount=1)

    assert kept(server_process.url, f"counters/{name}") == []


async def test_the_cache_is_bounded_and_what_left_it_is_loaded_again(opening: Opening) -> None:
    names = [fresh() for _ in range(5)]
    async with opening(counting(cache_max=2)) as counters:
        for name in names * 3:
            await counters.do(Counter.add, name, amount=1)

        assert len(counters.deciding.cache) == 2
        assert [(await counters.load(Counter, name)).state.total for name in names] == [3] * 5


async def test_a_stream_that_was_deleted_begins_anew(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    app = App(f"orders{next(_numbers)}", entities=[Order])
    async with opening(app) as shop:
        for _ in range(3):
            await shop.do(Order.place, name, sku="tea")
        with fencepost.connect(server_process.url) as client:
            client.stream(f"orders/{name}").delete()

        done = await shop.do(Order.place, name, sku="coffee")

        assert (done.version, done.state) == (0, Order(sku="coffee", placed_count=1))
        assert (await shop.load(Order, name)).state.placed_count == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_a_truncated_stream_keeps_its_versions(
    opening: Opening, server_process: ServerProcess, count: int
) -> None:
    """A stream that begins later is folded from there: its snapshot is what keeps the past."""
    name = fresh()
    app = App(f"orders{next(_numbers)}", entities=[Order])
    async with opening(app) as shop:
        for _ in range(count):
            await shop.do(Order.place, name, sku="tea")
        with fencepost.connect(server_process.url) as client:
            client.stream(f"orders/{name}").truncate(before="now")
        stored = await shop.commit(f"orders/{name}", [Placed(sku="coffee", quantity=1)])

        assert stored[0].version == count
    async with opening(app) as shop:
        loaded = await shop.load(Order, name)
        assert (loaded.state.placed_count, loaded.version) == (1, count)
