"""Carry events from the log into a projection, as operations without I/O of their own.

A worker holds the lease of the projection's group, takes the projection in the database, and
applies the log page by page. Where to go on is what the database says, never the group: a database
that was restored from a copy goes on from the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from fencepost.client.effects import Call, Operation
from fencepost.client.errors import FencepostError
from fencepost.client.group_worker import text_of
from fencepost.client.groups import EventFailure, Lease, LeaseAck
from fencepost.client.operations import log_head, query_of
from fencepost.client.reading import LogReader
from fencepost.client.results import LogEntry
from fencepost.client.settings import ClientSettings
from fencepost.events.commits import is_event
from fencepost.events.declarations import Declarations
from fencepost.events.errors import EventsError
from fencepost.events.projections.declared import Projection, ProjectionLostError
from fencepost.events.projections.stores import Applied, ProjectionStore, Taken, Transaction
from fencepost.events.registry import Registry
from fencepost.events.types import Recorded

log = logging.getLogger(__name__)

InThread = Callable[[Callable[[], Any]], Any | Awaitable[Any]]
"""Runs a function that blocks: itself with the sync client, in a thread with the async one."""
Progress = Callable[[int, int], None]
"""Told the position that was applied and the newest one."""
PAGE_ROWS = 1_000
DATABASE_WAIT_MS = 1_000


class Projecting(msgspec.Struct, frozen=True, kw_only=True):
    """A projection, the log that it is made of and the database that it is in."""

    settings: ClientSettings
    registry: Registry
    projection: Projection
    store: ProjectionStore
    in_thread: InThread

    def call(self, event: Recorded[Any], transaction: Transaction) -> None:
        """Give an event to the handlers that it is for."""
        for handler in self.projection.handlers:
            if event.name in handler.names:
                handler.function(event, transaction)


def projecting(
    app: Declarations,
    settings: ClientSettings,
    projection: Projection,
    store: ProjectionStore,
    in_thread: InThread,
) -> Projecting:
    """A projection of an app, ready to run."""
    return Projecting(
        settings=settings,
        registry=registry_of(app, projection),
        projection=projection,
        store=store,
        in_thread=in_thread,
    )


def registry_of(app: Declarations, projection: Projection) -> Registry:
    """The events that a projection is for, as reactions to its one target."""
    registry = Registry(app.registry.entities, (), app.registry.sources)
    for reaction in projection.reactions():
        registry.add(reaction)
    return registry


def handle_lease(
    run: Projecting, lease: Lease, is_lost: Callable[[], bool], *, live_from: int
) -> Operation[LeaseAck | None]:
    """Apply what a lease is for. A version that has come to `live_from` becomes the live one."""
    try:
        taken: Taken = yield Call(_blocking(run, lambda: run.store.take(run.projection)))
        applied = yield from advance(run, taken, lease.until, is_lost)
    except ProjectionLostError:
        return None
    except FencepostError:
        raise
    except Exception as error:
        # The database is away: that is no fault of an event, and is tried again for ever.
        text = text_of(error)
        log.warning("the database of the projection %s fails: %s", run.projection.group, text)
        failure = EventFailure(position=lease.until, error=text, delay_ms=DATABASE_WAIT_MS)
        return LeaseAck(token=lease.token, failure=failure)
    at = max(applied.position, lease.at)
    if applied.error is not None and applied.failed is not None:
        # The lease tells of attempts at its first event alone: progress ends their count.
        spent = lease.retry if at == lease.at else 0
        failure = run.projection.retry.failure(
            applied.failed, applied.error, retry=spent, dice=run.settings.clock.random()
        )
        becomes = "it is blocked" if failure.permanent else "it is tried again"
        text = "the projection %s failed at position %d, %s: %s"
        said = (run.projection.group, applied.failed, becomes, failure.error)
        log.warning(text, *said, exc_info=applied.error)
        return LeaseAck(token=lease.token, at=at, failure=failure)
    if not taken.live and applied.position >= live_from:
        yield Call(_blocking(run, lambda: run.store.switch(run.projection, taken)))
    return LeaseAck(token=lease.token, at=at)


def advance(
    run: Projecting,
    taken: Taken,
    until: int,
    is_lost: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Operation[Applied]:
    """Apply the log up to a position; raises `ProjectionLostError` if the projection was taken."""
    part = None if taken.part is None else "{}/{}".format(*taken.part)
    asked = {**run.registry.selection(), "limit": PAGE_ROWS, "pruned": "skip", "part": part}
    query = query_of(asked)
    reader = LogReader(run.settings, query, after=taken.position, until=until, live=False)
    at = taken.position
    while at < until:
        page = yield from reader.next()
        if is_lost():
            raise ProjectionLostError(f"{run.projection.group} went to another worker")
        read = _read(run, [] if page is None else page.entries)
        events, reached = read.events, until if page is None else max(at, min(page.next, until))
        if read.failed is not None:
            reached = max(at, read.failed - 1)
        here = Taken(taken.fence, at, taken.live, taken.part)
        applied: Applied | None = yield Call(_blocking(run, _applying(run, here, events, reached)))
        if applied is None:
            raise ProjectionLostError(f"{run.projection.group} was taken by another worker")
        if applied.error is not None:
            return applied
        at = reached
        if read.failed is not None:
            return Applied(at, read.error, read.failed)
        if progress is not None:
            progress(at, until)
        if page is None:
            break
    return Applied(at)


def _applying(
    run: Projecting, taken: Taken, events: list[Recorded[Any]], until: int
) -> Callable[[], Applied | None]:
    return lambda: run.store.apply(run.projection, taken, events, until, run.call)


def _blocking(run: Projecting, function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: run.in_thread(function)


class _Read(msgspec.Struct, frozen=True):
    """The events of a page, up to one that is not what its class says."""

    events: list[Recorded[Any]]
    error: Exception | None = None
    failed: int | None = None


def _read(run: Projecting, entries: list[LogEntry]) -> _Read:
    events: list[Recorded[Any]] = []
    for entry in entries:
        if entry.marker is not None or not is_event(entry.data):
            continue
        if not run.registry.concerns(entry.stream, entry.data["name"]):
            continue
        try:
            events.append(run.registry.codec.recorded(entry))
        except EventsError as error:
            return _Read(events, error, entry.position)
    return _Read(events)


def rebuild(run: Projecting, *, after: int | None, progress: Progress | None) -> Operation[Applied]:
    """Apply everything up to the head of the log, then make this version the live one.

    With `after` the projection goes back to that position first (-1: its tables are made anew).
    """
    if after is not None:
        yield Call(_blocking(run, lambda: run.store.reset(run.projection, after)))
    head = yield from log_head(run.settings)
    taken: Taken = yield Call(_blocking(run, lambda: run.store.take(run.projection)))
    applied = yield from advance(run, taken, head, progress=progress)
    if applied.error is not None:
        raise applied.error
    if not taken.live:
        switched = yield Call(
            _blocking(run, lambda: run.store.switch(run.projection, taken, back=True))
        )
        if not switched:
            raise ProjectionLostError(f"{run.projection.group} was taken by another worker")
    return applied
