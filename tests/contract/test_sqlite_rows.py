"""What only the embedded store has: its tables, read directly, as an operator could."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.streams import Lifetime
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing.clock import SimClock
from tests.contract.subject import SqliteEngine, Subject, answered
from tests.old_folders import make_older

JSON = "application/json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def embedded(folder: Path, clock: SimClock) -> AsyncIterator[Subject]:
    made = Subject(SqliteEngine(folder, clock), clock)
    yield made
    await made.close()


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(folder / "fencepost.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def test_a_folder_of_the_version_before_opens_with_open_books(
    embedded: Subject, folder: Path
) -> None:
    await embedded.made("a", JSON, body=b"[1]")
    await embedded.close()
    make_older(folder, version=12)

    assert check(folder).findings == [], "a check changes nothing, and an older folder is whole"
    embedded.store = embedded._engine.open()

    assert not (await embedded.info("a")).books_closed
    assert rows(folder, "SELECT books_closed_at FROM streams") == [(None,)]
    await embedded.appended("a", b"[2]", content_type=JSON)


async def test_positions_grow_with_every_message_over_all_streams(
    embedded: Subject, folder: Path
) -> None:
    await embedded.made("a", JSON)
    await embedded.made("b")
    sent = []
    for number in range(10):
        sent.append(embedded.appending("a", b"[1,2,3]", JSON))
        sent.append(embedded.appending("b", b"%d" % number))
    for answer in sent:
        await answered(answer)
    await embedded.reopen()
    await embedded.append("b", b"x", closes=True)
    await embedded.delete("a")

    found = rows(folder, "SELECT position, count FROM log ORDER BY position")

    [(next_position,)] = rows(folder, "SELECT next_position FROM counters")
    ends = [position + count for position, count in found]
    assert [position for position, _ in found[1:]] == ends[:-1]
    assert next_position == ends[-1]


async def test_times_of_the_log_never_run_backwards(embedded: Subject, folder: Path) -> None:
    await embedded.made("s")
    for step_ms in (5, -1_000, 3, -50, 7):
        embedded.clock.jump(step_ms)
        await embedded.appended("s", b"x")
        await embedded.reopen()

    times = [at_ms for (at_ms,) in rows(folder, "SELECT at_ms FROM log ORDER BY position")]

    assert len(times) == 5
    assert times == sorted(times)


async def test_a_position_is_not_given_twice_although_its_row_is_purged(
    folder: Path, clock: SimClock
) -> None:
    store = SqliteStore(SqliteSettings(folder=folder, log_retention_ms=0), clock)
    subject = _subject_of(store, clock)
    await subject.made("s", body=b"x" * 100)
    await subject.delete("s")
    [(before,)] = rows(folder, "SELECT next_position FROM counters")
    upkeep = SqliteUpkeep(store, clock)
    await upkeep.purge()
    await store.close()
    assert rows(folder, "SELECT count(*) FROM streams") == [(0,)]

    store = SqliteStore(SqliteSettings(folder=folder), clock)
    subject = _subject_of(store, clock)
    made = await subject.made("s", body=b"y")
    await store.close()

    [(position,)] = rows(folder, "SELECT position FROM log WHERE kind = 0")
    assert position == before
    assert made.stream.id == 2


async def test_a_request_writes_one_row_however_many_messages_it_has(
    embedded: Subject, folder: Path
) -> None:
    await embedded.made("s", JSON)
    await embedded.append("s", b"[1,22,333]", JSON, producer=("p", 3, 0))

    found = rows(
        folder, "SELECT version, start_bytes, count, size, producer, epoch, producer_seq FROM log"
    )

    assert found == [(0, 0, 3, 6, "p", 3, 0)]


async def test_the_sweep_ends_streams_that_nobody_looks_at(
    embedded: Subject, folder: Path, clock: SimClock
) -> None:
    await embedded.made("short", lifetime=Lifetime(ttl_s=8))
    await embedded.made("long", lifetime=Lifetime(ttl_s=800))
    store = embedded.store
    assert isinstance(store, SqliteStore)
    upkeep = SqliteUpkeep(store, clock)

    clock.advance(8_000)
    early = await upkeep.expire()
    clock.advance(1_000)
    due = await upkeep.expire()
    await store.durable()

    # What is stored carries slack, so the sweep comes an eighth later than a look would.
    assert (early, due) == (0, 1)
    assert rows(folder, "SELECT path FROM streams WHERE state = 0") == [("long",)]


async def test_the_sweep_leaves_a_stream_alone_that_was_used_since(
    embedded: Subject, folder: Path, clock: SimClock
) -> None:
    await embedded.made("s", lifetime=Lifetime(ttl_s=8))
    store = embedded.store
    assert isinstance(store, SqliteStore)
    clock.advance(900)
    await embedded.info("s", touch=True)  # covered by the slack: not written
    clock.advance(8_000)

    assert await SqliteUpkeep(store, clock).expire() == 0


def _subject_of(store: SqliteStore, clock: SimClock) -> Subject:
    subject = Subject.__new__(Subject)
    subject.clock = clock
    subject.store = store
    return subject
