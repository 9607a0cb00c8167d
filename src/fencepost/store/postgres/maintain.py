"""Background work of the shared store, which the node that leads does.

Beside the jobs of every store it forgets old turns, nodes that are gone, what large commits held
whose nodes died, and rows that nodes of an older version left behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from fencepost.clock import Clock
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.postgres.cluster.term import Term
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.postgres.large.locks import LARGE_COMMITS
from fencepost.store.sql import Row
from fencepost.store.write.decider import Decider

TURNS_PER_SWEEP_MAX = 10_000
HELD_PER_SWEEP_MAX = 2_000
TOLD_PER_LOOK_MAX = 1_000
NOTHING_TOLD = (0, "", -1)
"""The place before all rows of `told`."""
USAGE_ROWS_MIN, USAGE_ROWS_MAX = 1_000, 50_000
"""Changes of usage are folded when so many have come, and so many at once."""


class Followed(Protocol):
    """Follows the turns, and must know of each before it may be forgotten."""

    async def followed_durably(self) -> int | None:
        """The turn up to which nothing has to be told again; None when that is not known."""
        ...


class PostgresUpkeep(Upkeep):
    """The background jobs of one term."""

    def __init__(self, term: Term, clock: Clock, followed: Followed) -> None:
        super().__init__(term, clock)
        self._term = term
        self._followed = followed
        self._saved = -1
        self._told_seen = NOTHING_TOLD
        self._told_began_ms: int | None = None

    @property
    def jobs(self) -> tuple[Callable[[], Awaitable[object]], ...]:
        own = (self.follow, self.drop_turns, self.forget_nodes, self.forget_held, self.fold_usage)
        return (*super().jobs, *own, self.forget_told)

    async def follow(self) -> None:
        """Write down how far the subscriptions have followed: the next leader goes on there."""
        turn = await self._followed.followed_durably()
        if turn is not None and turn > self._saved:
            await self._term.between_commits(partial(_save_followed, turn))
            self._saved = turn

    async def drop_turns(self) -> int:
        """Forget turns that are older than they have to be kept."""
        before_ms = self._clock.now_ms() - self._term.settings.turns_kept_s * 1000
        if not await self._fetch("any_old_turn", before_ms, self._saved):
            return 0
        values = (before_ms, self._saved, TURNS_PER_SWEEP_MAX)
        return await self._term.between_commits(
            lambda connection: connection.execute("drop_old_turns", values)
        )

    async def forget_nodes(self) -> int:
        """Forget nodes that have been silent for long: they come back by themselves."""
        silent_ms = self._term.settings.node_silence_ms
        if not await self._fetch("any_silent_node", silent_ms):
            return 0
        return await self._term.between_commits(
            lambda connection: connection.execute("forget_silent_nodes", (silent_ms,))
        )

    async def fold_usage(self) -> int:
        """Add the changes of what principals hold together, into a row for each."""
        if not await self._fetch("any_usage_to_fold", USAGE_ROWS_MIN):
            return 0
        return await self._term.between_commits(
            lambda connection: connection.execute("fold_usage", (USAGE_ROWS_MAX,))
        )

    async def forget_told(self) -> int:
        """Forget what targets were told of and have got past, or whose group is gone.

        The ack and the end of a group remove it; nodes that do not know the table did not. One look
        goes over some of the rows.
        """
        now_ms = self._clock.monotonic_ms()
        if self._told_seen == NOTHING_TOLD:
            began_ms = self._told_began_ms
            interval_ms = self._term.settings.retention_interval_ms
            if began_ms is not None and now_ms - began_ms < interval_ms:
                return 0
            self._told_began_ms = now_ms
        after = self._told_seen
        rows = await self._fetch("told_after", *after, TOLD_PER_LOOK_MAX)
        is_last = len(rows) < TOLD_PER_LOOK_MAX
        self._told_seen = NOTHING_TOLD if is_last else rows[-1][:3]
        if not any(is_over for *_, is_over in rows):
            return 0
        values = (*after, *rows[-1][:3])
        return await self._term.between_commits(partial(_forget_told, values))

    async def forget_held(self) -> int:
        """Forget large commits whose nodes died, and what they held."""
        if await self._fetch("large_now") != [(None,)]:
            # Any turn ends a large commit that is dead, and there may be no other turn for long.
            await self._term.decide(_nothing, touches_all=False)
        after, forgotten = -1, 0
        while found := await self._fetch("next_holder", LARGE_COMMITS, after):
            [(after, gone)] = found
            while gone and (count := await self._term.between_commits(partial(_forget, after))):
                forgotten += count
        return forgotten


def _forget_told(values: Row, connection: PostgresConnection) -> int:
    """Forget what nothing needs between two places; how much."""
    with connection:
        count = connection.execute("forget_told", values)
        connection.execute("forget_told_counts")
    return count


def _forget(large: int, connection: PostgresConnection) -> int:
    """Forget some of what a large commit held; how much."""
    found = connection.fetch("release_held", (large, HELD_PER_SWEEP_MAX))
    return found[0][0] if found else 0


def _nothing(_decider: Decider) -> None:
    """Decide nothing: the turn itself is what counts."""


def _save_followed(turn: int, connection: PostgresConnection) -> None:
    connection.execute("save_followed", (turn,))
