"""Reading for groups: the events of leases, what there is to correlate, and pages of rows.

A claim gives out the events of its leases. Leases of one source are read together, each span of the
source once. The first event of a stream behind a position is found through the row that holds the
position before it, which is usually the event that was acked last; else by halving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from fencepost.protocol.batches import split
from fencepost.protocol.globs import Glob
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, Parked, Target, message_target
from fencepost.protocol.logs import Selection
from fencepost.protocol.streams import JSON
from fencepost.store.group_contract import (
    Correlation,
    Event,
    EventSpan,
    LaneStats,
    SpanEvents,
    WorkerRow,
)
from fencepost.store.maintain import purge as purges
from fencepost.store.read.chunks import Readers
from fencepost.store.read.log_selection import (
    first_place,
    head_of,
    row_start,
    run,
    streams_between,
)
from fencepost.store.sql import Connection, Row
from fencepost.store.write.groups import (
    BLOCKED,
    DUE,
    IDLE,
    group_from_row,
    parked_from_row,
    target_from_row,
)

PIECE_POSITIONS = 10_000
"""Positions that are correlated at once."""
BLOCK_POSITIONS = 4_096
"""Positions that are looked through together for a source that is a pattern."""


class _Named(msgspec.Struct):
    name: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


class SqlGroupReads:
    """The groups of one store, as committed."""

    def __init__(self, readers: Readers[Any]) -> None:
        self._readers = readers

    async def head(self) -> int:
        return await self._readers.run(head_of)

    async def find(self, name: str) -> Group | None:
        rows = await self._fetch("find_group", (name,))
        return group_from_row(rows[0]) if rows else None

    async def groups(self, after: str, limit: int) -> list[Group]:
        return [group_from_row(row) for row in await self._fetch("live_groups", (after, limit))]

    async def correlation(self, group: Group) -> Correlation | None:
        return await self._readers.run(partial(correlation_of, group=group))

    async def events(
        self, spans: Sequence[EventSpan], names: Sequence[str], *, events_max: int, bytes_max: int
    ) -> list[SpanEvents]:
        work = partial(
            events_of,
            spans=spans,
            names=frozenset(names),
            events_max=events_max,
            bytes_max=bytes_max,
        )
        return await self._readers.run(work)

    async def targets(
        self, group_id: int, after: str, limit: int, *, blocked: bool
    ) -> list[Target]:
        query = "blocked_leases_after" if blocked else "leases_after"
        rows = await self._fetch(query, (group_id, after, limit))
        return [target_from_row(row) for row in rows]

    async def target(self, group_id: int, target: str) -> Target | None:
        rows = await self._fetch("find_lease", (group_id, target))
        return target_from_row(rows[0]) if rows else None

    async def parked(self, group_id: int, after: tuple[str, int], limit: int) -> list[Parked]:
        rows = await self._fetch("parked_after", (group_id, *after, limit))
        return [parked_from_row(row) for row in rows]

    async def workers(self, group_id: int, after: str, limit: int) -> list[WorkerRow]:
        rows = await self._fetch("workers_of_group", (group_id, after, limit))
        return [WorkerRow(*row) for row in rows]

    async def stats(self, group_id: int) -> list[LaneStats]:
        return await self._readers.run(partial(stats_of, group_id=group_id))

    async def _fetch(self, query: str, values: tuple[object, ...]) -> list[Row]:
        return await self._readers.run(lambda connection: connection.fetch(query, values))


# Correlation


def correlation_of(connection: Connection, group: Group) -> Correlation | None:
    """The targets of the next piece of the log, for groups whose targets the server knows."""
    with connection:
        head = head_of(connection)
        after = group.watermark
        until = min(head, after + PIECE_POSITIONS)
        if until <= after:
            return None
        return Correlation(after, until, _found(connection, group, after + 1, until))


def _found(connection: Connection, group: Group, low: int, high: int) -> list[Correlated]:
    settings = group.settings
    selection = Selection((), [Glob(source) for source in settings.sources])
    start = row_start(connection, low)
    if settings.names:
        events = _events_in_range(connection, selection, start, high)
        named = frozenset(settings.names)
        rows = [
            (e.path, e.position)
            for e in events
            if e.position >= low and _is_taken(group, selection, e.path) and _has_name(e, named)
        ]
        return [_correlated(group, path, position) for path, position in rows]
    if settings.targets == "message":
        return [
            _correlated(group, path, position)
            for _, path, first, count in run(connection, "messages_between", low=start, high=high)
            if _is_taken(group, selection, path)
            for position in range(max(first, low), min(first + count - 1, high) + 1)
        ]
    found: list[Correlated] = []
    for _, path, first, last in run(connection, "work_between", low=start, high=high):
        if _is_taken(group, selection, path) and last >= low:
            # Both ends: where the work begins tells how old it is.
            ends = {max(first, low), min(last, high)}
            found += [Correlated(path, path, position) for position in sorted(ends)]
    return found


def _is_taken(group: Group, selection: Selection, path: str) -> bool:
    """Whether a stream is a source. The server's own streams are sources for meshes alone."""
    if path.startswith("__") and not group.name.startswith("mesh:"):
        return False
    return selection.takes_path(path)


def _correlated(group: Group, path: str, position: int) -> Correlated:
    if group.settings.targets == "message":
        return Correlated(message_target(path, position), path, position)
    return Correlated(path, path, position)


def _has_name(event: Event, names: frozenset[str]) -> bool:
    try:
        return _NAMED.decode(event.data).name in names
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


# Events


def events_of(
    connection: Connection,
    spans: Sequence[EventSpan],
    names: frozenset[str],
    events_max: int,
    bytes_max: int,
) -> list[SpanEvents]:
    """The first events of each span, each span of a source read once."""
    answers: list[SpanEvents] = []
    left_bytes = bytes_max
    known: dict[tuple[str, int, int], SpanEvents] = {}
    with connection:
        for span in spans:
            place = (span.source, span.after, span.until)
            read = known.get(place)
            if read is None:
                read = _read_span(connection, span, names, events_max, left_bytes)
                known[place] = read
                left_bytes -= sum(len(event.data) + 100 for event in read.events)
            events = [event for event in read.events if event.position not in span.left_out]
            replays = [_replay(connection, span, position) for position in span.replayed]
            given = [event._replace(replayed=True) for event in replays if event is not None]
            answers.append(read._replace(events=given + events))
    return answers


def _read_span(
    connection: Connection, span: EventSpan, names: frozenset[str], events_max: int, bytes_max: int
) -> SpanEvents:
    low, until = span.after + 1, span.until
    if low > until or bytes_max <= 0 or events_max <= 0:
        # No room in this answer: the worker acks what it was given and claims again.
        return SpanEvents((), span.after)
    taken: list[Event] = []
    size = 0
    read_to = until
    for event in _events_from(connection, span.source, low, until, events_max + 1):
        if event.position < low:
            continue
        if event.position > until:
            break
        size += len(event.data) + 100
        if len(taken) == events_max or (taken and size > bytes_max):
            break
        read_to = event.position
        if not names or _has_name(event, names):
            taken.append(event)
    else:
        read_to = until
    pruned = None
    if not taken or taken[0].position > low:
        selection = Selection((), (Glob(span.source),))
        end = taken[0].position - 1 if taken else read_to
        last = purges.last_purged(connection, selection, low, end)
        pruned = None if last is None else (low, last)
    return SpanEvents(taken, read_to, pruned)


def _replay(connection: Connection, span: EventSpan, position: int) -> Event | None:
    for event in _events_from(connection, span.source, position, position, 1):
        if event.position == position:
            return event
    return None


def _events_from(
    connection: Connection, source: str, low: int, high: int, limit: int
) -> Iterator[Event]:
    """The messages of a source, in order, from the row on that a position lies in."""
    glob = Glob(source)
    if not glob.is_exact:
        selection = Selection((), (glob,))
        return _events_in_range(connection, selection, row_start(connection, low), high)
    found = run(connection, "streams_of_path", path=source)
    streams = [
        _events_of_stream(connection, source, content_type, stream, low, limit)
        for stream, content_type in sorted(found)
    ]
    # Incarnations at a path follow one another, so their events do.
    return (event for stream in streams for event in stream)


def _events_of_stream(
    connection: Connection, path: str, content_type: str, stream: int, low: int, limit: int
) -> Iterator[Event]:
    place = _place(connection, stream, low)
    if place is not None:
        yield from stream_events(connection, path, stream, place, limit, content_type)


def stream_events(
    connection: Connection,
    path: str,
    stream: int,
    place: int,
    limit: int,
    content_type: str = JSON,
) -> Iterator[Event]:
    """The messages of a stream from a byte offset on, `limit` rows read at a time."""
    while True:
        rows = run(connection, "stream_events", stream=stream, place=place, limit=limit)
        for row in rows:
            yield from _messages(path, content_type, row)
        if len(rows) < limit:
            return
        place = rows[-1][2] + 1


def _place(connection: Connection, stream: int, low: int) -> int | None:
    """Where the stream's first row begins that ends at a position or after it."""
    for position in (low - 1, low) if low else (low,):
        around = run(connection, "row_around", position=position)
        if around and around[0][1] == stream and around[0][2] == 0:
            first, _, _, start_bytes, count, size = around[0]
            return int(start_bytes) if first + count > low else int(start_bytes) + int(size)
    return first_place(connection, stream, row_start(connection, low))


def _events_in_range(
    connection: Connection, selection: Selection, low: int, high: int
) -> Iterator[Event]:
    at = low
    while at <= high:
        stop = min(at + BLOCK_POSITIONS - 1, high)
        found = streams_between(connection, selection, at, stop)
        if found.names:
            source = found.source(at, stop, None)
            for row in run(connection, "event_rows", source, limit=BLOCK_POSITIONS):
                named = found.names.get(row[1])
                if named is not None:
                    yield from _messages(named.path, named.content_type, row)
        at = stop + 1


def _messages(path: str, content_type: str, row: Row) -> Iterator[Event]:
    """The messages of one append."""
    position, stream, start, version, count, at_ms, producer, epoch, seq, lengths, data = row
    sent = None if producer is None else (producer, epoch, seq)
    pieces = [bytes(data)] if lengths is None or count == 1 else split(bytes(lengths), bytes(data))
    for piece in pieces:
        yield Event(path, stream, content_type, position, start, version, at_ms, sent, piece)
        position += 1
        version += 1
        start += len(piece)


# Counts


def stats_of(connection: Connection, group_id: int) -> list[LaneStats]:
    """How many targets are in which state, lane by lane."""
    lanes: dict[str, LaneStats] = {}
    for lane, state, count, held, oldest, lag, _, _ in connection.fetch("lane_counts", (group_id,)):
        stats = lanes.get(lane, LaneStats(lane))
        if state == IDLE:
            lanes[lane] = stats._replace(idle=count)
            continue
        if state == BLOCKED:
            stats = stats._replace(blocked=count)
        elif state == DUE:
            stats = stats._replace(leased=held, deferred=count - held)
        else:
            stats = stats._replace(ready=count)
        known = oldest if stats.oldest is None else min(stats.oldest, oldest)
        lanes[lane] = stats._replace(oldest=known, lag=stats.lag + lag)
    return [_aged(connection, stats) for _, stats in sorted(lanes.items())]


def _aged(connection: Connection, stats: LaneStats) -> LaneStats:
    if stats.oldest is None:
        return stats
    rows = run(connection, "first_row_from", position=stats.oldest)
    return stats._replace(oldest_ms=rows[0][1]) if rows else stats
