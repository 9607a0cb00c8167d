"""Reactions at work: what the reactions of a lease do.

Operations without I/O. `fetch` sorts out the events of leases, `handle` runs the reactions of one
lease, event by event, and stores what they gathered together with the ack, in one commit. How a
target comes to its events is in `correlating.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from fencepost.client import operations
from fencepost.client.effects import Call, Operation
from fencepost.client.errors import LeaseLostError, ResponseError
from fencepost.client.group_worker import AWAY
from fencepost.client.groups import (
    EventFailure,
    GroupEvent,
    Lease,
    LeaseAck,
    ReplayedEvent,
)
from fencepost.client.operations import query_of
from fencepost.client.reading import LogReader
from fencepost.client.results import LogEntry
from fencepost.client.settings import ClientSettings
from fencepost.events.codec import CORRELATION
from fencepost.events.commits import is_event, meta_of
from fencepost.events.correlating import Correlating
from fencepost.events.deciding import Deciding
from fencepost.events.errors import ConcurrencyError, EventsError
from fencepost.events.notes import decode_note
from fencepost.events.registry import Breadcrumb, Reaction, Registry
from fencepost.events.types import Recorded
from fencepost.events.units import Turn, Unit

log = logging.getLogger(__name__)

FLUSH_MS = 250
"""A lease whose reactions have worked for so long stores what they did, and claims again."""
PAGES_MAX = 20
"""Pages of the log that are read for the leases of one claim."""


class Handled(msgspec.Struct, frozen=True):
    """How a handler ended: with an error, or well."""

    error: Exception | None = None


Invoke = Callable[[Reaction, Turn, Unit], Handled | Awaitable[Handled]]
"""Calls the handler of a reaction, in the way of the client that is used; it never raises."""
Tell = Callable[[Breadcrumb], None]


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of an app needs to handle leases."""

    app: str
    worker: str
    settings: ClientSettings
    registry: Registry
    deciding: Deciding
    correlating: Correlating
    invoke: Invoke
    tell: Tell
    events_max: int


def fetch(drain: Drain, leases: list[Lease]) -> Operation[list[Lease]]:
    """The leases with their own events alone, each piece of the log read once for all of them.

    Where it is not known what a target was told of, it is given the first events of all its
    streams, most of which may concern others. What lies behind those is read here, with the names
    that reactions have.
    """
    own = {
        lease.token: [
            event
            for event in lease.events
            if event.replayed or event.note is not None or _is_own(drain, lease, event)
        ]
        for lease in leases
    }
    read_to = {lease.token: lease.read_to for lease in leases}

    untold = [lease for lease in leases if "*" in lease.source and lease.untold_to is not None]

    def wants_more() -> list[Lease]:
        return [
            lease
            for lease in untold
            if read_to[lease.token] < _untold_to(lease) and len(own[lease.token]) < drain.events_max
        ]

    for _page in range(PAGES_MAX):
        open_leases = wants_more()
        if not open_leases:
            break
        after = min(read_to[lease.token] for lease in open_leases)
        until = max(map(_untold_to, open_leases))
        query = query_of({**drain.registry.selection(), "pruned": "skip"})
        reader = LogReader(drain.settings, query, after=after, until=until, live=False)
        page = yield from reader.next()
        entries = [] if page is None else page.entries
        scanned = until if page is None else page.next
        for lease in open_leases:
            _take(drain, lease, entries, scanned, own, read_to)
    return [
        msgspec.structs.replace(lease, events=own[lease.token], read_to=read_to[lease.token])
        for lease in leases
    ]


def _take(
    drain: Drain,
    lease: Lease,
    entries: list[LogEntry],
    scanned: int,
    own: dict[str, list[GroupEvent]],
    read_to: dict[str, int],
) -> None:
    """Give a lease those of some entries that are its own, as many as it may have."""
    token = lease.token
    for entry in entries:
        if not read_to[token] < entry.position <= _untold_to(lease):
            continue
        if len(own[token]) == drain.events_max:
            return
        read_to[token] = entry.position
        if _is_own(drain, lease, entry):
            own[token].append(GroupEvent(**msgspec.structs.asdict(entry)))
    read_to[token] = max(read_to[token], min(scanned, _untold_to(lease)))


def _untold_to(lease: Lease) -> int:
    return lease.read_to if lease.untold_to is None else lease.untold_to


def _is_own(drain: Drain, lease: Lease, entry: LogEntry) -> bool:
    """Whether an event is for this target, as far as the resolvers say today."""
    return any(found.target == lease.target for found in drain.correlating.targets(entry))


def handle(drain: Drain, lease: Lease, is_lost: Callable[[], bool]) -> Operation[LeaseAck | None]:
    """Run the reactions of a lease; its ack, or None when a commit has acked it or it was lost."""
    drain.tell(_crumb(drain, "claimed", lease, events=len(lease.events)))
    events = lease.events
    while True:
        found = yield from _handle(drain, lease, events, is_lost)
        if not isinstance(found, _Refused):
            return found
        if len(found.events) == 1:
            return _blamed(drain, lease, found)
        # Which of them is to blame is not known: the others must not fail for it. The events behind
        # these come again with the next lease.
        events = found.events[: len(found.events) // 2]


class _Refused(msgspec.Struct, frozen=True):
    """The server refuses what the reactions to these events want to store."""

    events: list[GroupEvent]
    error: ResponseError


def _handle(
    drain: Drain, lease: Lease, events: list[GroupEvent], is_lost: Callable[[], bool]
) -> Operation[LeaseAck | _Refused | None]:
    """Run the reactions to the first events of a lease, perhaps all of them."""
    clock = drain.settings.clock
    began_ms = clock.monotonic_ms()
    unit = Unit(drain.deciding)
    at: int | None = None
    kept: list[GroupEvent] = []
    replayed: list[ReplayedEvent] = []
    for event in events:
        if is_lost():
            drain.tell(lost(drain, lease))
            return None
        if not event.replayed and clock.monotonic_ms() - began_ms > FLUSH_MS and unit:
            return (yield from _store(drain, lease, unit, kept, _ack(lease, at, replayed)))
        # The lease tells of attempts at its first event alone.
        spent = 0 if event.replayed or at is not None else lease.retry
        error, reaction = yield from _react(drain, lease, event, unit, spent + 1)
        if error is None:
            unit.keep()
            kept.append(event)
            if event.replayed:
                replayed.append(ReplayedEvent(position=event.position))
            else:
                at = event.position
            continue
        unit.take_back()
        retry = reaction.retry if reaction else drain.registry.retry_of(_name(event))
        failure = retry.failure(event.position, error, retry=spent, dice=clock.random())
        _say(lease, event, failure, reaction, error)
        if event.replayed:
            replayed.append(ReplayedEvent(position=event.position, error=failure.error))
            continue
        # What the events before did is stored with their ack and with this failure.
        return (yield from _store(drain, lease, unit, kept, _ack(lease, at, replayed, failure)))
    if len(events) == len(lease.events):
        at = lease.read_to
    return (yield from _store(drain, lease, unit, kept, _ack(lease, at, replayed)))


def _say(
    lease: Lease,
    event: GroupEvent,
    failure: EventFailure,
    reaction: Reaction | None,
    error: Exception,
) -> None:
    """Log why an event failed and what becomes of it; a lost race shows at debug alone."""
    if event.replayed or failure.park:
        becomes = "it is parked"
    elif failure.permanent:
        becomes = f"the target {lease.target} is blocked"
    else:
        becomes = f"it is tried again in {(failure.delay_ms or 0) / 1000:.1f} s"
    log.log(
        logging.DEBUG if isinstance(error, ConcurrencyError) else logging.WARNING,
        "%s failed for %s at position %d, %s: %s",
        "a reaction" if reaction is None else f"the reaction {reaction.name}",
        event.stream,
        event.position,
        becomes,
        failure.error,
        exc_info=None if isinstance(error, EventsError) else error,
    )


def _blamed(drain: Drain, lease: Lease, refused: _Refused) -> LeaseAck:
    """What to report of the one event whose effects the server refuses."""
    event = refused.events[0]
    retry = drain.registry.retry_of(_name(event))
    spent = 0 if event.replayed else lease.retry
    dice = drain.settings.clock.random()
    failure = retry.failure(event.position, refused.error, retry=spent, dice=dice)
    _say(lease, event, failure, None, refused.error)
    if event.replayed:
        replayed = [ReplayedEvent(position=event.position, error=failure.error)]
        return LeaseAck(token=lease.token, at=lease.at, replayed=replayed)
    return LeaseAck(token=lease.token, failure=failure)


def _ack(
    lease: Lease,
    at: int | None,
    replayed: list[ReplayedEvent],
    failure: EventFailure | None = None,
) -> LeaseAck:
    """The end of a lease whose events are handled up to `at`."""
    reached = lease.at if at is None else at
    return LeaseAck(token=lease.token, at=reached, failure=failure, replayed=replayed)


def _react(
    drain: Drain, lease: Lease, event: GroupEvent, unit: Unit, attempt: int
) -> Operation[tuple[Exception | None, Reaction | None]]:
    """Run every reaction of the target to an event; the first error, and whose it was."""
    try:
        recorded = drain.registry.codec.recorded(event)
    except EventsError as error:
        return error, None
    turn = Turn(lease.target, recorded, attempt)
    note = decode_note(event.note)
    for reaction in drain.registry.matching(recorded, lease.target, event.note):
        if lease.target == recorded.stream and (note is None or reaction.name in note.raised):
            try:
                target = reaction.target(recorded)  # it raised when this was told, and may again
            except Exception as error:
                return error, reaction
            if target is None:
                continue  # now it can say that the event is not for it
        handled: Handled = yield Call(partial(drain.invoke, reaction, turn, unit))
        if handled.error is not None:
            return handled.error, reaction
    return None, None


def _store(
    drain: Drain, lease: Lease, unit: Unit, kept: list[GroupEvent], ack: LeaseAck
) -> Operation[LeaseAck | _Refused | None]:
    """Store what was gathered and ack the lease, in one commit; without effects, only the ack."""
    if not unit:
        return ack
    appends = unit.appends()
    try:
        done = yield from operations.commit(drain.settings, appends, None, leases=[ack])
    except LeaseLostError:
        drain.tell(lost(drain, lease))
        return None
    except AWAY:
        raise
    except ResponseError as error:
        return _Refused(kept, error)
    finally:
        for kind, path in unit.streams():
            drain.deciding.cache.drop(kind, path)
    drain.tell(_crumb(drain, "committed", lease, events=sum(len(a.messages) for a in appends)))
    # A commit whose first answer was lost is known again by its key, and says the same.
    for item in done.leases:
        crumb = _crumb(drain, item.outcome, lease, position=item.at)
        why = None if ack.failure is None else ack.failure.error
        drain.tell(msgspec.structs.replace(crumb, error=why))
    return None


def context_meta(drain: Drain, event: Recorded[Any]) -> dict[str, Any]:
    """What goes with the events of a reaction: the same correlation, caused by its event."""
    return meta_of(drain.settings, event.correlation, str(event.position))


def lost(drain: Drain, lease: Lease) -> Breadcrumb:
    """Tells that another worker has the target of a lease."""
    return _crumb(drain, "lost", lease)


def _crumb(
    drain: Drain, kind: str, lease: Lease, *, events: int = 0, position: int | None = None
) -> Breadcrumb:
    correlation = None
    if lease.events and is_event(lease.events[0].data):
        meta = lease.events[0].data.get("meta")
        correlation = meta.get(CORRELATION) if isinstance(meta, dict) else None
    return Breadcrumb(
        kind=kind,
        app=drain.app,
        target=lease.target,
        worker=drain.worker,
        events=events,
        position=position,
        correlation=correlation if isinstance(correlation, str) else None,
    )


def _name(event: GroupEvent) -> str:
    return str(event.data["name"]) if is_event(event.data) else ""
