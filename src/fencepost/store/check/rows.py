"""The pass over the log: positions, times, the rows of each stream, and what is in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from fencepost.protocol.offsets import Offset
from fencepost.store.check.report import Progress, Report, StreamState
from fencepost.store.database import Row
from fencepost.store.records import (
    CLOSED,
    DELETED,
    EXPIRED,
    LIVE,
    MESSAGES,
    REMOVED,
    TRUNCATED,
)

ROWS_PER_TELL = 4_096

_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])


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

    # Messages

    def _messages(self, where: str, stream: StreamState, row: Row) -> None:
        _, _, _, start_bytes, version, count, size, *_ = row
        where = f"{where}, {stream.name}"
        if start_bytes is None or version is None:
            self._report.add("place_missing", where, "messages without a place in their stream")
            return
        start = Offset(version, start_bytes)
        self._place(where, stream, start)
        if stream.closed_at is not None:
            self._report.add("message_after_close", where, f"closed at {stream.closed_at}")
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
        chunk, chunk_id, chunk_count, chunk_size, lengths, data = row[12:]
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
