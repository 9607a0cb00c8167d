"""A node that starts at a bad moment: while the database is being restarted."""

import asyncio
import logging
import os
import signal

import psycopg
import pytest

from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.testing.clock import SimClock
from fencepost.testing.postgres import PostgresServer

CHANGING = "the database system is shutting down"


async def _is_shutting_down(url: str) -> None:
    """Wait until the server takes no new session."""
    while True:
        try:
            await (await psycopg.AsyncConnection.connect(url)).close()
        except psycopg.OperationalError:
            return
        await asyncio.sleep(0)


async def test_a_start_waits_for_a_database_that_is_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "fencepost")
    with PostgresServer() as server:
        url = server.new_database()
        # A smart shutdown waits for the sessions that are there, and takes no other.
        held = await psycopg.AsyncConnection.connect(url)
        os.kill(server.pid, signal.SIGTERM)
        async with asyncio.timeout(60):
            await _is_shutting_down(url)

        settings = PostgresSettings(url=url)
        opening = asyncio.create_task(PostgresStore.open(settings, SimClock(), simulated=True))
        async with asyncio.timeout(60):
            while CHANGING not in caplog.text:
                assert not opening.done(), opening.result()
                await asyncio.sleep(0)
            await held.close()
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            store = await opening
            assert await store.probe() is None
            await store.close()


async def test_a_start_that_may_not_wait_says_why_at_once() -> None:
    with PostgresServer() as server:
        url = server.new_database()
        held = await psycopg.AsyncConnection.connect(url)
        os.kill(server.pid, signal.SIGTERM)
        async with asyncio.timeout(60):
            await _is_shutting_down(url)

        with pytest.raises(psycopg.OperationalError, match=CHANGING):
            await PostgresStore.open(PostgresSettings(url=url, start_wait_ms=0), SimClock())

        await held.close()
