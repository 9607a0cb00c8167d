"""Turns: what is asked together is decided together, and one bad request spoils no other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Appended
from fencepost.protocol.creates import Create, Created
from fencepost.store.contract import Failed, Missing, StreamInfo
from fencepost.store.postgres.cache import BulkLoader
from fencepost.store.postgres.requests import Request
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.store.write.decider import Decider
from tests.contract.subject import append


@pytest.fixture
async def store(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    opened = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
    created = asyncio.get_running_loop().create_future()
    opened.create(Create("s", content_type="text/plain"), created.set_result)
    assert isinstance(await created, Created)
    yield opened
    await opened.close()


def asked(store: PostgresStore, work: Any) -> asyncio.Future[Any]:
    answer = asyncio.get_running_loop().create_future()
    store.turns.submit(Request(work, answer.set_result))
    return answer


def appended(store: PostgresStore, body: bytes) -> asyncio.Future[Any]:
    answer = asyncio.get_running_loop().create_future()
    store.append(append("s", body), answer.set_result)
    return answer


async def test_requests_that_wait_together_share_a_turn(store: PostgresStore) -> None:
    before = store.turns.counted.turns
    answers = await asyncio.gather(*(appended(store, b"%d" % number) for number in range(50)))

    assert all(isinstance(answer, Appended) for answer in answers)
    assert [answer.position for answer in answers] == sorted(answer.position for answer in answers)
    assert store.turns.counted.turns - before < 10


async def test_a_request_that_cannot_be_decided_fails_alone(store: PostgresStore) -> None:
    def broken(_decider: Decider) -> None:
        raise ValueError("as the test asked")

    first, bad, last = appended(store, b"1"), asked(store, broken), appended(store, b"2")

    assert isinstance(await first, Appended)
    assert await bad == Failed(full=False)
    assert isinstance(await last, Appended)
    info = await store.look("s", touch=False)
    assert (await store.read(info, info.first, bytes_max=10)).data == b"12"  # type: ignore[arg-type, union-attr]


async def test_a_request_that_the_database_refuses_fails_alone(store: PostgresStore) -> None:
    def refused(decider: Decider) -> None:
        # PostgreSQL keeps no NUL in a text.
        decider.group.statements.append(("save_secret", ("a\0b", b"x", 0)))

    first, bad, last = appended(store, b"1"), asked(store, refused), appended(store, b"2")

    assert isinstance(await first, Appended)
    assert await bad == Failed(full=False)
    assert isinstance(await last, Appended)


async def test_a_request_whose_values_cannot_be_sent_is_answered_and_fails_alone(
    store: PostgresStore,
) -> None:
    def unsendable(decider: Decider) -> None:
        # More than a bigint holds: that shows when the turn is written, not when it is decided.
        decider.group.statements.append(("insert_truncation", (2**70, 1, 0)))

    first, bad, last = appended(store, b"1"), asked(store, unsendable), appended(store, b"2")

    async with asyncio.timeout(30):
        assert isinstance(await first, Appended)
        assert await bad == Failed(full=False)
        assert isinstance(await last, Appended)


async def test_streams_that_are_not_there_are_not_remembered_without_end(postgres_dsn: str) -> None:
    settings = PostgresSettings(url=postgres_dsn, streams_cached_max=8)
    store = await PostgresStore.open(settings, SystemClock())
    try:
        for number in range(20):
            answer = asyncio.get_running_loop().create_future()
            store.append(append(f"missing/{number}", b"1"), answer.set_result)
            assert isinstance(await answer, Missing)
        loader = store.decider.ledger._loader
        assert isinstance(loader, BulkLoader)
        assert len(loader.absent) <= settings.streams_cached_max
    finally:
        await store.close()


async def test_two_nodes_that_take_turns_see_each_others_state(
    store: PostgresStore, postgres_dsn: str
) -> None:
    other = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
    try:
        for number in range(20):
            node = (store, other)[number % 2]
            outcome = asyncio.get_running_loop().create_future()
            node.append(append("s", b"x", producer=("p", 0, number)), outcome.set_result)
            assert isinstance(await outcome, Appended), number
        assert other.turns.counted.turns == 10
    finally:
        await other.close()


async def test_a_database_that_isolates_more_by_default_does_not_cost_a_turn(
    postgres_dsn: str,
) -> None:
    """Where a transaction sees what was before its lock, whoever waited for it would be refused."""
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        name = postgres_dsn.rpartition("/")[2]
        connection.execute(
            f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'".encode()
        )
    nodes = [
        await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
        for _ in range(2)
    ]
    try:
        created = asyncio.get_running_loop().create_future()
        nodes[0].create(Create("s", content_type="text/plain"), created.set_result)
        assert isinstance(await created, Created)

        async def append_some(store: PostgresStore) -> None:
            for number in range(50):
                assert isinstance(await appended(store, b"%d" % number), Appended)

        await asyncio.gather(*map(append_some, nodes))

        assert [node.turns.counted.failed for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            await node.close()


async def test_a_look_at_a_stream_does_not_wait_for_those_who_ask_later_that_it_be_made(
    store: PostgresStore,
) -> None:
    """Somebody who makes the stream again and again is always under way."""
    looked = asyncio.Event()

    async def keep_creating() -> None:
        while not looked.is_set():
            created = asyncio.get_running_loop().create_future()
            store.create(Create("s", content_type="text/plain"), created.set_result)
            await created

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(keep_creating())
        try:
            async with asyncio.timeout(30):
                for _ in range(10):
                    assert isinstance(await store.look("s", touch=False), StreamInfo)
        finally:
            looked.set()
