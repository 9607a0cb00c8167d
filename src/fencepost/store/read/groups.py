"""Reading for groups: what there is to correlate, and pages of rows.

How the events of leases are read is in `group_events.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from fencepost.protocol.fingerprints import DEFAULT_PRIORITY, Priority
from fencepost.protocol.globs import Glob
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, Parked, Target, message_target
from fencepost.protocol.logs import Selection
from fencepost.protocol.meshes import LEASE_PRIORITIES
from fencepost.store.group_contract import (
    Correlation,
    Event,
    EventSpan,
    LaneStats,
    SpanEvents,
    WorkerRow,
)
from fencepost.store.read.chunks import Readers
from fencepost.store.read.group_events import events_in_range, events_of, has_name, stream_events
from fencepost.store.read.log_selection import first_place, head_of, row_start, run
from fencepost.store.sql import Connection, Row
from fencepost.store.write.groups import (
    BLOCKED,
    DUE,
    IDLE,
    MESH,
    group_from_row,
    parked_from_row,
    target_from_row,
)

MESH_PIECE_EVENTS = 1_000
"""Messages of a queue or an inbox that are correlated at once."""
PIECE_POSITIONS = 10_000
"""Positions that are correlated at once."""


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

    async def told(self, group_id: int) -> int:
        rows = await self._fetch("count_told", (group_id,))
        return int(rows[0][0]) if rows else 0

    async def _fetch(self, query: str, values: tuple[object, ...]) -> list[Row]:
        return await self._readers.run(lambda connection: connection.fetch(query, values))


# Correlation


def correlation_of(connection: Connection, group: Group) -> Correlation | None:
    """The targets of the next piece of the log, for groups whose targets the server knows."""
    with connection:
        head = head_of(connection)
        after = group.watermark
        if group.name.startswith(MESH):
            return None if head <= after else _mesh_correlation(connection, group, head)
        until = min(head, after + PIECE_POSITIONS)
        if until <= after:
            return None
        return Correlation(after, until, _found(connection, group, after + 1, until))


class _Sent(msgspec.Struct):
    priority: Priority = DEFAULT_PRIORITY


_SENT = msgspec.json.Decoder(_Sent)


def _mesh_correlation(connection: Connection, group: Group, head: int) -> Correlation:
    """The same for a queue or an inbox, whose one stream is read instead of the whole log."""
    [source] = group.settings.sources
    low, until = group.watermark + 1, head
    found: list[Correlated] = []
    for event in _stream_from(connection, source, low):
        if event.position > head:
            break
        if len(found) == MESH_PIECE_EVENTS:
            until = event.position - 1
            break
        if event.position < low:
            continue
        if group.settings.targets == "message":
            target = message_target(source, event.position)
            priority = LEASE_PRIORITIES[_SENT.decode(event.data).priority]
            found.append(Correlated(target, source, event.position, None, priority))
        elif len(found) < 2:
            found.append(Correlated(source, source, event.position))
        else:
            # Both ends: where the work begins tells how old it is.
            found[1] = Correlated(source, source, event.position)
    return Correlation(group.watermark, until, found)


def _stream_from(connection: Connection, path: str, position: int) -> Iterator[Event]:
    """The messages of a stream from the row on that a position lies in."""
    start = row_start(connection, position)
    # The stream of a mesh is as old as its group: there is no older one to read.
    for _, stream, *_ in connection.fetch("stream_at_path", (path,)):
        place = first_place(connection, stream, start)
        if place is not None:
            yield from stream_events(connection, path, stream, place, MESH_PIECE_EVENTS)


def _found(connection: Connection, group: Group, low: int, high: int) -> list[Correlated]:
    settings = group.settings
    selection = Selection((), [Glob(source) for source in settings.sources])
    start = row_start(connection, low)
    if settings.names:
        events = events_in_range(connection, selection, start, high)
        named = frozenset(settings.names)
        rows = [
            (e.path, e.position)
            for e in events
            if e.position >= low and _is_taken(group, selection, e.path) and has_name(e, named)
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


# Counts


def stats_of(connection: Connection, group_id: int) -> list[LaneStats]:
    """How many targets are in which state, lane by lane."""
    lanes: dict[str, LaneStats] = {}
    ends: dict[str, int] = {}
    rows = connection.fetch("lane_counts", (group_id,))
    for lane, state, count, held, oldest, newest, waiting in rows:
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
        ends[lane] = max(ends.get(lane, -1), newest)
        # Of targets that share the log each counts the others' events too; together they have no
        # more than lie between the first and the last.
        lag = min(stats.lag + waiting, ends[lane] - known + 1)
        lanes[lane] = stats._replace(oldest=known, lag=max(0, lag))
    return [_aged(connection, stats) for _, stats in sorted(lanes.items())]


def _aged(connection: Connection, stats: LaneStats) -> LaneStats:
    if stats.oldest is None:
        return stats
    rows = run(connection, "first_row_from", position=stats.oldest)
    return stats._replace(oldest_ms=rows[0][1]) if rows else stats
