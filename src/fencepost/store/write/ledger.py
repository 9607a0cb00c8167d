"""The ledger: every stream and producer in use, as it stands after all decisions made so far.

Decisions are made against the ledger at once, before anything is on disk, and what they change goes
into the open group at the same time. A record that is not in memory is asked of the loader, which
reads it from the database; it cannot be newer there, because a changed record stays in memory until
its group is committed. The ledger also keeps the committed view of each stream, which is all that
readers may see.

The store that owns the ledger undoes a failed commit by dropping all of it (`reset`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from typing import Any

from fencepost.protocol.appends import Append, Appended
from fencepost.protocol.batches import Batch
from fencepost.protocol.books import BooksChange
from fencepost.protocol.checksums import with_checksum
from fencepost.protocol.offsets import Offset
from fencepost.protocol.shares import Shares
from fencepost.protocol.streams import JSON, Producer, Stream
from fencepost.store import records
from fencepost.store.contract import Published, StreamInfo
from fencepost.store.read.chunks import is_place
from fencepost.store.records import (
    CLOSED,
    DELETED,
    LIVE,
    MESSAGES,
    TRUNCATED,
)
from fencepost.store.sql import Connection, Row
from fencepost.store.write.books import Books
from fencepost.store.write.groups import Groups
from fencepost.store.write.keys import KeyLedger
from fencepost.store.write.ledger_group import Entry, LedgerGroup
from fencepost.store.write.loader import Loader
from fencepost.store.write.sends import Meshes, Sends
from fencepost.store.write.staging import ROW_BYTES, Staging
from fencepost.store.write.usage import Usage
from fencepost.store.write.writers import Writers

NO_PRODUCER: tuple[Any, ...] = (None, None, None, None, None)
NO_DATA: tuple[Any, ...] = (None, None, None)


class Ledger(KeyLedger):
    """The decided state. Its methods are called on the event loop only."""

    def __init__(
        self,
        loader: Loader,
        *,
        streams_max: int,
        producers_max: int,
        key_retention_ms: int | None = None,
        writer_history_max: int = 10_000,
        shares: Shares | None = None,
        exact_deadlines: bool = False,
        counters: Row | None = None,
    ) -> None:
        """Begin with nothing in memory, and with the counters on disk unless others are given.

        With `exact_deadlines` every write stores the end of a stream to the millisecond, because
        other servers know it from there alone. Otherwise what is stored may be later than that.
        """
        self._pending: list[LedgerGroup] = []
        super().__init__(loader, self._pending, key_retention_ms)
        self._loader = loader
        self.exact_deadlines = exact_deadlines
        self._streams_max = streams_max
        self._producers_max = producers_max
        self._by_path: dict[str, Entry] = {}
        self._by_id: dict[int, Entry] = {}
        self._groups = 0
        self._committed = 0
        self.next_position = self.next_stream = self.last_ms = 0
        self.staging = Staging(loader, self._pending)
        self.writers = Writers(loader.connection, self._pending, history_max=writer_history_max)
        self.usage = Usage(loader.connection, self._pending, shares or Shares())
        self.groups = Groups(loader.groups, self._pending)
        self.sends = Sends(loader, self._pending)
        self.meshes = Meshes(loader.connection, self._pending)
        self.books = Books(loader.books, self.groups, self._pending)
        self.reset(counters)

    def reset(self, counters: Row | None = None) -> None:
        """Forget everything that is not on disk; `counters` if the caller has read them already."""
        self._by_path.clear()
        self._by_id.clear()
        self.meshes.reset()
        if counters is None:
            [counters] = self._loader.connection.fetch("load_counters")
        self._begin_again(counters)

    def _begin_again(self, counters: Row) -> None:
        """Forget everything but streams and their producers."""
        self._pending.clear()
        self._committed = self._groups
        self.next_position, self.next_stream, self.last_ms = counters
        self.staging.reset()
        self.writers.reset()
        self.usage.reset()
        self.reset_keys()
        self.sends.reset()

    @property
    def connection(self) -> Connection:
        """Where everything else is asked for that decisions need only now and then."""
        return self._loader.connection

    @property
    def cached_count(self) -> int:
        """Streams in memory."""
        return len(self._by_path)

    def new_group(self) -> LedgerGroup:
        self._groups += 1
        group = LedgerGroup(self._groups)
        self._pending.append(group)
        return group

    # Finding

    def find(self, path: str) -> Entry | None:
        """The stream at `path`, soft-deleted ones included, or None."""
        entry = self._by_path.get(path)
        if entry is None:
            row = self._loader.stream(path)
            return None if row is None else self.take_in(row)
        return None if entry.gone else entry

    def find_id(self, stream_id: int) -> Entry | None:
        """A stream by its incarnation, as long as it is not deleted."""
        entry = self._by_id.get(stream_id)
        if entry is None:
            row = self._loader.stream_by_id(stream_id)
            return None if row is None else self.take_in(row)
        return None if entry.gone else entry

    def take_in(self, row: Row) -> Entry:
        """Keep a stream as its row on disk has it."""
        stream, deadline_ms = records.stream_from_row(row)
        entry = Entry(stream, deadline_ms)
        entry.view = view_of(stream)
        self._keep(entry)
        return entry

    def _keep(self, entry: Entry) -> None:
        if len(self._by_path) >= self._streams_max:
            self._evict()
        self._by_path[entry.stream.path] = entry
        self._by_id[entry.stream.id] = entry

    def _evict(self) -> None:
        """Drop the oldest eighth of the entries that no pending group needs."""
        clean = [e for e in self._by_path.values() if e.dirty_in <= self._committed]
        for entry in clean[: max(1, self._streams_max // 8)]:
            self._drop(entry)

    def cached(self, path: str) -> Entry | None:
        """The stream at `path`, if it is in memory."""
        return self._by_path.get(path)

    def has_all(self, paths: Iterable[str], producers: Iterable[tuple[str, str]]) -> bool:
        """Whether these streams, and these producers on some of them, are in memory."""
        by_path = self._by_path
        for path in paths:
            if path not in by_path:
                return False
        return all(producer_id in by_path[path].producers for path, producer_id in producers)

    def drop_all(self, paths: Container[str]) -> None:
        """Have these streams loaded again, because their rows were written past this ledger. None
        of them is in a group that is not on disk."""
        for entry in [e for path, e in self._by_path.items() if path in paths]:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        if self._by_path.get(entry.stream.path) is entry:
            del self._by_path[entry.stream.path]
        self._by_id.pop(entry.stream.id, None)

    def refresh(
        self,
        counters: Row,
        *,
        changed: Set[int],
        rows: Iterable[Row],
        producers: Container[tuple[int, str]],
    ) -> None:
        """Take over what other servers wrote between two groups of this one, and keep the rest.

        `changed` are the streams that they wrote to, and `producers` those who wrote, by stream and
        id. `rows` are some of the streams as they are by now; others are loaded when asked for.
        """
        assert not self._pending, "between two turns no group is open"
        self._begin_again(counters)
        dropped = {}
        for stream_id in changed & self._by_id.keys():
            dropped[stream_id] = self._by_id[stream_id]
            self._drop(dropped[stream_id])
        for row in rows:
            before = dropped.get(row[0])
            if before is not None:
                self.take_in(row).producers = {
                    producer_id: producer
                    for producer_id, producer in before.producers.items()
                    if (row[0], producer_id) not in producers
                }

    def find_producer(self, entry: Entry, producer_id: str) -> Producer | None:
        """What a producer has done on a stream."""
        if producer_id in entry.producers:
            return entry.producers[producer_id]
        found = self._loader.producer(entry.stream.id, producer_id)
        self.take_producer(entry, producer_id, found)
        return found

    def take_producer(self, entry: Entry, producer_id: str, found: Producer | None) -> None:
        """Keep a producer as it is on disk, or that it is not there."""
        if len(entry.producers) >= self._producers_max:
            self._forget_producers(entry)
        entry.producers[producer_id] = found

    def _forget_producers(self, entry: Entry) -> None:
        """Keep only the producers whose newest state is not on disk yet."""
        pending = {
            producer_id
            for group in self._pending
            for stream_id, producer_id in group.producers
            if stream_id == entry.stream.id
        }
        entry.producers = {key: entry.producers[key] for key in pending}

    # Deciding: each of these changes the ledger and the open group together

    def touch(self, group: LedgerGroup, entry: Entry) -> None:
        """`entry` changed: its row goes into `group`."""
        group.whole.add(entry.stream.id)
        self._move(group, entry)

    def _move(self, group: LedgerGroup, entry: Entry) -> None:
        """The tail of `entry` moved: what its row says of it goes into `group`."""
        group.entries[entry.stream.id] = entry
        entry.dirty_in = group.number

    def add(self, group: LedgerGroup, stream: Stream) -> Entry:
        """Take a new stream in."""
        deadline_ms = (
            stream.lifetime.deadline_ms(stream.touched_ms)
            if self.exact_deadlines
            else stream.lifetime.stored_deadline_ms(stream.touched_ms)
        )
        entry = Entry(stream, deadline_ms)
        self.next_stream = max(self.next_stream, stream.id + 1)
        self._keep(entry)
        group.created.add(stream.id)
        entry.reshaped_in = group.number
        self.touch(group, entry)
        return entry

    def write(
        self, group: LedgerGroup, entry: Entry, start: Offset, batch: Batch, sent: tuple[Any, ...]
    ) -> None:
        """Messages of `entry` from `start` on: a row of the log. `sent` names their producer."""
        stream_id = entry.stream.id
        if batch.chunks:
            self._refer(group, stream_id, start, batch, sent)
            return
        group.rows.append(
            with_checksum(
                (
                    self.next_position,
                    stream_id,
                    MESSAGES,
                    start.bytes,
                    start.messages,
                    batch.messages,
                    batch.size,
                    self.last_ms,
                    *sent,
                    None,
                    batch.lengths,
                    batch.data,
                )
            )
        )
        self.next_position += batch.messages
        group.bytes += batch.size
        parts = group.parts.get(stream_id)
        if parts is None:
            group.parts[stream_id] = (start, [batch.data])
        else:
            parts[1].append(batch.data)

    def _refer(
        self, group: LedgerGroup, stream_id: int, start: Offset, batch: Batch, sent: tuple[Any, ...]
    ) -> None:
        """Rows that make staged chunks messages of a stream, without a byte of their data."""
        messages, size = start
        for chunk in batch.chunks:
            place = (size, messages, chunk.messages, chunk.size, self.last_ms)
            reference = (chunk.id, None, None)
            row = (self.next_position, stream_id, MESSAGES, *place, *sent, *reference)
            group.rows.append(with_checksum(row))
            self.next_position += chunk.messages
            messages += chunk.messages
            size += chunk.size
            # Only the first row of a batch is a link in its producer's chain.
            sent = (*sent[:3], None, None)
        group.bytes += ROW_BYTES * len(batch.chunks)
        # Readers who wait must ask for the data, which is not in memory.
        group.unshown.add(stream_id)

    def mark(
        self,
        group: LedgerGroup,
        entry: Entry,
        kind: int,
        sent: tuple[Any, ...] = NO_PRODUCER,
        *,
        at: Offset | None = None,
    ) -> None:
        """Something other than messages happened to a stream: a row of the log without data.

        It stands at the tail, unless it is about another place.
        """
        stream = entry.stream
        messages, size = at or stream.tail
        place = (size, messages, 1, 0, self.last_ms)
        row = (self.next_position, stream.id, kind, *place, *sent, *NO_DATA)
        group.rows.append(with_checksum(row))
        self.next_position += 1

    def apply(
        self,
        group: LedgerGroup,
        entry: Entry,
        request: Append,
        outcome: Appended,
        before: Producer | None,
        now_ms: int,
    ) -> None:
        """Carry out an accepted append; `before` is what its producer had done until then."""
        stream = entry.stream
        producer = outcome.producer
        sent = NO_PRODUCER
        if producer is not None:
            previous = None
            if before is not None and before.epoch == producer.epoch:
                previous = before.position
            sent = (producer.id, producer.epoch, producer.seq, previous, request.digest)
            entry.producers[producer.id] = producer
            group.producers[stream.id, producer.id] = producer
            if before is None or not producer.continues(before):
                group.opened.add((stream.id, producer.id))
        if request.batch is not None:
            self.write(group, entry, outcome.start, request.batch, sent)
            stream.tail = outcome.tail
            sent = NO_PRODUCER
        conditions = request.conditions
        if conditions is not None and conditions.key is not None:
            actor = request.actor
            place = (stream.id, "" if actor is None else actor.name, conditions.key)
            self.keep_append_key(group, place, request.digest, outcome, now_ms)
        if request.seq is not None:
            stream.seq = request.seq
        if outcome.closed:
            stream.closed = True
            claim = request.producer
            stream.closed_by = None if claim is None else (claim.id, claim.epoch, claim.seq)
            self.mark(group, entry, CLOSED, sent)
        if outcome.books is not None:
            self._apply_books(group, entry, outcome.books)
        if self.slide(entry, now_ms) or request.seq is not None or outcome.closed:
            self.touch(group, entry)
        else:
            self._move(group, entry)

    def _apply_books(self, group: LedgerGroup, entry: Entry, change: BooksChange) -> None:
        stream = entry.stream
        if change.first is not None:
            self.truncate(group, entry, change.first)
        if change.closed != stream.books_closed:
            stream.books_closed_at = self.next_position if change.closed else None
            group.statements.append(("save_books", (stream.books_closed_at, stream.id)))

    def is_place(self, stream: Stream, at: Offset) -> bool:
        """Whether a stream has such an offset, by its rows and those that it has inherited."""
        return is_place(self._loader.connection, stream, None, at)

    def truncate(self, group: LedgerGroup, entry: Entry, first: Offset) -> None:
        """Let a stream begin at `first`; the rows before stay until the log needs them no more."""
        stream = entry.stream
        stream.first = first
        values = (self.next_position, stream.id, self.last_ms)
        group.statements.append(("insert_truncation", values))
        self.mark(group, entry, TRUNCATED, at=first)
        self.touch(group, entry)

    def slide(self, entry: Entry, now_ms: int, *, is_read: bool = False) -> bool:
        """Restart the time to live; true when what is stored no longer covers it.

        A read stores a deadline that covers the reads of some time to come, also where deadlines
        are exact, because otherwise each read would be a write.
        """
        stream = entry.stream
        if stream.lifetime.ttl_s is None:
            return False
        is_exact = self.exact_deadlines and not is_read
        stream.touched_ms = max(stream.touched_ms, now_ms) if is_exact else now_ms
        deadline_ms = stream.lifetime.deadline_ms(now_ms)
        stored_ms = entry.stored_deadline_ms
        assert deadline_ms is not None
        if stored_ms is not None and stored_ms >= deadline_ms:
            return False
        entry.stored_deadline_ms = (
            deadline_ms if is_exact else stream.lifetime.stored_deadline_ms(now_ms)
        )
        return True

    def remove(self, group: LedgerGroup, entry: Entry, kind: int) -> None:
        """End a stream: softly while forks read it, else for good, its sources with it."""
        self.mark(group, entry, kind)
        self._remove(group, entry)

    def _remove(self, group: LedgerGroup, entry: Entry) -> None:
        stream = entry.stream
        self.touch(group, entry)
        entry.reshaped_in = group.number
        if stream.forks_count > 0:
            stream.soft_deleted = True
            return
        entry.gone = True
        entry.ended_ms = self.last_ms
        if stream.fork is None:
            return
        source = self.find_id(stream.fork.source_id)
        assert source is not None, "a fork's source outlives it"
        source.stream.forks_count -= 1
        self.touch(group, source)
        if source.stream.soft_deleted:
            self._remove(group, source)

    # Committing

    def seal(self, group: LedgerGroup) -> None:
        """Take down what to write and what to show, before later decisions change it again."""
        for entry in group.entries.values():
            stream = entry.stream
            state = LIVE
            if stream.id not in group.whole:
                group.moves.append((self.last_ms, *stream.tail, stream.id))
            else:
                state = entry.state
                hot = records.hot_columns(
                    stream, state, self.last_ms, entry.stored_deadline_ms, entry.ended_ms
                )
                if stream.id in group.created:
                    group.inserts.append(hot + records.cold_columns(stream))
                else:
                    group.updates.append((*hot, stream.id))
            group.views.append((entry, view_of(stream), state))
        if group.groups or group.leases or group.parked:
            self.groups.seal(group)
        group.key_rows = list(group.keys.values())
        group.counters = (self.next_position, self.next_stream, self.last_ms)

    def committed(self, group: LedgerGroup) -> list[Published]:
        """`group` is on disk: readers may see it."""
        self._pending.remove(group)
        self._committed = group.number
        if group.numbered_keys:
            self.keys_committed(group)
        if group.numbered_sends:
            self.sends.committed(group)
        if group.meshes or group.topics:
            self.meshes.committed(group)
        published = []
        for entry, view, state in group.views:
            entry.view = view
            start, parts = group.parts.get(view.id, (view.tail, ()))
            shown = None if view.id in group.unshown else parts
            published.append(tuple.__new__(Published, (view, start, shown, state != LIVE)))
            if state == DELETED:
                self._drop(entry)
        return published

    def undo(self, group: LedgerGroup, counters: Row) -> None:
        """Forget what was decided in the only group that is open, and keep the rest."""
        for entry in group.entries.values():
            self._drop(entry)
        self._begin_again(counters)

    def continue_after(self, group: LedgerGroup) -> None:
        """Let `group` be all that is not on disk, as far as later decisions look."""
        self._pending[:] = [group]

    def collections(self) -> list[dict[Any, Any]]:
        """The dictionaries of streams, for an owner that empties them a few at a time."""
        return [self._by_path, self._by_id]

    def is_settled(self, path: str) -> bool:
        """Whether no creation or deletion at `path` is still on its way to disk."""
        entry = self._by_path.get(path)
        return entry is None or entry.reshaped_in <= self._committed


def view_of(stream: Stream) -> StreamInfo:
    """A stream as its readers will see it."""
    # The constructor of a NamedTuple is a function in Python: this takes a quarter of the time.
    return tuple.__new__(
        StreamInfo,
        (
            stream.id,
            stream.path,
            stream.content_type,
            stream.media_type == JSON,  # as `is_json`, without the call
            stream.tail,
            stream.first,
            stream.closed,
            stream.lifetime,
            stream.created_ms,
            stream.retention,
            stream.segments,
            stream.books_closed_at is not None,
        ),
    )
