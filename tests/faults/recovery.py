"""Opening what a crash left and saying what is wrong with it, if anything.

A recovered store must equal the model after the first `k` requests for some `k` that is no smaller
than the number of answered requests. Then it must take the rest: sending every later request again,
in order, must end where the uninterrupted run ended, with nothing stored twice.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw

from fencepost.protocol.appends import (
    Append,
    Conditions,
    Duplicate,
    ProducerTuple,
    Replayed,
    SeqRegression,
    SequenceGap,
)
from fencepost.protocol.batches import bytes_batch
from fencepost.protocol.books import BooksClosed
from fencepost.protocol.commits import Part
from fencepost.store.contract import Chunk, SoftDeleted, StreamInfo
from fencepost.store.settings import SqliteSettings
from fencepost.store.sql import Row
from fencepost.store.sqlite.check import check as check_folder
from fencepost.store.sqlite.connection import FILE, SqliteConnection
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing import SimClock
from tests.faults.model import SOFT, Kept, Model, StagedView, View, Views
from tests.faults.workload import PATHS, History, Step, submit


class LostError(AssertionError):
    """The recovered store is not what any allowed number of requests makes."""


async def answered(store: SqliteStore, step: Step) -> object:
    """The answer to a request sent again."""
    return await ask(lambda done: submit(store, step.request, done))


async def ask(work: Callable[[Callable[[Any], None]], None]) -> Any:
    """The outcome that a call of the store hands to its callback."""
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    work(outcome.set_result)
    return await outcome


async def observe(store: SqliteStore, path: str) -> View | str | None:
    """A stream as its readers see it, read in small chunks."""
    info = await store.look(path, touch=False)
    if isinstance(info, SoftDeleted):
        return SOFT
    if not isinstance(info, StreamInfo):
        return None
    parts = []
    at = info.first
    while at != info.tail:
        chunk = await store.read(info, at, bytes_max=16_384)
        assert isinstance(chunk, Chunk), chunk
        assert chunk.next.bytes > at.bytes
        parts.append(chunk.data)
        at = chunk.next
    data = (b"," if info.is_json else b"").join(parts)
    state = (info.closed, info.lifetime.ttl_s, info.books_closed)
    return View(info.content_type, data, info.first, info.tail, *state)


async def observe_all(store: SqliteStore) -> Views:
    """Every stream as its readers see it, and every staged part as it lies on disk."""
    seen: Views = {path: await observe(store, path) for path in PATHS}
    seen.update(await store.readers.run(_staged))
    return seen


def _staged(connection: SqliteConnection) -> dict[Part, StagedView]:
    found: dict[Part, StagedView] = {}
    parts = "SELECT txn, part, media_type, committed IS NOT NULL FROM parts"
    chunks = "SELECT ordinal, digest FROM chunks WHERE txn = ? AND part = ? ORDER BY ordinal"
    rows: list[Row] = connection.raw.execute(parts).fetchall()
    for txn, part, kind, committed in rows:
        of_part: list[Row] = connection.raw.execute(chunks, (txn, part)).fetchall()
        numbered = tuple((ordinal, digest) for ordinal, digest in of_part)
        found[Part(txn, part)] = StagedView(kind, numbered, bool(committed))
    return found


async def check(folder: Path, history: History, *, answered_count: int, asked_count: int) -> int:
    """Hold a recovered folder against the history; how many requests it has."""
    now_ms = history.steps[asked_count - 1].at_ms if asked_count else SimClock().now_ms()
    store = SqliteStore(SqliteSettings(folder=folder), SimClock(now_ms=now_ms))
    try:
        seen = await observe_all(store)
        found = _prefix(history, seen, answered_count, asked_count, now_ms)
        await _check_writers(store, history.models[found], now_ms)
        for step in history.steps[found:asked_count]:
            outcome = await answered(store, step)
            _same_name(step, outcome)
        after = await observe_all(store)
        wanted = _views(history.models[asked_count], now_ms)
        assert after == wanted, "retrying the lost requests does not give the uninterrupted result"
    finally:
        await store.close()
    check_rows(folder)
    assert check_folder(folder).findings == []
    return found


def _same_name(step: Step, outcome: object) -> None:
    # Time stands at the crash, so a stream that was alive when the request first came may be over.
    name = type(outcome).__name__
    path = getattr(step.request, "path", "")
    assert name == step.expected or path.startswith("short/"), (step, outcome)


def _views(model: Model, now_ms: int) -> Views:
    looked_at = model.copy()
    views: Views = {path: looked_at.view(path, now_ms) for path in PATHS}
    views.update(looked_at.staged())
    return views


def _prefix(
    history: History, seen: Views, answered_count: int, asked_count: int, now_ms: int
) -> int:
    # The newest match: requests that change nothing make neighbouring models equal.
    for count in range(asked_count, -1, -1):
        if _views(history.models[count], now_ms) == seen:
            if count >= answered_count or _same_models(history, count, answered_count):
                return count
            raise LostError(f"{answered_count} requests were answered, the disk has {count}")
    wanted = _views(history.models[answered_count], now_ms)
    differing = [place for place in {**wanted, **seen} if seen.get(place) != wanted.get(place)]
    raise LostError(
        f"no number of requests from {answered_count} to {asked_count} makes what is on the disk;"
        f" after the answered ones these differ: {differing}"
    )


def _same_models(history: History, count: int, answered_count: int) -> bool:
    one, other = history.models[count], history.models[answered_count]
    return (one.streams, one.parts) == (other.streams, other.parts)


async def _check_writers(store: SqliteStore, model: Model, now_ms: int) -> None:
    """Producers, keys and Stream-Seq are where the messages are, not before and not behind."""
    for path, kept in list(model.copy().streams.items()):
        if kept.soft_deleted or kept.expired(now_ms):
            continue
        for name, (epoch, seq) in kept.producers:
            await _check_producer(store, path, kept, ProducerTuple(name, epoch, seq))
        for key, digest in kept.keys:
            again = Append(
                path,
                bytes_batch(b"0"),
                kept.content_type,
                digest=digest,
                conditions=Conditions(key=key),
            )
            outcome = await ask(partial(store.append, again))
            assert isinstance(outcome, Replayed), (path, key, outcome)
        if kept.seq is not None and not kept.closed:
            probe = Append(path, bytes_batch(b"0"), kept.content_type, seq=kept.seq)
            outcome = await ask(partial(store.append, probe))
            wanted = BooksClosed(kept.tail) if kept.books_closed else SeqRegression(kept.seq)
            assert outcome == wanted, (path, outcome)


async def _check_producer(store: SqliteStore, path: str, kept: Kept, last: ProducerTuple) -> None:
    again = Append(path, bytes_batch(b"0"), kept.content_type, producer=last)
    outcome = await ask(lambda done: store.append(again, done))
    assert isinstance(outcome, Duplicate), (path, last, outcome)
    assert (outcome.producer_epoch, outcome.producer_seq) == (last.epoch, last.seq)
    if kept.closed:
        return
    beyond = ProducerTuple(last.id, last.epoch, last.seq + 2)
    skipping = Append(path, bytes_batch(b"0"), kept.content_type, producer=beyond)
    outcome = await ask(lambda done: store.append(skipping, done))
    gap = SequenceGap(last.seq + 1, last.seq + 2)
    assert outcome == (BooksClosed(kept.tail) if kept.books_closed else gap), (path, outcome)


def check_rows(folder: Path) -> None:
    """The file is sound, and its numbers leave no gaps and never run backwards."""
    connection = apsw.Connection(str(folder / FILE))
    try:
        assert connection.pragma("integrity_check") == "ok"
        _check_positions(connection)
        _check_versions(connection)
    finally:
        connection.close()


def _check_positions(connection: apsw.Connection) -> None:
    rows: list[Row] = connection.execute(
        "SELECT position, count, at_ms FROM log ORDER BY position"
    ).fetchall()
    for (position, count, at_ms), (following, _, later_ms) in pairwise(rows):
        assert position + count == following, "positions have a gap"
        assert at_ms <= later_ms, "times run backwards along positions"
    if rows:
        [(next_position,)] = connection.execute("SELECT next_position FROM counters")
        assert rows[-1][0] + rows[-1][1] == next_position


def _check_versions(connection: apsw.Connection) -> None:
    streams: list[Row] = connection.execute(
        "SELECT id, tail_messages, tail_bytes FROM streams"
    ).fetchall()
    for stream, tail_messages, tail_bytes in streams:
        rows: list[Row] = connection.execute(
            "SELECT version, start_bytes, count, size FROM log"
            " WHERE stream = ? AND kind = 0 ORDER BY start_bytes",
            (stream,),
        ).fetchall()
        for before, after in pairwise(rows):
            assert (before[0] + before[2], before[1] + before[3]) == after[:2], (
                "versions have a gap"
            )
        if rows:
            version, start, count, size = rows[-1]
            assert (version + count, start + size) == (tail_messages, tail_bytes)
