"""Coordination among sixteen actors in four processes that are killed, on a network that cuts.

What happened is read from the stream afterwards, in the order of the server: for every task each
move is one that the state table allows, made by whom it allows, and exactly one completes it; a
counter holds every increment once; a session holds one result for every tool call.
FENCEPOST_FAULT_KILLS (`just faults`) makes it the long run.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import AsyncClient
from fencepost.coordination import AsyncResources
from tests.faults.actors import ACTORS, Counter
from tests.faults.proxy import Proxy, Trouble
from tests.serving import ServerProcess

LONG = "FENCEPOST_FAULT_KILLS" in os.environ
PROCESSES = 4
TASKS = 1000 if LONG else 100
KILLS = 20 if LONG else 4
INCREMENTS = 1000 if LONG else 30
SEED = int(os.environ.get("FENCEPOST_FAULT_SEED", "7"))
ROOT = Path(__file__).parents[2]
TROUBLE = Trouble(cut_requests=0.6, cut_answers=0.5, refuse=0.1, repeat=0.3, within_bytes=20_000)

pytestmark = pytest.mark.timeout(3000 if LONG else 120)


@pytest.fixture(name="client")
async def _client(server_process: ServerProcess) -> AsyncIterator[AsyncClient]:
    async with fencepost.connect_async(server_process.url) as client:
        yield client


async def start(*arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.actors", *map(str, arguments)), cwd=ROOT
    )


async def test_every_task_has_one_owner_at_a_time_and_is_completed_once(
    server_process: ServerProcess, client: AsyncClient
) -> None:
    jobs = await client.create("faults/jobs")
    dice = random.Random(SEED)
    async with Proxy("127.0.0.1", server_process.port, TROUBLE, seed=SEED) as proxy:
        urls = [server_process.url, proxy.url] * (PROCESSES // 2)
        crew = [await start("claims", url, jobs.path, seed, TASKS) for seed, url in enumerate(urls)]
        kills = [dice.randrange(TASKS * 2) for _kill in range(KILLS)]
        seen = 0
        # The moves themselves are the clock: so many of them, then the next one dies.
        async for _move in jobs.follow():
            while kills and seen >= min(kills):
                kills.remove(min(kills))
                victim = dice.randrange(PROCESSES)
                crew[victim].kill()
                await crew[victim].wait()
                crew[victim] = await start(
                    "claims", urls[victim], jobs.path, 100 + len(kills), TASKS
                )
            seen += 1
            if not kills:
                break
        assert [await process.wait() for process in crew] == [0] * PROCESSES
        assert proxy.cuts

    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    async for message in jobs.read():
        lines[message["key"]].append(message["value"])
    assert len(lines) == TASKS
    for task, line in lines.items():
        check(task, line)


def check(task: str, line: list[dict[str, Any]]) -> None:
    """Each move follows from the one before it."""
    before: dict[str, Any] | None = None
    for move in line:
        place, status = (move["epoch"], move["version"]), move["status"]
        if before is None:
            assert (place, status) == ((0, 0), "claimed"), (task, move)
        elif place == (before["epoch"], before["version"] + 1):
            held = before["status"] in ("claimed", "heartbeat")
            if status == "claimed":
                assert before["status"] == "released", (task, before, move)
            else:
                assert held, (task, before, move)
                assert move["owner"] == before["owner"], (task, before, move)
        else:
            assert place == (before["epoch"] + 1, 0), (task, before, move)
            assert before["status"] in ("claimed", "heartbeat"), (task, before, move)
            assert (status, move["previous_owner"]) == ("claimed", before["owner"])
        before = move
    assert [move["status"] for move in line].count("completed") == 1, task
    assert line[-1]["status"] == "completed", task


async def test_sixteen_actors_lose_no_increment_and_count_none_twice(
    server_process: ServerProcess, client: AsyncClient
) -> None:
    stream = await client.create("faults/counter")
    async with Proxy("127.0.0.1", server_process.port, TROUBLE, seed=SEED) as proxy:
        crew = [
            await start("counter", proxy.url, stream.path, seed, INCREMENTS)
            for seed in range(PROCESSES)
        ]
        assert [await process.wait() for process in crew] == [0] * PROCESSES
        assert proxy.cuts

    row = await AsyncResources(stream, "counter", Counter).get("visits")

    assert row is not None
    total = PROCESSES * ACTORS * INCREMENTS
    assert (row.value.count, row.epoch, row.version) == (total, 0, total - 1)


async def test_every_tool_call_has_one_result_whichever_actor_is_killed(
    server_process: ServerProcess, client: AsyncClient
) -> None:
    session = await client.create("faults/session")
    await client.create("faults/session/claims")
    await session.append_many({"type": "tool_call", "id": f"call-{n}"} for n in range(TASKS))
    dice = random.Random(SEED)
    async with Proxy("127.0.0.1", server_process.port, TROUBLE, seed=SEED) as proxy:
        urls = [server_process.url, proxy.url] * (PROCESSES // 2)
        crew = [await start("tools", url, session.path, seed, 0) for seed, url in enumerate(urls)]
        kills = {dice.randrange(TASKS) for _kill in range(KILLS)}
        answered: Counts[str] = Counts()
        async for message in session.follow():
            if message["type"] != "tool_result":
                continue
            if len(answered) in kills:
                kills.discard(len(answered))
                victim = dice.randrange(PROCESSES)
                crew[victim].kill()
                await crew[victim].wait()
                crew[victim] = await start("tools", urls[victim], session.path, 100 + len(kills), 0)
            answered[message["toolCallId"]] += 1
            if len(answered) == TASKS:
                break
        await session.close()
        assert [await process.wait() for process in crew] == [0] * PROCESSES

    results = [one["result"] async for one in session.read() if one["type"] == "tool_result"]
    assert Counts(results) == {f"call-{n}": 1 for n in range(TASKS)}
