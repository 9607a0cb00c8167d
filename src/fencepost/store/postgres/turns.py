"""Turns: how one node of several gets to write, and what happens in a turn.

Requests wait in a queue on the event loop. A turn begins with locking the one row of counters; who
holds it is alone in deciding and writing, so positions are given, and become visible, in order. All
requests that have come meanwhile are decided together on the ledger and written by a handful of
statements, and the transaction ends in the same round trip. Nothing of this waits for anything but
the database, and the database frees the row when the node that holds it is gone.

A large commit (`large.py`) is written beside the turns and has hold of what it names. A turn that
finds one under way puts requests about any of that aside; without one it costs nothing.

* An error before COMMIT undoes the turn. If the database was away, the requests get one more turn;
  then they are told that nothing happened.
* A connection that ends in COMMIT leaves an unknown outcome, and the answers say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from fencepost.store.contract import Failed, Failure, Unknown
from fencepost.store.database import Row
from fencepost.store.postgres.among import Among
from fencepost.store.postgres.driver.connection import is_away, is_full
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large import marks
from fencepost.store.postgres.large.waiting import LIVES, Aside
from fencepost.store.postgres.ledger import Needs, TurnLedger
from fencepost.store.postgres.loading import load
from fencepost.store.postgres.others import is_listed
from fencepost.store.postgres.requests import WAITS, Done, Request
from fencepost.store.postgres.settings import PostgresSettings
from fencepost.store.postgres.writing import statements
from fencepost.store.write.decider import Decider
from fencepost.store.write.ledger import LedgerGroup

log = logging.getLogger(__name__)

TRIES_MAX = 2
"""Turns that a request gets while the database goes away under them."""
BACKOFF_S = 0.25
"""How long a node waits between two tries to reach a database that is away."""


ASIDE_LOOK_S = 0.1
"""How often a node looks whether a large commit is over that requests wait for."""


class Counted:
    """What this node has done, for the metrics."""

    __slots__ = ("dropped", "failed", "reconnects", "turns", "unknown")

    def __init__(self) -> None:
        self.turns = self.dropped = self.failed = self.unknown = self.reconnects = 0


class Turns:
    """The writing of one node. Everything here runs on the event loop."""

    def __init__(
        self,
        settings: PostgresSettings,
        node: str,
        connect: Callable[[], Any],
        decider: Decider,
        *,
        committed: Callable[[LedgerGroup, int], None],
        lost: Callable[[], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._node = node
        self._connect = connect
        self._decider = decider
        assert isinstance(decider.ledger, TurnLedger)
        self._ledger = decider.ledger
        self._among = Among(decider)
        self._committed = committed
        self._lost = lost
        self._clock_ns = clock_ns
        self._connection: WritingConnection | None = None
        self._queue: deque[Request] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._aside: Aside[Request] = Aside()
        self._turn = -1
        self._closing = False
        self.now_ms = 0
        """The database's clock, as of this turn."""
        self.leader = ""
        """The node that leads, as of this turn."""
        self.large: int | None = None
        """The large commit that is under way, as of this turn."""
        self.turn = 0
        """The number of the turn before this one."""
        self.more_turns = 0
        """Rows of turns that what is being decided writes by itself: the turn counts for more."""
        self.ends_large = False
        """Whether the large commit is over with this turn."""
        self.counted = Counted()
        self.on_commit: Callable[[int, int, int], None] = _ignore
        self._running = asyncio.create_task(self._run())

    def submit(self, request: Request) -> None:
        """Have a request decided in the next turn."""
        if self._closing:
            request.done(Failed(full=False))
            return
        self._queue.append(request)
        self._idle.clear()
        self._arrived.set()

    def poke(self) -> None:
        """Another node has written: what was put aside may have its turn."""
        if self._aside:
            self._arrived.set()

    def is_aside(self, path: str) -> bool:
        """Whether a request about a stream waits for a large commit."""
        return self._aside.keeps((marks.of_path(path),))

    async def settled(self) -> None:
        """Wait until nothing is waiting or under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Finish what is waiting, then let go of the database."""
        self._closing = True
        self._arrived.set()
        await self.settled()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._disconnect()

    async def _run(self) -> None:
        while True:
            if not self._queue:
                await self._rest()
                if not self._queue and not self._aside:
                    continue
            try:
                await self._take_turn()
            except Exception:
                log.exception("a turn failed")
                await self._disconnect()
                await asyncio.sleep(BACKOFF_S)

    async def _rest(self) -> None:
        """Wait for something to do; not for long while something is put aside."""
        if self._aside and self._closing:
            # Who else is up to something large may take its time.
            over = [(request.done, None) for request in self._aside.take()]
            _tell(over, Failed(full=False))
        if not self._aside:
            self._idle.set()
        self._arrived.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASIDE_LOOK_S if self._aside else None):
                await self._arrived.wait()

    # One turn

    async def _take_turn(self) -> None:
        on = self._queue[0].on if self._queue else None
        try:
            connection = on or await self._connected()
            begin = self._among.begin(connection, self._turn) if on is None else on.begin()
            counters = await begin
        except psycopg.Error as error:
            await self._away(self._drained() if on is None else self._cut(on), error)
            return
        self.turn, self.large = counters[0], counters[7]
        self.more_turns, self.ends_large = 0, False
        if self._aside and self.large != self._aside.large and on is None:
            self._queue.extendleft(reversed(self._aside.take()))
        batch = self._cut(on)
        try:
            if self.large is not None and on is None:
                batch = await self._sift(connection, self.large, batch)
            group, outcomes = await self._decide(connection, counters, batch)
        except Exception as error:
            await self._undecided(batch, error)
            return
        await self._write(connection, counters, group, outcomes, batch)

    async def _connected(self) -> WritingConnection:
        if self._connection is None:
            self._connection = await self._connect()
            self._turn = -1
            self.counted.reconnects += 1
        return self._connection

    def _cut(self, on: WritingConnection | None) -> list[Request]:
        """The requests of this turn: all that wait, up to a bound."""
        batch: list[Request] = []
        size = 0
        settings = self._settings
        while self._queue and len(batch) < settings.turn_requests_max:
            if batch and size >= settings.turn_bytes_max:
                break
            if (batch and self._queue[0].alone) or self._queue[0].on is not on:
                break
            request = self._queue.popleft()
            size += request.size
            batch.append(request)
            if request.alone:
                break
        return batch

    async def _sift(
        self, connection: WritingConnection, large: int, batch: list[Request]
    ) -> list[Request]:
        """The requests that do not have to wait for a large commit; the others are put aside.

        A commit whose session is gone has come to nothing: this turn ends it.
        """
        marked = [(request, request.marks()) for request in batch]
        asked = list({mark for _, found in marked for mark in found})
        [(gone, held)] = await connection.fetch("held_by_large", (LIVES, large, asked))
        self.ends_large = gone
        taken = frozenset(() if gone else held)
        going = []
        for request, found in marked:
            waits = not taken.isdisjoint(found) or (request.reaches and not gone)
            if request.of == large or not (waits or self._aside.keeps(found)):
                going.append(request)
            elif request.instead is not WAITS:
                _tell([(request.done, request.instead)], None)
            else:
                self._aside.add(large, request, found)
        return going

    async def _decide(
        self, connection: WritingConnection, counters: Row, batch: Sequence[Request]
    ) -> tuple[LedgerGroup, list[tuple[Done, object]]]:
        self.now_ms, self.leader = counters[5], counters[6]
        # When somebody else has written, what we know may be wrong by now.
        self.counted.dropped += await self._among.catch_up(connection, counters, self._turn)
        needs = Needs()
        for request in batch:
            if request.needs is not None:
                request.needs(needs)
        await load(connection, self._ledger, needs)
        group = self._decider.new_group()
        outcomes = [(request.done, request.work(self._decider)) for request in batch]
        return group, outcomes

    async def _write(
        self,
        connection: WritingConnection,
        counters: Row,
        group: LedgerGroup,
        outcomes: list[tuple[Done, object]],
        batch: Sequence[Request],
    ) -> None:
        self._ledger.forget()
        started_ns = self._clock_ns()
        if group.is_empty() and not self.ends_large:
            # Nothing changes; what the answers say is committed, by whoever it was.
            try:
                await connection.rollback()
            except psycopg.Error as error:
                await self._away(batch, error)
                return
            self._turn = counters[0]
            self._ledger.committed(group)
            _tell(outcomes, None)
            return
        turn = counters[0] + 1 + self.more_turns
        try:
            self._ledger.seal(group)
            shape = (
                [entry.stream.id for entry in group.entries.values()],
                sorted(group.created),
                [view.id for _, view, state in group.views if state != 0],
            )
            ending = "end_large_turn" if self.ends_large else "end_turn"
            # Only of a turn by itself it is known what it changed.
            listed = () if self.ends_large else (not self.more_turns and is_listed(group),)
            end = (turn, *group.counters, counters[4], self._node, *shape, *listed)
            await connection.write_and_commit(list(statements(group)), end, ending=ending)
        except Exception as error:
            await self._write_failed(connection, batch, outcomes, error)
            return
        # Where a large commit has ended, what we know of its streams is of before.
        self._turn = turn if connection is self._connection else -1
        self.counted.turns += 1
        if self.ends_large:
            self._arrived.set()
        elapsed_ns = self._clock_ns() - started_ns
        self._committed(group, turn)
        self.on_commit(len(outcomes), elapsed_ns, elapsed_ns)
        _tell(outcomes, None)

    # What can go wrong

    async def _write_failed(
        self,
        connection: WritingConnection,
        batch: Sequence[Request],
        outcomes: list[tuple[Done, object]],
        error: Exception,
    ) -> None:
        if connection.is_lost:
            log.error("the database went away in a commit: its outcome is unknown", exc_info=error)
            self.counted.unknown += 1
            await self._forget()
            _tell(outcomes, Unknown())
            return
        # The database refused a statement, so it has undone all of them.
        await self._undecided(batch, error)

    async def _away(self, batch: Sequence[Request], error: psycopg.Error) -> None:
        """The database cannot be reached, and nothing of these requests has happened."""
        self.counted.failed += 1
        await self._forget()
        again = [request for request in batch if request.tries + 1 < TRIES_MAX]
        over = [request for request in batch if request.tries + 1 >= TRIES_MAX]
        self._queue.extendleft(
            request._replace(tries=request.tries + 1) for request in reversed(again)
        )
        if over:
            log.warning("the database is away: %s", str(error).strip())
            _tell([(request.done, None) for request in over], Failed(full=False))
        if not again:
            await asyncio.sleep(BACKOFF_S)

    async def _undecided(self, batch: Sequence[Request], error: Exception) -> None:
        """A turn came to nothing: because the database is away, or because of one request."""
        if isinstance(error, psycopg.Error) and is_away(error):
            await self._away(batch, error)
            return
        self.counted.failed += 1
        await self._forget()
        if len(batch) > 1 and not is_full(error):
            # Which of them it was shows when each has a turn of its own.
            self._queue.extendleft(request._replace(alone=True) for request in reversed(batch))
            return
        log.error("a request could not be carried out", exc_info=error)
        _tell([(request.done, None) for request in batch], Failed(full=is_full(error)))

    async def _forget(self) -> None:
        """Nothing that was decided since the last commit holds: begin again from the database."""
        self._turn = -1
        await self._disconnect()
        self._lost()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _drained(self) -> list[Request]:
        batch = [*self._aside.take(), *self._queue]
        self._queue.clear()
        return batch


def _ignore(_answers: int, _commit_ns: int, _fsync_ns: int) -> None:
    """Nobody measures."""


def _tell(outcomes: Sequence[tuple[Done, object]], failure: Failure | None) -> None:
    for done, outcome in outcomes:
        try:
            done(outcome if failure is None else failure)
        except Exception:
            log.exception("an answer could not be given")
