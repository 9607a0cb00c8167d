"""The two long walks of `fencepost check`: over the rows of the log, and over producers.

`RowCheck` walks the log once in the order of positions: positions, times, the rows of each stream,
and what is in them. `ProducerCheck` compares each producer's batches in the log, in order, with the
producer's own row. It reads two sorted lists side by side, so that memory does not grow with the
number of producers: there may be one for every task that was ever claimed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import msgspec

from fencepost.protocol.checksums import PAYLOAD_MASK, head_checksum, payload_checksum
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import PACKED_BYTES, RECENT_BATCHES, pack
from fencepost.store.check.report import Progress, Report, StreamState
from fencepost.store.records import (
    CLOSED,
    DELETED,
    EXPIRED,
    LIVE,
    MESSAGES,
    REMOVED,
    TRUNCATED,
)
from fencepost.store.sql import Row

ROWS_PER_TELL = 4_096

_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])


_CHECKSUMS = 18
"""Columns of a row of the log without checksums."""


class RowCheck:
    """One walk over all rows in the order of positions."""

    def __init__(
        self,
        report: Report,
        streams: dict[int, StreamState],
        purged: dict[int, int],
        progress: Progress,
    ) -> None:
        self._report = report
        self._streams = streams
        self._purged = purged
        self._progress = progress
        self._end = 0  # of the last row: no later one may begin before
        self._at_ms = 0
        self._before: Row = ()

    def run(self, rows: Iterable[Row], total: int) -> None:
        """Walk, then hold every stream against what its rows came to."""
        done = 0
        for row in rows:
            self._row(row)
            done += 1
            if done % ROWS_PER_TELL == 0:
                self._progress("messages", done, total)
        self._progress("messages", done, total)
        self._report.counts["rows"] = done
        for stream in self._streams.values():
            self._ended(stream)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self._end

    @property
    def last_ms(self) -> int:
        return self._at_ms

    def _row(self, row: Row) -> None:
        position, stream_id, kind, _, _, count, _, at_ms = row[:8]
        where = f"position {position}"
        if len(row) > _CHECKSUMS:
            self._checksum(where, row)
        if position < self._end:
            self._report.add(
                "positions_overlap", where, f"the row before it reaches to {self._end}"
            )
        if count < 1:
            self._report.add("count_wrong", where, f"a row stands for {count} messages")
        if at_ms < self._at_ms:
            self._report.add(
                "time_backwards", where, f"written at {at_ms}, after a row of {self._at_ms}"
            )
        self._end = position + max(count, 1)
        self._at_ms = max(self._at_ms, at_ms)
        stream = self._streams.get(stream_id)
        if stream is None:
            # Markers outlive their stream; its messages do not.
            if kind == MESSAGES or stream_id not in self._purged:
                self._report.add("row_without_stream", where, f"there is no stream {stream_id}")
        elif kind == MESSAGES:
            self._messages(where, stream, row)
        elif kind in (CLOSED, REMOVED, EXPIRED, TRUNCATED):
            self._marker(where, stream, row)
        else:
            self._report.add("kind_unknown", where, f"rows of kind {kind} do not exist")
        self._before = row

    def _checksum(self, where: str, row: Row) -> None:
        """A row against the checksums that were made with it, and with its chunk."""
        digest, chunk = row[11:13]
        lengths, data, previous, checksum, of_chunk = row[16:]
        if checksum is not None:
            wrong = []
            head: Row = (*row[:11], previous, digest, chunk)
            if checksum >> 32 != head_checksum(*head):
                wrong.append("what the row says")
            expected = checksum & PAYLOAD_MASK if chunk is None else of_chunk
            found = 0 if data is None else payload_checksum(lengths, data)
            strays = chunk is not None and checksum & PAYLOAD_MASK
            if strays or (expected is not None and expected != found):
                wrong.append("its payload")
            if wrong:
                detail = f"{' and '.join(wrong)} is not what was written"
                self._report.add("checksum_wrong", where, detail)

    # Messages

    def _messages(self, where: str, stream: StreamState, row: Row) -> None:
        position, _, _, start_bytes, version, count, size, *_ = row
        where = f"{where}, {stream.name}"
        if start_bytes is None or version is None:
            self._report.add("place_missing", where, "messages without a place in their stream")
            return
        start = Offset(version, start_bytes)
        self._place(where, stream, start)
        if stream.closed_at is not None:
            self._report.add("message_after_close", where, f"closed at {stream.closed_at}")
        if stream.books_closed_at is not None and position + count > stream.books_closed_at:
            detail = f"its books were closed at {stream.books_closed_at}"
            self._report.add("message_in_closed_books", where, detail)
        if stream.ended_at is not None:
            self._report.add("message_after_delete", where, f"deleted at {stream.ended_at}")
        if stream.own_first is None:
            stream.own_first = start
        stream.next = Offset(version + count, start_bytes + size)
        self._report.counts["messages"] += count
        self._report.counts["bytes"] += size
        self._sent_by(where, stream, row)
        self._content(where, stream, row)

    def _place(self, where: str, stream: StreamState, start: Offset) -> None:
        expected = stream.next
        if expected is None:
            if stream.purged >= 0 and start.bytes >= stream.base.bytes:
                return
            expected = stream.base
        if start.bytes > expected.bytes:
            self._report.add("messages_missing", where, f"expected {expected}, found {start}")
        elif start.bytes < expected.bytes:
            self._report.add("messages_overlap", where, f"expected {expected}, found {start}")
        elif start.messages != expected.messages:
            self._report.add("version_wrong", where, f"expected {expected}, found {start}")

    def _sent_by(self, where: str, stream: StreamState, row: Row) -> None:
        producer, epoch, seq, digest = row[8:12]
        if (producer is None) != (epoch is None) or (producer is None) != (seq is None):
            self._report.add("producer_incomplete", where, "id, epoch and seq come together")
        elif producer is not None and digest is None:
            # Further rows of a staged batch follow its first one, nothing between; unless a
            # truncation inside the batch has taken it.
            before = self._before
            is_left = stream.own_first == Offset(row[4], row[3]) and stream.purged >= row[0] - 1
            follows = before and before[1] == row[1] and before[8:11] == row[8:11]
            if not follows and not is_left:
                self._report.add("producer_unlinked", where, "a batch without its first row")

    def _content(self, where: str, stream: StreamState, row: Row) -> None:
        count, size = row[5:7]
        chunk, chunk_id, chunk_count, chunk_size, lengths, data = row[12:18]
        if chunk is not None and chunk_id is None:
            self._report.add("chunk_missing", where, f"staged chunk {chunk} is not there")
            return
        if data is None:
            self._report.add("data_missing", where, "messages without data")
            return
        if chunk is not None and (chunk_count, chunk_size) != (count, size):
            self._report.add(
                "chunk_wrong",
                where,
                f"{count} messages of {size} bytes refer to {chunk_count} of {chunk_size}",
            )
        detail = lengths_wrong(count, size, lengths, data)
        if detail is not None:
            self._report.add("lengths_wrong", where, detail)
        elif stream.is_json:
            detail = json_wrong(lengths, data)
            if detail is not None:
                self._report.add("json_wrong", where, detail)
        elif count != 1:
            self._report.add("count_wrong", where, f"one append of bytes with {count} messages")

    # Markers

    def _marker(self, where: str, stream: StreamState, row: Row) -> None:
        position, _, kind, start_bytes, version, *_ = row
        where = f"{where}, {stream.name}"
        if kind == TRUNCATED:
            first = Offset(version, start_bytes)
            before = stream.truncated_to
            if first.bytes > stream.tail.bytes or (before and first.bytes < before.bytes):
                self._report.add("truncation_wrong", where, f"truncated to {first}")
            stream.truncated_to = first
            return
        if kind == CLOSED:
            if stream.closed_at is not None:
                self._report.add("closed_twice", where, f"closed at {stream.closed_at} before")
            stream.closed_at = position
        else:
            if stream.ended_at is not None:
                self._report.add("deleted_twice", where, f"deleted at {stream.ended_at} before")
            stream.ended_at = position
        expected = stream.next or (stream.base if stream.purged < 0 else stream.tail)
        if (version, start_bytes) != expected:
            self._report.add(
                "marker_wrong", where, f"says ({version}, {start_bytes}), the tail was {expected}"
            )

    # Streams

    def _ended(self, stream: StreamState) -> None:
        """The stream's row against all of its rows in the log."""
        add = self._report.add
        end = stream.next
        if end is None:
            end = stream.tail if stream.purged >= 0 else stream.base
        if end != stream.tail:
            add("tail_wrong", stream.name, f"the row says {stream.tail}, its messages end at {end}")
        if stream.first.bytes > stream.tail.bytes:
            add("first_wrong", stream.name, f"first {stream.first} is past tail {stream.tail}")
        elif stream.truncated_to is not None and stream.truncated_to != stream.first:
            add("first_wrong", stream.name, f"{stream.first}, truncated to {stream.truncated_to}")
        if stream.closed_at is not None and not stream.closed:
            add("closed_wrong", stream.name, f"open, but closed at position {stream.closed_at}")
        if stream.state == LIVE and stream.ended_at is not None:
            add("state_wrong", stream.name, f"live, but deleted at position {stream.ended_at}")
        if stream.state == LIVE:
            self._own_rows(stream)
        if stream.state == DELETED and stream.purged >= 0:
            return  # its markers may be gone already, and it follows them
        if stream.truncated_to is None and stream.forked_from is None and stream.first.bytes > 0:
            add("first_wrong", stream.name, f"{stream.first}, and it never was truncated")
        if stream.closed and stream.closed_at is None:
            add("close_marker_missing", stream.name, "closed, but the log does not say so")
        if stream.state != LIVE and stream.ended_at is None:
            add("delete_marker_missing", stream.name, "deleted, but the log does not say so")

    def _own_rows(self, stream: StreamState) -> None:
        """What a reader may still ask for lies in its own rows from the first place kept on."""
        kept = max(stream.first.bytes, stream.base.bytes)
        if kept >= stream.tail.bytes:
            return
        if stream.own_first is None or stream.own_first.bytes > kept:
            self._report.add(
                "messages_missing", stream.name, f"rows from byte {kept} on are not there"
            )


def lengths_wrong(count: int, size: int, lengths: bytes | None, data: bytes) -> str | None:
    """Why a row's numbers do not fit its data; None when they do."""
    if size < 1:
        return f"a payload of {size} bytes"
    if len(data) != size + count - 1:
        return f"{len(data)} bytes of data for {count} messages of {size} bytes"
    if lengths is None:
        return None if count == 1 else f"{count} messages without lengths"
    if len(lengths) != 4 * count:
        return f"{len(lengths) // 4} lengths for {count} messages"
    total = sum(array("I", lengths))
    return None if total == size else f"lengths that sum up to {total}, not {size}"


def json_wrong(lengths: bytes | None, data: bytes) -> str | None:
    """Why a row is not the JSON messages that it says; None when it is."""
    try:
        data.decode()
        messages = _MESSAGES.decode(b"[%b]" % data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"not JSON: {error}"
    found = [memoryview(message).nbytes for message in messages]
    said = [len(data)] if lengths is None else list(array("I", lengths))
    return None if found == said else f"{len(said)} messages that are {len(found)} in other lengths"


class Link(NamedTuple):
    """A batch in a producer's chain."""

    position: int
    epoch: int
    seq: int
    previous: int | None
    start: Offset
    digest: bytes
    at_ms: int


class Head(NamedTuple):
    """A row of the producers' table."""

    stream: int
    id: str
    epoch: int
    seq: int
    first: bytes
    position: int
    updated_ms: int
    recent: bytes | None = None  # its newest batches, in a store that keeps them in the row


Place = tuple[int, str]


class ProducerCheck:
    """Chains of batches against the state that they led to."""

    def __init__(
        self,
        report: Report,
        streams: dict[int, StreamState],
        purged: dict[int, int],
        forgotten_after_ms: int | None,
    ) -> None:
        self._report = report
        self._streams = streams
        self._purged = purged
        # The shortest time after which an idle producer was ever forgotten; None when none was.
        self._forgotten_after_ms = forgotten_after_ms

    def run(self, rows: Iterable[Row], heads: Iterable[Row]) -> None:
        """Both walks are sorted by stream and id."""
        chains = groupby(rows, key=lambda row: (row[0], row[1]))
        waiting: Iterator[Head] = (Head(*row) for row in heads)
        head = next(waiting, None)
        for place, chain in chains:
            while head is not None and (head.stream, head.id) < place:
                self._without_rows(head)
                head = next(waiting, None)
            mine = head if head is not None and (head.stream, head.id) == place else None
            self._chain(place, (_link(row) for row in chain), mine)
            if mine is not None:
                head = next(waiting, None)
        while head is not None:
            self._without_rows(head)
            head = next(waiting, None)

    def _without_rows(self, head: Head) -> None:
        self._report.counts["producers"] += 1
        where = f"producer {head.id} of stream {head.stream}"
        if head.stream not in self._streams:
            self._report.add("producer_without_stream", where, "its stream does not exist")
        elif head.position > self._purged.get(head.stream, -1):
            self._report.add(
                "producer_without_batch",
                where,
                f"its newest batch should be at position {head.position}",
            )
        self._first(where, head, None)
        self._recent(where, head, ())

    def _chain(self, place: Place, chain: Iterable[Link], head: Head | None) -> None:
        stream_id, producer_id = place
        where = f"producer {producer_id} of stream {stream_id}"
        before: Link | None = None
        opening: Link | None = None
        newest: deque[Link] = deque(maxlen=RECENT_BATCHES)
        for link in chain:
            if link.seq == 0:
                self._opens(where, before, link)
                opening = link
                newest.clear()
            else:
                self._goes_on(where, stream_id, before, link)
                if before is None or before.epoch != link.epoch:
                    opening = None
                    newest.clear()
            newest.append(link)
            before = link
        assert before is not None
        if head is None:
            # The state goes with the stream; markers of a purged one may still name it.
            if stream_id in self._streams and self._forgotten_after_ms is None:
                self._report.add(
                    "producer_missing", where, f"it sent the batch at {before.position}"
                )
            return
        self._report.counts["producers"] += 1
        if stream_id not in self._streams:
            self._report.add("producer_without_stream", where, "its stream does not exist")
        if (head.epoch, head.seq, head.position) != (before.epoch, before.seq, before.position):
            self._report.add(
                "producer_wrong",
                where,
                f"its row says {head.epoch}.{head.seq} at {head.position}, the log"
                f" {before.epoch}.{before.seq} at {before.position}",
            )
        self._first(where, head, opening)
        self._recent(where, head, newest)

    def _opens(self, where: str, before: Link | None, link: Link) -> None:
        if link.previous is not None:
            self._report.add("previous_wrong", where, f"{link.position} opens an epoch")
        if before is None or link.epoch > before.epoch or self._was_forgotten(before, link):
            return
        code = "producer_repeats" if link.epoch == before.epoch else "epoch_backwards"
        self._report.add(
            code,
            where,
            f"{link.epoch}.0 at position {link.position} after"
            f" {before.epoch}.{before.seq} at {before.position}",
        )

    def _goes_on(self, where: str, stream_id: int, before: Link | None, link: Link) -> None:
        add = self._report.add
        at = f"{link.epoch}.{link.seq} at position {link.position}"
        if before is None:
            purged = self._purged.get(stream_id, -1)
            if link.previous is None or link.previous > purged:
                add("producer_gap", where, f"{at} without the batches before it")
            return
        after = f"{at} after {before.epoch}.{before.seq} at {before.position}"
        if link.epoch < before.epoch:
            add("epoch_backwards", where, after)
        elif link.epoch == before.epoch and link.seq <= before.seq:
            add("producer_repeats", where, after)
        elif link.epoch != before.epoch or link.seq != before.seq + 1:
            add("producer_gap", where, after)
        elif link.previous != before.position:
            add("previous_wrong", where, f"{after}, and it names {link.previous}")

    def _was_forgotten(self, before: Link, link: Link) -> bool:
        after_ms = self._forgotten_after_ms
        return after_ms is not None and link.at_ms - before.at_ms >= after_ms

    def _first(self, where: str, head: Head, opening: Link | None) -> None:
        if len(head.first) != PACKED_BYTES:
            self._report.add("producer_first_wrong", where, "what is kept of seq 0 is not readable")
        elif opening is not None and head.first != pack(opening.start, opening.digest):
            self._report.add(
                "producer_first_wrong",
                where,
                f"what is kept of seq 0 is not the batch at position {opening.position}",
            )

    def _recent(self, where: str, head: Head, newest: Iterable[Link]) -> None:
        """What a repeated request is compared with; of what was purged there is nothing else."""
        kept = head.recent
        if kept is None:
            return
        found = b"".join(pack(link.start, link.digest) for link in newest)
        shared = min(len(kept), len(found))
        if not kept or len(kept) % PACKED_BYTES:
            self._report.add("producer_recent_wrong", where, f"{len(kept)} bytes of batches")
        elif kept[len(kept) - shared :] != found[len(found) - shared :]:
            self._report.add("producer_recent_wrong", where, "not the batches that the log has")


def _link(row: Row) -> Link:
    position, epoch, seq, previous, version, start_bytes, digest, at_ms = row[2:]
    return Link(position, epoch, seq, previous, Offset(version, start_bytes), digest, at_ms)
