"""The loop of a worker with tasks: `async_work` for events, `async_work_leases` for leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from fencepost.client.errors import BadRequestError
from fencepost.client.group_worker import (
    AWAY,
    HANDLED,
    LOOK_SECONDS,
    STOPPABLE_WAIT_MS,
    WAIT_MS,
    AsyncHandler,
    AsyncLeaseHandler,
    Breaker,
    Finished,
    OnAcked,
    Progress,
    Working,
    tell,
)
from fencepost.client.groups import Acked, GroupInfo, Lease, LeaseAck, Leases, RenewedItem
from fencepost.client.handlers import async_check_handler
from fencepost.client.wires import async_call

T = TypeVar("T")

STOP_SECONDS = 3.0
"""How long a worker that is asked to stop waits for an answer; longer than a claim waits for work,
because the leases of a claim that is given up are lost until they expire."""


class AsyncWork(Protocol):
    async def info(self) -> GroupInfo: ...

    async def claim(
        self,
        worker: str,
        *,
        streams_max: int,
        events_max: int,
        lease_ms: int | None,
        lane: str | None,
        wait_ms: int,
    ) -> Leases: ...

    async def ack(self, *items: LeaseAck) -> Acked: ...

    async def ack_and_claim(
        self,
        items: list[LeaseAck],
        worker: str,
        *,
        streams_max: int,
        events_max: int,
        lease_ms: int | None,
        lane: str | None,
    ) -> Acked: ...

    async def renew(self, tokens: list[str], *, lease_ms: int | None) -> list[RenewedItem]: ...

    async def release(self, tokens: list[str]) -> list[RenewedItem]: ...


async def async_work(
    group: AsyncWork,
    handler: AsyncHandler,
    options: Working,
    *,
    stopping: asyncio.Event | None = None,
) -> None:
    """Hand single events to `handler` until cancelled or until `stopping` is set.

    The handlers that run then finish first.
    """

    async_check_handler(handler, HANDLED)

    async def handle(lease: Lease) -> LeaseAck:
        progress = Progress(lease)
        for event in lease.events:
            try:
                await async_call(partial(handler, event, lease))
            except Exception as error:
                if not progress.failed(event, error):
                    break
            else:
                progress.done(event)
        return progress.ack()

    await async_work_leases(group, handle, options, stopping=stopping)


async def async_work_leases(
    group: AsyncWork,
    handle: AsyncLeaseHandler,
    options: Working,
    *,
    prepare: Callable[[list[Lease]], Awaitable[list[Lease]]] | None = None,
    on_acked: OnAcked | None = None,
    breaker: Breaker | None = None,
    stopping: asyncio.Event | None = None,
) -> int | None:
    """Work until cancelled, or until `stopping` is set; the handlers that run then finish first.

    `prepare` may change the leases of a claim before they are handled. With `until_idle` it returns
    when there is nothing to claim: the time when the next target comes due, if there is one.
    """
    lease_ms = options.lease_ms
    if lease_ms is None:
        info = await unless_stopped(group.info(), stopping)
        if info is None:
            return None
        lease_ms = info.lease_ms
    crew = _AsyncCrew(group, handle, options, prepare, on_acked, breaker, stopping)
    renewing = asyncio.create_task(crew.renew_every(lease_ms / 3000))
    try:
        while stopping is None or not stopping.is_set():
            crew.check()
            free = options.streams - len(crew.running)
            has_ended = bool(crew.finished)
            if not free and not has_ended:
                await crew.wait()
                continue
            taken = await crew.take(free)
            for lease in taken.leases:
                crew.start(lease)
            if crew.running:
                # There is no more for the free hands, or there are none.
                await crew.wait(LOOK_SECONDS)
            elif options.until_idle and not has_ended and taken.due_ms != 0:
                return taken.due_ms
        return None
    finally:
        await crew.end()
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        crew.check()


class _AsyncCrew:
    """The leases that tasks work on, and what they have finished."""

    def __init__(
        self,
        group: AsyncWork,
        handle: AsyncLeaseHandler,
        options: Working,
        prepare: Callable[[list[Lease]], Awaitable[list[Lease]]] | None,
        on_acked: OnAcked | None,
        breaker: Breaker | None,
        stopping: asyncio.Event | None,
    ) -> None:
        self._group = group
        self._handle = handle
        self._options = options
        self._prepare = prepare
        self._on_acked = on_acked
        self._breaker = breaker
        self._stopping = stopping
        self._errors: list[BaseException] = []
        self._acking: list[Finished] = []
        self.running: dict[asyncio.Task[LeaseAck | None], Lease] = {}
        self.finished: list[Finished] = []

    def start(self, lease: Lease) -> None:
        """Have a task handle a lease."""
        task = asyncio.create_task(self._run(lease))
        self.running[task] = lease
        task.add_done_callback(self._ended)

    async def _run(self, lease: Lease) -> LeaseAck | None:
        return await self._handle(lease)

    def _ended(self, task: asyncio.Task[LeaseAck | None]) -> None:
        lease = self.running.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failed(error)
        elif (done := task.result()) is not None:
            self.finished.append((lease, done))

    def _failed(self, error: BaseException) -> None:
        if self._breaker is not None and isinstance(error, AWAY):
            self._breaker.failed(error)  # the lease ends by itself, or another worker takes it
        else:
            self._errors.append(error)

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._errors:
            raise self._errors[0]

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until a handler has ended, so long at most."""
        await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)

    async def take(self, free: int) -> Leases:
        """Ack what has ended, and claim as many targets as there are free hands."""
        try:
            if self.finished:
                taken = await self._ack(free)
            else:
                taken = await self._claim(free)
            leases = taken.leases
            if leases and self._prepare is not None:
                leases = await self._prepare(leases)
        except AWAY as error:
            if self._breaker is None:
                raise
            self._breaker.failed(error)
            await _pause(self._breaker.pause_s, self._stopping)
            return Leases(leases=[], due_ms=0)
        if self._breaker is not None:
            self._breaker.succeeded()
        return msgspec.structs.replace(taken, leases=leases)

    async def _claim(self, free: int) -> Leases:
        options = self._options
        wait_ms = WAIT_MS if self._stopping is None else STOPPABLE_WAIT_MS
        if options.until_idle:
            wait_ms = options.idle_wait_ms
        claim = self._group.claim(
            options.worker,
            streams_max=free,
            events_max=options.events,
            lease_ms=options.lease_ms,
            lane=options.lane,
            wait_ms=0 if self.running else wait_ms,
        )
        return await unless_stopped(claim, self._stopping) or Leases(leases=[], due_ms=0)

    async def _ack(self, free: int) -> Leases:
        """Ack together what has ended; with free hands claim in the same request."""
        self._acking, self.finished = self.finished, []
        try:
            items = [done for _, done in self._acking]
            if free:
                options = self._options
                acked = await self._group.ack_and_claim(
                    items,
                    options.worker,
                    streams_max=free,
                    events_max=options.events,
                    lease_ms=options.lease_ms,
                    lane=options.lane,
                )
            else:
                acked = await self._group.ack(*items)
        except BadRequestError:
            if len(self._acking) > 1:
                await self._ack_apart()
            raise
        else:
            tell(self._on_acked, self._acking, acked)
        finally:
            self._acking = []
        return Leases(leases=acked.leases, due_ms=acked.due_ms)

    async def _ack_apart(self) -> None:
        """Ack one by one: what is refused about one must not undo the others."""
        for one in self._acking:
            with contextlib.suppress(BadRequestError):
                tell(self._on_acked, [one], await self._group.ack(one[1]))

    async def renew_every(self, seconds: float) -> None:
        """Renew what is worked on, for ever; cancel what was lost."""
        while True:
            await asyncio.sleep(seconds)
            tasks = dict(self.running)
            acking = [lease.token for lease, _ in (*self._acking, *self.finished)]
            tokens = [lease.token for lease in tasks.values()]
            if not tokens and not acking:
                continue
            with contextlib.suppress(*AWAY):
                lease_ms = self._options.lease_ms
                items = await self._group.renew([*tokens, *acking], lease_ms=lease_ms)
                for task, item in zip(tasks, items, strict=False):
                    if item.outcome == "lost":
                        task.cancel()  # Another worker has the target.

    async def end(self) -> None:
        """Wait for the handlers that run, and ack what they have finished."""
        while self.running:
            await self.wait()
        if self.finished:
            try:
                await self._ack(0)
            except Exception as error:
                self._failed(error)


async def unless_stopped(
    asking: Coroutine[Any, Any, T], stopping: asyncio.Event | None
) -> T | None:
    """The result of a request; None if `stopping` is set and no answer comes soon.

    The client asks a server that is away again for a minute, which is longer than a worker that is
    to stop should take.
    """
    if stopping is None:
        return await asking
    asked, stop = asyncio.create_task(asking), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((asked, stop), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((asked,), timeout=STOP_SECONDS)
        return asked.result() if asked.done() else None
    finally:
        for task in (asked, stop):
            task.cancel()
        await asyncio.gather(asked, stop, return_exceptions=True)


async def _pause(seconds: float, stopping: asyncio.Event | None) -> None:
    if stopping is None:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), seconds)
