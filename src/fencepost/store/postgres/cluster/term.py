"""A term: the time that one node leads, what it may write in it, and how it follows the turns.

The row that every turn locks names the node that leads. A node that writes as the leader looks
there first, in the same turn. So a node that was stopped, or cut off, and wakes up after another
has taken over finds that out before it has written anything.

During its term the leader follows the turns of all nodes, in their order and without a gap, for the
subscriptions. The feed tells of turns as they come, with the streams that they changed. Turns that
the feed does not tell of, from before it began or while its connection was lost, are read from the
database. Each turn is told once, by the first of the two. The caller stores how far it has
followed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fencepost.clock import Clock
from fencepost.store.contract import Failed, Failure, StoreAwayError
from fencepost.store.postgres.cluster.feed import STREAMS_PER_LOOK_MAX, TURNS_PER_LOOK_MAX, Turn
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.postgres.readers import PostgresReaders
from fencepost.store.postgres.requests import NOTHING, Needs, Request
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Row
from fencepost.store.write.decider import Decider

log = logging.getLogger(__name__)

T = TypeVar("T")

CATCH_UP_S_MAX = 10.0
"""How long a request may wait until what was written before it has been told."""

Tell = Callable[[Turn, dict[int, Row]], None]
"""Takes a turn, and the rows by now of its streams."""


class NotLeadingError(Exception):
    """Another node leads by now: nothing was done, and nothing is left to do here."""


class DatabaseClock:
    """The clock of this process, set by the database's: it says when leases and lifetimes end.

    Between two words of the database time goes on as the monotonic clock does, so that this
    machine's wall clock may be set meanwhile. Until the first word the time is this machine's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms: int | None = None
        """What the database's time is ahead of the monotonic clock."""
        self._last_ms = 0

    def set(self, database_ms: int) -> None:
        """The database said just now what time it is."""
        # The answer may have taken long, and then this clock is behind until the next one. A clock
        # that is ahead would end leases before their time.
        self._ahead_ms = database_ms - self._clock.monotonic_ms()

    def now_ms(self) -> int:
        if self._ahead_ms is None:
            return self._clock.now_ms()
        self._last_ms = max(self._last_ms, self._clock.monotonic_ms() + self._ahead_ms)
        return self._last_ms

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def random(self) -> float:
        return self._clock.random()

    def token(self, bytes_count: int) -> bytes:
        return self._clock.token(bytes_count)


class _Deposed:
    """The outcome of a request that found another node leading."""


_DEPOSED = _Deposed()


class Term:
    """The store as its leader writes to it: everything here fails once another node leads."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self._turns = store.turns
        self.over = asyncio.Event()
        """Set when this node no longer leads, or has to begin again from the database."""

    def end(self, why: str) -> None:
        """Write no more: what was decided and is not stored is void."""
        if not self.over.is_set():
            log.warning("the term of this node as the leader is over: %s", why)
            self.over.set()

    def submit(
        self,
        work: Callable[[Decider], object],
        done: Callable[[Any], None],
        needs: Needs = NOTHING,
        *,
        touches_all: bool = False,
    ) -> None:
        """Have something decided in the next turn, if this node leads then.

        Work that touches more than its needs waits while a large commit is under way.
        """

        def decide(decider: Decider) -> object:
            if self.over.is_set() or self._turns.leader != self.store.node:
                return _DEPOSED
            return work(decider)

        def told(outcome: object) -> None:
            if outcome is _DEPOSED:
                self.end("another node leads")
                done(Failed(full=False))
            else:
                done(outcome)

        self.store.submit(Request(decide, told, needs, touches_all=touches_all))

    # As background work sees a store

    @property
    def settings(self) -> PostgresSettings:
        return self.store.settings

    @property
    def readers(self) -> PostgresReaders:
        return self.store.readers

    async def decide(self, work: Callable[[Decider], T], *, touches_all: bool = True) -> T:
        """Let `work` decide something, and wait until that is durable."""
        answer: asyncio.Future[T | Failure] = asyncio.get_running_loop().create_future()

        def done(outcome: T | Failure) -> None:
            if not answer.done():
                answer.set_result(outcome)

        self.submit(work, done, touches_all=touches_all)
        outcome = await answer
        if isinstance(outcome, Failure):
            raise StoreAwayError("the database could not be written to, or another node leads")
        return outcome

    async def between_commits(self, work: Callable[[PostgresConnection], T]) -> T:
        """Do a piece of upkeep in a transaction of its own, while no node has its turn."""

        def led(connection: PostgresConnection) -> T:
            if self.over.is_set() or not connection.fetch("leads", (self.store.node,)):
                raise NotLeadingError("another node leads by now")
            return work(connection)

        return await self.store.between_commits(led)

    def suspect(self, error: BaseException) -> None:
        """End the term if another node leads, as the error says; other failures are tried again."""
        if isinstance(error, NotLeadingError):
            self.end(str(error))


class Following:
    """Tells of every turn after `turn`, while it runs."""

    def __init__(self, term: Term, tell: Tell) -> None:
        self._term = term
        self._store = term.store
        self._told = tell
        self.turn = -1
        """The newest turn that was told."""
        self._behind = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def poke(self) -> None:
        """Look at once for what there is to do."""
        self._behind.set()

    async def run(self, besides: Callable[[], Awaitable[None]]) -> None:
        """Follow until cancelled, and do what else there is to do after every look."""
        feed = self._store.feed
        poll_s = self._term.settings.poll_interval_ms / 1000
        feed.on_turn = self._turned
        try:
            while True:
                self._behind.clear()
                try:
                    await self._catch_up()
                    await besides()
                except StoreAwayError as error:
                    log.warning("the turns cannot be followed: %s", error)
                try:
                    async with asyncio.timeout(poll_s):
                        await self._behind.wait()
                except TimeoutError:
                    pass
        finally:
            if feed.on_turn == self._turned:
                feed.on_turn = _ignore_turn
            for _, waiting in self._waiting:
                waiting.cancel()

    async def caught_up(self) -> Failure | None:
        """Wait until everything has been told that any node has written before this."""
        [(turn, _)] = await self._store.readers.run(
            lambda connection: connection.fetch("last_turn")
        )
        if self.turn >= turn:
            return None
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, waiting))
        self._waiting.sort(key=lambda pair: pair[0])
        try:
            async with asyncio.timeout(CATCH_UP_S_MAX):
                await asyncio.wait([waiting])
        except TimeoutError:
            return Failed(full=False)
        return Failed(full=False) if waiting.cancelled() else None

    async def _catch_up(self) -> None:
        """Read the turns that the feed will not tell."""
        while True:
            turns, rows = await self._store.readers.run(partial(_turns, self.turn))
            by_id = {row[0]: row for row in rows}
            if turns and turns[0].turn > self.turn + 1:
                log.error("turns %d to %d are gone", self.turn + 1, turns[0].turn - 1)
                self.turn = turns[0].turn - 1
            for turn in turns:
                # The feed may have told of this turn meanwhile.
                if turn.turn == self.turn + 1:
                    self._tell(turn, by_id)
            if not turns or self._term.over.is_set():
                return

    def _turned(self, turn: Turn, rows: Sequence[Row]) -> None:
        if turn.turn == self.turn + 1:
            self._tell(turn, {row[0]: row for row in rows})
        elif turn.turn > self.turn:
            self._behind.set()

    def _tell(self, turn: Turn, by_id: dict[int, Row]) -> None:
        if self._term.over.is_set():
            return
        try:
            self._told(turn, by_id)
        except Exception:
            log.exception("a turn could not be followed")
            self._term.end("a turn could not be followed")
            return
        self.turn = turn.turn
        while self._waiting and self._waiting[0][0] <= self.turn:
            _, waiting = self._waiting.pop(0)
            if not waiting.done():
                waiting.set_result(None)


def _turns(after: int, connection: PostgresConnection) -> tuple[list[Turn], list[Row]]:
    """The next turns, and their streams as they are by now."""
    limits = (TURNS_PER_LOOK_MAX, STREAMS_PER_LOOK_MAX)
    turns = [Turn(*row) for row in connection.fetch("turns_after", (after, *limits))]
    ids = list({stream for turn in turns for stream in turn.streams})
    return turns, connection.fetch("streams_of_turns", (ids,)) if ids else []


def _ignore_turn(_turn: Turn, _rows: Sequence[Row]) -> None:
    """The default of the feed: turns are not followed any more."""
