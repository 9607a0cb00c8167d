"""Workers of projections: hold the lease of the group, and apply what it is for.

Async and sync are written side by side by hand, because tasks and threads share nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.groups import AsyncGroup
from fencepost.client.group_tasks import async_work_leases
from fencepost.client.group_threads import work_leases
from fencepost.client.group_worker import Breaker, Working, text_of
from fencepost.client.groups import Lease, LeaseAck
from fencepost.client.operations import log_head
from fencepost.client.sync.connections import Driver
from fencepost.client.sync.groups import Group
from fencepost.events.correlating import Correlating, make_group
from fencepost.events.correlators import correlating_in_task, correlating_in_thread
from fencepost.events.errors import SettleTimeoutError
from fencepost.events.projections.projecting import Projecting, handle_lease

log = logging.getLogger(__name__)

SETTLE_WAIT_MS = 500

AsyncWork = Callable[[asyncio.Event], Awaitable[None]]
Work = Callable[[threading.Event], None]
"""The work of one projection until the event is set."""


def working(worker: str, lease_ms: int, *, until_idle: bool = False, wait_ms: int = 0) -> Working:
    """How a worker of a projection claims: one target, whose events it reads itself."""
    return Working(
        worker=worker,
        streams=1,
        events=0,
        lease_ms=lease_ms,
        until_idle=until_idle,
        idle_wait_ms=wait_ms,
    )


def _stopped(name: str, breaker: Breaker, error: Exception) -> None:
    """Say that a projection does not run. Its database may come back, so it is started again."""
    breaker.failed(error)
    text = "the projection %s has stopped and starts again in %.1f s: %s"
    log.error(text, name, breaker.pause_s, text_of(error))


def _correlating(run: Projecting) -> Correlating:
    return Correlating(run.settings, run.projection.group, run.registry, notes=False)


# With tasks


def async_in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    """Run what blocks in a thread."""
    return asyncio.to_thread(function)


async def _async_leases(
    driver: AsyncDriver,
    group: AsyncGroup,
    run: Projecting,
    options: Working,
    live_from: int,
    breaker: Breaker | None = None,
    stopping: asyncio.Event | None = None,
) -> int | None:
    async def handled(lease: Lease) -> LeaseAck | None:
        return await driver.run(handle_lease(run, lease, lambda: False, live_from=live_from))

    return await async_work_leases(group, handled, options, breaker=breaker, stopping=stopping)


async def async_work_projection(
    driver: AsyncDriver,
    group: AsyncGroup,
    run: Projecting,
    worker: str,
    lease_ms: int,
    stopping: asyncio.Event | None = None,
) -> None:
    """Apply what there is and what comes, until cancelled or until `stopping` is set."""
    await asyncio.to_thread(run.store.prepare, run.projection)
    await driver.run(make_group(driver.settings, run.projection.group, "first"))
    live_from = await driver.run(log_head(driver.settings))
    async with correlating_in_task(driver, _correlating(run)):
        options = working(worker, lease_ms)
        await _async_leases(driver, group, run, options, live_from, Breaker(), stopping)


async def async_settle_projection(
    driver: AsyncDriver,
    group: AsyncGroup,
    run: Projecting,
    worker: str,
    lease_ms: int,
    timeout: float,
) -> None:
    """Apply what there is, then return."""
    await asyncio.to_thread(run.store.prepare, run.projection)
    await driver.run(make_group(driver.settings, run.projection.group, "first"))
    correlating = _correlating(run)
    clock = driver.settings.clock
    ends_ms = clock.monotonic_ms() + timeout * 1000
    live_from = await driver.run(log_head(driver.settings))
    wait_ms = 0
    while True:
        noted = await driver.run(correlating.to_head())
        options = working(worker, lease_ms, until_idle=True, wait_ms=wait_ms)
        due_ms = await _async_leases(driver, group, run, options, live_from)
        if due_ms is None and not noted:
            return
        wait_ms = SETTLE_WAIT_MS if due_ms is not None else 0
        if clock.monotonic_ms() > ends_ms:
            raise SettleTimeoutError(f"the projection had work left after {timeout} s")


async def async_work_beside(
    reactions: Callable[[], Awaitable[None]],
    projections: Mapping[str, AsyncWork],
) -> None:
    """Run the reactions, and the projections for as long as those run."""

    stopping = asyncio.Event()

    async def projecting(name: str, work: AsyncWork) -> None:
        breaker = Breaker()
        while not stopping.is_set():
            try:
                await work(stopping)
            except Exception as error:
                _stopped(name, breaker, error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), breaker.pause_s)

    tasks = [asyncio.create_task(projecting(name, work)) for name, work in projections.items()]
    try:
        await reactions()
    finally:
        stopping.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# With threads


def in_thread(function: Callable[[], Any]) -> Any:
    """Run what blocks: here a thread waits for it in any case."""
    return function()


def _leases(
    driver: Driver,
    group: Group,
    run: Projecting,
    options: Working,
    live_from: int,
    breaker: Breaker | None = None,
    stopping: threading.Event | None = None,
) -> int | None:
    def handled(lease: Lease, is_lost: Callable[[], bool]) -> LeaseAck | None:
        return driver.run(handle_lease(run, lease, is_lost, live_from=live_from))

    return work_leases(group, handled, options, breaker=breaker, stopping=stopping)


def work_projection(
    driver: Driver,
    group: Group,
    run: Projecting,
    worker: str,
    lease_ms: int,
    stopping: threading.Event | None = None,
) -> None:
    """Apply what there is and what comes, until `stopping` is set."""
    run.store.prepare(run.projection)
    driver.run(make_group(driver.settings, run.projection.group, "first"))
    live_from = driver.run(log_head(driver.settings))
    with correlating_in_thread(driver, _correlating(run)):
        _leases(driver, group, run, working(worker, lease_ms), live_from, Breaker(), stopping)


def settle_projection(
    driver: Driver, group: Group, run: Projecting, worker: str, lease_ms: int, timeout: float
) -> None:
    """Apply what there is, then return."""
    run.store.prepare(run.projection)
    driver.run(make_group(driver.settings, run.projection.group, "first"))
    correlating = _correlating(run)
    clock = driver.settings.clock
    ends_ms = clock.monotonic_ms() + timeout * 1000
    live_from = driver.run(log_head(driver.settings))
    wait_ms = 0
    while True:
        noted = driver.run(correlating.to_head())
        options = working(worker, lease_ms, until_idle=True, wait_ms=wait_ms)
        due_ms = _leases(driver, group, run, options, live_from)
        if due_ms is None and not noted:
            return
        wait_ms = SETTLE_WAIT_MS if due_ms is not None else 0
        if clock.monotonic_ms() > ends_ms:
            raise SettleTimeoutError(f"the projection had work left after {timeout} s")


def work_beside(reactions: Callable[[], None], projections: Mapping[str, Work]) -> None:
    """Run the reactions, and the projections in threads for as long as those run."""
    stopping = threading.Event()

    def projecting(name: str, work: Work) -> None:
        breaker = Breaker()
        while not stopping.is_set():
            try:
                work(stopping)
            except Exception as error:
                _stopped(name, breaker, error)
                stopping.wait(breaker.pause_s)

    threads = [
        threading.Thread(target=projecting, args=one, name="fencepost-projection", daemon=True)
        for one in projections.items()
    ]
    for thread in threads:
        thread.start()
    try:
        reactions()
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
