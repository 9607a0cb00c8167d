"""The store on PostgreSQL: any number of nodes share one database, and agree on what is in it.

This module hands requests to the parts that carry them out. They are decided in `turns`, on a
ledger that the `cache` keeps correct as long as the turn lasts. What other nodes write comes
through the `feed`. Reads go to the database each time, so that every node answers with what is
committed by any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import psycopg

from fencepost.clock import Clock
from fencepost.protocol.appends import Append
from fencepost.protocol.commits import Commit
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Stream
from fencepost.protocol.writers import (
    Writer,
    WriterMissing,
)
from fencepost.store import records
from fencepost.store.contract import (
    BadOffset,
    Bundle,
    Chunk,
    Failed,
    Failure,
    Missing,
    Published,
    SoftDeleted,
    StoreAwayError,
    StreamInfo,
    Truncated,
    Upload,
)
from fencepost.store.group_contract import GroupRequest
from fencepost.store.large.commits import LargeCommits
from fencepost.store.mesh_contract import SendRequest
from fencepost.store.postgres.cache import BulkLoader, Cache
from fencepost.store.postgres.cluster.feed import Feed, Notifier
from fencepost.store.postgres.driver.connection import PostgresConnection, connect, is_away
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large.commits import LargeCommit
from fencepost.store.postgres.migrate import migrate
from fencepost.store.postgres.readers import Lookups, PostgresReaders, read_stream
from fencepost.store.postgres.requests import Needs, Request, needs_of, needs_of_append
from fencepost.store.postgres.turns import Turns
from fencepost.store.read.chunk_cache import ChunkCache, place_of
from fencepost.store.read.chunks import Piece, own_segments
from fencepost.store.settings import PostgresSettings
from fencepost.store.write.decider import Decider
from fencepost.store.write.front import Touched, WriteFront
from fencepost.store.write.ledger import view_of
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.store.write.writers import find_committed

log = logging.getLogger(__name__)

T = TypeVar("T")
Listener = Callable[[Sequence[Published]], None]

_HELD = object()
"""The answer when a stream cannot be ended now, because a large commit holds it."""

START_RETRY_S = 0.25
"""How long a start waits before it tries again to reach a database that is changing."""


class PostgresStore(WriteFront):
    """One node's view of the shared streams. Make it with `open`, on the loop that will use it."""

    def __init__(
        self, settings: PostgresSettings, clock: Clock, *, simulated: bool = False
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._simulated = simulated
        self.node = clock.token(8).hex()
        self._listeners: list[Listener] = []
        self._reshaped: Counter[str] = Counter()
        self._background: list[asyncio.Task[None]] = []
        self.lookups = Lookups(partial(connect, settings, wait_ms_max=settings.lookup_wait_ms))
        """The connection for what a decision has to look up, on the event loop."""
        loop = asyncio.get_running_loop()

        def reader_lost() -> None:
            # On the loop before what the thread reads next: it may be from another database.
            loop.call_soon_threadsafe(self.chunks.clear)

        self.readers = PostgresReaders(
            partial(connect, settings, readonly=True),
            threads=settings.reader_threads,
            lost=reader_lost,
        )
        self.chunks = ChunkCache(self.readers, bytes_max=settings.chunk_cache_bytes)
        self.scanners = PostgresReaders(
            partial(connect, settings, readonly=True), threads=settings.scan_threads + 1
        )
        self._upkeep = ThreadPoolExecutor(1, thread_name_prefix="fencepost-upkeep")
        self._upkeep_connection: PostgresConnection | None = None
        loader = BulkLoader(self.lookups)
        decider = Decider(self.lookups, settings, self._now_ms, loader=loader, exact_deadlines=True)
        large = LargeCommits(decider.holds, partial(LargeCommit, self))
        super().__init__(settings, decider, large)
        dial = partial(WritingConnection.connect, settings)
        self.feed = Feed(
            self.node,
            dial,
            poll_interval_s=settings.poll_interval_ms / 1000,
            published=self._told,
            lost=self.chunks.clear,
        )
        self.turns = Turns(
            settings,
            self.node,
            dial,
            self.decider,
            Cache(
                self.decider.ledger,
                loader,
                self.decider.claims,
                streams_max=settings.streams_cached_max,
                clock_ns=clock.monotonic_ns,
            ),
            committed=self._committed,
            lost=self._lost,
            feed=self.feed,
            clock_ns=clock.monotonic_ns,
        )
        self.notifier = Notifier(self.node, dial, self.feed)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never resolved with an error: a database that is away may come back."""
        for work in (self.feed.run(), self.notifier.run()):
            self._background.append(asyncio.create_task(work))

    @classmethod
    async def open(
        cls,
        settings: PostgresSettings,
        clock: Clock,
        *,
        simulated: bool = False,
        migrating: bool = True,
    ) -> PostgresStore:
        """Bring the schema up to date and join the other nodes.

        `simulated` lets `clock` and not the database say what time it is, for tests.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + settings.start_wait_ms / 1000
        is_changing = False
        while True:
            try:
                await loop.run_in_executor(None, partial(_prepare, settings, migrating=migrating))
                return cls(settings, clock, simulated=simulated)
            except psycopg.Error as error:
                # A database that is being restarted says so, and then nothing listens for a while.
                is_changing = is_changing or _is_changing(error)
                if not (is_changing and is_away(error)) or loop.time() >= ends:
                    raise
                log.warning("waiting for the database: %s", " ".join(str(error).split()))
            await asyncio.sleep(START_RETRY_S)

    async def close(self) -> None:
        """Finish what was asked and close the connections; a large commit under way fails."""
        await self._large.close()
        await self.turns.close()
        for task in self._background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.readers.close()
        self.scanners.close()
        self._upkeep.shutdown()
        if self._upkeep_connection is not None:
            self._upkeep_connection.close()
        self.lookups.close()
        if not self.failure.done():
            self.failure.cancel()

    def _now_ms(self) -> int:
        """The time of decisions: the database's, so that all nodes agree about it."""
        return self._clock.now_ms() if self._simulated else self.turns.now_ms

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def stats(self) -> dict[str, float]:
        """Numbers for the metrics."""
        counted = self.turns.counted
        return {
            "turns_total": counted.turns,
            "ledger_drops_total": counted.dropped,
            "failed_turns_total": counted.failed,
            "quick_turns_total": counted.quick,
            "overtaken_turns_total": counted.overtaken,
            "unknown_turns_total": counted.unknown,
            "connections_total": counted.reconnects,
            "feed_turn": self.feed.seen,
        }

    # Writing. A request that touches what a large commit of this node holds waits in `WriteFront`;
    # what large commits of other nodes hold is found out in the turn.

    def _decide(
        self,
        work: Callable[[Decider], Any],
        done: Callable[[Any], None],
        touched: Touched,
        size: int = 0,
    ) -> None:
        if isinstance(touched, GroupRequest):
            self.turns.submit(Request(work, done, about_group=touched))
            return
        if isinstance(touched, SendRequest):
            needs = Needs(parts=touched.send.body.parts)
            self.turns.submit(Request(work, done, needs, size, about_send=touched))
            return
        needs = needs_of(touched)
        repeatable = isinstance(touched, Commit | Upload | Bundle) and not (
            needs.leases or needs.books
        )
        self.turns.submit(Request(work, done, needs, size, repeatable=repeatable))

    def append(self, request: Append, done: Callable[[Any], None]) -> None:
        if self._held and self._holds_append(request, done):
            return
        size = 0 if request.batch is None else request.batch.size
        needs = needs_of_append(request)
        repeatable = not (needs.leases or needs.books)
        self.turns.submit(
            Request(
                lambda decider: decider.append(request), done, needs, size, repeatable=repeatable
            )
        )

    def _accepts_large(self, done: Callable[[Failure], None]) -> bool:
        if self._large.closing:
            done(Failed(full=False))
        return not self._large.closing

    async def find_writer(self, name: str) -> Writer | WriterMissing | Failure:
        return await self.readers.run(partial(find_committed, name=name)) or WriterMissing()

    def _reshaping(self, path: str, done: Callable[[Any], None]) -> Callable[[Any], None]:
        """A stream is being made or ended here: a request that looks at it later waits for that."""
        self._reshaped[path] += 1

        def reshaped(outcome: Any) -> None:
            self._reshaped[path] -= 1
            if not self._reshaped[path]:
                del self._reshaped[path]
            done(outcome)

        return reshaped

    async def decide(self, work: Callable[[Decider], T], *, touches_all: bool = True) -> T:
        """Let `work` decide something, and wait until that is durable.

        Work that may touch any stream or part waits while a large commit is under way.
        """
        answer: asyncio.Future[T | Failure] = asyncio.get_running_loop().create_future()
        self.submit(Request(work, partial(_tell, answer), touches_all=touches_all))
        outcome = await answer
        if isinstance(outcome, Failure):
            raise StoreAwayError("the database could not be written to")
        return outcome

    def submit(self, request: Request) -> None:
        """Have a request decided in the next turn; after any large commit if it touches all."""
        if (
            request.touches_all
            and self._held
            and self._holds.keeps_all(lambda: self.submit(request))
        ):
            return
        self.turns.submit(request)

    async def between_commits(self, work: Callable[[PostgresConnection], T]) -> T:
        """Do a piece of upkeep in a transaction of its own, while no node has its turn."""
        return await asyncio.get_running_loop().run_in_executor(
            self._upkeep, partial(self._exclusively, work)
        )

    def _exclusively(self, work: Callable[[PostgresConnection], T]) -> T:
        try:
            if self._upkeep_connection is None:
                self._upkeep_connection = connect(self.settings)
            with self._upkeep_connection as connection:
                connection.fetch("take_turn")
                return work(connection)
        except psycopg.OperationalError as error:
            lost, self._upkeep_connection = self._upkeep_connection, None
            if lost is not None:
                lost.close()
            raise StoreAwayError(str(error).strip()) from error

    def suspect(self, error: BaseException) -> None:
        """Background work met an error: nothing is done, because the work is tried again."""

    # Reading

    async def look(self, path: str, *, touch: bool) -> StreamInfo | Missing | SoftDeleted | Failure:
        if path in self._reshaped and not self.turns.is_held(path):
            failure = await self.durable()
            if failure is not None:
                return failure
        rows = await self.readers.run(lambda connection: connection.fetch("look_stream", (path,)))
        if not rows:
            return Missing()
        [(*row, now_ms)] = rows
        if self._simulated:
            now_ms = self._clock.now_ms()
        stream, stored_ms = records.stream_from_row(tuple(row))
        if stream.soft_deleted:
            return SoftDeleted()
        if stream.expired(now_ms):
            return await self._ended(path, view_of(stream), touch=touch)
        if touch and _slides(stream, stored_ms, now_ms):
            # A stream that a large commit holds lives on with the appends of that.
            work = partial(_touch, path, now_ms)
            self.turns.submit(Request(work, _unheard, Needs((path,)), if_held=None))
        return view_of(stream)

    async def _ended(
        self, path: str, info: StreamInfo, *, touch: bool
    ) -> StreamInfo | Missing | SoftDeleted | Failure:
        """An expired stream is gone on disk before a client is told that it is."""
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.turns.submit(
            Request(
                lambda decider: decider.alive(path, decider.tick()),
                partial(_tell, done),
                Needs((path,)),
                if_held=_HELD,
            )
        )
        outcome = await done
        if outcome is _HELD:
            return info  # a large commit is about to append to it
        if isinstance(outcome, Failure):
            return outcome
        return await self.look(path, touch=touch) if outcome is not None else Missing()

    async def read(
        self, info: StreamInfo, after: Offset, *, bytes_max: int
    ) -> Chunk | BadOffset | Truncated | Missing:
        if after == info.tail:
            return Chunk(info, after, after, b"")
        if after.bytes >= info.tail.bytes:
            return BadOffset()
        if after.bytes < info.first.bytes:
            return Truncated(info.first)
        segments = own_segments(info.id, info.segments, info.tail)
        place = place_of(segments, after, bytes_max=bytes_max, is_json=info.is_json)
        work = partial(read_stream, info=info, after=after, bytes_max=bytes_max)
        piece = await self.chunks.read(place, work)
        if not isinstance(piece, Piece):
            return piece
        return Chunk(info, after, piece.next, piece.data)

    async def probe(self) -> Failure | None:
        done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self.turns.submit(Request(_stir, partial(_tell, done)))
        return await done

    async def durable(self) -> Failure | None:
        """Wait until everything asked for so far is decided and durable."""
        done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self.turns.submit(Request(_nothing, partial(_tell, done)))
        return await done

    # What comes of turns

    def _committed(self, group: LedgerGroup, turn: int) -> None:
        self.notifier.poke(turn)
        self._publish(self.decider.ledger.committed(group))

    def _told(self, published: Sequence[Published]) -> None:
        """Another node has written, or a large commit is over."""
        self.turns.poke()
        self._publish(published)

    def _publish(self, published: Sequence[Published]) -> None:
        for listener in self._listeners:
            try:
                listener(published)
            except Exception:
                log.exception("a listener failed")

    def _lost(self) -> None:
        """A turn failed: what was decided in it is void."""
        self.lookups.close()
        # The database may come back as another one: a standby that had not heard of everything.
        self.chunks.clear()
        for watcher in self.decider.watchers:
            watcher.reset()


def _is_changing(error: BaseException) -> bool:
    """Whether a server said that it is shutting down or starting up.

    While a connection is made, libpq passes on what the server says, and not its code.
    """
    return getattr(error, "sqlstate", None) == "57P03" or "the database system is" in str(error)


def _prepare(settings: PostgresSettings, *, migrating: bool) -> None:
    connection = connect(settings)
    try:
        migrate(connection, dry_run=not migrating)
    finally:
        connection.close()


def _slides(stream: Stream, stored_ms: int | None, now_ms: int) -> bool:
    """Whether a use at this time has to be written down."""
    deadline_ms = stream.lifetime.deadline_ms(now_ms)
    return (
        stream.lifetime.ttl_s is not None
        and deadline_ms is not None
        and (stored_ms is None or stored_ms < deadline_ms)
    )


def _touch(path: str, at_ms: int, decider: Decider) -> None:
    """A stream was read at a time: its life is counted from then, however late it is by now."""
    decider.tick()
    entry = decider.ledger.find(path)
    if entry is None or entry.stream.soft_deleted or entry.stream.expired(at_ms):
        return
    if decider.ledger.slide(entry, at_ms, is_read=True):
        decider.ledger.touch(decider.group, entry)


def _tell(waiting: asyncio.Future[T], outcome: T) -> None:
    """Answer a future, unless its task has gone."""
    if not waiting.done():
        waiting.set_result(outcome)


def _unheard(_outcome: object) -> None:
    """No task waits for this: a read that is not written down is written with the next one."""


def _stir(decider: Decider) -> None:
    decider.group.statements.append(("stir", ()))


def _nothing(_decider: Decider) -> None:
    """Decide nothing: the answer shows that all requests before this one are durable."""
