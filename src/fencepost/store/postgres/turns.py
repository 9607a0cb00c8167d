"""Turns: how one node of several gets to write, and what happens in a turn.

Requests wait in a queue on the event loop. A turn begins with locking the one row of counters. Only
the node that holds this lock decides and writes, so positions are given, and become visible, in
order. All requests that have come meanwhile are decided together on the ledger and written by a
handful of statements, and the transaction ends in the same round trip. Nothing of this waits for
anything but the database, and the database frees the row when the node that holds it is gone.

A node that writes alone decides a request that comes by itself before it has the lock, and takes
the turn, writes and ends it in one round trip: a quick turn. If another node was first, the
database refuses all of it, the decision is undone, and an ordinary turn decides the request again.

A large commit (`large/commits.py`) is written beside the turns and holds what it names. A turn that
finds one under way keeps requests about any of that back; without one it costs nothing.

* An error before COMMIT undoes the turn. If the database was away, the requests get one more turn;
  then they are told that nothing happened.
* A connection that ends in COMMIT leaves an unknown outcome, and the answers say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import psycopg
from msgspec.structs import replace
from psycopg import errors

from fencepost.store.contract import Failed, Failure, Unknown
from fencepost.store.postgres.cache import Cache, lists_all_changes
from fencepost.store.postgres.cluster.feed import Feed
from fencepost.store.postgres.driver.connection import is_away, is_full
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large.locks import LARGE_COMMITS, HeldRequests, mark_of_path
from fencepost.store.postgres.requests import WAIT, Done, Request, together
from fencepost.store.records import producer_columns
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Row
from fencepost.store.write.decider import Decider
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.store.write.staging import gathered
from fencepost.store.write.stream_decider import Kept

log = logging.getLogger(__name__)

TRIES_MAX = 2
"""Turns that a request gets while the database goes away under them."""
BACKOFF_S = 0.25
"""How long a node waits between two tries to reach a database that is away."""
HELD_LOOK_S = 0.1
"""How often a node looks whether a large commit is over that requests wait for."""


class Counted:
    """Counts of the turns of this node, for the metrics."""

    __slots__ = ("dropped", "failed", "overtaken", "quick", "reconnects", "turns", "unknown")

    def __init__(self) -> None:
        self.turns = self.dropped = self.failed = self.unknown = self.reconnects = 0
        self.quick = self.overtaken = 0


class Turns:
    """The writing of one node. Everything here runs on the event loop."""

    def __init__(
        self,
        settings: PostgresSettings,
        node: str,
        connect: Callable[[], Any],
        decider: Decider,
        cache: Cache,
        *,
        committed: Callable[[LedgerGroup, int], None],
        lost: Callable[[], None],
        feed: Feed,
        clock_ns: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._node = node
        self._connect = connect
        self._decider = decider
        self._ledger = decider.ledger
        self._cache = cache
        self._committed = committed
        self._lost = lost
        self._feed = feed
        self._clock_ns = clock_ns
        self._connection: WritingConnection | None = None
        self._queue: deque[Request] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held: HeldRequests[Request] = HeldRequests()
        self._closing = False
        self._together = 0
        """Requests that were under way when the last turn ended."""
        self.now_ms = 0
        """The database's clock, as of this turn."""
        self.leader = ""
        """The node that leads, as of this turn."""
        self.large: int | None = None
        """The large commit that is under way, as of this turn."""
        self.turn = 0
        """The number of the turn before this one."""
        self.more_turns = 0
        """Rows of turns that a request of this turn writes by itself, beside the turn's own."""
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
        """Another node has written: requests that were kept back may have their turn."""
        if self._held:
            self._arrived.set()

    def is_held(self, path: str) -> bool:
        """Whether a request about a stream waits for a large commit."""
        return self._held.has_any((mark_of_path(path),))

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
                if not self._queue and not self._held:
                    continue
            try:
                await self._take_turn()
            except Exception:
                log.exception("a turn failed")
                await self._disconnect()
                await asyncio.sleep(BACKOFF_S)

    async def _rest(self) -> None:
        """Wait for something to do; not for long while a request is kept back."""
        if self._held and self._closing:
            # The large commit of another node may take long.
            over = [(request.done, None) for request in self._held.take()]
            _tell(over, Failed(full=False))
        if not self._held:
            self._idle.set()
        self._arrived.clear()
        if not self._held:
            await self._arrived.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_LOOK_S):
                await self._arrived.wait()

    # One turn

    async def _take_turn(self) -> None:
        foreseen = self._foreseen()
        if foreseen is not None:
            await self._take_quick_turn(*foreseen, self._queue.popleft())
            return
        own = self._queue[0].connection if self._queue else None
        try:
            connection = own or await self._connected()
            counters = await (self._begin(connection) if own is None else own.begin())
        except psycopg.Error as error:
            await self._away(self._drained() if own is None else self._cut(own), error)
            return
        self.turn, self.large = counters[0], counters[7]
        self.more_turns, self.ends_large = 0, False
        if self._held and self.large != self._held.large and own is None:
            self._queue.extendleft(reversed(self._held.take()))
        batch = self._cut(own)
        try:
            if self.large is not None and own is None:
                batch = await self._hold_back(connection, self.large, batch)
            group, outcomes = await self._decide(connection, counters, batch)
        except Exception as error:
            await self._undecided(batch, error)
            return
        await self._write(connection, counters, group, outcomes, batch)

    def _foreseen(self) -> tuple[WritingConnection, Row] | None:
        """The counters of the next turn, when the one request that waits can be decided before it.

        Where several are under way, most of them come while the lock is waited for, and share the
        turn. One by itself would wait for nothing.
        """
        connection = self._connection
        if connection is None or self._held or self._together > 1 or len(self._queue) != 1:
            return None
        if not self._queue[0].repeatable or self._queue[0].alone:
            return None
        counters = self._cache.foreseen(self._feed.seen)
        return None if counters is None else (connection, counters)

    async def _take_quick_turn(
        self, connection: WritingConnection, counters: Row, request: Request
    ) -> None:
        """Decide on the ledger as it is, then begin a turn, write it and end it in one round trip.

        It comes to nothing if another node has had a turn. If none has, then nothing has changed
        since this node's last turn, not even what was loaded without the lock meanwhile.
        """
        batch = [request]
        kept = self._decider.kept()
        self.turn, self.large = counters[0], None
        self.more_turns, self.ends_large = 0, False
        self.now_ms, self.leader = counters[5], counters[6]
        claims, is_keyed = self._decider.claims, bool(request.needs.keys)
        try:
            await self._cache.prepare_quick(connection, request.needs)
            group = self._decider.new_group()
            if is_keyed:
                claims.hold_events()
            outcomes = [(request.done, request.work(self._decider))]
            stands = not is_keyed or self._cache.saves_keys(group)
            if is_keyed and stands:
                claims.tell_held()
        except psycopg.Error as error:
            await self._undecided(batch, error)
            return
        except Exception:
            # What was loaded at different times without the lock need not fit together.
            log.info("a request is decided again, in a turn", exc_info=True)
            self._decide_again(request, self._decider.group, counters, kept)
            await self._forget()
            return
        if not stands:
            self._decide_again(request, group, counters, kept)
            return
        started_ns = self._clock_ns()
        is_empty = group.is_empty()
        try:
            if is_empty:
                # What its answers say is committed, unless another node has had a turn.
                last = (counters[0], self._ledger.last_ms)
                is_taken = bool(await connection.fetch("still_last_turn", last))
            else:
                is_taken = await self._write_quickly(connection, counters[0], group)
        except errors.UniqueViolation:
            # A key was not new. Anything else meets the same again in the ordinary turn.
            self._decide_again(request, group, counters, kept)
            return
        except Exception as error:
            if not connection.is_lost:
                self._decider.undo(group, counters[1:4], kept)
            if isinstance(error, errors.LockNotAvailable):
                await self._away(batch, error)
            else:
                await self._write_failed(connection, batch, outcomes, error)
            return
        if not is_taken:
            self.counted.overtaken += 1
            self._cache.overtaken()
            self._decide_again(request, group, counters, kept)
        elif is_empty:
            self._cache.taken(counters[0], group)
            self._ledger.committed(group)
            _tell(outcomes, None)
        else:
            self.counted.quick += 1
            self._written(group, counters[0] + 1, outcomes, started_ns)

    def _decide_again(
        self, request: Request, group: LedgerGroup, counters: Row, kept: Kept
    ) -> None:
        """Undo a decision that was made before its turn, and have an ordinary turn decide."""
        self._decider.undo(group, counters[1:4], kept)
        self._cache.undone()
        self._queue.appendleft(replace(request, repeatable=False))

    async def _write_quickly(
        self, connection: WritingConnection, last_turn: int, group: LedgerGroup
    ) -> bool:
        self._ledger.seal(group)
        turn = last_turn + 1
        shape = (*_shape(group), lists_all_changes(group))
        end = (turn, *group.counters, self._node, *shape, last_turn)
        now_ms = await connection.take_quick_turn(list(statements(group)), end)
        if now_ms is not None:
            self._cache.taken(turn, group, now_ms)
        return now_ms is not None

    async def _begin(self, connection: WritingConnection) -> Row:
        """Wait for the turn, and have rows of groups come along for the requests that wait now."""
        waiting = islice(self._queue, self._settings.turn_requests_max)
        about = [
            (r.about_group, r.needs.leases) for r in waiting if r.about_group or r.needs.leases
        ]
        groups = [request for request, _ in about if request is not None]
        return await self._cache.begin(
            connection, groups, {ref for _, refs in about for ref in refs}
        )

    async def _connected(self) -> WritingConnection:
        if self._connection is None:
            self._connection = await self._connect()
            self._cache.lost()
            self.counted.reconnects += 1
        return self._connection

    def _cut(self, own: WritingConnection | None) -> list[Request]:
        """The requests of this turn: all that wait for it, up to a bound.

        Those with a connection of their own get a turn in its transaction, by themselves.
        """
        batch: list[Request] = []
        size = 0
        settings = self._settings
        while self._queue and len(batch) < settings.turn_requests_max:
            if batch and size >= settings.turn_bytes_max:
                break
            if (batch and self._queue[0].alone) or self._queue[0].connection is not own:
                break
            request = self._queue.popleft()
            size += request.size
            batch.append(request)
            if request.alone:
                break
        return batch

    async def _hold_back(
        self, connection: WritingConnection, large: int, batch: list[Request]
    ) -> list[Request]:
        """Keep back the requests that have to wait for a large commit; the others.

        A large commit whose session is gone has failed, and this turn ends it.
        """
        marked = [(request, request.needs.marks()) for request in batch]
        asked = list({mark for _, found in marked for mark in found})
        [(gone, held)] = await connection.fetch("held_by_large", (LARGE_COMMITS, large, asked))
        self.ends_large = gone
        taken = frozenset(() if gone else held)
        going = []
        for request, found in marked:
            waits = not taken.isdisjoint(found) or (request.touches_all and not gone)
            if request.large_commit == large or not (waits or self._held.has_any(found)):
                going.append(request)
            elif request.if_held is not WAIT:
                _tell([(request.done, request.if_held)], None)
            else:
                self._held.add(large, request, found)
        return going

    async def _decide(
        self, connection: WritingConnection, counters: Row, batch: Sequence[Request]
    ) -> tuple[LedgerGroup, list[tuple[Done, object]]]:
        self.now_ms, self.leader = counters[5], counters[6]
        needs = batch[0].needs if len(batch) == 1 else together([one.needs for one in batch])
        self.counted.dropped += await self._cache.prepare(connection, counters, needs)
        groups = [r.about_group for r in batch if r.about_group is not None]
        if groups or needs.leases:
            await self._cache.load_groups(connection, groups, needs.leases)
        sends = [r.about_send for r in batch if r.about_send is not None]
        if sends:
            await self._cache.load_sends(connection, sends)
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
        started_ns = self._clock_ns()
        if group.is_empty() and not self.ends_large:
            # This turn changes nothing, and what its answers say is committed already.
            try:
                await connection.rollback()
            except psycopg.Error as error:
                await self._away(batch, error)
                return
            self._cache.taken(counters[0], group)
            self._ledger.committed(group)
            _tell(outcomes, None)
            return
        turn = counters[0] + 1 + self.more_turns
        try:
            self._ledger.seal(group)
            ending = "end_large_turn" if self.ends_large else "end_turn"
            # What a turn changed is known only if it has no further rows of turns.
            listed = not self.more_turns and lists_all_changes(group)
            lists = () if self.ends_large else (listed,)
            end = (turn, *group.counters, counters[4], self._node, *_shape(group), *lists)
            await connection.write_and_commit(list(statements(group)), end, ending=ending)
        except Exception as error:
            await self._write_failed(connection, batch, outcomes, error)
            return
        # After the turn of a large commit the ledger has its streams as they were before it.
        self._cache.taken(turn if connection is self._connection else -1, group)
        if self.ends_large:
            self._arrived.set()
        self._written(group, turn, outcomes, started_ns)

    def _written(
        self,
        group: LedgerGroup,
        turn: int,
        outcomes: list[tuple[Done, object]],
        started_ns: int,
    ) -> None:
        """A turn is on disk."""
        self.counted.turns += 1
        self._together = len(outcomes) + len(self._queue)
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
            replace(request, tries=request.tries + 1) for request in reversed(again)
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
            # Which request it was shows when each has a turn of its own.
            self._queue.extendleft(replace(request, alone=True) for request in reversed(batch))
            return
        log.error("a request could not be carried out", exc_info=error)
        _tell([(request.done, None) for request in batch], Failed(full=is_full(error)))

    async def _forget(self) -> None:
        """Nothing that was decided since the last commit holds: begin again from the database."""
        self._cache.lost()
        await self._disconnect()
        self._lost()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _drained(self) -> list[Request]:
        batch = [*self._held.take(), *self._queue]
        self._queue.clear()
        return batch


def _ignore(_answers: int, _commit_ns: int, _fsync_ns: int) -> None:
    """The default of `on_commit`: commits are not measured."""


def _tell(outcomes: Sequence[tuple[Done, object]], failure: Failure | None) -> None:
    for done, outcome in outcomes:
        try:
            done(outcome if failure is None else failure)
        except Exception:
            log.exception("an answer could not be given")


# What a turn writes


def _shape(group: LedgerGroup) -> tuple[list[int], list[int], list[int]]:
    """The streams that a sealed group changes, makes and ends."""
    return (
        [entry.stream.id for entry in group.entries.values()],
        sorted(group.created),
        [view.id for _, view, state in group.views if state != 0],
    )


def statements(sealed: LedgerGroup) -> Iterator[tuple[str, Sequence[Row]]]:
    """The statements of a sealed group by name, each with all its rows, in the order to write.

    They are a handful over arrays, whatever the number of requests.
    """
    # Updates first: a deleted stream gives its path up before a new one takes it.
    if sealed.updates:
        yield "update_stream", sealed.updates
    if sealed.moves:
        yield "move_tail", sealed.moves
    if sealed.inserts:
        yield "insert_stream", sealed.inserts
    if sealed.rows:
        yield "insert_log", sealed.rows
    if sealed.producers:
        yield (
            "save_producer",
            [
                (*producer_columns(stream_id, producer), producer.recent)
                for (stream_id, _), producer in sealed.producers.items()
            ],
        )
    if sealed.key_rows:
        yield "save_key", sealed.key_rows
    if sealed.sends:
        yield "save_send", list(sealed.sends.values())
    yield from gathered(sealed.statements)
    yield from sealed.bulk
