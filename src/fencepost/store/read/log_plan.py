"""Weighing ranges of the log without reading them: how many rows and bytes lie where.

Every 4096 positions are a bucket. Once a bucket is full its rows can only become fewer, by a purge
that corrects its entry, so its weight is written down once, by the upkeep, behind the head. A plan
over everything adds up entries and looks at rows only in the first bucket, in the last, and where
it cuts. A plan over a few streams that have few of the rows goes by their indexes; over any other
selection it weighs the rows of each bucket in a scan, in slices that each are a read transaction of
their own and wait for their turn (`scans`), and stops where the asked bound is, or when the client
has left.
"""

from __future__ import annotations

import json
from functools import partial

import msgspec

from fencepost.protocol.logs import (
    NOTHING,
    LogRow,
    Selection,
    Stretch,
    Weight,
    bounded_end,
    even_splits,
    messages_of,
    up_to,
)
from fencepost.store.log_contract import BeyondHead, Plan, PlanQuery
from fencepost.store.maintain.purge import count_purged, last_purged
from fencepost.store.read.log_selection import (
    SHORT_RANGE,
    SLICE_POSITIONS,
    STREAMS_MAX,
    WIDTH,
    Source,
    bucket_of,
    ends_of,
    first_place,
    head_of,
    resolve,
    row_start,
    run,
    selected,
)
from fencepost.store.read.scans import Scans
from fencepost.store.sql import Connection

_INTEGERS = msgspec.json.Decoder(list[int])

PART_POSITIONS = 64 * WIDTH
"""Positions that are weighed in one read transaction where no paths are compared."""
SPARSE = 16
"""Few streams are weighed by their index when they have at most one in so many of the positions."""
BUCKETS_PER_TALLY_MAX = 256
"""Buckets whose weight is written down in one round of the upkeep."""


async def make(scans: Scans, query: PlanQuery) -> Plan | BeyondHead:
    """Carry out a plan: weigh in slices, then bound, split and look up the time."""
    head, newest = await scans.run(query.principal, ends_of)
    if query.after > newest:
        return BeyondHead(head)
    until = max(query.after, head if query.until is None else min(query.until, head))
    sparse = await _weigh_sparse(scans, query, until)
    stretches = sparse or []
    total = NOTHING
    low = query.after + 1 if sparse is None else until + 1
    while low <= until:
        high = until if not _filtered(query.selection) else min(until, _slice_end(query, low))
        weighed = await scans.run(
            query.principal,
            partial(
                weigh, selection=query.selection, low=low, high=high, after=query.after, until=until
            ),
        )
        stretches += weighed
        total = sum((stretch.weight for stretch in weighed), total)
        if _beyond(total, query):
            break
        low = high + 1
    return await scans.run(
        query.principal,
        partial(_finish, query=query, stretches=stretches, until=until, head=head),
    )


async def _weigh_sparse(scans: Scans, query: PlanQuery, until: int) -> list[Stretch] | None:
    """The weights of a few streams in a long range, by their indexes; None when that is no help."""
    low = query.after + 1
    if not query.selection.by_path or until - low < SHORT_RANGE:
        return None
    ids = await scans.run(query.principal, partial(_sparse_ids, query=query, until=until))
    if ids is None:
        return None
    found: dict[int, Weight] = {}
    for stream in ids:
        sums = await scans.run(
            query.principal, partial(_stream_sums, stream=stream, low=low, until=until)
        )
        for bucket, weight in sums.items():
            found[bucket] = found.get(bucket, NOTHING) + weight
    return await scans.run(
        query.principal,
        partial(
            _with_edges,
            selection=query.selection,
            found=found,
            low=low,
            high=until,
            after=query.after,
            until=until,
        ),
    )


def _sparse_ids(connection: Connection, query: PlanQuery, until: int) -> list[int] | None:
    with connection:
        ids = resolve(connection, query.selection, STREAMS_MAX)
        found = run(connection, "messages_of_streams", streams=json.dumps(ids or []))
    return ids if found[0][0] * SPARSE <= until - query.after else None


def _stream_sums(connection: Connection, stream: int, low: int, until: int) -> dict[int, Weight]:
    """Weights of one stream's rows that start in a range, by bucket."""
    values: dict[str, object] = {"stream": stream, "low": low, "high": until}
    sources = [Source("source_markers", values)]
    found: dict[int, Weight] = {}
    with connection:
        place = first_place(connection, stream, low)
        if place is not None:
            sources.append(Source("source_stream", values | {"place": place}))
        for source in sources:
            for bucket, messages, size in run(connection, "bucket_sums", source, width=WIDTH):
                found[bucket] = found.get(bucket, NOTHING) + Weight(messages, size)
    return found


def _filtered(selection: Selection) -> bool:
    return selection.by_path or selection.part is not None


def _slice_end(query: PlanQuery, low: int) -> int:
    width = SLICE_POSITIONS if query.selection.by_path else PART_POSITIONS
    return (low // width + 1) * width - 1


def _beyond(total: Weight, query: PlanQuery) -> bool:
    return (query.rows_max is not None and total.rows > query.rows_max) or (
        query.bytes_max is not None and total.bytes > query.bytes_max
    )


def _finish(
    connection: Connection,
    query: PlanQuery,
    stretches: list[Stretch],
    until: int,
    head: int,
) -> Plan:
    with connection:
        scale = Scale(connection, query.selection, query.after, until)
        end = bounded_end(
            stretches,
            scale,
            until=until,
            rows_max=query.rows_max,
            bytes_max=query.bytes_max,
        )
        kept = up_to(stretches, end)
        splits = even_splits(kept, scale, after=query.after, end=end, parts=query.parts)
        low, high = query.after + 1, end.position
        pruned = last_purged(connection, query.selection, low, high)
        gone = 0 if pruned is None else count_purged(connection, query.selection, low, high)
        at = None if query.at_ms is None else before_time(connection, query.at_ms, head)
    return Plan(end=end, splits=splits, head=head, pruned=pruned, pruned_rows=gone, at=at)


class Scale:
    """Looks into single stretches of a selection, message by message."""

    def __init__(
        self, connection: Connection, selection: Selection, after: int, until: int
    ) -> None:
        self._connection = connection
        self._selection = selection
        self._low = after + 1
        self._until = until

    def messages(self, stretch: Stretch) -> list[tuple[int, int]]:
        first = stretch.first
        if first == self._low:
            first = row_start(self._connection, first)
        source = selected(self._connection, self._selection, first, stretch.last)
        [(most, positions, sizes)] = run(self._connection, "weighed_messages", source)
        if most == 1:
            return list(zip(_INTEGERS.decode(positions), _INTEGERS.decode(sizes), strict=True))
        rows = _rows(self._connection, source)
        return list(messages_of(rows, self._low, min(self._until, _last_of(rows))))

    def last_position(self, stretch: Stretch) -> int:
        found = run(self._connection, "row_over", position=stretch.last)
        if not found:
            return stretch.last
        [(start, count, _, _)] = run(self._connection, "one_row", position=found[0][0])
        return max(stretch.last, min(int(start + count) - 1, self._until))


def _rows(connection: Connection, source: Source) -> list[LogRow]:
    return [LogRow(*row) for row in run(connection, "weighed_rows", source)]


def _last_of(rows: list[LogRow]) -> int:
    return rows[-1].position + rows[-1].messages - 1 if rows else -1


def weigh(
    connection: Connection, selection: Selection, low: int, high: int, after: int, until: int
) -> list[Stretch]:
    """The weights of a slice of a range, bucket by bucket.

    An append counts where it starts; only where the whole range begins or ends inside one is it
    counted in part.
    """
    with connection:
        if _filtered(selection):
            found = _sums(connection, selection, low, high)
        else:
            found = _bucket_sums(connection, selection, low, high)
    return _with_edges(connection, selection, found, low, high, after, until)


def _with_edges(
    connection: Connection,
    selection: Selection,
    found: dict[int, Weight],
    low: int,
    high: int,
    after: int,
    until: int,
) -> list[Stretch]:
    with connection:
        if low == after + 1:
            _add_cut(connection, selection, found, low, until)
        if high == until:
            _take_cut(connection, selection, found, low, high)
    return [
        Stretch(max(bucket * WIDTH, low), min(bucket * WIDTH + WIDTH - 1, high), weight)
        for bucket, weight in sorted(found.items())
    ]


def _sums(connection: Connection, selection: Selection, low: int, high: int) -> dict[int, Weight]:
    """Weights of the rows that start in a range, by bucket."""
    if low > high:
        return {}
    rows = run(connection, "bucket_sums", selected(connection, selection, low, high), width=WIDTH)
    return {bucket: Weight(messages, size) for bucket, messages, size in rows}


def _bucket_sums(
    connection: Connection, selection: Selection, low: int, high: int
) -> dict[int, Weight]:
    """Weights of all rows in a range, by bucket, from the entries where they are written."""
    # The buckets that lie wholly within the range.
    first, last = bucket_of(low - 1) + 1, bucket_of(high + 1) - 1
    if first > last:
        return _sums(connection, selection, low, high)
    rows = run(connection, "buckets", first=first, last=last)
    found = {bucket: Weight(messages, size) for bucket, messages, size in rows}
    # The upkeep goes from the first bucket to the last, so what is missing is the end.
    known = max(found, default=first - 1)
    edges = ((low, first * WIDTH - 1), ((known + 1) * WIDTH, high))
    for edge_low, edge_high in edges:
        found |= _sums(connection, selection, edge_low, edge_high)
    return found


def _add_cut(
    connection: Connection,
    selection: Selection,
    found: dict[int, Weight],
    low: int,
    until: int,
) -> None:
    """Count the rest of an append that the range begins inside of."""
    start = row_start(connection, low)
    if start < low:
        rows = _rows(connection, selected(connection, selection, start, start))
        bucket = bucket_of(low)
        found[bucket] = found.get(bucket, NOTHING) + _weight(rows, low, until)


def _take_cut(
    connection: Connection,
    selection: Selection,
    found: dict[int, Weight],
    low: int,
    high: int,
) -> None:
    """Do not count what lies above the range of an append that it ends inside of."""
    start = row_start(connection, high + 1)
    bucket = bucket_of(start)
    if low <= start <= high and bucket in found:
        rows = _rows(connection, selected(connection, selection, start, start))
        found[bucket] = found[bucket].minus(_weight(rows, high + 1, _last_of(rows)))


def _weight(rows: list[LogRow], low: int, high: int) -> Weight:
    sizes = [size for _, size in messages_of(rows, low, high)]
    return Weight(len(sizes), sum(sizes))


def before_time(connection: Connection, at_ms: int, head: int) -> int:
    """The newest position that is older than a time; times never run backwards along positions."""
    low, high = 0, head + 1
    while low < high:
        middle = (low + high) // 2
        found = run(connection, "first_row_from", position=middle)
        if not found or found[0][0] > head or found[0][1] >= at_ms:
            high = middle
        else:
            low = found[0][0] + 1
    # The newest older row may be an append of several messages: all of it is older.
    return row_end(connection, low - 1)


def row_end(connection: Connection, position: int) -> int:
    """The last position of the append that a position lies in."""
    start = row_start(connection, position)
    rows = run(connection, "one_row", position=start)
    return int(rows[0][0] + rows[0][1] - 1) if rows else position


def untallied(connection: Connection) -> list[tuple[int, int, int]]:
    """The next buckets that are full and not written down yet, in order."""
    with connection:
        [(last,)] = run(connection, "last_bucket")
        first = last + 1
        stop = min((head_of(connection) + 1) // WIDTH, first + BUCKETS_PER_TALLY_MAX)
        found = _sums(connection, Selection(), first * WIDTH, stop * WIDTH - 1)
    return [(bucket, *found.get(bucket, NOTHING)) for bucket in range(first, stop)]
