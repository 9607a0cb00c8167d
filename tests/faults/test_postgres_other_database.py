"""A database is gone without a word and another one answers in its place: nothing of the first is
served from memory, although no session with it has ended yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Appended
from fencepost.protocol.creates import Create, Created
from fencepost.store.contract import Chunk, StreamInfo
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.testing.postgres import PostgresServer
from tests.contract.subject import append
from tests.faults.test_postgres_away import frozen
from tests.postgres.test_quick_turns import asked, content

LOOKS = 6
"""More than there are reader threads so far, and less than there may be."""
WAIT_SECONDS_MAX = 15.0


@pytest.fixture
def servers() -> Iterator[list[PostgresServer]]:
    with PostgresServer() as first, PostgresServer() as second:
        yield [first, second]


async def written(url: str, body: bytes) -> PostgresStore:
    """A store whose stream `s` begins with this."""
    settings = PostgresSettings(url=url, connect_timeout_s=2, reader_threads=16)
    store = await PostgresStore.open(settings, SystemClock())
    assert isinstance(await asked(store.create, Create("s", content_type="text/plain")), Created)
    assert isinstance(await asked(store.append, append("s", body)), Appended)
    return store


async def test_what_another_database_held_is_not_served_from_memory(
    servers: list[PostgresServer],
) -> None:
    """As after a failover to a standby that was behind: the streams are the same, up to a point."""
    for server in servers:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE DATABASE streams TEMPLATE template0 ENCODING 'UTF8'")
    hosts = [f"127.0.0.1:{conninfo_to_dict(server.dsn)['port']}" for server in servers]
    other = await written(f"postgresql://postgres@{hosts[1]}/streams", b"taken over")
    await other.close()
    store = await written(f"postgresql://postgres@{','.join(hosts)}/streams", b"taken back")
    try:
        for _ in range(3):
            assert await content(store, "s") == b"taken back"
        assert store.chunks.stats()["chunk_cache_hits_total"] > 0

        with frozen(servers[0]):
            looks = [asyncio.create_task(store.look("s", touch=False)) for _ in range(LOOKS)]
            # Some are stuck in threads that have a session with the first database.
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                done, stuck = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
                info = done.pop().result()
                assert isinstance(info, StreamInfo)
                chunk = await store.read(info, info.first, bytes_max=1 << 20)
            assert stuck

        assert isinstance(chunk, Chunk)
        assert chunk.data == b"taken over"
        await asyncio.wait(stuck)
    finally:
        await store.close()
