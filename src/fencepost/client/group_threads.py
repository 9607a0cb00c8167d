"""The loop of a worker with threads: `work` for single events, `work_leases` for leases.

One thread speaks to the server, the others handle. A handler in a thread cannot be cancelled when
its lease is lost; its ack and its fenced writes are refused.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from fencepost.client.errors import BadRequestError
from fencepost.client.group_worker import (
    AWAY,
    HANDLED,
    LOOK_SECONDS,
    STOPPABLE_WAIT_MS,
    Breaker,
    Finished,
    Handler,
    LeaseHandler,
    OnAcked,
    Progress,
    Working,
    tell,
)
from fencepost.client.groups import Acked, GroupInfo, Lease, LeaseAck, Leases, RenewedItem
from fencepost.client.handlers import check_handler
from fencepost.client.wires import call


class Work(Protocol):
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

    def ack_and_claim(
        self,
        items: list[LeaseAck],
        worker: str,
        *,
        streams_max: int,
        events_max: int,
        lease_ms: int | None,
        lane: str | None,
    ) -> Acked: ...

    def renew(self, tokens: list[str], *, lease_ms: int | None) -> list[RenewedItem]: ...

    def release(self, tokens: list[str]) -> list[RenewedItem]: ...


def work(
    group: Work,
    handler: Handler,
    options: Working,
    *,
    stopping: threading.Event | None = None,
) -> None:
    """Hand single events to `handler`, each target in a thread, until `stopping` is set."""

    check_handler(handler, HANDLED)

    def handle(lease: Lease, is_lost: Callable[[], bool]) -> LeaseAck | None:
        progress = Progress(lease)
        for event in lease.events:
            if is_lost():
                return None
            try:
                call(partial(handler, event, lease))
            except Exception as error:
                if not progress.failed(event, error):
                    break
            else:
                progress.done(event)
        return progress.ack()

    work_leases(group, handle, options, stopping=stopping)


def work_leases(
    group: Work,
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
    with ThreadPoolExecutor(options.streams, thread_name_prefix="fencepost-group") as pool:
        crew = _Crew(group, handle, options, pool, prepare, on_acked, breaker, stopping)
        crew.renew_s = lease_ms / 3000
        try:
            while stopping is None or not stopping.is_set():
                crew.check()
                free = options.streams - len(crew.running)
                has_ended = bool(crew.finished)
                if not free and not has_ended:
                    crew.wait(crew.renew_s)
                    continue
                taken = crew.take(free)
                for lease in taken.leases:
                    crew.start(lease)
                if crew.running:
                    # There is no more for the free hands, or there are none.
                    crew.wait(min(LOOK_SECONDS, crew.renew_s))
                elif options.until_idle and not has_ended and taken.due_ms != 0:
                    return taken.due_ms
            return None
        finally:
            crew.end()
            crew.check()


class _Crew:
    """The leases that threads work on, and what they have finished."""

    def __init__(
        self,
        group: Work,
        handle: LeaseHandler,
        options: Working,
        pool: ThreadPoolExecutor,
        prepare: Callable[[list[Lease]], list[Lease]] | None,
        on_acked: OnAcked | None,
        breaker: Breaker | None,
        stopping: threading.Event | None,
    ) -> None:
        self._group = group
        self._handle = handle
        self._options = options
        self._pool = pool
        self._prepare = prepare
        self._on_acked = on_acked
        self._breaker = breaker
        self._stopping = stopping or threading.Event()
        self._lost: set[str] = set()
        self._renewed_s = time.monotonic()
        self._ended: queue.SimpleQueue[tuple[Lease, LeaseAck | BaseException | None]]
        self._ended = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self.renew_s = 1.0
        self.running: dict[str, Lease] = {}
        self.finished: list[Finished] = []

    def start(self, lease: Lease) -> None:
        """Have a thread handle a lease."""
        self.running[lease.token] = lease
        self._pool.submit(self._carry, lease)

    def _carry(self, lease: Lease) -> None:
        done: LeaseAck | BaseException | None
        try:
            done = self._handle(lease, lambda: lease.token in self._lost)
        except BaseException as error:  # raised again by the thread that waits
            done = error
        self._ended.put((lease, done))

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._errors:
            raise self._errors[0]

    def wait(self, seconds: float) -> None:
        """Wait until a handler has ended, so long at most; renew the others in time."""
        with contextlib.suppress(queue.Empty):
            ended = self._ended.get(timeout=seconds)
            while True:
                self._end(*ended)
                ended = self._ended.get_nowait()
        now_s = time.monotonic()
        if self.running and now_s - self._renewed_s >= self.renew_s:
            self._renewed_s = now_s
            self._renew()

    def _end(self, lease: Lease, done: LeaseAck | BaseException | None) -> None:
        del self.running[lease.token]
        self._lost.discard(lease.token)
        if isinstance(done, LeaseAck):
            self.finished.append((lease, done))
        elif done is not None:
            self._failed(done)

    def _failed(self, error: BaseException) -> None:
        if self._breaker is not None and isinstance(error, AWAY):
            self._breaker.failed(error)  # the lease ends by itself, or another worker takes it
        else:
            self._errors.append(error)

    def take(self, free: int) -> Leases:
        """Ack what has ended, and claim as many targets as there are free hands."""
        try:
            taken = self._ack(free) if self.finished else self._claim(free)
            leases = taken.leases
            if leases and self._prepare is not None:
                leases = self._prepare(leases)
        except AWAY as error:
            if self._breaker is None:
                raise
            self._breaker.failed(error)
            self._stopping.wait(self._breaker.pause_s)
            return Leases(leases=[], due_ms=0)
        if self._breaker is not None:
            self._breaker.succeeded()
        return msgspec.structs.replace(taken, leases=leases)

    def _claim(self, free: int) -> Leases:
        options = self._options
        wait_ms = options.idle_wait_ms if options.until_idle else STOPPABLE_WAIT_MS
        return self._group.claim(
            options.worker,
            streams_max=free,
            events_max=options.events,
            lease_ms=options.lease_ms,
            lane=options.lane,
            wait_ms=0 if self.running else wait_ms,
        )

    def _ack(self, free: int) -> Leases:
        """Ack together what has ended; with free hands claim in the same request."""
        ended, self.finished = self.finished, []
        items = [done for _, done in ended]
        try:
            if free:
                options = self._options
                acked = self._group.ack_and_claim(
                    items,
                    options.worker,
                    streams_max=free,
                    events_max=options.events,
                    lease_ms=options.lease_ms,
                    lane=options.lane,
                )
            else:
                acked = self._group.ack(*items)
        except BadRequestError:
            if len(ended) == 1:
                raise
            self._ack_apart(ended)
            raise
        tell(self._on_acked, ended, acked)
        return Leases(leases=acked.leases, due_ms=acked.due_ms)

    def _ack_apart(self, ended: list[Finished]) -> None:
        """Ack one by one: what is refused about one must not undo the others."""
        for one in ended:
            with contextlib.suppress(BadRequestError):
                tell(self._on_acked, [one], self._group.ack(one[1]))

    def _renew(self) -> None:
        tokens = list(self.running)
        with contextlib.suppress(*AWAY):
            items = self._group.renew(tokens, lease_ms=self._options.lease_ms)
            for token, item in zip(tokens, items, strict=True):
                if item.outcome == "lost":
                    self._lost.add(token)

    def end(self) -> None:
        """Wait for the handlers that run, and ack what they have finished."""
        while self.running:
            self.wait(self.renew_s)
        if self.finished:
            try:
                self._ack(0)
            except Exception as error:
                self._failed(error)
