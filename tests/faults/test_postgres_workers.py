"""Workers of one server, killed one after the other under load: each comes back, nothing is lost.

They share a port, so a producer whose worker dies is given another one when it connects again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

from tests.acceptance.test_postgres_command import children, is_there
from tests.faults.cluster import Cluster, LogReader, check_log, whole_log
from tests.faults.coordinating import PAIR, Committer, check_commits
from tests.faults.killing import JSON, Client, SharedProducer, check_shared, create_shared
from tests.faults.test_postgres_kills import check_database
from tests.faults.wire import asked, put
from tests.serving import ServerProcess

KILLS = min(20, int(os.environ.get("FENCEPOST_FAULT_KILLS", "4")))
SEED = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
PRODUCERS = 8
WAIT_SECONDS = 60.0


async def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(
    postgres_dsn: str,
) -> None:
    arguments = ["--workers", "2", "--long-poll-ms", "300"]
    with ServerProcess(store=postgres_dsn, arguments=arguments) as server:
        cluster = Cluster([server], SEED)
        await create_shared(cluster)
        for path in PAIR:
            assert (await asked(server.port, put(path, JSON))).status == 201
        producers = [SharedProducer(number, cluster.seat(0)) for number in range(PRODUCERS)]
        committers = [Committer(number, cluster.seat(0)) for number in range(2)]
        reader = LogReader(server.port, cluster)
        async with asyncio.TaskGroup() as followers:
            followers.create_task(reader.run())
            async with asyncio.TaskGroup() as clients:
                busy: list[Client] = [*producers, *committers]
                for client in busy:
                    clients.create_task(client.run())
                await kill_workers(server, cluster)
                cluster.done.set()
            cluster.settled.set()
        await check_shared(server.port, producers, [])
        await check_commits(server.port, committers)
        check_log([reader], await whole_log(server.port))
        assert server.output.count("killed by signal 9") == KILLS
    checked = await asyncio.to_thread(check_database, postgres_dsn)
    assert checked.returncode == 0, checked.stdout
    assert sum(producer.retried_count for producer in producers) >= KILLS, "no request was hit"


async def kill_workers(server: ServerProcess, cluster: Cluster) -> None:
    """Kill one worker after the other, each when both are there."""
    dice = random.Random(SEED)
    for _ in range(KILLS):
        await cluster.more_answers(dice.randint(1, 400))
        workers = await asyncio.to_thread(both_workers, server)
        victim = dice.choice(sorted(workers))
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(gone, victim)
    await asyncio.to_thread(both_workers, server)
    await cluster.more_answers(400)


def both_workers(server: ServerProcess) -> set[int]:
    """The two workers, waited for."""
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found := {pid for pid in children(server.pid) if is_there(pid)}) != 2:
        assert time.monotonic() < deadline, f"there are {len(found)} workers"
    return found


def gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while is_there(pid):
        assert time.monotonic() < deadline
