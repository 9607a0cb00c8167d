"""Three servers on one PostgreSQL, all of which die again and again: nothing lost, nothing doubled.

Twenty-four producers pipeline over all servers and move on when theirs dies. Beside them streams
are made, closed and deleted, commits go to several streams, parts are staged, keys repeat
themselves, writers race with If-Match, a worker acks a subscription, and on each server a reader
follows the global log. Servers are killed in turn, and PostgreSQL is restarted, now in order and
now as by a crash. What each client was told is written down, and at the end it must be so, on every
server: and no reader of the log may have been passed by a row.

FENCEPOST_FAULT_KILLS=100 makes it the long run, with a restart of PostgreSQL for every 20 kills
(`just faults`).
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Iterator

import pytest

from fencepost.testing.postgres import PostgresServer
from tests.faults import test_commit_kills as commits
from tests.faults.cluster import (
    RACED,
    Cluster,
    LogReader,
    Racer,
    check_agreement,
    check_log,
    check_races,
    whole_log,
)
from tests.faults.coordinating import (
    PAIR,
    Committer,
    PullWorker,
    check_commits,
    create_coordinated,
)
from tests.faults.killing import (
    JSON,
    SHARED,
    Client,
    Lives,
    Reader,
    SharedProducer,
    check_lives,
    check_shared,
    create_shared,
)
from tests.faults.wire import asked, put
from tests.serving import ServerProcess

KILLS = int(os.environ.get("FENCEPOST_FAULT_KILLS", "6"))
SEED = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
KILLS_PER_RESTART = 20
SERVERS = 3
PRODUCERS = 24
ANSWERS_BETWEEN_KILLS_MAX = 800

pytestmark = pytest.mark.timeout(240 + 30 * KILLS)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of its own, to be restarted."""
    with PostgresServer() as server:
        yield server


async def test_nothing_is_lost_doubled_or_passed_by_however_often_servers_and_database_die(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    arguments = ["--long-poll-ms", "300"]
    servers = [ServerProcess(store=url, arguments=arguments) for _ in range(SERVERS)]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        load = Load(servers)
        await load.create()
        await load.run(kill_in_turn(load.cluster, postgres))
        await load.check()
    except BaseException as error:
        error.add_note(
            f"after {KILLS} kills; again: FENCEPOST_FAULT_KILLS={KILLS} FENCEPOST_FAULT_SEED={SEED}"
            " ./test tests/faults/test_postgres_kills.py"
        )
        for server in servers:
            if server.is_running:
                await asyncio.to_thread(server.kill)
        raise
    for server in servers:
        assert await asyncio.to_thread(server.stop) == 0
    checked = await asyncio.to_thread(check_database, url)
    assert checked.returncode == 0, checked.stdout
    assert load.hits() >= KILLS, "no kill hit a request: they came while nothing was in flight"


class Load:
    """All clients that keep the servers busy."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self.servers = servers
        self.cluster = cluster = Cluster(servers, SEED)
        self.book = commits.Book()
        self.producers = [SharedProducer(n, cluster.seat(n)) for n in range(PRODUCERS)]
        self.lives = [Lives(n, cluster.seat(n)) for n in range(2)]
        self.readers = [Reader(path, cluster.seat(n)) for n, path in enumerate(SHARED)]
        self.committers = [Committer(n, cluster.seat(n)) for n in range(3)]
        self.racers = [Racer(n, cluster.seat(n)) for n in range(SERVERS)]
        self.actors: list[commits.Actor] = [
            commits.Committer(0, cluster.seat(0), self.book),
            commits.Stager(0, cluster.seat(1), self.book),
            *(commits.Appender(n, cluster.seat(n), self.book) for n in range(SERVERS)),
        ]
        self.worker = PullWorker(cluster.seat(2))
        self.log_readers = [LogReader(server.port, cluster) for server in servers]

    async def create(self) -> None:
        await create_shared(self.cluster)
        await create_coordinated(self.cluster)
        for path in (*RACED, *commits.STREAMS):
            assert (await asked(self.cluster.port, put(path, JSON))).status == 201

    async def run(self, meanwhile: Awaitable[None]) -> None:
        """Keep the servers busy until something else is done."""
        writers: list[Client] = [*self.producers, *self.lives, *self.committers, *self.racers]
        writers += [*self.actors, self.worker, *self.readers]
        async with asyncio.TaskGroup() as followers:
            for reader in self.log_readers:
                followers.create_task(reader.run())
            async with asyncio.TaskGroup() as clients:
                for client in writers:
                    clients.create_task(client.run())
                await meanwhile
                self.cluster.done.set()
            self.cluster.settled.set()

    async def check(self) -> None:
        """Hold every server to what any client was told by any of them."""
        log = await whole_log(self.cluster.port)
        check_log(self.log_readers, log)
        for server in self.servers:
            port = server.port
            await check_shared(port, self.producers, self.readers)
            await check_lives(port, self.lives)
            await check_commits(port, self.committers)
            await check_races(port, self.racers)
            found = await commits.read_streams(port, self.book, anew=True)
            self.book.check(found, complete=True)
            assert await whole_log(port) == log
        await commits.check_replays(self.cluster, self.book)
        await self.worker.check()
        paths = (*SHARED, *PAIR, *RACED, *commits.STREAMS, *self.lives[0].expected)
        await check_agreement([server.port for server in self.servers], paths)

    def hits(self) -> int:
        """Requests that had to be sent again."""
        return self.book.retried_count + sum(one.retried_count for one in self.producers)


async def kill_in_turn(cluster: Cluster, postgres: PostgresServer) -> None:
    """Kill one server after the other, each after some answers, while those before come back."""
    dice = random.Random(SEED)
    coming_back: dict[int, asyncio.Task[object]] = {}
    restarts = 0
    for kill in range(KILLS):
        await cluster.more_answers(dice.randint(1, ANSWERS_BETWEEN_KILLS_MAX))
        number = kill % SERVERS
        server = cluster.servers[number]
        if number in coming_back:
            await coming_back.pop(number)
        await asyncio.to_thread(server.kill)
        coming_back[number] = asyncio.create_task(asyncio.to_thread(server.restart))
        if kill % KILLS_PER_RESTART == min(KILLS, KILLS_PER_RESTART) // 2:
            # A server that starts while there is no database ends with a sentence: not now.
            await asyncio.gather(*coming_back.values())
            coming_back.clear()
            await cluster.more_answers(dice.randint(1, ANSWERS_BETWEEN_KILLS_MAX))
            await asyncio.to_thread(postgres.stop if restarts % 2 else postgres.kill)
            await asyncio.to_thread(postgres.start)
            restarts += 1
    await asyncio.gather(*coming_back.values())
    await cluster.more_answers(ANSWERS_BETWEEN_KILLS_MAX)


def check_database(url: str) -> subprocess.CompletedProcess[str]:
    """What `fencepost check` says about the database."""
    command = [sys.executable, "-m", "fencepost", "check", "--store", url]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
