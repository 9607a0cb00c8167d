"""The embedded store: streams in one SQLite file, used by one server.

A request is decided against the ledger, joins the open group, and is answered when the group is on
disk. This module puts the parts together: the rules are in `protocol`, the state in `write/ledger`,
the commits in `write/group_commit`, reading in `read/chunks`, background jobs in `maintain`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import apsw

from fencepost.clock import Clock
from fencepost.protocol.appends import Append
from fencepost.protocol.offsets import Offset
from fencepost.protocol.writers import (
    Writer,
    WriterMissing,
)
from fencepost.store.contract import (
    BadOffset,
    Chunk,
    DataDamagedError,
    Failed,
    Failure,
    Missing,
    Published,
    SoftDeleted,
    StreamInfo,
    Truncated,
    Watcher,
)
from fencepost.store.large.commits import LargeCommit, LargeCommits
from fencepost.store.large.slices import redo, tell_redone
from fencepost.store.read import chunks as reading
from fencepost.store.read.chunk_cache import ChunkCache, place_of
from fencepost.store.read.chunks import own_segments
from fencepost.store.settings import SqliteSettings
from fencepost.store.sql import Row
from fencepost.store.sqlite.connection import (
    FILE,
    PAGE_BYTES,
    FolderLock,
    LedgerWriter,
    SqliteConnection,
    connect,
    fold,
    is_disk_error,
    make_folder,
    restart_log,
)
from fencepost.store.sqlite.migrate import migrate
from fencepost.store.write.decider import Decider
from fencepost.store.write.front import Touched, WriteFront
from fencepost.store.write.group_commit import GroupCommit
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.store.write.loader import DiskLoader
from fencepost.store.write.writers import find_committed

log = logging.getLogger(__name__)

T = TypeVar("T")
Listener = Callable[[Sequence[Published]], None]


class StoreBrokenError(Exception):
    """The disk failed: what is on it must be looked at before anything is served again."""


class SqliteStore(WriteFront):
    """Streams in one SQLite file. Make it on the event loop that will use it."""

    def __init__(self, settings: SqliteSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        make_folder(settings.folder)
        self._lock = FolderLock(settings.folder)
        self.file = settings.folder / FILE
        self._writer = LedgerWriter(self._open(), settings.rows_behind_max)
        self._lookups = self._connect(readonly=True)
        self.behind = self._writer.behind
        # What a server before left there is known before anything is decided or read.
        self.behind.load(self._lookups)
        self.readers = reading.Readers(
            partial(self._connect, readonly=True), threads=settings.reader_threads
        )
        self.chunks = ChunkCache(self.readers, bytes_max=settings.chunk_cache_bytes)
        self.scanners = reading.Readers(
            partial(self._connect, readonly=True), threads=settings.scan_threads + 1
        )
        loader = DiskLoader(self._lookups, self.behind)
        decider = Decider(self._lookups, settings, clock.now_ms, loader=loader)
        large = LargeCommits(decider.holds, partial(LargeCommit, self))
        super().__init__(settings, decider, large)
        self.ledger = decider.ledger
        # Two of the things that the group commit asks of the owner of the state.
        self.new_group, self.seal = decider.new_group, self.ledger.seal
        self.keys = self.ledger.filter_keys()
        self.sends = self.ledger.sends.use_filter()
        self._closing = False
        self._listeners: list[Listener] = []
        self._folded_pages = 0
        self.wal_grown = asyncio.Event()
        """Set when the write-ahead log is long enough to be folded in."""
        self.commits = GroupCommit(
            self._writer,
            self,
            is_disk_error=is_disk_error,
            clock_ns=clock.monotonic_ns,
            loop_commit_us_max=settings.loop_commit_us_max,
        )
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved with the error when the disk fails: the server must stop then."""

    def _open(self) -> SqliteConnection:
        """The writer's connection, the file's schema brought up to date and its log folded in."""
        try:
            connection = self._connect()
            migrate(connection.raw)
            redo(connection, LedgerWriter(connection).write_slice)
            fold(connection.raw)
        except Exception as error:
            self._lock.release()
            if is_disk_error(error):
                raise StoreBrokenError(f"{self.file} cannot be used: {error}") from error
            raise
        return connection

    def _connect(self, *, readonly: bool = False) -> SqliteConnection:
        return SqliteConnection(
            connect(
                self.file,
                readonly=readonly,
                synchronous=self.settings.synchronous,
                vfs=self.settings.vfs,
            )
        )

    async def close(self) -> None:
        """Commit what was decided, fold the log into the database, and let go of the folder."""
        # A large commit may end half way, for the next start to finish: from here on nothing may be
        # decided about what it holds.
        self._closing = True
        await self._large.close()
        await self.commits.close()
        self.readers.close()
        self.scanners.close()
        self._lookups.close()
        if not self.failure.done():
            with contextlib.suppress(apsw.FullError):  # the next start knows it from the log
                self._writer.write_behind()
            fold(self._writer.connection.raw)
            self.failure.cancel()
        else:
            # What the log holds is for the next start to find out; SQLite would fold it in here.
            self._writer.connection.raw.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._writer.connection.close()
        self._lock.release()

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def lookup(self, query: str, values: tuple[object, ...] = ()) -> list[Row]:
        """All committed rows of a small query, read on the event loop."""
        return self._lookups.fetch(query, values)

    # Writing: what `WriteFront` leaves to the store

    def _decide(
        self,
        work: Callable[[Decider], Any],
        done: Callable[[Any], None],
        _touched: Touched,
        _size: int = 0,
    ) -> None:
        if self._accepts(done):
            self.commits.after(done, work(self.decider))

    def append(self, request: Append, done: Callable[[Any], None]) -> None:
        if self._held and self._holds_append(request, done):
            return
        if self._closing or self.failure.done():
            done(Failed(full=False))
        else:
            self.commits.after(done, self.decider.append(request))

    def _accepts_large(self, done: Callable[[Failure], None]) -> bool:
        return self._accepts(done)

    def _accepts(self, done: Callable[[Failure], None]) -> bool:
        """Whether anything may be decided; if not, `done` is told that nothing is."""
        if self._closing or self.failure.done():
            done(Failed(full=False))
            return False
        return True

    async def find_writer(self, name: str) -> Writer | WriterMissing | Failure:
        failure = await self.durable()
        if failure is not None:
            return failure
        return find_committed(self._lookups, name) or WriterMissing()

    def tick(self) -> int:
        """The time of a decision about to be made."""
        return self.decider.tick()

    # Reading

    async def look(self, path: str, *, touch: bool) -> StreamInfo | Missing | SoftDeleted | Failure:
        held = self._holds.held
        if held is not None and path in held.paths and not held.was_shown:
            # Nothing may change about it, not even how long it lives; it lives on with its appends.
            return await self._look_at_held(path)
        now_ms = self.tick()
        entry = self.decider.alive(path, now_ms)
        while not self.ledger.is_settled(path):
            failure = await self.durable()
            if failure is not None:
                return failure
            entry = self.ledger.find(path)
        if entry is None:
            return Missing()
        if entry.stream.soft_deleted:
            return SoftDeleted()
        if touch and self.ledger.slide(entry, now_ms):
            self.ledger.touch(self.commits.group, entry)
            self.commits.flush()
        assert entry.view is not None
        return entry.view

    async def _look_at_held(self, path: str) -> StreamInfo | Missing | SoftDeleted | Failure:
        """What readers see of a stream while a large commit has hold of it."""
        held = self._holds.held
        while held is not None and path not in held.views and not held.was_shown:
            if not self.ledger.is_settled(path):
                failure = await self.durable()
                if failure is not None:
                    return failure
                continue
            entry = self.ledger.find(path)
            if entry is None:
                return Missing()
            if entry.stream.soft_deleted:
                return SoftDeleted()
            assert entry.view is not None
            return entry.view
        if held is None or held.was_shown:
            return await self.look(path, touch=False)
        return held.views[path]

    async def probe(self) -> Failure | None:
        if self.failure.done():
            return Failed(full=False)
        self.stir(self.commits.group)
        return await self.durable()

    async def durable(self) -> Failure | None:
        """Wait until everything decided so far is on disk."""
        told: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()

        def answer(failure: Failure | None) -> None:
            if not told.done():  # a request whose client has left waits no longer
                told.set_result(failure)

        self.commits.after(answer)
        return await told

    async def read(
        self, info: StreamInfo, after: Offset, *, bytes_max: int
    ) -> Chunk | BadOffset | Truncated | Missing:
        if after == info.tail:
            return Chunk(info, after, after, b"")
        if after.bytes >= info.tail.bytes:
            return BadOffset()
        if after.bytes < info.first.bytes:
            return Truncated(info.first)
        entry = self.ledger.find_id(info.id)
        if entry is None:
            return Missing()
        segments = own_segments(info.id, entry.stream.segments, info.tail)
        place = place_of(segments, after, bytes_max=bytes_max, is_json=info.is_json)
        work = partial(
            reading.read_chunk,
            segments=segments,
            after=after,
            bytes_max=bytes_max,
            is_json=info.is_json,
        )
        try:
            piece = await self.chunks.read(place, work)
        except reading.OffsetError:
            return BadOffset()
        except reading.RowsGoneError as error:
            entry = self.ledger.find_id(info.id)
            if entry is None:
                return Missing()
            # Truncated and purged since the reader looked, if the log keeps nothing for long.
            if after.bytes < entry.stream.first.bytes:
                return Truncated(entry.stream.first)
            raise DataDamagedError(f"stream {info.path!r}: {error}") from None
        return Chunk(info, after, piece.next, piece.data)

    # Upkeep

    def suspect(self, error: BaseException) -> None:
        """Upkeep met an error: stop if it was the disk's doing."""
        self.commits.suspect(error)

    async def restart_log(self) -> bool:
        """Fold what is left of the write-ahead log in, so that the next commit starts it anew.

        The file keeps its size: writing over it syncs faster than making it grow again. False while
        a reader uses it, such as a backup: writers do not wait for that.
        """
        # Also on a disk that is too full to write what is behind: this makes room.
        restarted = await self._exclusively(lambda connection: restart_log(connection.raw))
        if restarted:
            self._writer.wal_pages = 0
        return restarted

    @property
    def wal_pages(self) -> int:
        """How long the write-ahead log is."""
        return self._writer.wal_pages

    async def between_commits(self, work: Callable[[SqliteConnection], T]) -> T:
        """Do a piece of upkeep on the writer's connection while no group is under way.

        It finds streams and producers as they are: what is behind is written first.
        """

        def settled(connection: SqliteConnection) -> T:
            self._writer.write_behind()
            return work(connection)

        return await self._exclusively(settled)

    async def settle(self) -> None:
        """Write what is behind into the rows of streams and producers."""
        await self._exclusively(lambda _connection: self._writer.write_behind())

    async def _exclusively(self, work: Callable[[SqliteConnection], T]) -> T:
        results: list[T] = []
        await self.commits.exclusively(lambda: results.append(work(self._writer.connection)))
        return results[0]

    async def decide(self, work: Callable[[Decider], T]) -> T:
        """Let `work` decide something, and wait until that is durable."""
        result = work(self.decider)
        await self.durable()
        return result

    def _watch_log(self) -> None:
        """Have the write-ahead log folded in whenever it has grown by so much since last time."""
        pages = self._writer.wal_pages
        if pages < self._folded_pages:
            self._folded_pages = 0  # it started anew
        grown_bytes = (pages - self._folded_pages) * PAGE_BYTES
        if grown_bytes >= self.settings.checkpoint_wal_bytes:
            self._folded_pages = pages
            self.wal_grown.set()

    # What else the group commit asks

    def committed(self, group: LedgerGroup) -> None:
        self._watch_log()
        self.behind.committed(group)
        published = self.ledger.committed(group)
        if self._holds.held is not None:
            # Behind a large commit the log does not show them yet: they are told again then.
            self._holds.held.appended_meanwhile.update((info.id, info) for info, *_ in published)
        self.publish(published)

    def publish(self, changes: Sequence[Published]) -> None:
        """Tell those who listen what is visible now."""
        for listener in self._listeners:
            listener(changes)

    def reset(self) -> None:
        self.behind.load(self._lookups)
        self.decider.reset()

    def stir(self, group: LedgerGroup) -> None:
        group.statements.append(("stir", ()))

    def broken(self, error: BaseException) -> None:
        log.critical("the disk failed; stopping rather than guessing what is on it")
        self.give_up(error)

    # What large commits ask of the store that they are carried out in

    @property
    def committed_state(self) -> SqliteConnection:
        return self._lookups

    def after(self, done: Callable[[Any], None], outcome: object = None) -> None:
        self.commits.after(done, outcome)

    def is_broken(self) -> bool:
        return self.failure.done()

    def tell_redone(self, watcher: Watcher, published: Listener) -> None:
        """Tell of what was finished at this start; it need not be told again."""
        tell_redone(self._lookups, self.commits.group, watcher, published)
        self.commits.flush()

    def give_up(self, error: BaseException) -> None:
        """Stop; the next start finds out what is on disk, and finishes what was certain."""
        if not self.failure.done():
            failure = StoreBrokenError(str(error))
            failure.__cause__ = error
            self.failure.set_exception(failure)
