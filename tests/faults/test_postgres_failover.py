"""The database fails over to its standby: what was acknowledged stays, and no server is restarted.

The servers are given both addresses. Of the two only the one that takes writes is used; while there
is none, requests get 503 with Retry-After, which the clients here ask of every 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict

from fencepost.testing.postgres import PostgresServer
from tests.faults.cluster import Cluster, LogReader, check_agreement, check_log, whole_log
from tests.faults.killing import SHARED, Client, Reader, SharedProducer, check_shared, create_shared
from tests.faults.test_postgres_kills import check_database
from tests.serving import ServerProcess

ANSWERS = 300

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def primary() -> Iterator[PostgresServer]:
    """A PostgreSQL of this test's own, to be lost."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Another that has every commit of the first."""
    with primary.standby() as server:
        yield server


def port_of(server: PostgresServer) -> str:
    return str(conninfo_to_dict(server.dsn)["port"])


async def test_what_was_acknowledged_is_there_after_a_failover(
    primary: PostgresServer, standby: PostgresServer
) -> None:
    name = (await asyncio.to_thread(primary.new_database)).rpartition("/")[2]
    hosts = ",".join(f"127.0.0.1:{port_of(server)}" for server in (standby, primary))
    url = f"postgresql://postgres@{hosts}/{name}?target_session_attrs=read-write"
    servers = [ServerProcess(store=url, arguments=["--long-poll-ms", "300"]) for _ in range(2)]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        cluster = Cluster(servers, seed=0)
        await create_shared(cluster)
        producers = [SharedProducer(number, cluster.seat(number)) for number in range(8)]
        readers = [Reader(path, cluster.seat(number)) for number, path in enumerate(SHARED)]
        busy: list[Client] = [*producers, *readers]
        log_readers = [LogReader(server.port, cluster) for server in servers]
        async with asyncio.TaskGroup() as followers:
            for log_reader in log_readers:
                followers.create_task(log_reader.run())
            async with asyncio.TaskGroup() as clients:
                for client in busy:
                    clients.create_task(client.run())
                await cluster.more_answers(ANSWERS)
                await asyncio.to_thread(primary.kill)
                await asyncio.to_thread(standby.promote)
                await cluster.more_answers(ANSWERS)
                cluster.done.set()
            cluster.settled.set()

        log = await whole_log(servers[0].port)
        check_log(log_readers, log)
        for server in servers:
            await check_shared(server.port, producers, readers)
            assert await whole_log(server.port) == log
        await check_agreement([server.port for server in servers], tuple(SHARED))
        assert sum(producer.retried_count for producer in producers) > 0, "no producer noticed"
    finally:
        for server in servers:
            await asyncio.to_thread(server.stop)
    checked = await asyncio.to_thread(check_database, url)
    assert checked.returncode == 0, checked.stdout
