"""The same rows in both engines: made by the embedded store, then copied table by table.

What a query finds on one of them it must find on the other.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psycopg

from fencepost.protocol.creates import Create
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import Retention
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Chunk
from fencepost.store.group_contract import DeleteGroup
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.sql import Row
from fencepost.store.sqlite.connection import SqliteConnection
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing.clock import SimClock
from tests.contract.conditional import JSON, TEXT, ask_append, ask_commit, ask_stage, item
from tests.contract.grouping import acked, ask, claimed, failed, made, parking, with_work
from tests.contract.subject import SqliteEngine, Subject, answered

PATHS = ["a", "a/b", "a/b/c", "a/ä", "b", "b/\U0001f600", "b/\U0010ffff\U0010ffff", "c/x", "c/y"]
LONG_BATCH = b"[" + b",".join(b"%d" % number for number in range(6_000)) + b"]"


async def fill(folder: Path, clock: SimClock) -> None:
    """A data folder with everything in it that queries tell apart."""
    random_source = random.Random(5)
    subject = Subject(SqliteEngine(folder, clock), clock)
    try:
        await _work(subject, clock, random_source)
        assert isinstance(subject.store, SqliteStore)
        await SqliteUpkeep(subject.store, clock).index_keys(at_least=1)
    finally:
        await subject.close()


async def _work(subject: Subject, clock: SimClock, random_source: random.Random) -> None:
    for place, path in enumerate(PATHS):
        await subject.made(path, JSON if place % 2 else TEXT)
    for name, retention in (("kept/few", Retention(messages=3)), ("kept/short", Retention(60))):
        request = Create(name, TEXT, retention=retention)
        await answered(subject.ask(subject.store.create, request))
    paths = [*PATHS, "kept/few", "kept/short"]
    seqs: dict[tuple[str, str], int] = {}
    for step in range(160):
        clock.advance(random_source.randrange(50))
        await _append(subject, random_source, random_source.choice(paths), step, seqs)
        if step % 20 == 10:
            await subject.append(random_source.choice(PATHS[1::2]), LONG_BATCH, JSON)
        if step == 60:
            await _reshape(subject, clock)
            paths.remove("b")
        if step == 110:
            await _stage_and_commit(subject)
    await ask_stage(subject, "nobody", b"waits")
    await _group(subject)
    await subject.append("c/y", b"", closes=True, producer=("closer", 0, 0))


async def _append(
    subject: Subject,
    random_source: random.Random,
    path: str,
    step: int,
    seqs: dict[tuple[str, str], int],
) -> None:
    info = await subject.info(path)
    if info.is_json:
        count = random_source.choice([1, 1, 1, 2, 5])
        body = b"[" + b",".join(b'{"n":%d}' % (step * 10 + i) for i in range(count)) + b"]"
    else:
        body = b"%d:" % step + "grüße ".encode() * random_source.randrange(1, 40)
    content_type = JSON if info.is_json else TEXT
    producer = None
    if random_source.random() < 0.6:
        name = random_source.choice(["p", "q/1", "q/2", "task:7"])
        producer = (name, 1, seqs.setdefault((path, name), 0))
        seqs[path, name] += 1
    if random_source.random() < 0.2:
        await ask_append(
            subject, path, body, content_type=content_type, producer=producer, key=f"k{step}"
        )
    else:
        await subject.append(path, body, content_type, producer=producer)


async def _reshape(subject: Subject, clock: SimClock) -> None:
    """Forks, truncations, ends, and streams that come again under their names."""
    await subject.fork("fork/of-b", "b")
    await subject.fork("fork/early", "a/b", Offset(1, 8))
    await subject.fork("fork/of-fork", "fork/of-b")
    await subject.append("fork/of-b", b"own words")
    for path in ("a", "c/x"):
        before = await _boundary(subject, path)
        await answered(_truncate(subject, path, before))
        clock.advance(5)
    await subject.made("gone/early", body=b"x" * 50)
    await subject.made("gone/twice", JSON, body=b"[1,2,3]")
    await subject.delete("gone/early")
    await subject.delete("gone/twice")
    await subject.made("gone/twice", TEXT, body=b"again")
    await subject.delete("gone/twice")
    await subject.made("b/mortal", lifetime=Lifetime(ttl_s=8))
    await subject.made("b/dated", lifetime=Lifetime(expires_at_ms=clock.now_ms() + 5_000))
    await subject.delete("b")  # softly: its forks read it


async def _group(subject: Subject) -> None:
    """Targets in every state: ready, leased, deferred, blocked, done; and parked events."""
    paths = [f"work/{n}" for n in range(12)]
    group = await with_work(subject, *paths)
    rows = await claimed(subject, group, streams_max=9)
    for row in rows[:2]:
        await acked(subject, group, row)
    await failed(subject, group, rows[2])
    await failed(subject, group, rows[3], permanent=True)
    for row in rows[4:6]:
        await failed(subject, group, row, park=True)
    await ask(subject, parking(group, (rows[4].target, rows[4].work_to), replay=True))
    await ask(subject, DeleteGroup((await made(subject, "gone")).name))


def _truncate(subject: Subject, path: str, before: Offset) -> Any:
    return subject.ask(
        lambda request, done: subject.store.truncate(request[0], request[1], done), (path, before)
    )


async def _boundary(subject: Subject, path: str) -> Offset:
    """Where an append of a stream begins, not far from its first."""
    chunk = await subject.read(path, bytes_max=400)
    assert isinstance(chunk, Chunk)
    return chunk.next


async def _stage_and_commit(subject: Subject) -> None:
    for part, content_type in (("text", TEXT), ("json", JSON)):
        for ordinal in range(4):
            body = b"chunk %d " % ordinal if content_type == TEXT else b"[%d,2,3]" % ordinal
            await ask_stage(subject, part, body, ordinal, content_type)
    done = await ask_commit(
        subject,
        item("staged/text", parts=("text",), creates=True),
        item("staged/json", parts=("json",), content_type=JSON, creates=True),
        item("a", b"in the same commit", producer=("committer", 0, 0)),
        key="whole commit",
    )
    assert "Committed" in type(done).__name__, done


# Copying

TABLES = [
    "counters",
    "streams",
    "log",
    "chunks",
    "parts",
    "producers",
    "remembered",
    "forgetting",
    "keys",
    "purges",
    "log_buckets",
    "truncations",
    "subscriptions",
    "links",
    "partial_subscriptions",
    "secrets",
    "writers",
    "writer_history",
    "large_commits",
    "large_slices",
    "groups",
    "leases",
    "parked",
    "told",
]
ONLY_POSTGRES: dict[str, dict[str, object]] = {
    "counters": {"turn": 0, "next_chunk": 1, "last_subscription": 0, "leader": ""},
    "producers": {"recent": b""},
}


def copy(source: SqliteConnection, target: PostgresConnection) -> None:
    """Put every row of the embedded store into the tables of the other."""
    with target:
        target.raw.execute(f"TRUNCATE {', '.join(TABLES)}".encode(), prepare=False)
        for table in TABLES:
            names, rows = contents(source, table)
            booleans = _booleans(target.raw, table)
            more = ONLY_POSTGRES.get(table, {})
            columns = [*names, *more]
            places = ", ".join(f"${place}" for place in range(1, len(columns) + 1))
            text = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"
            for row in rows:
                values = [
                    bool(value) if name in booleans else value
                    for name, value in zip(names, row, strict=True)
                ]
                target.raw.execute(text.encode(), [*values, *more.values()])
    target.raw.execute(b"ANALYZE", prepare=False)


def contents(connection: SqliteConnection, table: str) -> tuple[list[str], list[Row]]:
    """The columns of a table and all its rows, in an order; numbers that a database gives aside."""
    raw = connection.raw
    names = [row[1] for row in raw.execute(f"PRAGMA table_info({table})")]
    if table in ("purges", "keys"):
        names.remove("id")
    order = ", ".join(str(place + 1) for place in range(len(names)))
    rows = raw.execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY {order}")
    return names, list(rows)


def same_contents(connection: PostgresConnection, table: str, names: list[str]) -> list[Row]:
    """The same columns of the same table on the other engine, in the same order."""
    order = ", ".join(f"{name} NULLS FIRST" for name in names)
    text = f"SELECT {', '.join(names)} FROM {table} ORDER BY {order}"
    return connection.raw.execute(text.encode(), prepare=False).fetchall()


def _booleans(raw: psycopg.Connection[Row], table: str) -> set[str]:
    """The columns of a table that the embedded store keeps as 0 and 1."""
    rows = raw.execute(
        "SELECT attname::text FROM pg_attribute"
        " WHERE attrelid = to_regclass($1) AND attnum > 0 AND atttypid = 'boolean'::regtype",
        [table],
    ).fetchall()
    return {name for (name,) in rows}
