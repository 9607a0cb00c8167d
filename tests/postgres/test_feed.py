"""The feed tells the readers of a node, whatever happens to the database or to who else listens."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import psycopg
import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Appended
from fencepost.protocol.creates import Create, Created
from fencepost.protocol.offsets import START
from fencepost.store.contract import Chunk, Published, StreamInfo
from fencepost.store.postgres.cluster.feed import Turn
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Row
from tests.contract.subject import append

WAIT_SECONDS_MAX = 30.0


async def write(store: PostgresStore, path: str) -> object:
    """Append something, as often as it takes until the database is there again."""
    while True:
        answer = asyncio.get_running_loop().create_future()
        store.append(append(path, b"x"), answer.set_result)
        outcome = await answer
        if isinstance(outcome, Appended):
            return outcome


def told_to(store: PostgresStore) -> asyncio.Queue[str]:
    """The streams that the readers of a node are told of."""
    told: asyncio.Queue[str] = asyncio.Queue()

    def listen(changes: Sequence[Published]) -> None:
        for change in changes:
            told.put_nowait(change.info.path)

    store.listen(listen)
    return told


@pytest.fixture
async def writer(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    """A node, and two streams."""
    store = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
    for path in ("busy", "quiet"):
        created = asyncio.get_running_loop().create_future()
        store.create(Create(path, content_type="text/plain"), created.set_result)
        assert isinstance(await created, Created)
    yield store
    await store.close()


@pytest.fixture
async def reader(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    """Another node."""
    store = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
    yield store
    await store.close()


async def test_readers_are_told_of_turns_that_a_failover_has_taken_back_and_given_anew(
    writer: PostgresStore, reader: PostgresStore, postgres_dsn: str
) -> None:
    """A standby that was behind becomes the database: it counts turns from where it stood."""
    told = told_to(reader)
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        for _ in range(20):
            await write(writer, "busy")
        while await told.get() != "busy" or reader.feed.seen < 22:
            pass

        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute("DELETE FROM turns WHERE turn > 10")
            connection.execute("UPDATE counters SET turn = 10")
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        await write(writer, "quiet")

        while await told.get() != "quiet":
            pass


async def test_a_node_that_only_reads_forgets_chunks_that_a_failover_has_taken_back(
    writer: PostgresStore, reader: PostgresStore, postgres_dsn: str
) -> None:
    """Another append stands where one stood that the standby had not heard of."""

    async def chunk() -> bytes:
        info = await reader.look("quiet", touch=False)
        assert isinstance(info, StreamInfo)
        found = await reader.read(info, START, bytes_max=100)
        assert isinstance(found, Chunk)
        return found.data

    async with asyncio.timeout(WAIT_SECONDS_MAX):
        await write(writer, "quiet")
        assert [await chunk() for _ in range(4)] == [b"x"] * 4
        assert reader.chunks.stats()["chunk_cache_hits_total"] >= 1

        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute("UPDATE log SET data = 'y', checksum = NULL WHERE kind = 0")
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

        assert [await chunk() for _ in range(4)] == [b"y"] * 4


async def test_a_turn_that_somebody_cannot_follow_does_not_end_the_feed(
    writer: PostgresStore, reader: PostgresStore
) -> None:
    failed = asyncio.Event()

    def fail(_turn: Turn, _rows: Sequence[Row]) -> None:
        failed.set()
        raise ValueError("as the test asked")

    told = told_to(reader)
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        reader.feed.on_turn = fail
        while not failed.is_set():
            await write(writer, "busy")
        reader.feed.on_turn = follow
        await write(writer, "quiet")

        while await told.get() != "quiet":
            pass


def follow(_turn: Turn, _rows: Sequence[Row]) -> None:
    """Without any trouble."""
