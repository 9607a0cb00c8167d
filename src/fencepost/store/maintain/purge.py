"""Purge the log: remove rows of deleted streams for good, after the log's retention.

Each purge of a piece of a stream records in its own transaction which positions went, to the
position. So a reader is told of a loss exactly when rows that it asked for are gone, and not
because a stream that once lived beside them is. Records are kept; a stream that is truncated again
and again has few of them, because its newest one is added to until it is large.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

from fencepost.protocol.logs import Selection
from fencepost.store.read.log_selection import bucket_of, end_of, run
from fencepost.store.sql import Connection, Row

RUNS_PER_RECORD_MAX = 4_096
"""A record with fewer runs of positions than this is added to."""


def purge(connection: Connection, stream_id: int, rows_max: int) -> int:
    """Drop some rows of a stream and record it; how many there were. Call it in a transaction.

    Messages go first: as long as there is one, its stream's markers are there as well.
    """
    rows = connection.fetch("purgeable_messages", (stream_id, rows_max))
    if not rows:
        rows = connection.fetch("purgeable_markers", (stream_id, rows_max))
    drop(connection, stream_id, rows)
    return len(rows)


def drop(connection: Connection, stream_id: int, rows: Sequence[Row]) -> None:
    """Remove these rows (position, count, size, chunk) of a stream, in a transaction.

    Everything that takes rows out of the log goes through here: the record and the weights of the
    ranges change together with the rows.
    """
    if not rows:
        return
    runs = [(position, count) for position, count, _, _ in rows]
    _record(connection, stream_id, runs)
    reduced: dict[int, tuple[int, int]] = {}
    for position, count, size, _ in rows:
        bucket = bucket_of(position)
        messages, payload = reduced.get(bucket, (0, 0))
        reduced[bucket] = messages + count, payload + size
    connection.execute_many(
        "reduce_bucket", [(*weight, bucket) for bucket, weight in reduced.items()]
    )
    connection.execute_many("purge_row", [(position,) for position, _ in runs])
    chunks = [(chunk,) for _, _, _, chunk in rows if chunk is not None]
    connection.execute_many("purge_chunk", chunks)


def _record(connection: Connection, stream_id: int, runs: list[tuple[int, int]]) -> None:
    for record, before in connection.fetch("newest_purge", (stream_id,)):
        known = list(unpack_runs(before))
        if len(known) < RUNS_PER_RECORD_MAX:
            connection.execute("forget_purge", (record,))
            runs = known + runs
    joined = join_runs(sorted(runs))
    last = sum(joined[-1]) - 1
    connection.execute("save_purge", (stream_id, joined[0][0], last, pack_runs(joined)))


def last_purged(connection: Connection, selection: Selection, low: int, high: int) -> int | None:
    """The newest position from `low` to `high` whose row was of this selection and is gone."""
    newest = None
    for stream, path, first, last, runs in _records(connection, selection, low, high):
        if (newest is not None and last <= newest) or not selection.takes(stream, path):
            continue
        found = _last_within(first, last, runs, low, high)
        if found is not None and (newest is None or found > newest):
            newest = found
        if newest is not None and newest >= high:
            break
    return newest


def count_purged(connection: Connection, selection: Selection, low: int, high: int) -> int:
    """How many positions from `low` to `high` were rows of this selection and are gone."""
    return sum(
        max(0, min(position + count - 1, high) - max(position, low) + 1)
        for stream, path, first, last, runs in _records(connection, selection, low, high)
        if first <= high and last >= low and selection.takes(stream, path)
        for position, count in unpack_runs(runs)
    )


def _records(connection: Connection, selection: Selection, low: int, high: int) -> Iterator[Row]:
    if not selection.by_path:
        yield from connection.fetch("purges_between", {"low": low, "high": high})
        return
    for first, last in selection.path_ranges():
        yield from run(
            connection,
            "purges_of_paths",
            first=first,
            last=end_of(connection, last),
            low=low,
            high=high,
        )


def _last_within(first: int, last: int, runs: bytes, low: int, high: int) -> int | None:
    if low <= last <= high:
        return last
    if first > high or last < low:
        return None
    newest = None
    for position, count in unpack_runs(runs):
        if position > high:
            break
        if position + count > low:
            newest = min(position + count - 1, high)
    return newest


def join_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions, in order, in as few runs as there can be."""
    joined: list[tuple[int, int]] = []
    for position, count in runs:
        if joined and sum(joined[-1]) == position:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((position, count))
    return joined


def pack_runs(runs: Iterable[tuple[int, int]]) -> bytes:
    """Runs of positions, in order, as small differences: most of them take a few bits."""
    numbers = array("q")
    before = 0
    for position, count in runs:
        numbers.extend((position - before, count))
        before = position + count
    return zlib.compress(numbers.tobytes())


def unpack_runs(packed: bytes) -> Iterator[tuple[int, int]]:
    """What `pack_runs` packed."""
    numbers = array("q", zlib.decompress(packed))
    at = 0
    for gap, count in zip(numbers[::2], numbers[1::2], strict=True):
        yield at + gap, count
        at += gap + count
