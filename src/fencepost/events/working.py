"""Workers of an app: correlate, claim, run reactions, commit and ack.

Async and sync are written side by side by hand, because tasks and threads share nothing; the loop
itself is the client's (`client/group_worker.py`), and what happens with a lease is an operation
(`reactions.py`). An async app runs plain functions in threads, so both kinds of handlers can be
given to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec

from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.groups import AsyncGroup
from fencepost.client.effects import Operation
from fencepost.client.group_tasks import async_work_leases, unless_stopped
from fencepost.client.group_threads import work_leases
from fencepost.client.group_worker import Breaker, Working
from fencepost.client.groups import Acked, Lease, LeaseAck, Leases, RenewedItem
from fencepost.client.results import AckedItem
from fencepost.client.sync.connections import Driver
from fencepost.client.sync.groups import Group
from fencepost.events import tracing
from fencepost.events.awaiting import WatchedContext, check_plain
from fencepost.events.correlating import Correlating, make_group
from fencepost.events.correlators import correlating_in_task, correlating_in_thread
from fencepost.events.deciding import Deciding
from fencepost.events.declarations import Declarations
from fencepost.events.errors import DefinitionError, SettleTimeoutError
from fencepost.events.reactions import (
    Drain,
    Handled,
    Invoke,
    context_meta,
    fetch,
    handle,
    lost,
)
from fencepost.events.registry import Breadcrumb, Reaction
from fencepost.events.sync.contexts import Context
from fencepost.events.types import Recorded
from fencepost.events.units import Turn, Unit

T = TypeVar("T")

CAUSE: ContextVar[tuple[str | None, str] | None] = ContextVar("fencepost_cause", default=None)
"""Inside a reaction: the correlation of its event, and the event's position."""
SETTLE_WAIT_MS = 500

OnWait = Callable[[int], None]
"""Told when the next work of a group comes due, by the server's clock, instead of waiting."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What `settle` did."""

    leases: int = 0
    """Leases that were handled to their end."""


class Staff(msgspec.Struct, frozen=True, kw_only=True):
    """An app that a worker works for, and how it claims."""

    app: Declarations
    deciding: Deciding
    options: Working


class Tally:
    """Counts what a worker reports, on its way to the hooks."""

    def __init__(self, tell: Callable[[Breadcrumb], None]) -> None:
        self._tell = tell
        self.acked = 0

    def __call__(self, crumb: Breadcrumb) -> None:
        self.acked += crumb.kind == "acked"
        self._tell(crumb)


def _drain(
    staff: Staff,
    tell: Callable[[Breadcrumb], None],
    invoker: Callable[[Drain, Reaction, Turn, Unit], Handled | Awaitable[Handled]],
) -> Drain:
    app, settings = staff.app, staff.deciding.settings

    def invoke(reaction: Reaction, turn: Turn, unit: Unit) -> Handled | Awaitable[Handled]:
        return invoker(drain, reaction, turn, unit)

    called: Invoke = invoke
    drain = Drain(
        app=app.name,
        worker=staff.options.worker,
        settings=settings,
        registry=app.registry,
        deciding=staff.deciding,
        correlating=Correlating(settings, app.name, app.registry),
        invoke=called,
        tell=tell,
        events_max=staff.options.events,
    )
    return drain


def _told(drain: Drain) -> Callable[[Lease, LeaseAck, AckedItem], None]:
    def on_acked(lease: Lease, ack: LeaseAck, item: AckedItem) -> None:
        drain.tell(
            Breadcrumb(
                kind=item.outcome,
                app=drain.app,
                target=lease.target,
                worker=drain.worker,
                position=item.at,
                events=len(lease.events),
                error=None if ack.failure is None else ack.failure.error,
            )
        )

    return on_acked


def _claim_span(drain: Drain, lease: Lease) -> AbstractContextManager[tracing.Carrier]:
    """A span that lasts as long as a worker works on a lease."""
    found = {"app": drain.app, "target": lease.target, "worker": drain.worker}
    return tracing.span("claim", {**found, "events": len(lease.events)})


def _handle_span(
    drain: Drain, reaction: Reaction, turn: Turn
) -> AbstractContextManager[tracing.Carrier]:
    """A span that lasts as long as a handler runs, child of the commit that stored the event."""
    event = turn.event
    found = {
        "app": drain.app,
        "reaction": reaction.name,
        "target": turn.target,
        "stream": event.stream,
        "position": event.position,
        "correlation": event.correlation,
        "attempt": turn.attempt,
    }
    return tracing.span("handle", found, cause=event.meta)


def _cause(event: Recorded[Any]) -> tuple[str | None, str]:
    return event.correlation, str(event.position)


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """Leases that another process has claimed, for this one to handle."""

    leases: list[Lease]


def _still_held(leases: list[Lease], renewed: list[RenewedItem]) -> list[Lease]:
    """The leases that were renewed: another attempt of this work may have ended some."""
    pairs = zip(leases, renewed, strict=True)
    return [lease for lease, item in pairs if item.outcome != "lost"]


# With tasks


class _Bridge(Driver):
    """Lets a thread run operations on the loop of an async client."""

    def __init__(self, driver: AsyncDriver, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(driver.settings)
        self._async_driver = driver
        self._loop = loop

    def run(self, operation: Operation[T], stop: Any = None) -> T:  # noqa: ARG002
        running = asyncio.run_coroutine_threadsafe(self._async_driver.run(operation), self._loop)
        return running.result()


async def _async_invoke(
    driver: AsyncDriver,
    drain: Drain,
    threads: Executor,
    reaction: Reaction,
    turn: Turn,
    unit: Unit,
) -> Handled:
    token = CAUSE.set(_cause(turn.event))
    try:
        with _handle_span(drain, reaction, turn) as carried:
            meta = {**context_meta(drain, turn.event), **carried}
            if inspect.iscoroutinefunction(reaction.handler):
                watched = WatchedContext(driver, unit, meta, drain.app, turn)
                error = await _async_call(reaction, turn, watched)
            else:
                loop = asyncio.get_running_loop()
                plain = Context(_Bridge(driver, loop), unit, meta, drain.app, turn)
                call = partial(copy_context().run, _call, reaction, turn, plain)
                error = await loop.run_in_executor(threads, call)
            if error is not None:
                tracing.failed(error)
            return Handled(error)
    except Exception as error:  # what an event carries may be anything
        return Handled(error)
    finally:
        CAUSE.reset(token)


async def _async_call(reaction: Reaction, turn: Turn, context: WatchedContext) -> Exception | None:
    """What an async handler raised."""
    try:
        await reaction.handler(turn.event, context)
        context.check(reaction.name)
    except Exception as error:
        return error
    return None


def _call(reaction: Reaction, turn: Turn, context: Context) -> Exception | None:
    """What a plain handler raised: it is handed over, as a future cannot raise `StopIteration`."""
    try:
        check_plain(reaction.name, reaction.handler(turn.event, context))
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def _threads(count: int) -> Iterator[Executor]:
    """Threads for plain handlers alone: they wait for the loop, which needs threads of its own."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="fencepost-reaction")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)  # a handler that hangs holds up no one but itself


async def async_work_app(
    driver: AsyncDriver, group: AsyncGroup, staff: Staff, stopping: asyncio.Event | None
) -> None:
    """Run reactions until cancelled, or until `stopping` is set."""
    with _threads(staff.options.streams) as threads:
        drain = _async_drain(driver, staff, threads, staff.app.tell)
        making = make_group(driver.settings, staff.app.name, staff.app.settings.start)
        if await unless_stopped(driver.run(making), stopping) is None:
            return
        breaker = Breaker()
        async with correlating_in_task(driver, drain.correlating):
            await _async_leases(driver, group, drain, staff.options, breaker, stopping)


def _async_drain(
    driver: AsyncDriver, staff: Staff, threads: Executor, tell: Callable[[Breadcrumb], None]
) -> Drain:
    def invoke(drain: Drain, reaction: Reaction, turn: Turn, unit: Unit) -> Awaitable[Handled]:
        return _async_invoke(driver, drain, threads, reaction, turn, unit)

    return _drain(staff, tell, invoke)


async def _async_leases(
    driver: AsyncDriver,
    group: AsyncGroup | _AsyncHandOver,
    drain: Drain,
    options: Working,
    breaker: Breaker | None,
    stopping: asyncio.Event | None,
) -> int | None:
    async def handled(lease: Lease) -> LeaseAck | None:
        with _claim_span(drain, lease):
            try:
                return await driver.run(handle(drain, lease, lambda: False))
            except asyncio.CancelledError:
                drain.tell(lost(drain, lease))  # handlers end before a worker does, unless so
                raise

    async def prepare(leases: list[Lease]) -> list[Lease]:
        return await driver.run(fetch(drain, leases))

    return await async_work_leases(
        group,
        handled,
        options,
        prepare=prepare,
        on_acked=_told(drain),
        breaker=breaker,
        stopping=stopping,
    )


async def async_settle(
    driver: AsyncDriver,
    group: AsyncGroup,
    staff: Staff,
    timeout: float,
    on_wait: OnWait | None = None,
) -> Settled:
    """Run reactions until there is nothing left to do."""
    tally = Tally(staff.app.tell)
    if staff.app.registry.reactions:
        with _threads(staff.options.streams) as threads:
            drain = _async_drain(driver, staff, threads, tally)
            clock = driver.settings.clock
            ends_ms = clock.monotonic_ms() + timeout * 1000
            await driver.run(make_group(driver.settings, staff.app.name, staff.app.settings.start))
            wait_ms = 0
            while True:
                chosen = msgspec.structs.replace(
                    staff.options, until_idle=True, idle_wait_ms=wait_ms
                )
                acked = tally.acked
                due_ms = await _async_leases(driver, group, drain, chosen, None, None)
                is_moving = due_ms is not None or tally.acked > acked
                noted = await driver.run(drain.correlating.to_head(is_moving=is_moving))
                if due_ms is None and not noted and tally.acked == acked:
                    break
                wait_ms = SETTLE_WAIT_MS if due_ms is not None else 0
                if on_wait is not None and due_ms is not None:
                    on_wait(due_ms)
                    wait_ms = 0
                if clock.monotonic_ms() > ends_ms:
                    raise SettleTimeoutError(f"work was left after {timeout} s")
    tally(Breadcrumb(kind="settled", app=staff.app.name))
    return Settled(leases=tally.acked)


class _AsyncHandOver:
    """The group as the loop of a worker sees it: there is one claim, of what was given."""

    def __init__(self, group: AsyncGroup, given: list[Lease]) -> None:
        self._group = group
        self._given = given
        self.info, self.ack = group.info, group.ack
        self.renew, self.release = group.renew, group.release

    async def claim(
        self,
        worker: str,  # noqa: ARG002
        *,
        streams_max: int,  # noqa: ARG002
        events_max: int,  # noqa: ARG002
        lease_ms: int | None,
        lane: str | None,  # noqa: ARG002
        wait_ms: int,  # noqa: ARG002
    ) -> Leases:
        leases, self._given = self._given, []
        if leases:
            tokens = [lease.token for lease in leases]
            leases = _still_held(leases, await self._group.renew(tokens, lease_ms=lease_ms))
        return Leases(leases=leases)

    async def ack_and_claim(self, items: list[LeaseAck], *_: Any, **_more: Any) -> Acked:
        return await self._group.ack(*items)


async def async_work_given(
    driver: AsyncDriver, group: AsyncGroup, staff: Staff, given: Given
) -> Settled:
    """Handle leases that another process claimed, all of them side by side, and nothing else."""
    tally = Tally(staff.app.tell)
    count = max(1, len(given.leases))
    with _threads(count) as threads:
        drain = _async_drain(driver, staff, threads, tally)
        options = msgspec.structs.replace(staff.options, until_idle=True, streams=count)
        await _async_leases(driver, _AsyncHandOver(group, given.leases), drain, options, None, None)
    return Settled(leases=tally.acked)


# With threads


def _invoke(driver: Driver, drain: Drain, reaction: Reaction, turn: Turn, unit: Unit) -> Handled:
    token = CAUSE.set(_cause(turn.event))
    try:
        with _handle_span(drain, reaction, turn) as carried:
            meta = {**context_meta(drain, turn.event), **carried}
            error = _call(reaction, turn, Context(driver, unit, meta, drain.app, turn))
            if error is not None:
                tracing.failed(error)
            return Handled(error)
    except Exception as error:  # what an event carries may be anything
        return Handled(error)
    finally:
        CAUSE.reset(token)


def work_app(driver: Driver, group: Group, staff: Staff, stopping: threading.Event | None) -> None:
    """Run reactions until `stopping` is set."""
    drain = _sync_drain(driver, staff, staff.app.tell)
    driver.run(make_group(driver.settings, staff.app.name, staff.app.settings.start))
    breaker = Breaker()
    with correlating_in_thread(driver, drain.correlating):
        _sync_leases(driver, group, drain, staff.options, breaker, stopping)


def _sync_drain(driver: Driver, staff: Staff, tell: Callable[[Breadcrumb], None]) -> Drain:
    for reaction in staff.app.registry.reactions:
        if inspect.iscoroutinefunction(reaction.handler):
            raise DefinitionError(
                f"the reaction {reaction.name} is async: work with an async client, or with "
                "`fencepost events run`"
            )

    def invoke(drain: Drain, reaction: Reaction, turn: Turn, unit: Unit) -> Handled:
        return _invoke(driver, drain, reaction, turn, unit)

    return _drain(staff, tell, invoke)


def _sync_leases(
    driver: Driver,
    group: Group | _HandOver,
    drain: Drain,
    options: Working,
    breaker: Breaker | None,
    stopping: threading.Event | None,
) -> int | None:
    def handled(lease: Lease, is_lost: Callable[[], bool]) -> LeaseAck | None:
        with _claim_span(drain, lease):
            return driver.run(handle(drain, lease, is_lost))

    def prepare(leases: list[Lease]) -> list[Lease]:
        return driver.run(fetch(drain, leases))

    return work_leases(
        group,
        handled,
        options,
        prepare=prepare,
        on_acked=_told(drain),
        breaker=breaker,
        stopping=stopping,
    )


def settle(
    driver: Driver,
    group: Group,
    staff: Staff,
    timeout: float,
    on_wait: OnWait | None = None,
) -> Settled:
    """Run reactions until there is nothing left to do."""
    tally = Tally(staff.app.tell)
    if staff.app.registry.reactions:
        drain = _sync_drain(driver, staff, tally)
        clock = driver.settings.clock
        ends_ms = clock.monotonic_ms() + timeout * 1000
        driver.run(make_group(driver.settings, staff.app.name, staff.app.settings.start))
        wait_ms = 0
        while True:
            chosen = msgspec.structs.replace(staff.options, until_idle=True, idle_wait_ms=wait_ms)
            acked = tally.acked
            due_ms = _sync_leases(driver, group, drain, chosen, None, None)
            is_moving = due_ms is not None or tally.acked > acked
            noted = driver.run(drain.correlating.to_head(is_moving=is_moving))
            if due_ms is None and not noted and tally.acked == acked:
                break
            wait_ms = SETTLE_WAIT_MS if due_ms is not None else 0
            if on_wait is not None and due_ms is not None:
                on_wait(due_ms)
                wait_ms = 0
            if clock.monotonic_ms() > ends_ms:
                raise SettleTimeoutError(f"work was left after {timeout} s")
    tally(Breadcrumb(kind="settled", app=staff.app.name))
    return Settled(leases=tally.acked)


class _HandOver:
    """The same with threads."""

    def __init__(self, group: Group, given: list[Lease]) -> None:
        self._group = group
        self._given = given
        self.info, self.ack = group.info, group.ack
        self.renew, self.release = group.renew, group.release

    def claim(
        self,
        worker: str,  # noqa: ARG002
        *,
        streams_max: int,  # noqa: ARG002
        events_max: int,  # noqa: ARG002
        lease_ms: int | None,
        lane: str | None,  # noqa: ARG002
        wait_ms: int,  # noqa: ARG002
    ) -> Leases:
        leases, self._given = self._given, []
        if leases:
            tokens = [lease.token for lease in leases]
            leases = _still_held(leases, self._group.renew(tokens, lease_ms=lease_ms))
        return Leases(leases=leases)

    def ack_and_claim(self, items: list[LeaseAck], *_: Any, **_more: Any) -> Acked:
        return self._group.ack(*items)


def work_given(driver: Driver, group: Group, staff: Staff, given: Given) -> Settled:
    """Handle leases that another process claimed, all of them side by side, and nothing else."""
    tally = Tally(staff.app.tell)
    drain = _sync_drain(driver, staff, tally)
    options = msgspec.structs.replace(
        staff.options, until_idle=True, streams=max(1, len(given.leases))
    )
    _sync_leases(driver, _HandOver(group, given.leases), drain, options, None, None)
    return Settled(leases=tally.acked)
