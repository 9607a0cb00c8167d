"""Background jobs that every store needs: expiry, retention, purges, and forgetting old keys.

Each job does a bounded piece of work at a time, so that no writer waits long behind it. `Upkeep`
runs them one after the other; `MaintainedStore` is what they need of a store.

* Expiry: a stream whose time is over also ends when a request finds it expired. The job ends those
  that no request asks for.
* Retention (`Keeper`): settings, or the stream itself, bound how much a stream holds. Truncating
  moves the stream's first offset, through the ledger like any other decision. The rows stay for the
  global log as long as the log's own retention says; then they are purged, except those that a fork
  still reads. A purge goes from the beginning of a stream to its end and never leaves a hole; what
  producers must remember of the purged batches is kept apart.
* Idempotency-Keys, dedupe rows of sends, staged parts and silent producers are forgotten when their
  time is over.
* The rows of a deleted group go in pieces; until then no request finds them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fencepost.clock import Clock
from fencepost.protocol.commits import Part
from fencepost.protocol.meshes import names_root
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
from fencepost.store.contract import StoreAwayError
from fencepost.store.maintain import purge as purges
from fencepost.store.mesh_contract import DropMesh
from fencepost.store.read import log_plan as plans
from fencepost.store.read.chunks import Readers
from fencepost.store.records import TRUNCATED
from fencepost.store.settings import StoreSettings
from fencepost.store.sql import Connection, Row
from fencepost.store.write.decider import Decider
from fencepost.store.write.sends import GONE, mesh_from_row

T = TypeVar("T")


class MaintainedStore(Protocol):
    """What the background jobs need of a store."""

    @property
    def settings(self) -> StoreSettings: ...

    @property
    def readers(self) -> Readers[Any]: ...

    async def decide(self, work: Callable[[Decider], T]) -> T:
        """Let `work` decide something, and wait until that is durable."""
        ...

    async def between_commits(self, work: Callable[[Any], T]) -> T:
        """Do a piece of work on the writing connection, in transactions of its own."""
        ...

    def suspect(self, error: BaseException) -> None:
        """Upkeep met an error: stop if it was the disk's doing."""
        ...


log = logging.getLogger(__name__)

STREAMS_PER_SWEEP_MAX = 1_000
STREAMS_PER_PURGE_MAX = 100
ROWS_PER_PURGE_MAX = 2_000
KEYS_PER_SWEEP_MAX = 5_000
PARTS_PER_SWEEP_MAX = 100
PARTS_PER_LOOK_MAX = 500


GROUP_ROWS_PER_SWEEP_MAX = 2_000


def drop_deleted_group(connection: Connection) -> int:
    """Remove some rows of a group that was deleted; how many there were."""
    with connection:
        found = connection.fetch("deleted_groups")
        if not found:
            return 0
        [(group_id,)] = found
        values = (group_id, GROUP_ROWS_PER_SWEEP_MAX)
        dropped = connection.execute("drop_group_leases", values)
        dropped += connection.execute("drop_group_parked", values)
        if not dropped:
            connection.execute("drop_group", (group_id,))
        return dropped


def paths_of(mesh: str, limit: int, connection: Connection) -> list[str]:
    """Some streams of a mesh."""
    root = names_root(mesh)
    rows = connection.fetch("streams_between_paths", (root, root[:-1] + "0", limit))
    return [row[0] for row in rows]


def _purge_mesh(mesh_id: int, connection: Connection) -> int:
    """Remove some dedupe rows of a deleted mesh, and behind the last of them the mesh."""
    with connection:
        purged = connection.execute("purge_sends", (mesh_id, KEYS_PER_SWEEP_MAX))
        if not purged:
            connection.execute("drop_mesh", (mesh_id,))
    return purged


class Upkeep:
    """The background jobs of one store."""

    def __init__(self, store: MaintainedStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settings = store.settings
        self._keeper = Keeper(store, clock)
        self._parts_seen = ("", "")

    @property
    def jobs(self) -> tuple[Callable[[], Awaitable[object]], ...]:
        """What is done in turn, each a bounded piece."""
        keeper = self._keeper
        return (
            self.expire,
            self.purge,
            keeper.retain,
            keeper.purge,
            keeper.forget_producers,
            self.tally,
            self.sweep_keys,
            self.sweep_sends,
            self.sweep_parts,
            self.forget_parts,
            self.drop_groups,
            self.drop_meshes,
        )

    async def run(self) -> None:
        """Do the jobs until cancelled; one that fails is logged and tried again."""
        interval_s = self._settings.sweep_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s)
            for job in self.jobs:
                await self.attempt(job)

    async def drop_groups(self) -> int:
        """Remove a piece of the rows of a deleted group, and the group behind the last of them."""
        if not await self._fetch("deleted_groups"):
            return 0
        return await self._store.between_commits(drop_deleted_group)

    async def drop_meshes(self) -> int:
        """Remove a piece of a mesh that is being deleted: streams first, then dedupe rows."""
        rows = await self._fetch("meshes_to_drop")
        if not rows:
            return 0
        [row] = rows
        mesh, state = mesh_from_row(row), row[2]
        if state == GONE:
            return await self._store.between_commits(partial(_purge_mesh, mesh.id))
        paths = await self._store.readers.run(partial(paths_of, mesh.name, STREAMS_PER_SWEEP_MAX))
        request = DropMesh(mesh.name, paths, is_last=len(paths) < STREAMS_PER_SWEEP_MAX)
        await self._store.decide(lambda decider: decider.meshes.decide(request))
        return len(paths)

    async def attempt(self, job: Callable[[], Awaitable[object]]) -> None:
        """Do a job; when it fails it is logged, and tried again with the next round."""
        try:
            await job()
        except StoreAwayError as error:
            log.warning("upkeep waits for the store: %s", error)
        except Exception as error:
            log.exception("upkeep failed and will be tried again")
            self._store.suspect(error)

    async def _fetch(self, query: str, *values: object) -> list[Row]:
        return await self._store.readers.run(lambda connection: connection.fetch(query, values))

    async def expire(self) -> int:
        """End the streams whose time is over."""
        now_ms = self._clock.now_ms()
        rows = await self._fetch("expired_streams", now_ms, STREAMS_PER_SWEEP_MAX)
        if not rows:
            return 0
        return await self._store.decide(
            lambda decider: sum(decider.expire(path) for (path,) in rows)
        )

    async def purge(self) -> int:
        """Drop rows of streams that were deleted longer ago than the log's retention."""
        before_ms = self._clock.now_ms() - self._settings.log_retention_ms
        rows = await self._fetch("purgeable_streams", before_ms, STREAMS_PER_PURGE_MAX)
        return sum([await self._purge(stream_id, before_ms) for (stream_id,) in rows])

    async def _purge(self, stream_id: int, before_ms: int) -> int:
        purged = 0
        for source_id in await self._store.readers.run(partial(inherited_from, stream_id)):
            # What the stream inherited may have been kept for it alone.
            purged += await self._keeper.purge_beginning(source_id, before_ms)
        while count := await self._store.between_commits(partial(_purge_rows, stream_id)):
            purged += count
        await self._store.between_commits(partial(_purge_stream, stream_id))
        return purged

    async def tally(self) -> int:
        """Write down what the full buckets of the log weigh.

        A purge corrects what is written down, and the two take turns here: so no weight is written
        that was taken before a purge.
        """
        weighed = await self._store.readers.run(plans.untallied)
        if weighed:
            await self._store.decide(partial(_save_buckets, weighed))
        return len(weighed)

    async def sweep_keys(self) -> int:
        """Forget Idempotency-Keys whose time is over."""
        now_ms = self._clock.now_ms()
        if not await self._fetch("any_expired_key", now_ms):
            return 0
        return await self._store.between_commits(partial(_sweep_keys, now_ms))

    async def sweep_sends(self) -> int:
        """Forget some sends whose time is over; how many."""
        now_ms = self._clock.now_ms()
        if not await self._fetch("any_expired_send", now_ms):
            return 0
        return await self._store.between_commits(partial(sweep_sends, now_ms))

    async def sweep_parts(self) -> int:
        """Drop staged parts that were not committed in time."""
        before_ms = self._clock.now_ms() - self._settings.staging_ttl_s * 1000
        rows = await self._fetch("abandoned_parts", before_ms, PARTS_PER_SWEEP_MAX)
        if rows:
            # This is a decision, not work between groups: a commit decided meanwhile must see it.
            await self._store.decide(partial(_drop_parts, [Part(txn, part) for txn, part in rows]))
        return len(rows)

    async def forget_parts(self) -> int:
        """Forget some parts that were committed, once nothing can come of it; how many.

        A part that is known to be committed cannot be committed again. One whose data is purged can
        be committed again only by uploading it again, so it is remembered for as long as the key of
        its commit would be, counted from when it had to be committed at the latest.
        """
        settings = self._settings
        if settings.key_retention_s == 0:
            return 0
        kept_s = settings.staging_ttl_s + settings.key_retention_s
        before_ms = self._clock.now_ms() - kept_s * 1000
        after = self._parts_seen
        rows = await self._fetch("used_parts_after", *after, PARTS_PER_LOOK_MAX)
        self._parts_seen = ("", "")
        if len(rows) == PARTS_PER_LOOK_MAX:
            self._parts_seen = (rows[-1][0], rows[-1][1])
        if not any(staged_ms <= before_ms for _, _, staged_ms in rows):
            return 0
        values = (*after, rows[-1][0], rows[-1][1], before_ms)
        return await self._store.between_commits(partial(_forget_parts, values))


def _forget_parts(values: Row, connection: Connection) -> int:
    forgotten = 0
    with connection:
        connection.execute("forget_chunks", values)
        forgotten += connection.execute("forget_parts", values)
    return forgotten


def _save_buckets(weighed: list[tuple[int, int, int]], decider: Decider) -> None:
    decider.group.statements += [("save_bucket", values) for values in weighed]


def _drop_parts(parts: list[Part], decider: Decider) -> None:
    for part in parts:
        decider.drop_part(part)


def _purge_rows(stream_id: int, connection: Connection) -> int:
    """Drop some rows of a deleted stream; how many there were."""
    purged = 0
    with connection:
        purged += purges.purge(connection, stream_id, ROWS_PER_PURGE_MAX)
    return purged


def _purge_stream(stream_id: int, connection: Connection) -> None:
    """Drop what is left of a deleted stream."""
    with connection:
        for what in ("producers", "remembered", "truncations", "keys", "stream"):
            connection.execute(f"purge_{what}", (stream_id,))


def _sweep_keys(before_ms: int, connection: Connection) -> int:
    """Forget some keys whose time was over; how many there were."""
    swept = 0
    with connection:
        swept += connection.execute("sweep_keys", (before_ms, KEYS_PER_SWEEP_MAX))
    return swept


def sweep_sends(before_ms: int, connection: Connection) -> int:
    """Forget some sends whose time was over; how many there were."""
    swept = 0
    with connection:
        swept += connection.execute("sweep_sends", (before_ms, KEYS_PER_SWEEP_MAX))
    return swept


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
