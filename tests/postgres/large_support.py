"""Nodes that share a database, and a way to stop a large commit where a test wants it to be.

A large commit locks the streams that it writes. Whoever has locked the row of one of them before
stops it there, with some of its slices written, for as long as the test likes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Append, Conditions
from fencepost.protocol.batches import digest
from fencepost.protocol.commits import Commit, CommitItem, Part
from fencepost.protocol.limits import Limits
from fencepost.store.contract import Chunk, StreamInfo
from fencepost.store.postgres.large.locks import LARGE_COMMITS
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.read.log import SqlLogs
from fencepost.store.read.scans import Scans
from fencepost.store.settings import PostgresSettings
from tests.contract.subject import batch_of
from tests.postgres.nodes import until

JSON = "application/json"
SLICE = 3
COUNT = 24
PATHS = [f"s/{number:02}" for number in range(COUNT)]
STOP = PATHS[COUNT // 2]
"""The stream that a commit is stopped at."""
WAIT_S = 30.0


class Node:
    """One store of several on a database, with small slices, and its log."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.logs = SqlLogs(Scans(store.scanners, threads=1), Limits())

    def ask(self, ask: Callable[..., None], *request: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ask(*request, answer.set_result)
        return answer

    def append(self, path: str, body: bytes = b"1", **more: Any) -> asyncio.Future[Any]:
        return self.ask(self.store.append, append(path, body, **more))

    def commit(self, *items: CommitItem, **more: Any) -> asyncio.Future[Any]:
        mark = more.pop("mark", b"m" * 16)
        return self.ask(self.store.commit, Commit(items, more.pop("key", None), mark, **more))

    async def content(self, path: str) -> bytes:
        info = await self.store.look(path, touch=False)
        if not isinstance(info, StreamInfo):
            return b""
        chunk = await self.store.read(info, info.first, bytes_max=1 << 20)
        assert isinstance(chunk, Chunk)
        return chunk.data


@contextlib.asynccontextmanager
async def node(dsn: str, **settings: Any) -> AsyncIterator[Node]:
    """One more node on a database."""
    chosen = PostgresSettings(url=dsn, **{"commit_slice_appends": SLICE, **settings})
    store = await PostgresStore.open(chosen, SystemClock())
    try:
        yield Node(store)
    finally:
        await store.close()


def append(path: str, body: bytes = b"1", *, makes: bool = True, **conditions: Any) -> Append:
    return Append(
        path,
        batch_of(body, JSON) if body else None,
        JSON if body else None,
        False,
        None,
        None,
        digest(JSON if body else "", False, body),
        Conditions(create_as=JSON if makes else None, **conditions),
    )


def item(path: str, body: bytes = b"1", *, parts: tuple[str, ...] = (), **more: Any) -> CommitItem:
    if parts:
        body = b""
    return CommitItem(append(path, body, **more), tuple(Part("t", name) for name in parts))


def items(value: int = 1, **more: Any) -> list[CommitItem]:
    return [item(path, b"%d" % value, **more) for path in PATHS]


async def answered(answer: asyncio.Future[Any]) -> Any:
    """What was answered, in time."""
    async with asyncio.timeout(WAIT_S):
        return await answer


class Database:
    """The database past all nodes."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return connection.execute(query.encode()).fetchall()

    def large(self) -> int | None:
        [(number,)] = self.rows("SELECT large FROM counters")
        return None if number is None else int(number)

    def waits_for_a_stream(self) -> bool:
        """Whether a large commit waits for the row of a stream."""
        return self._session("wait_event_type = 'Lock' AND query LIKE '%FROM streams%'")

    def waits_for_its_turn(self) -> bool:
        """Whether a large commit has written everything, and waits for the turn to end in: in the
        database, or in its node behind others who wait there."""
        return self._session(
            "wait_event_type = 'Lock' AND query LIKE '%FROM counters%'"
            " OR state = 'idle in transaction'"
            " AND state_change < clock_timestamp() - interval '1 second'"
        )

    def is_in_its_commit(self) -> bool:
        """Whether a large commit has its turn, and waits there for its own mark in the log."""
        return self._session(
            "wait_event_type = 'Lock' AND query LIKE '%DELETE FROM large_commits%'"
        )

    def _session(self, condition: str) -> bool:
        """Whether this holds for the session of a large commit."""
        return bool(
            self.rows(
                "SELECT 1 FROM pg_stat_activity JOIN pg_locks USING (pid)"
                f" WHERE locktype = 'advisory' AND classid = {LARGE_COMMITS} AND ({condition})"
            )
        )

    def end_large_session(self) -> None:
        """The session of the large commit is ended, as when its node dies."""
        self.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_locks"
            f" WHERE locktype = 'advisory' AND classid = {LARGE_COMMITS} AND mode = 'ExclusiveLock'"
        )

    @contextlib.contextmanager
    def locked(self, query: str) -> Iterator[psycopg.Connection[Any]]:
        """Rows are locked until the block ends."""
        with psycopg.connect(self._dsn) as connection:
            assert connection.execute(query.encode()).fetchall()
            yield connection

    def stopping(self, path: str = STOP) -> contextlib.AbstractContextManager[Any]:
        """A large commit that names this stream stops there until the block ends."""
        return self.locked(f"SELECT 1 FROM streams WHERE path = '{path}' FOR UPDATE")

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a condition, and say which one when it does not come."""
        await asyncio.to_thread(until, holds, what)

    async def until_stopped(self) -> None:
        await self.until(self.waits_for_a_stream, "a large commit waits for a stream")

    async def until_over(self) -> None:
        """Wait until nothing is left of large commits."""

        def over() -> bool:
            return self.large() is None and not self.rows(
                "SELECT 1 FROM held UNION ALL SELECT 1 FROM large_commits"
            )

        await self.until(over, "nothing is left of large commits")
