"""How far groups are behind: counted now and then, not for each scrape or each question.

Counting a group looks at all its targets, so it is bounded: it takes a small part of the time, and
no round of it takes long. A round that ends early goes on with the other groups at a later scrape.
Those who ask for one group share a count of it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.protocol.groups import Group
from fencepost.store.group_contract import GroupReads, LaneStats

ROUND_MS_MIN = 1_000
"""Scrapes closer together than this show the same figures."""
PAUSE_FACTOR = 50
"""After a round that took so long, the next one waits for so many times that: 2 % of the time."""
ROUND_MS_MAX = 1_000
"""A round ends after so long, and the next one goes on with the other groups."""
PAGE_GROUPS = 100
ASKED_FACTOR = 20
"""The count of one group that took so long answers for so many times that: 5 % of the time. One
that takes less than a millisecond is never reused."""


class GroupLag(NamedTuple):
    """A group as it was when it was counted."""

    group: Group
    lanes: list[LaneStats]
    head: int
    at_ms: int
    told: int
    """Events that computed targets were told of and have not got past."""


class _Asked(NamedTuple):
    """A count of one group that was asked for."""

    counting: asyncio.Task[GroupLag]
    incarnation: int
    good_until_ms: int | None = None
    """None while it is being counted."""


class Gauges:
    """The figures of all groups, those included that no worker asks for."""

    def __init__(self, reads: GroupReads, clock: Clock) -> None:
        self._reads = reads
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._is_counting = False
        self._next_ms = 0
        self._after = ""
        self._round: set[str] = set()
        self.lags: dict[str, GroupLag] = {}

    async def lag_of(self, group: Group) -> GroupLag:
        """The figures of one group. Those who ask at the same time, or soon after, share them."""
        now_ms = self._clock.monotonic_ms()
        for name, old in list(self._asked.items()):
            if old.good_until_ms is not None and old.good_until_ms <= now_ms:
                del self._asked[name]
        asked = self._asked.get(group.name)
        if asked is None or asked.incarnation != group.id:
            counting = asyncio.create_task(self._count_one(group, now_ms))
            asked = self._asked[group.name] = _Asked(counting, group.id)
        return await asyncio.shield(asked.counting)

    async def _count_one(self, group: Group, began_ms: int) -> GroupLag:
        good_until_ms = began_ms
        try:
            lanes = await self._reads.stats(group.id)
            told = await self._told(group)
            lag = GroupLag(group, lanes, await self._reads.head(), self._clock.now_ms(), told)
            ended_ms = self._clock.monotonic_ms()
            good_until_ms = ended_ms + ASKED_FACTOR * (ended_ms - began_ms)
            return lag
        finally:
            asked = self._asked.get(group.name)
            if asked is not None and asked.incarnation == group.id:
                self._asked[group.name] = asked._replace(good_until_ms=good_until_ms)

    async def _told(self, group: Group) -> int:
        is_computed = group.settings.targets == "computed"
        return await self._reads.told(group.id) if is_computed else 0

    async def refresh(self) -> None:
        """Count groups again if it is time, or leave the figures as they are."""
        started_ms = self._clock.monotonic_ms()
        if self._is_counting or started_ms < self._next_ms:
            return
        self._is_counting = True
        try:
            await self._count(started_ms + ROUND_MS_MAX)
        finally:
            self._is_counting = False
            ended_ms = self._clock.monotonic_ms()
            self._next_ms = ended_ms + max(ROUND_MS_MIN, PAUSE_FACTOR * (ended_ms - started_ms))

    async def _count(self, ends_ms: int) -> None:
        head = await self._reads.head()
        while True:
            page = await self._reads.groups(self._after, PAGE_GROUPS)
            for group in page:
                lanes = await self._reads.stats(group.id)
                told = await self._told(group)
                self.lags[group.name] = GroupLag(group, lanes, head, self._clock.now_ms(), told)
                self._round.add(group.name)
                self._after = group.name
                if self._clock.monotonic_ms() >= ends_ms:
                    return
            if len(page) < PAGE_GROUPS:
                break
        self.lags = {name: lag for name, lag in self.lags.items() if name in self._round}
        self._after, self._round = "", set()
