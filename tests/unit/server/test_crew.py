"""The crew of webhook deliveries: principals take turns, no host and no principal has all of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fencepost.server.subscriptions.webhooks import Crew


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_targets_that_never_answer_delay_only_their_own_principal() -> None:
    crew = Crew(8, per_principal=4, per_host=3)
    begun: list[str] = []
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def job(name: str, *, hangs: bool) -> Callable[[], Coroutine[Any, Any, None]]:
        async def work() -> None:
            begun.append(name)
            if hangs:
                await never

        return work

    async def meanwhile() -> None:
        for number in range(300):
            crew.add(job("mallory", hangs=True), "mallory", f"host-{number % 50}")
        await settle()
        assert (crew.working_count, begun) == (4, ["mallory"] * 4)

        crew.add(job("ann", hangs=False), "ann", "ann.example")
        await settle()

        assert begun[-1] == "ann"
        crew.forget()
        never.set_result(None)

    await crew.run(meanwhile)


async def test_a_host_that_never_answers_leaves_room_for_another_of_the_same_principal() -> None:
    crew = Crew(8, per_principal=4, per_host=3)
    begun: list[str] = []
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def job(host: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def work() -> None:
            begun.append(host)
            if host == "slow":
                await never

        return work

    async def meanwhile() -> None:
        for _ in range(10):
            crew.add(job("slow"), "ann", "slow")
        for _ in range(3):
            crew.add(job("quick"), "ann", "quick")
        await settle()

        assert (begun.count("slow"), begun.count("quick")) == (3, 3)
        never.set_result(None)
        await settle()
        assert begun.count("slow") == 10

    await crew.run(meanwhile)
