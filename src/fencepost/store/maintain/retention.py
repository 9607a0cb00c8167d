"""Retention: settings, or the stream itself, bound how much a stream holds.

Truncating moves the stream's first offset, through the ledger like any other decision. The rows
stay for the global log as long as the log's own retention says; then they are purged, except those
that a fork still reads. A purge goes from the beginning of a stream to its end and never leaves a
hole; what producers must remember of the purged batches is kept apart. Producers that have been
silent for long enough are forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import (
    KEEP_ALL,
    IdGlobs,
    Kept,
    Policy,
    Retention,
    first_to_keep,
    is_within,
    retention_of,
)
from fencepost.protocol.streams import PACKED_BYTES, RECENT_BATCHES, Segment, pack
from fencepost.store.maintain import purge as purges
from fencepost.store.maintain.contract import MaintainedStore
from fencepost.store.records import TRUNCATED
from fencepost.store.sql import Connection, Row

STREAMS_PER_STEP_MAX = 1_000
TRUNCATIONS_PER_STEP_MAX = 100
ROWS_PER_STEP_MAX = 2_000
PRODUCERS_PER_STEP_MAX = 5_000


_Within = Callable[[Kept], bool]


class Keeper:
    """The jobs of retention, for the upkeep to call again and again."""

    def __init__(self, store: MaintainedStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settings = store.settings
        self._kept_producers = IdGlobs(store.settings.kept_producer_globs)
        self._last_stream = 0
        self._round_began_ms: int | None = None
        self._last_producer: tuple[int, str] = (0, "")
        self._producers_began_ms: int | None = None

    # Truncating by policy

    async def retain(self) -> int:
        """Truncate some streams that hold more than they may; how many."""
        now_ms = self._clock.monotonic_ms()
        if self._last_stream == 0:
            began_ms = self._round_began_ms
            if began_ms is not None and now_ms - began_ms < self._settings.retention_interval_ms:
                return 0
            self._round_began_ms = now_ms
        work = partial(
            find_overdue,
            after=self._last_stream,
            policies=self._settings.retention,
            now_ms=self._clock.now_ms(),
        )
        overdue, self._last_stream = await self._store.readers.run(work)
        if not overdue:
            return 0
        return await self._store.decide(
            lambda decider: sum(decider.truncate_stream(*place) for place in overdue)
        )

    # Purging

    async def purge(self) -> int:
        """Drop the rows of some truncations that are old enough; how many there were."""
        before_ms = self._clock.now_ms() - self._settings.log_retention_ms
        purged = 0
        for _ in range(TRUNCATIONS_PER_STEP_MAX):
            due = await self._store.readers.run(partial(_find_due, before_ms=before_ms))
            if due is None:
                break
            stream_id, position, inherited = due
            for source_id in (*inherited, stream_id):
                purged += await self.purge_beginning(source_id, before_ms)
            await self._store.between_commits(
                partial(_finish, stream_id=stream_id, position=position)
            )
        return purged

    async def purge_beginning(self, stream_id: int, before_ms: int) -> int:
        """Drop the rows at the beginning of a stream that no request may ask for any more."""
        limit = await self._store.readers.run(
            partial(purge_limit, stream_id=stream_id, before_ms=before_ms)
        )
        purged = 0
        while limit > 0:
            count = await self._store.between_commits(
                partial(purge_piece, stream_id=stream_id, limit=limit)
            )
            purged += count
            if count < ROWS_PER_STEP_MAX:
                break
        return purged

    # Producers

    async def forget_producers(self) -> int:
        """Forget some producers that have not sent anything for longer than their lifetime."""
        lifetime_ms = self._settings.producer_retention_s * 1000
        now_ms = self._clock.monotonic_ms()
        if lifetime_ms == 0:
            return 0
        if self._last_producer == (0, ""):
            began_ms = self._producers_began_ms
            if began_ms is not None and now_ms - began_ms < self._settings.retention_interval_ms:
                return 0
            self._producers_began_ms = now_ms
        before_ms = self._clock.now_ms() - lifetime_ms
        rows = await self._store.readers.run(
            partial(_producers, after=self._last_producer, rows_max=PRODUCERS_PER_STEP_MAX)
        )
        self._last_producer = (
            (rows[-1][0], rows[-1][1]) if len(rows) == PRODUCERS_PER_STEP_MAX else (0, "")
        )
        silent = [
            (stream_id, producer_id, before_ms, lifetime_ms)
            for stream_id, producer_id, updated_ms in rows
            if updated_ms <= before_ms and not self._kept_producers.matches(producer_id)
        ]
        if not silent:
            return 0
        return await self._store.decide(
            lambda decider: sum(decider.forget_producer(*one) for one in silent)
        )


class _Held(NamedTuple):
    """A stream as the search for what is overdue sees it."""

    id: int
    tail: Offset
    first: Offset
    segments: tuple[Segment, ...]


def find_overdue(
    connection: Connection, *, after: int, policies: Sequence[Policy], now_ms: int
) -> tuple[list[tuple[int, Offset]], int]:
    """Streams with a number above `after` that hold too much, and where they should begin.

    Also says where to go on: 0 when all were looked at.
    """
    query = "streams_to_look_at" if policies else "retained_streams_to_look_at"
    rows = connection.fetch(query, (after, STREAMS_PER_STEP_MAX))
    overdue = []
    for stream_id, path, own, *numbers, segments in rows:
        retention = retention_of(
            path, KEEP_ALL if own is None else Retention(*json.loads(own)), policies
        )
        if retention == KEEP_ALL:
            continue
        tail, first = Offset(*numbers[:2]), Offset(*numbers[2:])
        held = _Held(stream_id, tail, first, segments_from(segments))
        keep_from = find_first(connection, held, retention, now_ms)
        if keep_from.bytes > first.bytes:
            overdue.append((stream_id, keep_from))
    return overdue, rows[-1][0] if len(rows) == STREAMS_PER_STEP_MAX else 0


def segments_from(text: str | None) -> tuple[Segment, ...]:
    """The segments of a stream as its row has them."""
    if text is None:
        return ()
    return tuple(Segment(stream_id, Offset(*end)) for stream_id, end in json.loads(text))


def find_first(connection: Connection, held: _Held, retention: Retention, now_ms: int) -> Offset:
    """Where a stream should begin by its retention: an append's start, its tail, or where it does.

    Appends become smaller to keep, and younger, from the first to the last, so the first one that
    is within bounds is found by halving.
    """

    def within(row: Kept) -> bool:
        return is_within(retention, row, held.tail, now_ms)

    newest: Kept | None = None
    for stream_id, low, high in _stretches(held):
        last = _row(connection, "last_row_before", (stream_id, high))
        if last is None:
            continue
        newest = last
        if not within(last):
            continue
        begin = _row(connection, "last_row_before", (stream_id, low + 1))
        if begin is not None:
            # A stream that was cut inside an append begins there, all others where one starts.
            place = held.first if low == held.first.bytes else begin.start
            if within(Kept(place, begin.at_ms)):
                return place
        below = low - 1 if begin is None else begin.start.bytes
        return _first_within(connection, stream_id, below, last, within).start
    if newest is None:
        return held.first
    return first_to_keep(retention, None, newest, held.tail, now_ms)


def _stretches(held: _Held) -> Iterator[tuple[int, int, int]]:
    """The parts of a stream that are kept: in which stream they lie, from and up to which byte."""
    low = held.first.bytes
    for stream_id, end in (*held.segments, Segment(held.id, held.tail)):
        if end.bytes > low:
            yield stream_id, low, end.bytes
            low = end.bytes


def _first_within(
    connection: Connection, stream_id: int, below: int, found: Kept, within: _Within
) -> Kept:
    above = found.start.bytes
    while above - below > 1:
        middle = (below + above) // 2
        row = _row(connection, "first_row_between", (stream_id, middle, above))
        if row is None:
            above = middle
        elif within(row):
            found, above = row, middle
        else:
            below = row.start.bytes
    return found


def _row(connection: Connection, query: str, values: tuple[int, ...]) -> Kept | None:
    for version, start_bytes, at_ms in connection.fetch(query, values):
        return Kept(Offset(version, start_bytes), at_ms)
    return None


# Purging


def _find_due(connection: Connection, before_ms: int) -> tuple[int, int, tuple[int, ...]] | None:
    """A stream with rows to purge, its newest marker that is old enough, and what it inherits."""
    found = connection.fetch("oldest_truncation")
    if not found or found[0][1] > before_ms:
        return None
    [(stream_id, _)] = found
    [(position,)] = connection.fetch("last_due_truncation", (stream_id, before_ms))
    return stream_id, position, inherited_from(stream_id, connection)


def inherited_from(stream_id: int, connection: Connection) -> tuple[int, ...]:
    """The streams in which a fork's inherited messages lie."""
    rows = connection.fetch("stream_to_purge", (stream_id,))
    segments = segments_from(rows[0][3]) if rows else ()
    return tuple(segment.stream_id for segment in segments)


def purge_limit(connection: Connection, stream_id: int, before_ms: int) -> int:
    """The byte of a stream below which no reader, fork or log may ask for anything."""
    rows = connection.fetch("stream_to_purge", (stream_id,))
    due = connection.fetch("due_marker", (stream_id, before_ms))
    if not rows or not due:
        return 0
    [(_, tail_bytes, forks_count, _)] = rows
    [(kind, start_bytes)] = due
    limit: int = start_bytes if kind == TRUNCATED else tail_bytes
    if forks_count > 0:
        for first_bytes, segments in connection.fetch("forks"):
            limit = min(limit, _needed_from(stream_id, first_bytes, segments_from(segments), limit))
    return limit


def _needed_from(
    stream_id: int, first_bytes: int, segments: tuple[Segment, ...], limit: int
) -> int:
    """The first byte of a stream that a fork reads, or `limit` when it reads nothing below."""
    start = 0
    for source_id, end in segments:
        if source_id == stream_id and end.bytes > first_bytes:
            return max(start, first_bytes)
        start = end.bytes
    return limit


def purge_piece(connection: Connection, stream_id: int, limit: int) -> int:
    """Drop some rows that end by `limit`, in one transaction; how many there were."""
    with connection:
        found = connection.fetch("rows_to_purge", (stream_id, limit, ROWS_PER_STEP_MAX))
        rows = [row[:4] for row in found if row[4] + row[2] <= limit]
        if rows:
            _, _, size, _, start_bytes = found[len(rows) - 1]
            _remember(connection, stream_id, start_bytes + size)
            purges.drop(connection, stream_id, rows)
    return len(rows)


def _remember(connection: Connection, stream_id: int, before_bytes: int) -> None:
    """Keep what repeated requests are compared with, before the rows go."""
    producers = connection.fetch("producers_of_rows", (stream_id, before_bytes, RECENT_BATCHES))
    for producer_id, epoch, seq, position in producers:
        chain = connection.fetch("recent_batches", (position, RECENT_BATCHES))
        packed = b"".join(pack(Offset(version, size), digest) for version, size, digest in chain)
        missing = min(seq + 1, RECENT_BATCHES) - len(chain)
        if missing > 0:
            packed = (
                _kept_before(connection, stream_id, producer_id, epoch, seq - len(chain)) + packed
            )
        values = (stream_id, producer_id, epoch, seq, packed[-RECENT_BATCHES * PACKED_BYTES :])
        connection.execute("save_remembered", values)


def _kept_before(
    connection: Connection, stream_id: int, producer_id: str, epoch: int, upto: int
) -> bytes:
    """What was kept earlier of a producer's batches up to a sequence number."""
    found = connection.fetch("find_remembered", (stream_id, producer_id))
    if not found or found[0][0] != epoch or found[0][1] < upto:
        return b""
    [(_, seq, batches)] = found
    return bytes(batches[: len(batches) - (seq - upto) * PACKED_BYTES])


def _finish(connection: Connection, stream_id: int, position: int) -> int:
    """Note that a truncation is purged, and drop earlier markers, which no reader needs."""
    with connection:
        markers = connection.fetch("superseded_markers", (stream_id, position, ROWS_PER_STEP_MAX))
        purges.drop(connection, stream_id, markers)
        if len(markers) < ROWS_PER_STEP_MAX:
            connection.execute("forget_truncations", (stream_id, position))
    return len(markers)


def _producers(connection: Connection, after: tuple[int, str], rows_max: int) -> list[Row]:
    return connection.fetch("producers_after", (*after, rows_max))
