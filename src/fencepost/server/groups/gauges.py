"""How far groups are behind, for `/metrics`: counted now and then, not for each scrape.

Counting a group looks at all its targets, so it is bounded: it takes a small part of the time, and
no round of it takes long. A round that ends early goes on with the other groups at a later scrape.
"""

from __future__ import annotations

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


class GroupLag(NamedTuple):
    """A group as it was when it was counted."""

    group: Group
    lanes: list[LaneStats]
    head: int
    at_ms: int


class Gauges:
    """The figures of all groups, those included that no worker asks for."""

    def __init__(self, reads: GroupReads, clock: Clock) -> None:
        self._reads = reads
        self._clock = clock
        self._is_counting = False
        self._next_ms = 0
        self._after = ""
        self._round: set[str] = set()
        self.lags: dict[str, GroupLag] = {}

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
                self.lags[group.name] = GroupLag(group, lanes, head, self._clock.now_ms())
                self._round.add(group.name)
                self._after = group.name
                if self._clock.monotonic_ms() >= ends_ms:
                    return
            if len(page) < PAGE_GROUPS:
                break
        self.lags = {name: lag for name, lag in self.lags.items() if name in self._round}
        self._after, self._round = "", set()
