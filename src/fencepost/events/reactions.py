"""Reactions at work: which targets events concern, and what the reactions of a lease do.

Operations without I/O. `Correlating` reads the log behind the group's watermark and notes the
targets that its events concern, one compare-and-swap for each page. `handle` runs the reactions of
one lease, event by event, and stores what they gathered together with the ack, in one commit.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from fencepost.client import groups, operations
from fencepost.client.effects import Call, Operation
from fencepost.client.errors import (
    CorrelationMovedError,
    ForbiddenError,
    GroupExistsError,
    LeaseLostError,
    ResponseError,
    TailMovedError,
)
from fencepost.client.group_worker import AWAY
from fencepost.client.groups import (
    EventFailure,
    GroupEvent,
    Lease,
    LeaseAck,
    ReplayedEvent,
    TargetInfo,
)
from fencepost.client.http import Request
from fencepost.client.operations import query_of, stream_target
from fencepost.client.reading import LogReader, Pages
from fencepost.client.results import LogEntry
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings
from fencepost.events.codec import CORRELATION
from fencepost.events.commits import is_event, meta_of
from fencepost.events.deciding import Deciding
from fencepost.events.errors import ConcurrencyError, EventsError
from fencepost.events.registry import Breadcrumb, Correlated, Reaction, Registry
from fencepost.events.types import Recorded
from fencepost.events.units import Turn, Unit

log = logging.getLogger(__name__)

FLUSH_MS = 250
"""A lease whose reactions have worked for so long stores what they did, and claims again."""
TARGETS_MAX = 5_000
"""Targets of one correlation; the server takes 10,000."""
IDLE_POSITIONS_MAX = 1_000
"""Positions without any event for a reaction that the watermark may lag behind the log."""
SPANS_MAX = 1_000
"""Pieces of the log whose targets this process noted by itself, the newest ones."""
ROWS_MAX = 10_000
"""Targets of other processes that are remembered."""
ADOPTED, ADOPTED_TTL_S = "$adopted/", 30 * 86_400
"""Streams that say which events were handled for another target than that of the resolver."""
PAGES_MAX = 20
"""Pages of the log that are read for the leases of one claim."""

# Attempts, waits and what happens after the last are decided by each reaction. The group only
# keeps them: it never gives up by itself, and takes waits of any length.
GROUP = {
    "sources": ["**"],
    "targets": "computed",
    "retries_max": 0,
    "on_exhausted": "retry",
    "backoff": {"kind": "fixed", "base_ms": 1_000, "cap_ms": 7 * 86_400_000, "jitter": 0.0},
}


class Handled(msgspec.Struct, frozen=True):
    """How a handler ended: with an error, or well."""

    error: Exception | None = None


Invoke = Callable[[Reaction, Turn, Unit], Handled | Awaitable[Handled]]
"""Calls the handler of a reaction, in the way of the client that is used; it never raises."""
Tell = Callable[[Breadcrumb], None]


def make_group(settings: ClientSettings, name: str, start: int | str) -> Operation[int]:
    """Make the group of an app, or find it; the position up to which it is correlated."""
    try:
        info = yield from groups.make_group(settings, name, {**GROUP, "start": start})
    except GroupExistsError:
        info = yield from groups.show_group(settings, name)
        if info.targets != "computed":
            raise
    return info.correlated


class Correlating:
    """Reads the log behind the watermark of the group and notes what events concern."""

    def __init__(self, settings: ClientSettings, group: str, registry: Registry) -> None:
        self._settings = settings
        self._group = group
        self._registry = registry
        self._watermark: int | None = None
        self._spans: list[tuple[int, int]] = []
        self._rows: OrderedDict[str, TargetInfo] = OrderedDict()

    def to_head(self) -> Operation[bool]:
        """Correlate what there is; whether there was anything for a reaction."""
        return (yield from self._go_on(live=False, stopped=lambda: False))

    def catch_up(self) -> Operation[None]:
        """Correlate what there is, up to the very head; raises if there is no such group."""
        yield from self._go_on(live=False, stopped=lambda: False, idle_positions_max=0)

    def follow(self, stopped: Callable[[], bool]) -> Operation[None]:
        """Correlate what there is and what comes, until `stopped`."""
        yield from self._go_on(live=True, stopped=stopped)

    def _go_on(
        self,
        *,
        live: bool,
        stopped: Callable[[], bool],
        idle_positions_max: int = IDLE_POSITIONS_MAX,
    ) -> Operation[bool]:
        info = yield from groups.show_group(self._settings, self._group)
        self._watermark = info.correlated
        query = query_of({**self._registry.selection(), "pruned": "skip"})
        reader = LogReader(self._settings, query, after=info.correlated, until=None, live=live)
        reader.stopped = stopped
        # A group that never learns of events that concern none of its targets would lag on their
        # streams for ever, and keep their books from being closed.
        reader.tells_idle = live
        noted = False
        while (page := (yield from reader.next())) is not None:
            if page.entries or page.next > self._watermark:
                yield from self._note(page.entries, page.next)
            noted = noted or bool(page.entries)
        scanned = reader.after
        if isinstance(scanned, int) and scanned - self._watermark > idle_positions_max:
            yield from self._note([], scanned)
        return noted

    def _note(self, entries: list[LogEntry], until: int) -> Operation[None]:
        found = [correlated for entry in entries for correlated in self.targets(entry)]
        for start in range(0, max(len(found), 1), TARGETS_MAX):
            piece = found[start : start + TARGETS_MAX]
            last = start + TARGETS_MAX >= len(found)
            # Events of one position stay together: their targets are noted in one step.
            end = until if last else piece[-1].position - 1
            yield from self._swap([item for item in found if item.position <= end], end)

    def _swap(self, found: list[Correlated], until: int) -> Operation[None]:
        assert self._watermark is not None
        while until > self._watermark:
            items = [item for item in found if item.position > self._watermark]
            targets = [_body(item) for item in newest(items)]
            after = self._watermark
            try:
                self._watermark = yield from groups.correlate(
                    self._settings, self._group, after, until, targets
                )
            except CorrelationMovedError as moved:
                if moved.watermark is None or moved.watermark <= self._watermark:
                    raise
                self._watermark = moved.watermark
            else:
                self._covered(after, until)

    def _covered(self, after: int, until: int) -> None:
        if self._spans and self._spans[-1][1] == after:
            self._spans[-1] = (self._spans[-1][0], until)
        else:
            self._spans.append((after, until))
            del self._spans[:-SPANS_MAX]

    @property
    def noted(self) -> list[tuple[int, int]]:
        """The pieces of the log whose targets this process noted, the newest ones."""
        return list(self._spans)

    def noted_by_others(self, spans: list[tuple[int, int]]) -> None:
        """Take over what another process noted with the same resolvers."""
        self._spans = list(spans)

    def noted_here(self, position: int) -> bool:
        """Whether this process noted the targets of an event, with the resolvers that it has."""
        index = bisect_left(self._spans, position, key=lambda span: span[1])
        return index < len(self._spans) and self._spans[index][0] < position

    def was_told(self, target: str, position: int) -> Operation[bool]:
        """Whether a target was told of an event by any worker, or has gone past it."""
        row = self._rows.get(target)
        if row is None or not tells(row, position):
            # What a row was told of stays told, so only a "no" is asked for again.
            query = query_of({"match": target})
            path = f"/v1/groups/{self._group}/streams"
            page = yield from Pages(self._settings, path, "streams", TargetInfo, query).next()
            if not page:
                return False
            row = self._rows[target] = page[0]
            while len(self._rows) > ROWS_MAX:
                self._rows.popitem(last=False)
        return tells(row, position)

    def targets(self, entry: LogEntry) -> list[Correlated]:
        """What an entry of the log concerns."""
        if entry.marker is not None or not is_event(entry.data):
            return []
        if not self._registry.concerns(entry.stream, entry.data["name"]):
            return []
        try:
            event = self._registry.codec.recorded(entry)
        except EventsError:
            # Its worker reports it: an event that cannot be read fails at its own stream.
            return [Correlated(entry.stream, entry.stream, entry.position)]
        return self._registry.targets(event)


def tells(row: TargetInfo, position: int) -> bool:
    """Whether a row shows that its target was told of an event, or has gone past it."""
    return row.at >= position or row.waits_from <= position <= row.work_to


def newest(found: list[Correlated]) -> list[Correlated]:
    """One entry for each target and the first position too: it says since when work waits."""
    by_target: dict[str, list[Correlated]] = {}
    for item in found:
        by_target.setdefault(item.target, []).append(item)
    chosen = []
    for items in by_target.values():
        chosen.append(items[0])
        if len(items) > 1:
            chosen.append(items[-1])
    return sorted(chosen, key=lambda item: item.position)


def _body(item: Correlated) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(item).items() if value is not None}


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

    A target that gets events from many streams is given the first events of all of them, most of
    which concern others. What lies behind those is read here, with the names that reactions have.
    """
    own = {
        lease.token: [
            event for event in lease.events if event.replayed or _is_own(drain, lease, event)
        ]
        for lease in leases
    }
    read_to = {lease.token: lease.read_to for lease in leases}

    def wants_more() -> list[Lease]:
        return [
            lease
            for lease in leases
            if "*" in lease.source
            and read_to[lease.token] < lease.until
            and len(own[lease.token]) < drain.events_max
        ]

    for _page in range(PAGES_MAX):
        open_leases = wants_more()
        if not open_leases:
            break
        after = min(read_to[lease.token] for lease in open_leases)
        until = max(lease.until for lease in open_leases)
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
        if not read_to[token] < entry.position <= lease.until:
            continue
        if len(own[token]) == drain.events_max:
            return
        read_to[token] = entry.position
        if _is_own(drain, lease, entry):
            own[token].append(GroupEvent(**msgspec.structs.asdict(entry)))
    read_to[token] = max(read_to[token], min(scanned, lease.until))


def _is_own(drain: Drain, lease: Lease, entry: LogEntry) -> bool:
    """Whether an event is for this target, or for one that may not have been told of it."""
    targets = [found.target for found in drain.correlating.targets(entry)]
    if lease.target in targets:
        return True
    return bool(targets) and not drain.correlating.noted_here(entry.position)


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
    found = drain.registry.matching(recorded, lease.target)
    if not found:
        try:
            found = yield from _adopted(drain, lease, recorded, unit)
        except ForbiddenError as error:
            return error, None
    turn = Turn(lease.target, recorded, attempt)
    for reaction in found:
        if callable(reaction.to) and lease.target == recorded.stream:
            try:
                reaction.target(recorded)  # it raised when the target was noted, and may again
            except Exception as error:
                return error, reaction
        handled: Handled = yield Call(partial(drain.invoke, reaction, turn, unit))
        if handled.error is not None:
            return handled.error, reaction
    return None, None


def _adopted(
    drain: Drain, lease: Lease, event: Recorded[Any], unit: Unit
) -> Operation[list[Reaction]]:
    """The reactions to an event whose target was another one when it was noted.

    A resolver that has changed since sends the event to a target that was never told of it. Then a
    target that was told handles it. Which one that was is written nowhere, so all whose leases
    cover the event try, and a stream that must be empty lets one of their commits through.
    """
    adopted: list[Reaction] = []
    if drain.correlating.noted_here(event.position):
        return adopted
    for reaction in drain.registry.reactions_to(event):
        target = drain.registry.target_of(reaction, event)
        if target is None or target == lease.target:
            continue
        if (yield from drain.correlating.was_told(target, event.position)):
            continue
        guard = f"{ADOPTED}{drain.app}/{event.position}/{reaction.name}"
        if (yield from _is_free(drain.settings, guard)):
            unit.guard(guard)
            adopted.append(reaction)
    return adopted


def _is_free(settings: ClientSettings, guard: str) -> Operation[bool]:
    """Whether no commit has taken a guard yet; it is made, and forgets itself after a while."""
    creation = operations.Creation(content_type=JSON, ttl_seconds=ADOPTED_TTL_S)
    yield from operations.create(settings, guard, creation)
    answer = yield from exchange(settings, Request("HEAD", stream_target(guard)), Kind.READ)
    return answer.response.integer("stream-version") == -1


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
    except TailMovedError:
        # Another target has adopted an event of this lease: it comes again, and is found taken.
        return LeaseAck(token=lease.token, at=lease.at)
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
