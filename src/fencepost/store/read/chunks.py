"""Reading messages: bounded chunks, fetched by a few threads with connections of their own.

No read transaction outlives one chunk, so the write-ahead log can always be folded back into the
database. A chunk is made of whole rows joined by the database itself; only its first row may be
partial, when a reader resumes inside it or when it alone is larger than the chunk may be.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

from fencepost.protocol.batches import cut, message_lengths
from fencepost.protocol.checksums import PAYLOAD_MASK, payload_checksum
from fencepost.protocol.creates import (
    BadForkPoint,
    ForkFrom,
    ForkPoint,
    SourceDeleted,
    SourceMissing,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Segment, Stream
from fencepost.store.sql import Connection


class Closable(Protocol):
    """As much of a connection as the pool itself needs."""

    def close(self) -> None: ...


T = TypeVar("T")
ConnectionT = TypeVar("ConnectionT", bound=Closable)

LENGTH_BYTES = 4
"""Bytes in which a row of several messages stores the length of one."""
CHECKED_BYTES_MAX = 16 << 10
"""A read that gives one append of up to so many bytes compares its checksum, and one that gives a
part of an append; others would become slower by more than a twentieth."""
CHARACTER_BYTES_MAX = 4
"""The longest character in UTF-8."""


class Readers(Generic[ConnectionT]):
    """A few threads that read, each call on a connection that no other call is using."""

    def __init__(self, connect: Callable[[], ConnectionT], *, threads: int) -> None:
        self._connections: queue.SimpleQueue[ConnectionT] = queue.SimpleQueue()
        self._all = [connect() for _ in range(threads)]
        for connection in self._all:
            self._connections.put(connection)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fencepost-reader")

    async def run(self, work: Callable[[ConnectionT], T]) -> T:
        """The result of `work`, done in a reader thread."""
        return await self.submit(work)

    def submit(self, work: Callable[[ConnectionT], T]) -> asyncio.Future[T]:
        """Have `work` done in a reader thread."""
        return asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[ConnectionT], T]) -> T:
        connection = self._connections.get()
        try:
            return work(connection)
        finally:
            self._connections.put(connection)

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._all:
            connection.close()


class Piece(NamedTuple):
    """Some data of a stream and the offset after it."""

    data: bytes
    next: Offset


class RowsGoneError(Exception):
    """Rows below the committed tail are not there: the stream was purged under the reader.

    Where nothing was purged, the data is damaged.
    """


class OffsetError(Exception):
    """The asked offset is not a place of this stream."""


def read_chunk(
    connection: Connection,
    segments: tuple[Segment, ...],
    after: Offset,
    *,
    bytes_max: int,
    is_json: bool,
) -> Piece:
    """The data of a stream after `after`; its last segment is its own and ends at its tail."""
    pieces: list[bytes] = []
    at = after
    left = bytes_max
    for segment in segments:
        while at.bytes < segment.end.bytes and left > 0:
            if pieces and left < CHARACTER_BYTES_MAX:
                left = 0  # the next row might begin with a character that does not fit
                break
            piece = _read_segment(connection, segment, at, bytes_max=left, is_json=is_json)
            if pieces and len(piece.data) > left:
                left = 0
                break
            pieces.append(piece.data)
            left -= piece.next.bytes - at.bytes
            at = piece.next
    return Piece((b"," if is_json else b"").join(pieces), at)


def _read_segment(
    connection: Connection, segment: Segment, at: Offset, *, bytes_max: int, is_json: bool
) -> Piece:
    stream, end = segment
    limit = min(at.bytes + bytes_max, end.bytes)
    last = connection.fetch("last_start_below", (stream, at.bytes, limit))
    if last:
        [(last_version, last_start, next_version, last_end, version)] = last
        stop = Offset(last_version, last_start)
        if last_end <= limit:
            stop = Offset(next_version, last_end)
        is_small = last_start == at.bytes and last_end - last_start <= CHECKED_BYTES_MAX
        if version is not None and stop.bytes > at.bytes and not is_small:
            if version != at.messages:
                raise OffsetError
            return _whole_rows(connection, stream, at, stop, is_json=is_json)
    return _part_of_row(connection, segment, at, limit, is_json=is_json)


def _whole_rows(
    connection: Connection, stream: int, at: Offset, stop: Offset, *, is_json: bool
) -> Piece:
    """The rows from `at`, where one starts, up to `stop`, where one ends."""
    [(size, data)] = connection.fetch(
        "joined_rows", (stream, at.bytes, stop.bytes, "," if is_json else "")
    )
    # A row that is missing between these is missing in their sum; one without data, in the data.
    found = 0 if data is None else len(data)
    separators = stop.messages - at.messages - 1 if is_json else 0
    expected = stop.bytes - at.bytes + separators
    if size != stop.bytes - at.bytes or found != expected:
        raise RowsGoneError(f"{found} bytes are there between {at} and {stop}, not {expected}")
    return Piece(data, stop)


def _part_of_row(
    connection: Connection, segment: Segment, at: Offset, limit: int, *, is_json: bool
) -> Piece:
    rows = connection.fetch("row_at", (segment.stream_id, at.bytes))
    if not rows:
        raise RowsGoneError(f"nothing is there at {at}")
    [(version, start, count, size, lengths, data, checksum)] = rows
    if start + size <= at.bytes:
        raise RowsGoneError(f"nothing is there at {at}")
    if not is_whole(count, size, lengths, data, is_json=is_json):
        raise RowsGoneError(f"the append at {Offset(version, start)} is not as long as it was")
    if checksum is not None and checksum & PAYLOAD_MASK != payload_checksum(lengths, data):
        raise RowsGoneError(f"the append at {Offset(version, start)} is not what was written")
    if at == (version, start) and start + size <= limit:
        return Piece(data, Offset(version + count, start + size))
    if is_json:
        return _json_part(version, start, count, lengths, data, at, limit)
    if at.messages != version:
        raise OffsetError
    stop = min(limit, start + size)
    if stop < min(start + size, segment.end.bytes):
        stop = start + _between_characters(data, at.bytes - start, stop - start)
    part = data[at.bytes - start : stop - start]
    if stop == segment.end.bytes:
        return Piece(part, segment.end)
    return Piece(part, Offset(version + (stop == start + size), stop))


def is_whole(
    count: int, size: int, lengths: bytes | None, data: bytes | None, *, is_json: bool
) -> bool:
    """Whether the content of a row is as long as the row says."""
    if data is None or (lengths is None) != (count == 1):
        return False
    if lengths is not None and len(lengths) != LENGTH_BYTES * count:
        return False
    return len(data) == size + (count - 1 if is_json else 0)


def _between_characters(data: bytes, start: int, stop: int) -> int:
    """The last place up to `stop` that is not inside a UTF-8 character, or `stop` if there is none.

    A reader of server-sent events decodes each on its own, so a character cut by us would be lost.
    What is not UTF-8 may be cut anywhere.
    """
    for place in range(stop, max(start, stop - CHARACTER_BYTES_MAX), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return stop


def _json_part(
    version: int, start: int, count: int, lengths: bytes | None, data: bytes, at: Offset, limit: int
) -> Piece:
    """From message `at` of a batch on: as many messages as fit below `limit`, at least one."""
    first = at.messages - version
    if not 0 <= first < count:
        raise OffsetError
    ends = list(accumulate(message_lengths(count, len(data), lengths), initial=start))
    if ends[first] != at.bytes:
        raise OffsetError
    stop = first + 1
    while stop < count and ends[stop + 1] <= limit:
        stop += 1
    part, _ = cut(data, lengths, first, stop)
    return Piece(part, Offset(version + stop, ends[stop]))


def whole_messages(connection: Connection, segments: tuple[Segment, ...], at: Offset) -> Offset:
    """`at` as a fork begins there: a message that it cuts counts, for the fork has it."""
    for segment in segments:
        if at.bytes < segment.end.bytes:
            rows = connection.fetch("row_at", (segment.stream_id, at.bytes))
            if not rows:
                raise RowsGoneError
            version, start = rows[0][:2]
            inside = start < at.bytes and at.messages == version
            return Offset(at.messages + 1, at.bytes) if inside else at
    return at


def resolve_sub_offset(
    connection: Connection,
    segments: tuple[Segment, ...],
    anchor: Offset,
    sub_offset: int,
    *,
    is_json: bool,
) -> Offset | None:
    """The place `sub_offset` messages (JSON) or bytes past `anchor`, within the next append."""
    for segment in segments:
        if anchor.bytes < segment.end.bytes:
            break
    else:
        return None
    rows = connection.fetch("row_at", (segment.stream_id, anchor.bytes))
    if not rows:
        raise RowsGoneError
    [(version, start, count, size, lengths, data, _)] = rows
    if not is_whole(count, size, lengths, data, is_json=is_json):
        raise RowsGoneError(f"the append at {Offset(version, start)} is not as long as it was")
    if is_json:
        stop = anchor.messages - version + sub_offset
        ends = list(accumulate(message_lengths(count, len(data), lengths), initial=start))
        if stop > count or ends[stop] > segment.end.bytes:
            return None
        return Offset(version + stop, ends[stop])
    stop = anchor.bytes + sub_offset
    if stop > min(start + size, segment.end.bytes):
        return None
    return Offset(version + 1, stop)


# Places in a stream: what an offset and a sub-offset come to in its rows


def fork_point(
    connection: Connection, source: Stream | None, committed_tail: Offset | None, asked: ForkFrom
) -> ForkPoint | SourceMissing | SourceDeleted | BadForkPoint:
    """Where a fork of `source` begins, or why it cannot.

    Rows are looked at only for a place inside the source: its ends are known without.
    """
    if source is None:
        return SourceMissing(asked.path)
    if source.soft_deleted:
        return SourceDeleted(asked.path)
    at = asked.offset if asked.offset is not None else source.tail
    if at == START:
        at = source.first  # the beginning, which truncation may have moved
    if at.bytes > source.tail.bytes:
        return BadForkPoint("the offset is beyond the end of the source")
    # A client knows the committed tail; appends behind it may still be on their way.
    if asked.sub_offset == 0 and at in (source.tail, source.first, committed_tail):
        return ForkPoint(source, at)
    if at.bytes < source.first.bytes:
        return BadForkPoint("the offset is before the first one that is still kept")
    if not is_place(connection, source, committed_tail, at):
        return BadForkPoint("the source has no such offset")
    return _place_in(connection, source, at, asked.sub_offset)


def is_place(
    connection: Connection, stream: Stream, committed_tail: Offset | None, at: Offset
) -> bool:
    """Whether a stream has such an offset.

    Only committed rows are looked at: a client cannot know another offset.
    """
    if at in (stream.tail, committed_tail):
        return True
    segments = own_segments(stream.id, stream.segments, stream.tail)
    try:
        read_chunk(connection, segments, at, bytes_max=1, is_json=stream.is_json)
    except (OffsetError, RowsGoneError):
        return False
    return True


def _place_in(
    connection: Connection, source: Stream, at: Offset, sub_offset: int
) -> ForkPoint | BadForkPoint:
    segments = own_segments(source.id, source.segments, source.tail)
    try:
        if sub_offset == 0:
            return ForkPoint(source, whole_messages(connection, segments, at))
        place = resolve_sub_offset(connection, segments, at, sub_offset, is_json=source.is_json)
    except (OffsetError, RowsGoneError):
        return BadForkPoint("the source has no such offset")
    if place is None:
        return BadForkPoint("the sub-offset goes past the end of the append at the offset")
    return ForkPoint(source, place)


def own_segments(
    stream_id: int, inherited: tuple[Segment, ...], tail: Offset
) -> tuple[Segment, ...]:
    """All the rows of a stream: what it inherited, then its own up to `tail`."""
    return (*inherited, Segment(stream_id, tail))
