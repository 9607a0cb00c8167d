"""SIGKILL under load: eight producers, a server killed again and again, nothing lost or doubled.

Producers pipeline, and after each loss of their connection send again whatever has no answer, as
any client would. Beside them streams are made, closed and deleted, commits go to several streams at
once, and a worker acks a subscription. What they were told is written down; at the end, and for
readers all along, the server must agree with it. FENCEPOST_FAULT_KILLS=200
makes it the long run (`just faults`).
"""

import asyncio
import os
import random
from pathlib import Path

from tests.faults.coordinating import Committer, PullWorker, check_commits, create_coordinated
from tests.faults.killing import (
    Client,
    Lives,
    Load,
    Reader,
    SharedProducer,
    check_lives,
    check_shared,
    create_shared,
)
from tests.serving import ServerProcess

KILLS_DEFAULT = 10
PRODUCERS = 8
LIVES = 2
COMMITTERS = 2
ANSWERS_BETWEEN_KILLS_MAX = 1_500


async def test_nothing_is_lost_or_doubled_however_often_the_server_is_killed(
    tmp_path: Path,
) -> None:
    kills = int(os.environ.get("FENCEPOST_FAULT_KILLS", KILLS_DEFAULT))
    seed = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
    server = ServerProcess(tmp_path / "data", arguments=["--long-poll-ms", "200"])
    await asyncio.to_thread(server.start)
    load = Load(server.port, seed)
    await create_shared(load)
    await create_coordinated(load)
    producers = [SharedProducer(number, load) for number in range(PRODUCERS)]
    lives = [Lives(number, load) for number in range(LIVES)]
    readers = [Reader(path, load) for path in ("json/shared", "bytes/shared")]
    committers = [Committer(number, load) for number in range(COMMITTERS)]
    worker = PullWorker(load)

    try:
        async with asyncio.TaskGroup() as clients:
            everyone: list[Client] = [*producers, *lives, *readers, *committers, worker]
            for client in everyone:
                clients.create_task(client.run())
            await kill_often(server, load, kills)
            load.done.set()
        await check_shared(load.port, producers, readers)
        await check_lives(load.port, lives)
        await check_commits(load.port, committers)
        await worker.check()
    except BaseException as error:
        error.add_note(
            f"after {kills} kills; again: FENCEPOST_FAULT_KILLS={kills} FENCEPOST_FAULT_SEED={seed}"
            " ./test tests/faults/test_kills.py"
        )
        await asyncio.to_thread(server.kill)
        raise

    assert await asyncio.to_thread(server.stop) == 0
    retried = sum(producer.retried_count for producer in producers)
    assert retried >= kills, "no kill hit a request: they came while nothing was in flight"


async def kill_often(server: ServerProcess, load: Load, kills: int) -> None:
    """Kill the server after some answers, start it again, and so on."""
    dice = random.Random(load.seed)
    for _ in range(kills):
        await load.more_answers(dice.randint(1, ANSWERS_BETWEEN_KILLS_MAX))
        load.up.clear()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
        load.up.set()
    await load.more_answers(1)
