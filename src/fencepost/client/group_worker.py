"""The loop of a worker: claim, handle targets side by side and each in order, renew, ack.

`async_work_leases` and `work_leases` are the loop, with tasks and with threads. They hand over
whole leases: what handles one returns its ack, or None when it has ended the lease by itself, as a
commit that acks does. `async_work` and `work` put a handler of single events on top. What that
handler raises is the failure of its event: the progress before counts, and the group decides about
another attempt. `PermanentError` says that another attempt would fail as well.

Leases are renewed until the last handler has ended, during shutdown too. A worker that is to
outlive its server has a `Breaker`: while the server fails, nothing is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from fencepost.client.errors import ConnectionFailedError, OutcomeUnknownError, UnavailableError
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
from fencepost.client.results import AckedItem

AsyncHandler = Callable[[GroupEvent, Lease], Awaitable[None]]
Handler = Callable[[GroupEvent, Lease], None]
AsyncLeaseHandler = Callable[[Lease], Awaitable[LeaseAck | None]]
LeaseHandler = Callable[[Lease, Callable[[], bool]], LeaseAck | None]
"""Handles a lease; the function tells whether the lease was lost meanwhile."""
OnAcked = Callable[[Lease, AckedItem], None]

log = logging.getLogger(__name__)

WAIT_MS = 20_000
STOPPABLE_WAIT_MS = 1_000
"""How long a claim waits for work where the worker may be asked to stop."""
LOOK_SECONDS = 0.2
"""How often a thread with free hands looks for more work while handlers run."""
ERROR_CHARACTERS_MAX = 1_000
AWAY = (ConnectionFailedError, UnavailableError, OutcomeUnknownError)
"""The server does not answer, or cannot store."""


class PermanentError(Exception):
    """Raise it in a handler: this event cannot be handled, and another attempt would not help."""


class Working(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker claims."""

    worker: str
    streams: int = 10
    """Targets that are handled at once."""
    events: int = 10
    """Events of one target that come with its lease."""
    lane: str | None = None
    lease_ms: int | None = None
    until_idle: bool = False
    """Return when there is nothing to claim."""
    idle_wait_ms: int = 0
    """With `until_idle`: how long to wait for work that comes due."""


class Breaker:
    """Keeps a worker from a server that fails: after each failure in a row it waits longer.

    It is closed at first. A failure opens it for a while; then one attempt is let through, and its
    outcome closes it or opens it for longer.
    """

    def __init__(self, first_s: float = 0.2, longest_s: float = 10.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0

    @property
    def is_open(self) -> bool:
        """Whether the newest attempt failed."""
        return self._failures > 0

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt."""
        if not self._failures:
            return 0.0
        return min(self._first_s * 2.0 ** min(self._failures - 1, 30), self._longest_s)

    def failed(self, error: Exception) -> None:
        """The server did not answer, or could not do it."""
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        log.log(level, "the server fails, the worker waits %.1f s: %s", self.pause_s, error)

    def succeeded(self) -> None:
        """The server answered."""
        if self._failures:
            log.info("the server answers again")
        self._failures = 0


class _AsyncWork(Protocol):
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

    async def renew(self, tokens: list[str], *, lease_ms: int | None) -> list[RenewedItem]: ...

    async def release(self, tokens: list[str]) -> list[RenewedItem]: ...


class _Work(Protocol):
    def info(self) -> GroupInfo: ...

    def claim(
        self,
        worker: str,
        *,
        streams_max: int,
        events_max: int,
        lease_ms: int | None,
        lane: str | None,
        wait_ms: int,
    ) -> Leases: ...

    def ack(self, *items: LeaseAck) -> Acked: ...

    def renew(self, tokens: list[str], *, lease_ms: int | None) -> list[RenewedItem]: ...

    def release(self, tokens: list[str]) -> list[RenewedItem]: ...


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


# With tasks


async def async_work(group: _AsyncWork, handler: AsyncHandler, options: Working) -> None:
    """Hand single events to `handler` until cancelled; the handlers that run then finish first."""

    async def handle(lease: Lease) -> LeaseAck:
        progress = _Progress(lease)
        for event in lease.events:
            try:
                await handler(event, lease)
            except Exception as error:
                if not progress.failed(event, error):
                    break
            else:
                progress.done(event)
        return progress.ack()

    await async_work_leases(group, handle, options)


async def async_work_leases(
    group: _AsyncWork,
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
    lease_ms = options.lease_ms or (await group.info()).lease_ms
    running: dict[asyncio.Task[None], str] = {}
    errors: list[BaseException] = []

    async def carry(lease: Lease) -> None:
        try:
            done = await handle(lease)
            if done is not None:
                acked = await group.ack(done)
                if on_acked is not None:
                    on_acked(lease, acked.items[0])
        except AWAY as error:
            if breaker is None:
                raise
            breaker.failed(error)  # the lease ends by itself, or another worker takes it

    def ended(task: asyncio.Task[None]) -> None:
        running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            errors.append(error)

    async def renew() -> None:
        while True:
            await asyncio.sleep(lease_ms / 3000)
            tasks = dict(running)
            if not tasks:
                continue
            with contextlib.suppress(*AWAY):
                items = await group.renew(list(tasks.values()), lease_ms=options.lease_ms)
                for task, item in zip(tasks, items, strict=True):
                    if item.outcome == "lost":
                        task.cancel()  # Another worker has the target.

    async def claim(free: int) -> Leases:
        wait_ms = WAIT_MS if stopping is None else STOPPABLE_WAIT_MS
        if options.until_idle:
            wait_ms = options.idle_wait_ms
        try:
            taken = await group.claim(
                options.worker,
                streams_max=free,
                events_max=options.events,
                lease_ms=options.lease_ms,
                lane=options.lane,
                wait_ms=0 if running else wait_ms,
            )
            leases = taken.leases
            if leases and prepare is not None:
                leases = await prepare(leases)
        except AWAY as error:
            if breaker is None:
                raise
            breaker.failed(error)
            await _pause(breaker.pause_s, stopping)
            return Leases(leases=[], due_ms=0)
        if breaker is not None:
            breaker.succeeded()
        return msgspec.structs.replace(taken, leases=leases)

    renewing = asyncio.create_task(renew())
    try:
        while stopping is None or not stopping.is_set():
            if errors:
                raise errors[0]
            free = options.streams - len(running)
            if not free:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                continue
            taken = await claim(free)
            for lease in taken.leases:
                task = asyncio.create_task(carry(lease))
                running[task] = lease.token
                task.add_done_callback(ended)
            if not taken.leases and running:
                await asyncio.wait(
                    running, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK_SECONDS
                )
            elif not taken.leases and options.until_idle:
                return taken.due_ms
        return None
    finally:
        while running:
            await asyncio.wait(list(running))
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        if errors:
            raise errors[0]


async def _pause(seconds: float, stopping: asyncio.Event | None) -> None:
    if stopping is None:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), seconds)


# With threads


def work(
    group: _Work,
    handler: Handler,
    options: Working,
    *,
    stopping: threading.Event | None = None,
) -> None:
    """The same with a thread for each target. Only this thread speaks to the server.

    A handler in a thread cannot be cancelled when its lease is lost; its ack and its fenced writes
    are refused.
    """

    def handle(lease: Lease, is_lost: Callable[[], bool]) -> LeaseAck | None:
        progress = _Progress(lease)
        for event in lease.events:
            if is_lost():
                return None
            try:
                handler(event, lease)
            except Exception as error:
                if not progress.failed(event, error):
                    break
            else:
                progress.done(event)
        return progress.ack()

    work_leases(group, handle, options, stopping=stopping)


def work_leases(
    group: _Work,
    handle: LeaseHandler,
    options: Working,
    *,
    prepare: Callable[[list[Lease]], list[Lease]] | None = None,
    on_acked: OnAcked | None = None,
    breaker: Breaker | None = None,
    stopping: threading.Event | None = None,
) -> int | None:
    """The loop with a thread for each target; see `async_work_leases`."""
    lease_ms = options.lease_ms or group.info().lease_ms
    crew = _Crew(group, handle, options, lease_ms, on_acked, breaker)
    with ThreadPoolExecutor(options.streams, thread_name_prefix="fencepost-group") as pool:
        try:
            while stopping is None or not stopping.is_set():
                free = options.streams - len(crew.running)
                taken = Leases(leases=[])
                if free and crew.finished.empty():
                    taken = _claim(group, options, free, crew, prepare, breaker, stopping)
                    for lease in taken.leases:
                        crew.start(pool, lease)
                    if not taken.leases and not crew.running and options.until_idle:
                        return taken.due_ms
                if crew.running:
                    crew.wait(LOOK_SECONDS if free else lease_ms / 3000)
            return None
        finally:
            while crew.running:
                crew.wait(lease_ms / 3000)


def _claim(
    group: _Work,
    options: Working,
    free: int,
    crew: _Crew,
    prepare: Callable[[list[Lease]], list[Lease]] | None,
    breaker: Breaker | None,
    stopping: threading.Event | None,
) -> Leases:
    wait_ms = options.idle_wait_ms if options.until_idle else STOPPABLE_WAIT_MS
    try:
        taken = group.claim(
            options.worker,
            streams_max=free,
            events_max=options.events,
            lease_ms=options.lease_ms,
            lane=options.lane,
            wait_ms=0 if crew.running else wait_ms,
        )
        leases = taken.leases
        if leases and prepare is not None:
            leases = prepare(leases)
    except AWAY as error:
        if breaker is None:
            raise
        breaker.failed(error)
        (stopping or threading.Event()).wait(breaker.pause_s)
        return Leases(leases=[], due_ms=0)
    if breaker is not None:
        breaker.succeeded()
    return msgspec.structs.replace(taken, leases=leases)


class _Crew:
    """The leases that threads work on, and what they have finished."""

    def __init__(
        self,
        group: _Work,
        handle: LeaseHandler,
        options: Working,
        lease_ms: int,
        on_acked: OnAcked | None,
        breaker: Breaker | None,
    ) -> None:
        self._group = group
        self._handle = handle
        self._options = options
        self._lease_ms = lease_ms
        self._on_acked = on_acked
        self._breaker = breaker
        self._lost: set[str] = set()
        self._renewed_s = time.monotonic()
        self.finished: queue.SimpleQueue[tuple[Lease, LeaseAck | Exception | None]]
        self.finished = queue.SimpleQueue()
        self.running: dict[str, Lease] = {}

    def start(self, pool: ThreadPoolExecutor, lease: Lease) -> None:
        """Have a thread handle a lease."""
        self.running[lease.token] = lease
        pool.submit(self._carry, lease)

    def _carry(self, lease: Lease) -> None:
        done: LeaseAck | Exception | None
        try:
            done = self._handle(lease, lambda: lease.token in self._lost)
        except Exception as error:
            done = error
        self.finished.put((lease, done))

    def wait(self, wait_s: float) -> None:
        """Ack what has ended, after waiting for one at most so long; renew the others in time."""
        with contextlib.suppress(queue.Empty):
            lease, done = self.finished.get(timeout=wait_s)
            del self.running[lease.token]
            self._lost.discard(lease.token)
            self._end(lease, done)
        now_s = time.monotonic()
        if self.running and now_s - self._renewed_s >= self._lease_ms / 3000:
            self._renewed_s = now_s
            self._renew()

    def _end(self, lease: Lease, done: LeaseAck | Exception | None) -> None:
        try:
            if isinstance(done, Exception):
                raise done
            if done is not None:
                acked = self._group.ack(done)
                if self._on_acked is not None:
                    self._on_acked(lease, acked.items[0])
        except AWAY as error:
            if self._breaker is None:
                raise
            self._breaker.failed(error)

    def _renew(self) -> None:
        tokens = list(self.running)
        with contextlib.suppress(*AWAY):
            items = self._group.renew(tokens, lease_ms=self._options.lease_ms)
            for token, item in zip(tokens, items, strict=True):
                if item.outcome == "lost":
                    self._lost.add(token)
