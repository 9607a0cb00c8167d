"""Task claims: `AsyncTaskClaims` over the rules of `fencepost.coordination.rules.claims`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fencepost.client.aio.streams import AsyncStream
from fencepost.client.errors import ConnectionFailedError, OutcomeUnknownError, UnavailableError
from fencepost.client.wires import async_wait
from fencepost.coordination.rules.claims import (
    CLAIM_SECONDS,
    RECLAIM_SECONDS,
    Claim,
    Claiming,
    Kind,
    TaskState,
)


class AsyncTaskClaims:
    """The claims of one actor on one stream: of many actors, one at a time has a task.

    Args:
        stream: The JSON stream that all actors share.
        owner: Who we are, for others to read; what proves a claim is its nonce, not this name.
        kind: `task`, or `tool` for the calls of a `ToolExecutor`.
    """

    def __init__(self, stream: AsyncStream, owner: str, *, kind: Kind = "task") -> None:
        self._driver = stream._driver
        self._core = Claiming(stream._driver.settings, stream.path, owner, kind)

    async def claim(self, task: str) -> Claim | None:
        """The task as a claim of ours; None when another holds it or it is completed."""
        return await self._driver.run(self._core.claim(task))

    async def claim_with_timeout(self, task: str, timeout: float = CLAIM_SECONDS) -> Claim | None:
        """The same, and a claim whose holder was silent for `timeout` seconds is taken over."""
        return await self._driver.run(self._core.claim_with_timeout(task, timeout))

    async def own(self, claim: Claim) -> bool:
        """Whether the task still is ours; one request, and nothing is read."""
        return await self._driver.run(self._core.own(claim))

    async def heartbeat(self, claim: Claim) -> None:
        """Say that we still work on it; raises `ClaimLostError` when it was taken over."""
        await self._driver.run(self._core.heartbeat(claim))

    async def release(self, claim: Claim) -> None:
        """Give the task back for anyone to claim; raises `ClaimLostError` when it was taken."""
        await self._driver.run(self._core.release(claim))

    async def complete(self, claim: Claim) -> None:
        """The task is done, for good; raises `ClaimLostError` when it was taken over."""
        await self._driver.run(self._core.complete(claim))

    async def get(self, task: str) -> TaskState | None:
        """Where a task is now; None when it was never claimed."""
        return await self._driver.run(self._core.get(task))

    async def open(self) -> list[TaskState]:
        """The tasks that an actor holds now."""
        return await self._driver.run(self._core.open())

    async def stale(self, timeout: float = RECLAIM_SECONDS) -> list[TaskState]:
        """The tasks whose holders were silent for `timeout` seconds, by the server's clock."""
        return await self._driver.run(self._core.stale(timeout))

    async def reclaim_stale(self, timeout: float = RECLAIM_SECONDS) -> list[str]:
        """Make stale tasks available again, and say which; call it now and then, anywhere."""
        return await self._driver.run(self._core.reclaim_stale(timeout))

    async def keep_reclaiming(
        self,
        stop: asyncio.Event,
        *,
        timeout: float = RECLAIM_SECONDS,
        every: float = RECLAIM_SECONDS / 4,
        on_reclaimed: Callable[[list[str]], None] | None = None,
    ) -> None:
        """Be the service that puts the tasks of silent holders back, until `stop` is set.

        Any number may run: each task is put back once. A server that is away is waited for.
        """
        while not stop.is_set():
            try:
                reclaimed = await self.reclaim_stale(timeout)
            except (ConnectionFailedError, UnavailableError, OutcomeUnknownError):
                reclaimed = []  # whatever is stale now will be stale in the next round
            if reclaimed and on_reclaimed is not None:
                on_reclaimed(reclaimed)
            await async_wait(stop, every)
