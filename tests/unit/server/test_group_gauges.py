"""Gauges of groups: counted in rounds that are bounded, and never for each scrape."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fencepost.protocol.groups import Group, GroupSettings
from fencepost.server.groups.gauges import (
    ASKED_FACTOR,
    PAUSE_FACTOR,
    ROUND_MS_MAX,
    ROUND_MS_MIN,
    Gauges,
)
from fencepost.store.group_contract import LaneStats
from fencepost.testing.clock import SimClock


class Slow:
    """Groups whose targets take a while to count."""

    def __init__(self, clock: SimClock, names: list[str], each_ms: int) -> None:
        self.clock = clock
        self.names = names
        self.each_ms = each_ms
        self.counted: list[int] = []

    async def head(self) -> int:
        return 41

    async def groups(self, after: str, limit: int) -> list[Group]:
        settings = GroupSettings(sources=("s",))
        return [
            Group(n, name, settings, -1, -1, 0) for n, name in enumerate(self.names) if name > after
        ][:limit]

    async def stats(self, group_id: int) -> list[LaneStats]:
        self.clock.advance(self.each_ms)
        self.counted.append(group_id)
        return [LaneStats("default", ready=group_id)]


def gauges_of(reads: Slow) -> Gauges:
    return Gauges(cast(Any, reads), reads.clock)


async def test_scrapes_close_together_count_once() -> None:
    reads = Slow(SimClock(), ["a", "b"], 0)
    gauges = gauges_of(reads)

    await gauges.refresh()
    reads.clock.advance(ROUND_MS_MIN - 1)
    await gauges.refresh()

    assert reads.counted == [0, 1]
    assert list(gauges.lags) == ["a", "b"]
    reads.clock.advance(1)
    await gauges.refresh()
    assert reads.counted == [0, 1, 0, 1]


async def test_what_takes_long_to_count_is_counted_seldom() -> None:
    reads = Slow(SimClock(), ["a"], 100)
    gauges = gauges_of(reads)

    await gauges.refresh()
    reads.clock.advance(PAUSE_FACTOR * 100 - 1)
    await gauges.refresh()

    assert reads.counted == [0]


async def test_a_round_that_takes_too_long_goes_on_with_the_other_groups_later() -> None:
    reads = Slow(SimClock(), ["a", "b", "c"], ROUND_MS_MAX)
    gauges = gauges_of(reads)

    for _ in range(3):
        await gauges.refresh()
        reads.clock.advance(PAUSE_FACTOR * ROUND_MS_MAX)

    assert reads.counted == [0, 1, 2]
    assert list(gauges.lags) == ["a", "b", "c"]


async def test_a_group_that_is_gone_is_no_longer_shown() -> None:
    reads = Slow(SimClock(), ["a", "b"], 0)
    gauges = gauges_of(reads)
    await gauges.refresh()

    reads.names = ["b"]
    reads.clock.advance(ROUND_MS_MIN)
    await gauges.refresh()

    assert list(gauges.lags) == ["b"]


async def test_questions_about_one_group_share_a_count_that_takes_long() -> None:
    reads = Slow(SimClock(), ["a", "b"], 10)
    gauges = gauges_of(reads)
    a, b = await reads.groups("", 2)

    lags = await asyncio.gather(*(gauges.lag_of(a) for _ in range(5)))
    reads.clock.advance(ASKED_FACTOR * 10 - 1)
    await gauges.lag_of(a)

    assert reads.counted == [0]
    assert {lag.at_ms for lag in lags} == {lags[0].at_ms}
    assert (await gauges.lag_of(b)).lanes == [LaneStats("default", ready=1)]
    reads.clock.advance(1)
    await gauges.lag_of(a)
    assert reads.counted == [0, 1, 0]


async def test_a_group_that_is_counted_at_once_is_counted_for_each_question() -> None:
    reads = Slow(SimClock(), ["a"], 0)
    gauges = gauges_of(reads)
    [a] = await reads.groups("", 1)

    for _ in range(2):
        await gauges.lag_of(a)

    assert reads.counted == [0, 0]


async def test_the_next_group_of_a_name_is_counted_anew() -> None:
    reads = Slow(SimClock(), ["a"], 1_000)
    gauges = gauges_of(reads)
    [a] = await reads.groups("", 1)

    await gauges.lag_of(a)
    await gauges.lag_of(a._replace(id=7))

    assert reads.counted == [0, 7]
