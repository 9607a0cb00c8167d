"""What leaves for PostgreSQL in one piece, and what comes back, until the connection is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import uvloop

from fencepost.store.postgres.driver.connection import SilentError, is_away
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.driver.statements import packed, packer
from fencepost.store.settings import PostgresSettings
from fencepost.testing.postgres import shared_server

Work = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.SelectorEventLoop], ids=["uv", "selector"])
def run(request: pytest.FixtureRequest) -> Callable[[Work], None]:
    """Runs a coroutine on either kind of loop: they differ in how they tell of a dead socket."""

    def run(work: Work) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work())

    return run


@asynccontextmanager
async def connected(**changed: Any) -> AsyncIterator[WritingConnection]:
    settings = PostgresSettings(url=shared_server().dsn)
    connection = await WritingConnection.connect(settings)
    for name, value in changed.items():
        setattr(connection.raw, name, value)
    try:
        yield connection
    finally:
        await connection.close()


async def ask(connection: WritingConnection, text: str, *values: Any) -> list[Any]:
    return await connection._pipeline.fetch(packed(text.encode(), values))


async def end(connection: WritingConnection) -> None:
    """End the session of a connection, as an administrator does."""
    async with connected() as other:
        pid = connection.raw.pgconn.backend_pid
        await ask(other, "SELECT pg_terminate_backend($1::int, 60000)", pid)


def test_values_come_back_as_they_left(run: Callable[[Work], None]) -> None:
    async def work() -> None:
        async with connected() as connection:
            numbers = packer("bigint")([1, None, -(2**63)])
            values = (2**63 - 1, "ünï", b"\x00\xff", True, None, numbers)
            casts = ("bigint", "text", "bytea", "boolean", "text", "bigint[]")
            columns = ", ".join(f"${n}::{cast}" for n, cast in enumerate(casts, 1))
            for _ in range(2):  # prepared, then used again
                [row] = await ask(connection, f"SELECT {columns}", *values)
                assert row == (*values[:5], [1, None, -(2**63)])

    run(work)


def test_a_stretch_larger_than_any_buffer_gets_through_in_both_directions(
    run: Callable[[Work], None],
) -> None:
    async def work() -> None:
        async with connected() as connection:
            data = bytes(range(256)) * 65_536
            parcels = [packed(b"SELECT $1::bytea", (data,)) for _ in range(3)]
            results = await connection._pipeline.exchange(parcels)
            assert [connection._pipeline.rows(result) for result in results] == [[(data,)]] * 3

    run(work)


def test_a_refused_statement_keeps_those_after_it_from_being_carried_out(
    run: Callable[[Work], None],
) -> None:
    async def work() -> None:
        async with connected() as connection:
            await ask(connection, "CREATE TEMPORARY TABLE written (n bigint)")
            stretch = [
                packed(b"SELECT 1 / $1", (0,)),
                packed(b"INSERT INTO written VALUES (1)", ()),
            ]
            with pytest.raises(psycopg.errors.DivisionByZero):
                await connection._pipeline.exchange(stretch)
            assert await ask(connection, "SELECT count(*) FROM written") == [(0,)]

    run(work)


def test_a_notification_that_comes_with_an_answer_is_not_lost(run: Callable[[Work], None]) -> None:
    async def work() -> None:
        async with connected() as connection:
            await connection.listen("wire")
            await ask(connection, "SELECT pg_notify('wire', 'first')")
            await ask(connection, "SELECT 1")
            assert await connection.wait_for_notification(60) == [b"first"]
            async with connected() as other:
                waiting = asyncio.create_task(connection.wait_for_notification(60))
                await ask(other, "SELECT pg_notify('wire', 'second')")
                assert await waiting == [b"second"]
            assert await connection.wait_for_notification(0.001) == []

    run(work)


def test_a_notification_that_came_behind_the_last_answer_is_not_waited_for(
    run: Callable[[Work], None],
) -> None:
    async def work() -> None:
        async with connected() as connection:
            await connection.listen("wire")
            # It is read together with the end of the answer, so the socket says nothing of it.
            await ask(connection, "SELECT pg_notify('wire', 'behind')")
            assert await connection.wait_for_notification(0.001) == [b"behind"]

    run(work)


def test_whoever_is_told_to_stop_leaves_the_connection_fit_for_use(
    run: Callable[[Work], None],
) -> None:
    async def work() -> None:
        async with connected() as connection:
            slow = asyncio.create_task(ask(connection, "SELECT pg_sleep(0.2)"))
            await asyncio.sleep(0)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            assert await ask(connection, "SELECT 2") == [(2,)]

    run(work)


def test_a_session_that_ended_while_it_was_idle_is_away_at_the_next_use(
    run: Callable[[Work], None],
) -> None:
    async def work() -> None:
        async with connected() as connection:
            await end(connection)
            with pytest.raises(psycopg.Error) as lost:
                await ask(connection, "SELECT 1")
            assert is_away(lost.value)
            assert connection.raw.closed

    run(work)


def test_a_session_that_ends_under_a_query_or_under_a_wait_is_away_at_once(
    run: Callable[[Work], None],
) -> None:
    async def work() -> None:
        async with connected() as asking, connected() as listening:
            await listening.listen("wire")
            waits = [
                asyncio.create_task(ask(asking, "SELECT pg_sleep(60)")),
                asyncio.create_task(listening.wait_for_notification(60)),
            ]
            await asyncio.sleep(0)
            await end(asking)
            await end(listening)
            for error in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(error, psycopg.Error)
                assert is_away(error)

    run(work)


def test_a_database_that_says_nothing_is_given_up(run: Callable[[Work], None]) -> None:
    async def work() -> None:
        async with connected(silence_s_max=0.1) as connection:
            with pytest.raises(SilentError):
                await ask(connection, "SELECT pg_sleep(60)")
            assert connection.raw.closed

    run(work)
