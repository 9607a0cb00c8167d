"""A term: the time that one node leads, and what it may write in it.

The row that every turn locks names the node that leads. A node that writes as the leader looks
there first, in the same turn. So a node that was stopped, or cut off, and wakes up after another
has taken over finds that out before it has written anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fencepost.clock import Clock
from fencepost.store.contract import Failed, Failure, StoreAwayError
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.postgres.readers import PostgresReaders
from fencepost.store.postgres.requests import NOTHING, Needs, Request
from fencepost.store.postgres.settings import PostgresSettings
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.write.decider import Decider

log = logging.getLogger(__name__)

T = TypeVar("T")


class NotLeadingError(Exception):
    """Another node leads by now: nothing was done, and nothing is left to do here."""


class DatabaseClock:
    """The clock of this process, set by the database's: it says when leases and lifetimes end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms = 0
        self._last_ms = 0

    def set(self, database_ms: int) -> None:
        """The database said just now what time it is."""
        # The answer may have taken long, and then this clock is behind until the next one. A clock
        # that is ahead would end leases before their time.
        self._ahead_ms = database_ms - self._clock.now_ms()

    def now_ms(self) -> int:
        self._last_ms = max(self._last_ms, self._clock.now_ms() + self._ahead_ms)
        return self._last_ms

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
        """What went wrong is tried again; only another leader ends a term."""
        if isinstance(error, NotLeadingError):
            self.end(str(error))
