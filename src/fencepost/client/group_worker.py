"""The loop of a worker: claim, handle targets side by side and each in order, renew, ack.

The async loop and the threaded one have the same parts. A handler is called with an event and its
lease. What it raises is the failure of that event: the progress before counts, and the group
decides about another attempt. `PermanentError` says that another attempt would fail as well.
Leases are renewed until the last handler has ended, during shutdown too.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from fencepost.client.groups import (
    Acked,
    EventFailure,
    GroupEvent,
    GroupInfo,
    Lease,
    LeaseAck,
    Leases,
    RenewedItem,
    ReplayedEvent,
)

AsyncHandler = Callable[[GroupEvent, Lease], Awaitable[None]]
Handler = Callable[[GroupEvent, Lease], None]
WAIT_MS = 20_000
ERROR_CHARACTERS_MAX = 1_000


class PermanentError(Exception):
    """Raise it in a handler: this event cannot be handled, and another attempt would not help."""


class _AsyncWork(Protocol):
    async def info(self) -> GroupInfo: ...

    async def claim(
        self, worker: str, *, streams_max: int, events_max: int, lane: str | None, wait_ms: int
    ) -> Leases: ...

    async def ack(self, *items: LeaseAck) -> Acked: ...

    async def renew(self, tokens: list[str]) -> list[RenewedItem]: ...


class _Work(Protocol):
    def info(self) -> GroupInfo: ...

    def claim(
        self, worker: str, *, streams_max: int, events_max: int, lane: str | None, wait_ms: int
    ) -> Leases: ...

    def ack(self, *items: LeaseAck) -> Acked: ...

    def renew(self, tokens: list[str]) -> list[RenewedItem]: ...


class _Progress:
    """What a worker has to say about a lease, event by event."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._at: int | None = None
        self._failure: EventFailure | None = None
        self._replayed: list[ReplayedEvent] = []

    def done(self, event: GroupEvent) -> None:
        if event.replayed:
            self._replayed.append(ReplayedEvent(position=event.position))
        else:
            self._at = event.position

    def failed(self, event: GroupEvent, error: Exception) -> bool:
        """Note a failure; whether the lease goes on behind it."""
        text = f"{type(error).__name__}: {error}".replace("\0", "")[:ERROR_CHARACTERS_MAX]
        if event.replayed:
            self._replayed.append(ReplayedEvent(position=event.position, error=text))
            return True
        permanent = isinstance(error, PermanentError)
        self._failure = EventFailure(position=event.position, error=text, permanent=permanent)
        return False

    def ack(self) -> LeaseAck:
        at = self._at if self._failure is not None else self._lease.read_to
        return LeaseAck(
            token=self._lease.token, at=at, failure=self._failure, replayed=self._replayed
        )


async def async_work(
    group: _AsyncWork,
    handler: AsyncHandler,
    *,
    worker: str,
    streams: int,
    events: int,
    lane: str | None,
    until_idle: bool,
) -> None:
    """Work until cancelled; the handlers that run then are finished first."""
    renew_s = (await group.info()).lease_ms / 3000
    running: dict[asyncio.Task[None], str] = {}

    async def handle(lease: Lease) -> None:
        progress = _Progress(lease)
        for event in lease.events:
            try:
                await handler(event, lease)
            except Exception as error:
                if not progress.failed(event, error):
                    break
            else:
                progress.done(event)
        await group.ack(progress.ack())

    async def renew() -> None:
        while True:
            await asyncio.sleep(renew_s)
            tasks = dict(running)
            if tasks:
                items = await group.renew(list(tasks.values()))
                for task, item in zip(tasks, items, strict=True):
                    if item.outcome == "lost":
                        task.cancel()  # Another worker has the target.

    renewing = asyncio.create_task(renew())
    try:
        while True:
            free = streams - len(running)
            if not free:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                continue
            wait_ms = 0 if running or until_idle else WAIT_MS
            taken = await group.claim(
                worker, streams_max=free, events_max=events, lane=lane, wait_ms=wait_ms
            )
            for lease in taken.leases:
                task = asyncio.create_task(handle(lease))
                running[task] = lease.token
                task.add_done_callback(lambda done: running.pop(done, None))
            if not taken.leases and running:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            elif not taken.leases and until_idle:
                return
    finally:
        while running:
            await asyncio.wait(list(running))
        renewing.cancel()


def work(
    group: _Work,
    handler: Handler,
    *,
    worker: str,
    streams: int,
    events: int,
    lane: str | None,
    until_idle: bool,
    stopping: threading.Event | None = None,
) -> None:
    """The same with a thread for each target. Only this thread speaks to the server.

    A handler in a thread cannot be cancelled when its lease is lost; its ack and its fenced writes
    are refused.
    """
    renew_s = group.info().lease_ms / 3000
    finished: queue.SimpleQueue[tuple[Lease, LeaseAck]] = queue.SimpleQueue()
    running: dict[str, Lease] = {}

    def handle(lease: Lease) -> None:
        progress = _Progress(lease)
        for event in lease.events:
            try:
                handler(event, lease)
            except Exception as error:
                if not progress.failed(event, error):
                    break
            else:
                progress.done(event)
        finished.put((lease, progress.ack()))

    def settle(wait_s: float) -> None:
        """Ack what has ended, after waiting for one at most so long; renew the others."""
        try:
            lease, done = finished.get(timeout=wait_s) if wait_s else finished.get_nowait()
        except queue.Empty:
            if running:
                group.renew(list(running))
            return
        del running[lease.token]
        group.ack(done)

    with ThreadPoolExecutor(streams, thread_name_prefix="fencepost-group") as pool:
        try:
            while stopping is None or not stopping.is_set():
                free = streams - len(running)
                if free and finished.empty():
                    wait_ms = 0 if running or until_idle else min(WAIT_MS, 1_000)
                    taken = group.claim(
                        worker, streams_max=free, events_max=events, lane=lane, wait_ms=wait_ms
                    )
                    for lease in taken.leases:
                        running[lease.token] = lease
                        pool.submit(handle, lease)
                    if not taken.leases and not running and until_idle:
                        return
                if running:
                    settle(renew_s)
        finally:
            while running:
                settle(renew_s)
