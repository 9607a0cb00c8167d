"""Reading on PostgreSQL: a read asks the database for a stream's row once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.creates import Create, Created
from fencepost.protocol.offsets import START
from fencepost.store.contract import Chunk, StreamInfo
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from tests.contract.subject import append


@pytest.fixture
async def store(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    opened = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
    yield opened
    await opened.close()


async def test_a_look_and_a_read_load_the_stream_once(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, appended = (asyncio.get_running_loop().create_future() for _ in range(2))
    store.create(Create("s", content_type="text/plain"), created.set_result)
    assert isinstance(await created, Created)
    store.append(append("s", b"hello"), appended.set_result)
    await appended
    asked: list[str] = []
    fetch = PostgresConnection.fetch

    def recorded(connection: PostgresConnection, query: str, *values: Any, **options: Any) -> Any:
        asked.append(query)
        return fetch(connection, query, *values, **options)

    monkeypatch.setattr(PostgresConnection, "fetch", recorded)

    info = await store.look("s", touch=True)
    assert isinstance(info, StreamInfo)
    chunk = await store.read(info, START, bytes_max=100)

    assert isinstance(chunk, Chunk)
    assert chunk.data == b"hello"
    assert asked == ["look_stream", "last_start_below", "row_at"]
