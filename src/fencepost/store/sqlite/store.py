"""The embedded store: decide against the ledger, commit as a group, answer.

This module is the order of things and little else. The rules are in `protocol`, the state in
`ledger`, the waiting in `store.commit`, the reading in `reading`; upkeep (expiry, purge,
checkpoints) is in `upkeep`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import apsw

from fencepost.clock import Clock
from fencepost.protocol.appends import (
    Append,
    Appended,
    AppendOutcome,
    Duplicate,
    KeyRecord,
    Replayed,
    decide_append,
)
from fencepost.protocol.claims import EpochGuarded, NotHolder
from fencepost.protocol.commits import (
    Commit,
    CommitKeyReused,
    CommitOutcome,
    CommitRefused,
    CommitReplayed,
    Committed,
    Part,
    decide_commit,
    describe_commit,
)
from fencepost.protocol.creates import (
    Create,
    Created,
    CreateOutcome,
    ForkPoint,
    decide_create,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.rates import TooFast
from fencepost.protocol.retention import BeyondTail, Cut, Uncut, decide_truncation
from fencepost.protocol.streams import Stream
from fencepost.store.commit import GroupCommit
from fencepost.store.contract import (
    BadOffset,
    Chunk,
    ChunkConflict,
    Deleted,
    Failed,
    Failure,
    Missing,
    PartClosed,
    Published,
    SoftDeleted,
    Staged,
    StageOutcome,
    StreamInfo,
    TooManyParts,
    Truncated,
    Upload,
    Watcher,
)
from fencepost.store.sqlite import reading
from fencepost.store.sqlite.claims import Claims
from fencepost.store.sqlite.database import (
    FILE,
    PAGE_BYTES,
    FolderLock,
    Row,
    connect,
    fold,
    is_disk_error,
    make_folder,
    migrate,
    restart_log,
)
from fencepost.store.sqlite.drafts import Draft
from fencepost.store.sqlite.forking import fork_point, is_place, own_segments
from fencepost.store.sqlite.ledger import COMMITS, NO_PRODUCER, Entry, Ledger, LedgerGroup
from fencepost.store.sqlite.records import CLOSED, EXPIRED, REMOVED
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.store.sqlite.staging import ROW_BYTES
from fencepost.store.sqlite.writing import LedgerWriter

log = logging.getLogger(__name__)

T = TypeVar("T")
Listener = Callable[[Sequence[Published]], None]


class StoreBrokenError(Exception):
    """The disk failed: what is on it must be looked at before anything is served again."""


class Counts:
    """What was accepted since the start, for the metrics."""

    __slots__ = ("appends", "bytes", "duplicates", "messages")

    def __init__(self) -> None:
        self.appends = self.messages = self.bytes = self.duplicates = 0

    def add(self, request: Append) -> None:
        self.appends += 1
        if request.batch is not None:
            self.messages += request.batch.messages
            self.bytes += request.batch.size


class SqliteStore:
    """Streams in one SQLite file. Make it with `open`, on the event loop that will use it."""

    def __init__(self, settings: SqliteSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        make_folder(settings.folder)
        self._lock = FolderLock(settings.folder)
        self.file = settings.folder / FILE
        self._writer = LedgerWriter(self._open())
        self._lookups = self._connect(readonly=True)
        self.readers = reading.Readers(
            partial(self._connect, readonly=True), threads=settings.reader_threads
        )
        self.ledger = Ledger(
            self._lookups,
            streams_max=settings.streams_cached_max,
            producers_max=settings.producers_cached_max,
            key_retention_ms=settings.key_retention_s * 1000 or None,
        )
        self.claims = Claims(self._lookups)
        self._listeners: list[Listener] = []
        self._watchers: list[Watcher] = []
        self.counts = Counts()
        self.wal_pages = self._folded_pages = 0
        self.wal_grown = asyncio.Event()
        """Set when the write-ahead log is long enough to be folded in."""
        self._writer.connection.set_wal_hook(self._wal_written)
        self.commits = GroupCommit(
            self._writer,
            self,
            is_disk_error=is_disk_error,
            clock_ns=clock.monotonic_ns,
            loop_commit_us_max=settings.loop_commit_us_max,
        )
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved with the error when the disk fails: whoever runs the store must stop."""

    def _open(self) -> apsw.Connection:
        """The writer's connection, the file's schema brought up to date and its log folded in."""
        try:
            connection = self._connect()
            migrate(connection)
            fold(connection)
        except Exception as error:
            self._lock.release()
            if is_disk_error(error):
                raise StoreBrokenError(f"{self.file} cannot be used: {error}") from error
            raise
        return connection

    def _connect(self, *, readonly: bool = False) -> apsw.Connection:
        return connect(
            self.file,
            readonly=readonly,
            synchronous=self.settings.synchronous,
            vfs=self.settings.vfs,
        )

    async def close(self) -> None:
        """Commit what was decided, fold the log into the database, and let go of the folder."""
        await self.commits.close()
        self.readers.close()
        self._lookups.close()
        if not self.failure.done():
            fold(self._writer.connection)
            self.failure.cancel()
        else:
            # What the log holds is for the next start to find out; SQLite would fold it in here.
            self._writer.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._writer.connection.close()
        self._lock.release()

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` change its own state in the commits that make and end streams."""
        self._watchers.append(watcher)

    def lookup(self, query: str, values: tuple[object, ...] = ()) -> list[Row]:
        """All committed rows of a small query, read on the event loop."""
        return self._lookups.execute(query, values).fetchall()

    # Writing

    def append(
        self,
        request: Append,
        done: Callable[[AppendOutcome | Missing | SoftDeleted | Failure], None],
    ) -> None:
        if self.failure.done():
            done(Failed(full=False))
            return
        now_ms = self.tick()
        if request.actor is not None:
            too_fast = self.claims.pace(request.actor, now_ms)
            if too_fast is not None:
                self._answer(done, too_fast)
                return
        entry = self._alive(request.path, now_ms)
        conditions = request.conditions
        if entry is None and conditions is not None and conditions.makes is not None:
            self._append_to_new(request, conditions.makes, now_ms, done)
            return
        if entry is None or entry.stream.soft_deleted:
            self._answer(done, Missing() if entry is None else SoftDeleted())
            return
        claim = request.producer
        producer = None if claim is None else self.ledger.find_producer(entry, claim.id)
        key = None
        if conditions is not None and conditions.key is not None:
            key = self.ledger.find_key(entry.stream.id, request.principal, conditions.key)
        outcome = decide_append(
            entry.stream,
            producer,
            request,
            key=key,
            position=self.ledger.next_position,
            now_ms=now_ms,
        )
        if request.actor is not None:
            outcome = self.claims.settle(request, producer, outcome, now_ms)
        if isinstance(outcome, Appended):
            self.ledger.apply(self.commits.group, entry, request, outcome, now_ms)
            self.counts.add(request)
        elif not isinstance(outcome, NotHolder | EpochGuarded | TooFast):
            self.counts.duplicates += isinstance(outcome, Duplicate | Replayed)
            if self.ledger.slide(entry, now_ms):
                self.ledger.touch(self.commits.group, entry)
        if request.actor is not None:
            self.claims.tell(request, producer, outcome, now_ms)
        self._answer(done, outcome)

    def _append_to_new(
        self,
        request: Append,
        content_type: str,
        now_ms: int,
        done: Callable[[AppendOutcome | Missing | SoftDeleted | Failure], None],
    ) -> None:
        """An append that makes its stream, if it is accepted."""
        stream = Stream(self.ledger.next_stream, request.path, content_type, created_ms=now_ms)
        position = self.ledger.next_position
        outcome = decide_append(stream, None, request, position=position, now_ms=now_ms)
        outcome = self.claims.settle(request, None, outcome, now_ms)
        if isinstance(outcome, Appended):
            entry = self._make(stream)
            self.ledger.apply(self.commits.group, entry, request, outcome, now_ms)
            self.counts.add(request)
        self._answer(done, outcome)

    def _make(self, stream: Stream) -> Entry:
        """Take in a stream that an append makes; its messages follow."""
        entry = self.ledger.add(self.commits.group, stream)
        for watcher in self._watchers:
            watcher.created(stream.id, stream.path, stream.tail)
        return entry

    def commit(self, request: Commit, done: Callable[[CommitOutcome | Failure], None]) -> None:
        if self.failure.done():
            done(Failed(full=False))
            return
        now_ms = self.tick()
        known = None if request.key is None else self._commit_key(request)
        if known is not None:
            record, answer = known
            same = record.digest == request.digest
            self._answer(
                done, CommitReplayed(answer) if same else CommitKeyReused(record.created_ms)
            )
            return
        first = request.items[0].append
        too_fast = self.claims.pace(first.actor, now_ms, appends=len(request.items))
        if too_fast is not None:
            self._answer(done, CommitRefused(0, too_fast))
            return
        paths = dict.fromkeys(item.append.path for item in request.items)
        entries = {path: self._alive(path, now_ms) for path in paths}
        draft = Draft(self.ledger, entries, self.claims, now_ms=now_ms)
        outcomes = []
        for item in request.items:
            outcomes.append(draft.decide(item))
            if isinstance(decide_commit(outcomes[-1:]), CommitRefused):
                break
        outcome = decide_commit(outcomes)
        if isinstance(outcome, Committed):
            self._carry_out(draft)
            self._keep_commit(request, draft, outcome, now_ms)
            self.claims.take_over(draft.standings)
        for append, before, decided in draft.audited(outcome):
            self.claims.tell(append, before, decided, now_ms)
        self._answer(done, outcome)

    def _keep_commit(self, request: Commit, draft: Draft, outcome: Committed, now_ms: int) -> None:
        group = self.commits.group
        last = self.ledger.next_position - 1
        for part in draft.parts:
            self.ledger.staging.use(group, part, last)
        if request.key is not None:
            record = KeyRecord(request.digest, START, START, False, last, now_ms)
            answer = describe_commit(request, outcome)
            place = (COMMITS, request.principal, request.key)
            self.ledger.keep_key(group, place, record, answer)

    def _commit_key(self, request: Commit) -> tuple[KeyRecord, bytes] | None:
        assert request.key is not None
        return self.ledger.find_commit_key(request.principal, request.key)

    def _carry_out(self, draft: Draft) -> None:
        """Do what a draft has decided, on the ledger and in the open group."""
        group = self.commits.group
        group.bytes += ROW_BYTES * len(draft.decided)
        for stream in draft.made.values():
            self._make(stream)
        for append, outcome in draft.decided:
            entry = self.ledger.find(append.path)
            assert entry is not None
            self.ledger.apply(group, entry, append, outcome, self.ledger.last_ms)
            self.counts.add(append)

    def stage(self, upload: Upload, done: Callable[[StageOutcome | Failure], None]) -> None:
        if self.failure.done():
            done(Failed(full=False))
            return
        self._answer(done, self._stage(upload, self.tick()))

    def _stage(self, upload: Upload, now_ms: int) -> StageOutcome:
        part, staging = upload.part, self.ledger.staging
        staged = Staged(upload.batch.messages, upload.batch.size, repeated=False)
        before = staging.find_chunk(part, upload.ordinal)
        if before is not None:
            if before != upload.digest:
                return ChunkConflict("another content was uploaded as this chunk before")
            return staged._replace(repeated=True)
        found = staging.find(part)
        if found is None:
            if staging.waiting_count >= self.settings.staged_parts_max:
                return TooManyParts(self.settings.staged_parts_max)
        elif found.committed is not None:
            return PartClosed(found.committed)
        elif found.media_type != upload.media_type:
            return ChunkConflict(f"the part holds {found.media_type}")
        staging.add(self.commits.group, upload, new=found is None, now_ms=now_ms)
        return staged

    def create(self, request: Create, done: Callable[[CreateOutcome | Failure], None]) -> None:
        if self.failure.done():
            done(Failed(full=False))
            return
        now_ms = self.tick()
        entry = self._alive(request.path, now_ms)
        point: ForkPoint | None = None
        if entry is None and request.fork_from is not None:
            source = self._alive(request.fork_from.path, now_ms)
            found = fork_point(self._lookups, source, request.fork_from)
            if not isinstance(found, ForkPoint):
                self._answer(done, found)
                return
            point = found
        outcome = decide_create(
            None if entry is None else entry.stream,
            request,
            stream_id=self.ledger.next_stream,
            fork_point=point,
            now_ms=now_ms,
        )
        if isinstance(outcome, Created):
            self._carry_out_create(request, outcome, point)
        self._answer(done, outcome)

    def _carry_out_create(self, request: Create, created: Created, point: ForkPoint | None) -> None:
        group = self.commits.group
        entry = self.ledger.add(group, created.stream)
        if request.batch is not None:
            self.ledger.write(group, entry, created.start, request.batch, NO_PRODUCER)
        if created.stream.closed:
            self.ledger.mark(group, entry, CLOSED)
        if point is not None:
            source = self.ledger.find_id(point.source.id)
            assert source is not None
            source.stream.forks_count += 1
            self.ledger.touch(group, source)
        for watcher in self._watchers:
            watcher.created(created.stream.id, created.stream.path, created.start)

    def delete(
        self, path: str, done: Callable[[Deleted | Missing | SoftDeleted | Failure], None]
    ) -> None:
        if self.failure.done():
            done(Failed(full=False))
            return
        entry = self._alive(path, self.tick())
        if entry is None or entry.stream.soft_deleted:
            self._answer(done, Missing() if entry is None else SoftDeleted())
            return
        self._remove(entry, REMOVED)
        self._answer(done, Deleted())

    def truncate(
        self,
        path: str,
        before: Offset | None,
        done: Callable[[Cut | Uncut | BadOffset | Missing | SoftDeleted | Failure], None],
    ) -> None:
        if self.failure.done():
            done(Failed(full=False))
            return
        entry = self._alive(path, self.tick())
        if entry is None or entry.stream.soft_deleted:
            self._answer(done, Missing() if entry is None else SoftDeleted())
            return
        stream = entry.stream
        at = stream.tail if before is None else before
        outcome = decide_truncation(stream.first, stream.tail, at)
        if isinstance(outcome, BeyondTail):
            self._answer(done, BadOffset())
        elif isinstance(outcome, Uncut):
            self._answer(done, outcome)
        elif not is_place(self._lookups, entry, at):
            self._answer(done, BadOffset())
        else:
            self.ledger.truncate(self.commits.group, entry, outcome.first)
            self._answer(done, outcome)

    def truncate_stream(self, stream_id: int, first: Offset) -> bool:
        """Let an incarnation begin at a place that a look at its rows has found."""
        self.tick()
        entry = self.ledger.find_id(stream_id)
        if entry is None or entry.stream.soft_deleted:
            return False
        stream = entry.stream
        if not isinstance(decide_truncation(stream.first, stream.tail, first), Cut):
            return False
        self.ledger.truncate(self.commits.group, entry, first)
        self.commits.flush()
        return True

    def _remove(self, entry: Entry, kind: int) -> None:
        self.claims.end_all(entry, self.ledger.last_ms)
        self.ledger.remove(self.commits.group, entry, kind)
        for watcher in self._watchers:
            watcher.removed(entry.stream.id, entry.stream.path)

    def expire(self, path: str) -> bool:
        """End the stream at `path` if its time is over."""
        now_ms = self.tick()
        entry = self.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or not entry.stream.expired(now_ms):
            return False
        self._remove(entry, EXPIRED)
        self.commits.flush()
        return True

    def tick(self) -> int:
        """The time of the decision about to be made: never earlier than that of the last one."""
        now_ms = max(self._clock.now_ms(), self.ledger.last_ms)
        self.ledger.last_ms = now_ms
        return now_ms

    def _alive(self, path: str, now_ms: int) -> Entry | None:
        """The stream at `path`, unless its time is over: then that is decided here and now."""
        entry = self.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or not entry.stream.expired(now_ms):
            return entry
        self._remove(entry, EXPIRED)
        return None if entry.gone else entry

    def _answer(self, done: Callable[[Any], None], outcome: object) -> None:
        self.commits.after(done, outcome)

    # Reading

    async def look(self, path: str, *, touch: bool) -> StreamInfo | Missing | SoftDeleted | Failure:
        now_ms = self.tick()
        entry = self._alive(path, now_ms)
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

    async def probe(self) -> Failure | None:
        if self.failure.done():
            return Failed(full=False)
        self.stir(self.commits.group)
        return await self.durable()

    async def durable(self) -> Failure | None:
        """Wait until everything decided so far is on disk."""
        done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self.commits.after(done.set_result)
        return await done

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
        work = partial(
            reading.read_chunk,
            segments=own_segments(info.id, entry.stream.segments, info.tail),
            after=after,
            bytes_max=bytes_max,
            is_json=info.is_json,
        )
        try:
            piece = await self.readers.run(work)
        except reading.OffsetError:
            return BadOffset()
        except reading.RowsGoneError:
            entry = self.ledger.find_id(info.id)
            if entry is None:
                return Missing()
            # Truncated and purged since the reader looked, if the log keeps nothing for long.
            if after.bytes < entry.stream.first.bytes:
                return Truncated(entry.stream.first)
            raise
        return Chunk(info, after, piece.next, piece.data)

    # Upkeep

    def suspect(self, error: BaseException) -> None:
        """Upkeep met an error: stop if it was the disk's doing."""
        self.commits.suspect(error)

    async def restart_log(self) -> bool:
        """Fold what is left of the write-ahead log in, so that the next commit starts it anew.

        The file keeps its size: writing over it syncs faster than making it grow again. False when
        somebody is reading from it, such as a backup: writers do not wait for that.
        """
        restarted = await self.between_commits(restart_log)
        if restarted:
            self.wal_pages = 0
        return restarted

    async def between_commits(self, work: Callable[[apsw.Connection], T]) -> T:
        """Do a piece of upkeep on the writer's connection while no group is under way."""
        results: list[T] = []
        await self.commits.exclusively(lambda: results.append(work(self._writer.connection)))
        return results[0]

    async def drop_part(self, part: Part) -> None:
        """Drop a staged part, unless a commit has taken it."""
        # In the open group, not between groups: a commit decided meanwhile must see it.
        self.ledger.staging.drop(self.commits.group, part)
        await self.durable()

    def _watch_log(self) -> None:
        """Have the write-ahead log folded in whenever it has grown by so much since last time."""
        if self.wal_pages < self._folded_pages:
            self._folded_pages = 0  # it started anew
        grown_bytes = (self.wal_pages - self._folded_pages) * PAGE_BYTES
        if grown_bytes >= self.settings.checkpoint_wal_bytes:
            self._folded_pages = self.wal_pages
            self.wal_grown.set()

    def _wal_written(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        """SQLite tells after each commit how long the write-ahead log is."""
        self.wal_pages = pages
        return apsw.SQLITE_OK

    # What the group commit asks of the owner of the state

    def new_group(self) -> LedgerGroup:
        return self.ledger.new_group()

    def seal(self, group: LedgerGroup) -> None:
        self.ledger.seal(group)

    def committed(self, group: LedgerGroup) -> None:
        self._watch_log()
        published = self.ledger.committed(group)
        for listener in self._listeners:
            listener(published)

    def reset(self) -> None:
        self.ledger.reset()
        self.claims.reset()
        for watcher in self._watchers:
            watcher.reset()

    def stir(self, group: LedgerGroup) -> None:
        group.statements.append(("UPDATE counters SET id = id", ()))

    def broken(self, error: BaseException) -> None:
        log.critical("the disk failed; stopping rather than guessing what is on it")
        if not self.failure.done():
            failure = StoreBrokenError(str(error))
            failure.__cause__ = error
            self.failure.set_exception(failure)
