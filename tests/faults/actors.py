"""A process with several actors of the coordination faults; the test kills it and starts another.

`python -m tests.faults.actors claims URL STREAM SEED TASKS` works through tasks with careless
actors: they heartbeat, release, forget what they hold, and take over what others hold.
`python -m tests.faults.actors counter URL STREAM SEED INCREMENTS` increments one counter.
`python -m tests.faults.actors tools URL STREAM SEED 0` carries out the calls of a session; its
claims are on STREAM/claims.
"""

from __future__ import annotations

import asyncio
import random
import sys

import msgspec

import fencepost
from fencepost import AsyncClient, AsyncStream, Retries, Timeouts
from fencepost.coordination import (
    AsyncClaim,
    AsyncResources,
    AsyncTaskClaims,
    AsyncToolExecutor,
    ClaimLostError,
    ToolCall,
)

ACTORS = 4
BRISK = Retries(delay_seconds_max=0.1, attempts_max=1000, seconds_max=600.0)
QUICK = Timeouts(connect=2.0, answer=5.0, live=5.0)


class Counter(msgspec.Struct):
    count: int


def more(counter: Counter | None) -> Counter:
    return Counter(1 if counter is None else counter.count + 1)


async def work(stream: AsyncStream, name: str, seed: int, tasks: int) -> None:
    """Go through every task until each is completed, by whomever."""
    dice = random.Random(f"{name}/{seed}")
    claims = AsyncTaskClaims(stream, name)
    left = [f"task-{number}" for number in range(tasks)]
    while left:
        task = dice.choice(left)
        # Sometimes a live holder counts as dead: what the patience is must not matter.
        timeout = 0.0 if dice.random() < 0.2 else 30.0
        claim = await claims.claim_with_timeout(task, timeout)
        if claim:
            try:
                await carry_out(claims, claim, dice)
            except ClaimLostError:
                continue
        seen = await claims.get(task)
        if seen is not None and seen.status == "completed":
            left.remove(task)


async def carry_out(claims: AsyncTaskClaims, claim: AsyncClaim, dice: random.Random) -> None:
    for _beat in range(dice.randrange(3)):
        await claims.heartbeat(claim)
    fate = dice.random()
    if fate < 0.1:
        return  # a crash: the claim stays behind
    if fate < 0.2:
        await claims.release(claim)
    else:
        await claims.complete(claim)


async def count(stream: AsyncStream, increments: int) -> None:
    counters = AsyncResources(stream, "counter", Counter)
    for _time in range(increments):
        await counters.update("visits", more, retries=100_000)


async def execute(client: AsyncClient, path: str, name: str, timeout: float) -> None:
    """Carry out calls until the session is closed; some executors do not wait."""

    async def handler(call: ToolCall) -> str:
        await executor.heartbeat(call)
        return call.id

    session, claims = client.stream(path), client.stream(f"{path}/claims")
    executor = AsyncToolExecutor(session, claims, name, handler, timeout=timeout)
    await executor.run(poll=0.05)


async def main(mode: str, url: str, path: str, seed: str, amount: str) -> None:
    async with fencepost.connect_async(url, timeouts=QUICK, retries=BRISK) as client:
        stream = client.stream(path)
        async with asyncio.TaskGroup() as group:
            for number in range(ACTORS):
                name = f"actor-{seed}-{number}"
                if mode == "claims":
                    group.create_task(work(stream, name, int(seed), int(amount)))
                elif mode == "tools":
                    group.create_task(execute(client, path, name, 0.0 if number == 0 else 30.0))
                else:
                    group.create_task(count(stream, int(amount)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
