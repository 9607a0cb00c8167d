"""Task claims: `AsyncTaskClaims` over the rules of `fencepost.coordination.rules.claims`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import msgspec

from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.streams import AsyncStream
from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    OutcomeUnknownError,
    RateLimitedError,
    UnavailableError,
)
from fencepost.client.handlers import async_check_handler
from fencepost.client.heartbeats import AsyncHeartbeats
from fencepost.client.wires import async_call, async_wait
from fencepost.coordination.rules.checks import (
    check_event,
    check_seconds,
    check_stream,
    check_timeout,
)
from fencepost.coordination.rules.claims import (
    CLAIM_SECONDS,
    POLL_SECONDS,
    RECLAIM_SECONDS,
    Claiming,
    Kind,
)
from fencepost.coordination.rules.tasks import (
    ClaimLostError,
    ClaimNotWonError,
    Found,
    Held,
    Outcome,
    TaskState,
    restored,
)

AWAY = (ConnectionFailedError, UnavailableError, OutcomeUnknownError)
"""The server does not answer: wait, then try again."""


class AsyncClaim:
    """What came of an attempt to claim a task; true only if the task was won.

    As a context manager it is the work on a task that was won: heartbeats go out in the background,
    the end of the block completes the task, and an exception releases it. When the claim is lost
    the block ends with `ClaimLostError`: a coroutine is cancelled at once, a thread can look at
    `lost`. On a task that was not won the block raises `ClaimNotWonError` and does not begin.
    """

    def __init__(
        self, driver: AsyncDriver, core: Claiming, found: Held | Found, timeout: float
    ) -> None:
        self._driver = driver
        self._core = core
        self._found = found
        self._timeout = timeout
        self._moving = asyncio.Lock()
        self._beats: AsyncHeartbeats | None = None
        self._alive_ms = core.settings.clock.monotonic_ms()

    def __bool__(self) -> bool:
        return isinstance(self._found, Held)

    def __repr__(self) -> str:
        return f"<AsyncClaim {self.task!r}: {self.outcome}, owner {self.owner!r}>"

    @property
    def outcome(self) -> Outcome:
        """`won`; or `held`, `completed`, `mine` (this actor won it before), `unreadable`."""
        return "won" if isinstance(self._found, Held) else self._found.outcome

    @property
    def task(self) -> str:
        return self._found.task

    @property
    def owner(self) -> str | None:
        """Who holds the task, or has completed it."""
        return self._found.owner

    @property
    def since(self) -> datetime | None:
        """Since when the other actor holds it, by the clock of the server."""
        return None if isinstance(self._found, Held) else self._found.since

    @property
    def epoch(self) -> int:
        return self.held.epoch

    @property
    def version(self) -> int:
        return self.held.version

    @property
    def is_open(self) -> bool:
        """Whether it was won, and neither completed nor released by us since."""
        return isinstance(self._found, Held) and self._found.status in ("claimed", "heartbeat")

    @property
    def lost(self) -> bool:
        """Whether the heartbeats in the background found that another actor has the task."""
        return self._beats is not None and self._beats.lost is not None

    @property
    def held(self) -> Held:
        """Where our claim stands; raises `ClaimNotWonError` when we have none."""
        if isinstance(self._found, Found):
            raise ClaimNotWonError(self._found)
        return self._found

    def save(self) -> bytes:
        """The claim for a process that comes back: `restore` goes on with it."""
        return msgspec.json.encode(self.held)

    async def own(self) -> bool:
        """Whether the task still is ours; one request, and nothing is read."""
        async with self._moving:
            return bool(self) and await self._driver.run(self._core.own(self.held))

    async def heartbeat(self) -> None:
        """Say that we still work on it; raises `ClaimLostError` when it was taken over."""
        async with self._moving:
            await self._driver.run(self._core.heartbeat(self.held))
        self._alive_ms = self._core.settings.clock.monotonic_ms()

    async def release(self) -> None:
        """Give the task back for anyone to claim; raises `ClaimLostError` when it was taken."""
        async with self._moving:
            await self._driver.run(self._core.release(self.held))

    async def complete(self, result: Any = None) -> None:
        """The task is done, for good, with a JSON value that `TaskState.result` shows.

        Raises `ClaimLostError` when it was taken over.
        """
        async with self._moving:
            await self._driver.run(self._core.complete(self.held, result))

    async def __aenter__(self) -> Self:
        held = self.held
        if not self.is_open:
            raise ClaimLostError(f"the claim of {held.task} has ended: it is {held.status}")
        self._beats = AsyncHeartbeats(self._beat, self._timeout / 3)
        await self._beats.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._beats is not None
        lost = await self._beats.stop()
        if lost is not None:
            raise lost from error
        if self.is_open and error is None:
            await self.complete()
        elif self.is_open:
            # The task is free again at once, if the server hears of it; else after the timeout.
            with contextlib.suppress(FencepostError):
                await self.release()

    async def _beat(self) -> None:
        """One heartbeat in the background; a server that is away is waited for, up to a point."""
        if not self.is_open:
            return
        clock = self._core.settings.clock
        try:
            async with self._moving:
                # Short of the next one: a server that is away must not keep us from noticing.
                beat = self._core.heartbeat(self.held, self._timeout / 3)
                await self._driver.run(beat)
            self._alive_ms = clock.monotonic_ms()
        except (*AWAY, RateLimitedError) as error:
            silent_ms = clock.monotonic_ms() - self._alive_ms
            if silent_ms < self._timeout * 1000:
                return
            raise ClaimLostError(
                f"no heartbeat of {self.task} was acknowledged for {silent_ms / 1000:.0f} s:"
                " another actor may have it"
            ) from error
        except ClaimLostError:
            if self.is_open:  # else the block ended the claim while this heartbeat waited
                raise


Handler = Callable[[AsyncClaim], Any] | Callable[[AsyncClaim], Awaitable[Any]]


class AsyncTaskClaims:
    """The claims of one actor on one stream: of many actors, one at a time has a task.

    Args:
        stream: The JSON stream that all actors share.
        owner: Who we are, for others to read; what proves a claim is its nonce, not this name.
        kind: `task`, or `tool` for the calls of a `ToolExecutor`.
        timeout: Seconds after which a silent holder counts as dead. Blocks over a claim, and
            `work`, send a heartbeat every third of it.
    """

    def __init__(
        self,
        stream: AsyncStream,
        owner: str,
        *,
        kind: Kind = "task",
        timeout: float = CLAIM_SECONDS,
    ) -> None:
        check_stream(stream, AsyncStream)
        check_timeout(timeout)
        self._driver = stream._driver
        self._core = Claiming(stream._settings, stream.path, owner, kind)
        self._timeout = timeout

    async def offer(self, task: str) -> bool:
        """Make a task known, for actors that look for one; False when it was known before."""
        return await self._driver.run(self._core.offer(task))

    async def claim(self, task: str) -> AsyncClaim:
        """The task, if it was free; else a claim that is not true and says what was found."""
        return self._claim(await self._driver.run(self._core.claim(task)))

    async def claim_with_timeout(self, task: str, timeout: float | None = None) -> AsyncClaim:
        """The same, and a claim whose holder was silent for `timeout` seconds is taken over.

        A server with authorization has a time of its own (`stale_after_s`). Before it is over a
        shorter `timeout` raises `EpochGuardedError`.
        """
        chosen = self._timeout if timeout is None else timeout
        return self._claim(await self._driver.run(self._core.claim_with_timeout(task, chosen)))

    def restore(self, saved: bytes) -> AsyncClaim:
        """A claim that `save` gave, perhaps in another process; `own` proves it."""
        return self._claim(restored(saved))

    async def own(self, claim: AsyncClaim) -> bool:
        """Whether the task still is ours; one request, and nothing is read."""
        return await claim.own()

    async def heartbeat(self, claim: AsyncClaim) -> None:
        """Say that we still work on it; raises `ClaimLostError` when it was taken over."""
        await claim.heartbeat()

    async def release(self, claim: AsyncClaim) -> None:
        """Give the task back for anyone to claim; raises `ClaimLostError` when it was taken."""
        await claim.release()

    async def complete(self, claim: AsyncClaim, result: Any = None) -> None:
        """The task is done, for good; raises `ClaimLostError` when it was taken over."""
        await claim.complete(result)

    async def work(
        self,
        handler: Handler,
        *,
        stop: asyncio.Event | None = None,
        poll: float = POLL_SECONDS,
        on_error: Callable[[AsyncClaim, Exception], Any] | None = None,
    ) -> None:
        """Claim free and stale tasks and carry them out, one at a time, until `stop` is set.

        `handler` gets the claim. What it returns completes the task, as its result, unless it ended
        the claim itself. Heartbeats go out in the background. When the claim is lost meanwhile the
        handler is cancelled (in a thread it can look at `lost`) and the next task is taken. When it
        raises, the task is released, and `on_error` is told; without `on_error` the exception
        passes through. With nothing to do it looks again every `poll` seconds, and waits for a
        server that is away.
        """
        async_check_handler(handler, ("claim",))
        check_event(stop, asyncio.Event)
        check_seconds(poll, "poll")
        stopping = asyncio.Event() if stop is None else stop
        while not stopping.is_set():
            done = 0
            for task in await self._workable():
                if stopping.is_set():
                    return
                done += await self._work_on(task, handler, on_error)
            if not done:
                await async_wait(stopping, poll)

    async def _workable(self) -> list[TaskState]:
        try:
            return await self._driver.run(self._core.workable(self._timeout))
        except AWAY:
            return []

    async def _work_on(
        self,
        task: TaskState,
        handler: Handler,
        on_error: Callable[[AsyncClaim, Exception], Any] | None,
    ) -> bool:
        """Whether a task was claimed and carried out."""
        try:
            claim = await self.claim_with_timeout(task.task)
        except AWAY:
            return False
        if not claim:
            return False
        try:
            async with claim:
                result = await async_call(lambda: handler(claim))
                if claim.is_open:
                    await claim.complete(result)
        except ClaimLostError:
            return False
        except Exception as error:
            if on_error is None:
                raise
            told = error
            await async_call(lambda: on_error(claim, told))
            return False
        return True

    async def follow(self) -> AsyncIterator[TaskState]:
        """The tasks that are free now, then those that become free, until the client is closed."""
        core, stop = self._core.beside(), self._driver.stop_of(None)
        for free in await self._driver.run(core.available()):
            yield free
        while not stop.is_over():
            for free in await self._driver.run(core.freed(stop.is_over), stop):
                yield free

    async def available(self) -> list[TaskState]:
        """The tasks that anyone may claim now."""
        return await self._driver.run(self._core.available())

    def known(self, task: str) -> TaskState | None:
        """Where a task was when the stream was last read; asks nothing."""
        return self._core.known(task)

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
        check_event(stop, asyncio.Event)
        check_seconds(every, "every")
        while not stop.is_set():
            try:
                reclaimed = await self.reclaim_stale(timeout)
            except AWAY:
                reclaimed = []  # whatever is stale now will be stale in the next round
            if reclaimed and on_reclaimed is not None:
                on_reclaimed(reclaimed)
            await async_wait(stop, every)

    def _claim(self, found: Held | Found) -> AsyncClaim:
        return AsyncClaim(self._driver, self._core, found, self._timeout)
