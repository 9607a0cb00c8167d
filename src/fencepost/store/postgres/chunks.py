"""Reading a stream from the database, as it is there at the time."""

from __future__ import annotations

from fencepost.protocol.offsets import Offset
from fencepost.store import records
from fencepost.store.contract import BadOffset, Chunk, Missing, StreamInfo, Truncated
from fencepost.store.database import Row
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.read import chunks as reading
from fencepost.store.read.chunks import own_segments


def read_stream(
    connection: PostgresConnection, info: StreamInfo, after: Offset, bytes_max: int
) -> Chunk | BadOffset | Truncated | Missing:
    """What a stream holds after an offset, up to so many bytes."""
    rows = connection.fetch("find_stream_by_id", (info.id,))
    if not rows:
        return Missing()
    stream, _ = records.stream_from_row(rows[0])
    try:
        piece = reading.read_chunk(
            connection,
            own_segments(info.id, stream.segments, info.tail),
            after,
            bytes_max=bytes_max,
            is_json=info.is_json,
        )
    except reading.OffsetError:
        return BadOffset()
    except reading.RowsGoneError:
        return _purged(connection, info, after)
    return Chunk(info, after, piece.next, piece.data)


def _purged(connection: PostgresConnection, info: StreamInfo, after: Offset) -> Truncated | Missing:
    """Rows went under the reader: the stream was deleted, or truncated, and purged since."""
    rows: list[Row] = connection.fetch("find_stream_by_id", (info.id,))
    if not rows:
        return Missing()
    stream, _ = records.stream_from_row(rows[0])
    if after.bytes < stream.first.bytes:
        return Truncated(stream.first)
    raise reading.RowsGoneError
