"""Requests about groups and what comes of them: the store's contract for `/v1/groups`.

A request is decided in the one write path, with appends and commits, and its answer leaves when it
is durable. A request that names no group that exists comes to `GroupMissing`, and nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from fencepost.protocol.acks import Ack, AckItem
from fencepost.protocol.groups import (
    Filter,
    Group,
    GroupExists,
    GroupInvalid,
    GroupMade,
    GroupSettings,
    LimitExceeded,
)
from fencepost.protocol.leases import (
    BeyondHead,
    Claim,
    Claimed,
    Correlated,
    CorrelationMoved,
    InboxHeld,
    InboxShared,
    LeaseRef,
    Parked,
    Target,
)

# Requests


class MakeGroup(NamedTuple):
    """Make a group, or find the one that is there."""

    group: str
    settings: GroupSettings
    owner: str = ""


class DeleteGroup(NamedTuple):
    """Remove a group; its rows go in pieces, later."""

    group: str


class Correlate(NamedTuple):
    """Note which targets the events of a piece of the log concern."""

    group: str
    after: int
    until: int
    found: Sequence[Correlated]
    group_id: int | None = None
    """The incarnation of the group whose settings found the targets; None: any."""


class ClaimTargets(NamedTuple):
    """A worker asks for work."""

    group: str
    claim: Claim
    may_read: Callable[[str], bool] | None = None
    """Whether the worker may read a source; None: all of them."""
    principal: str = ""
    """The principal of the worker."""


class AckLeases(NamedTuple):
    """A worker ends leases, and perhaps asks for the next ones."""

    group: str
    items: Sequence[tuple[LeaseRef, Ack]]
    random: float
    """Spreads the waits before retries."""
    claim: ClaimTargets | None = None


class RenewLeases(NamedTuple):
    """A worker goes on, or gives back what it did not begin. `lease_ms` None: it gives back."""

    group: str
    leases: Sequence[LeaseRef]
    lease_ms: int | None


Operation = Literal["unblock", "reset", "defer", "prioritize", "skip"]


class Operate(NamedTuple):
    """An operator changes targets: those that are named, or a page of those that a filter takes."""

    group: str
    operation: Operation
    targets: Sequence[str] | None
    filter: Filter
    after: str = ""
    at: int | None = None
    until_ms: int = 0
    priority: int = 0
    rows_max: int = 500
    principal: str | None = None
    """Who asks, for the audit stream; None without authorization."""
    reason: str = ""


class ParkEvents(NamedTuple):
    """An operator sets events aside, or has parked ones given out again (`replay`)."""

    group: str
    replay: bool
    events: Sequence[tuple[str, int]] | None
    filter: Filter
    limit: int = 100
    principal: str | None = None
    reason: str = ""
    after: tuple[str, int] = ("", -1)
    """A filter goes on behind this target and position."""


class ForgetReplays(NamedTuple):
    """Parked events that were to be given out again are in the log no longer: they go."""

    group: str
    group_id: int
    events: Sequence[tuple[str, int]]


GroupRequest = (
    MakeGroup
    | DeleteGroup
    | Correlate
    | ClaimTargets
    | AckLeases
    | RenewLeases
    | Operate
    | ParkEvents
    | ForgetReplays
)

# What comes of them


class GroupMissing(NamedTuple):
    """No group has this name."""


class GroupDeleted(NamedTuple):
    """The group is gone, and its tokens with it."""


class TargetMissing(NamedTuple):
    """The group has no such target."""

    target: str


class CorrelationDone(NamedTuple):
    """The targets are stored, and the watermark has moved."""

    group: Group


class Aside(NamedTuple):
    """Parked events of a target that change what its lease brings."""

    replayed: tuple[int, ...] = ()
    """Positions of parked events that are given out again."""
    left_out: frozenset[int] = frozenset()
    """Positions of parked events within the range of the lease, which are not given out."""
    until: int | None = None
    """The last one that was looked at, where there may be more: the lease gets no event beyond."""
    notes: tuple[tuple[int, str], ...] = ()
    """The notes of those that are given out again."""


class ClaimDone(NamedTuple):
    """The leases that the worker has now."""

    group: Group
    leases: Sequence[Claimed]
    blocked: Sequence[Target]
    """Targets that were blocked on the way, because they lost too many workers."""
    due_ms: int | None
    """When the next target can be claimed, if none can be claimed now."""
    now_ms: int = 0
    aside: Sequence[Aside] = ()
    """For each lease; empty where no event of the group is parked."""


class AckDone(NamedTuple):
    """Every item, in the order of the request."""

    group: Group
    items: Sequence[AckItem]
    claimed: ClaimDone | None


class AckRefused(NamedTuple):
    """One item says what cannot be, so none was done."""

    item: int
    detail: str


class RenewDone(NamedTuple):
    """For each lease: its end, or None when it is lost. Leases that were given back end at 0."""

    until_ms: Sequence[int | None]


class Changed(NamedTuple):
    """How many rows an operation changed, and where to go on after, if there may be more: a target,
    or the target and the position of an event, with `@` between them."""

    targets: Sequence[str]
    next: str | None = None
    events: int = 0


GroupOutcome = (
    GroupMade
    | GroupExists
    | GroupInvalid
    | LimitExceeded
    | GroupMissing
    | GroupDeleted
    | TargetMissing
    | CorrelationDone
    | CorrelationMoved
    | BeyondHead
    | ClaimDone
    | InboxHeld
    | InboxShared
    | AckDone
    | AckRefused
    | RenewDone
    | Changed
)


# Reading: none of this takes a lease or waits for one


class EventSpan(NamedTuple):
    """The events that a lease is about: those of its source behind `after`, up to `until`."""

    source: str
    after: int
    until: int
    left_out: frozenset[int] = frozenset()
    """Positions that are parked."""
    replayed: tuple[int, ...] = ()
    """Parked positions that are given out again."""
    notes: tuple[tuple[int, str], ...] = ()
    """The notes of these."""
    told: tuple[int, str] | None = None
    """The group and the computed target of the lease, which gets only what it was told of."""


class Event(NamedTuple):
    """One message, as a worker gets it."""

    path: str
    stream: int
    content_type: str
    position: int
    start_bytes: int
    version: int
    at_ms: int
    producer: tuple[str, int, int] | None
    data: bytes
    replayed: bool = False
    note: str | None = None
    """The note that the target was told of it with."""


class SpanEvents(NamedTuple):
    """What a span holds: its first events, and how far the server has looked."""

    events: Sequence[Event]
    read_to: int
    pruned: tuple[int, int] | None = None
    """The first and the last position between which events are gone."""
    not_replayed: Sequence[int] = ()
    """Positions to be given out again that are gone."""
    untold_to: int | None = None
    """If it is not known which events behind `read_to` the target was told of: up to where."""


class Correlation(NamedTuple):
    """A piece of the log, and the targets that its events concern."""

    after: int
    until: int
    found: Sequence[Correlated]


class LaneStats(NamedTuple):
    """The targets of one lane."""

    lane: str
    idle: int = 0
    ready: int = 0
    leased: int = 0
    deferred: int = 0
    blocked: int = 0
    oldest: int | None = None
    """The oldest position that waits."""
    oldest_ms: int | None = None
    """When it was written."""
    lag: int = 0
    """Events that wait, at most: positions that concern no target may be among them."""


class WorkerRow(NamedTuple):
    """A worker and the leases that it holds."""

    worker: str
    leases: int
    first_end_ms: int
    last_end_ms: int


class GroupReads(Protocol):
    """Groups, their targets and events, as committed."""

    async def head(self) -> int:
        """The last position of the log that may be read."""
        ...

    async def find(self, name: str) -> Group | None:
        """A group by its name."""
        ...

    async def groups(self, after: str, limit: int) -> list[Group]:
        """A page of groups, by their names."""
        ...

    async def correlation(self, group: Group) -> Correlation | None:
        """The next piece of the log behind the group's watermark; None when there is none."""
        ...

    async def events(
        self, spans: Sequence[EventSpan], names: Sequence[str], *, events_max: int, bytes_max: int
    ) -> list[SpanEvents]:
        """The first events of each span."""
        ...

    async def targets(
        self, group_id: int, after: str, limit: int, *, blocked: bool
    ) -> list[Target]:
        """A page of targets, by their names; `blocked`: only such."""
        ...

    async def target(self, group_id: int, target: str) -> Target | None:
        """One target."""
        ...

    async def parked(self, group_id: int, after: tuple[str, int], limit: int) -> list[Parked]:
        """A page of parked events, by target and position."""
        ...

    async def workers(self, group_id: int, after: str, limit: int) -> list[WorkerRow]:
        """A page of workers that hold leases."""
        ...

    async def stats(self, group_id: int) -> list[LaneStats]:
        """How many targets are in which state, lane by lane."""
        ...

    async def told(self, group_id: int) -> int:
        """How many events computed targets were told of and have not got past."""
        ...
