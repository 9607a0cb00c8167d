"""The session of a large commit: its sign of life, what it holds, and its transaction."""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.store.database import Row
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large.waiting import LIVES

ROWS_MAX = 2_000
"""Marks, paths or parts that go to the database in one statement."""


class LargeSession(WritingConnection):
    """The session of a large commit, and its transaction."""

    number = 0
    """Of the commit, by which it is known to all nodes."""

    async def live(self, idle_ms_max: int) -> None:
        """Give the commit its number and the lock that shows that it lives."""
        [(self.number, *_)] = await self.fetch("live_as_large", (LIVES, str(idle_ms_max)))

    async def hold(self, held: Sequence[int]) -> None:
        """Have hold of some marks, once it is the one commit under way."""
        await self.write([("hold", [(self.number, mark) for mark in held])])

    async def open(self) -> None:
        """Begin the transaction that nobody sees until its end."""
        await self.fetch("begin")

    async def begin(self) -> Row:
        """Wait for the turn, in the transaction that is open."""
        [counters] = await self.fetch("take_turn")
        return counters

    async def forget(self) -> None:
        """Let go of all marks: the commit is over."""
        await self.fetch("release_all", (self.number,))
