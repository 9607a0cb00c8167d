"""Finding a place in a stream: what an offset and a sub-offset come to in its rows.

Only committed rows are looked at: those are all that a client can know an offset of.
"""

from __future__ import annotations

from fencepost.protocol.creates import (
    BadForkPoint,
    ForkFrom,
    ForkPoint,
    SourceDeleted,
    SourceMissing,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Segment, Stream
from fencepost.store.database import Connection
from fencepost.store.read import chunks as reading
from fencepost.store.write.ledger import Entry


def fork_point(
    connection: Connection, entry: Entry | None, asked: ForkFrom
) -> ForkPoint | SourceMissing | SourceDeleted | BadForkPoint:
    """Where a fork of the stream in `entry` begins, or why it cannot."""
    if entry is None:
        return SourceMissing(asked.path)
    source = entry.stream
    if source.soft_deleted:
        return SourceDeleted(asked.path)
    at = asked.offset if asked.offset is not None else source.tail
    if at == START:
        at = source.first  # the beginning, wherever that is by now
    if at.bytes > source.tail.bytes:
        return BadForkPoint("the offset is beyond the end of the source")
    # Whoever asks knows the committed tail; appends behind it may still be on their way.
    known = source.first if entry.view is None else entry.view.tail
    if asked.sub_offset == 0 and at in (source.tail, source.first, known):
        return ForkPoint(source, at)
    if at.bytes < source.first.bytes:
        return BadForkPoint("the offset is before the first one that is still kept")
    if not is_place(connection, entry, at):
        return BadForkPoint("the source has no such offset")
    return _place_in(connection, source, at, asked.sub_offset)


def is_place(connection: Connection, entry: Entry, at: Offset) -> bool:
    """Whether a stream has such an offset, among those that a client can know."""
    stream = entry.stream
    if at == stream.tail or (entry.view is not None and at == entry.view.tail):
        return True
    segments = own_segments(stream.id, stream.segments, stream.tail)
    try:
        reading.read_chunk(connection, segments, at, bytes_max=1, is_json=stream.is_json)
    except (reading.OffsetError, reading.RowsGoneError):
        return False
    return True


def _place_in(
    connection: Connection, source: Stream, at: Offset, sub_offset: int
) -> ForkPoint | BadForkPoint:
    segments = own_segments(source.id, source.segments, source.tail)
    try:
        if sub_offset == 0:
            return ForkPoint(source, reading.whole_messages(connection, segments, at))
        place = reading.resolve_sub_offset(
            connection, segments, at, sub_offset, is_json=source.is_json
        )
    except (reading.OffsetError, reading.RowsGoneError):
        return BadForkPoint("the source has no such offset")
    if place is None:
        return BadForkPoint("the sub-offset goes past the end of the append at the offset")
    return ForkPoint(source, place)


def own_segments(
    stream_id: int, inherited: tuple[Segment, ...], tail: Offset
) -> tuple[Segment, ...]:
    """All the rows of a stream: what it inherited, then its own up to `tail`."""
    return (*inherited, Segment(stream_id, tail))
