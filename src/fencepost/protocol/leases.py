"""Leases: one row per target of a group, and the rules that move it.

A target is what a group hands out as one piece: a stream, a message, or whatever a worker computes.
`at` is the last position that was processed, `work_to` the newest position that concerns the
target; a target has work while `at` is below `work_to`, so no queue exists that could disagree with
the log. A claim gives a worker the lease of a target, and the lease has a number.

    claim       the number grows, worker and end are set
    renew       the end moves; the number stays, so appends in flight stay good
    ack         `at` moves forward, retry and lost begin again, the lease ends
    failure     retry grows, the target waits, the lease ends; or the target is blocked or parked
    release     the lease ends, nothing else
    (timeout)   nothing happens; the next claim counts `lost` and takes the target, or blocks it

A lease is current while its number is the row's and a worker holds it. Time alone never ends it: a
lease past its end that no other worker took still fits, so the fence needs no clock.

`decide_*` functions take rows and return the next ones, or why there are none. They change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fencepost.protocol.globs import ANY, Glob
from fencepost.protocol.groups import Group, GroupInvalid, LimitExceeded
from fencepost.protocol.meshes import Policy
from fencepost.protocol.timing import fence_fits, has_passed
from fencepost.protocol.told import Told

NOWHERE = -1
"""The position before the first one."""

SHARE_MIN, SHARE_MAX = 0.2, 0.8
SHARE_AT_FIRST = 0.5
"""The part of a claim that goes to lagging targets; the rest goes to leading ones."""

FAIR_PART = 4
"""One of so many lagging targets is taken for its age alone."""

SUSPECT_LOST = 2
"""A target that so many workers in a row let expire is claimed alone: if it kills its workers, the
targets that they hold beside it must not be blocked with it."""

DEFAULT_LANE = "default"


class Target(NamedTuple):
    """A row of a group."""

    target: str
    source: str
    """The stream whose events the target gets, or a glob of several."""
    lane: str = DEFAULT_LANE
    priority: int = 0
    at: int = NOWHERE
    work_to: int = NOWHERE
    waits_from: int = 0
    """No event before this position waits: where to begin reading, and how old the work is."""
    token: int = 0
    worker: str | None = None
    lease_until_ms: int = 0
    retry: int = 0
    lost: int = 0
    blocked: bool = False
    error: str | None = None
    failed: int | None = None
    """The position that failed last, as long as the target has not got past it."""
    deferred_until_ms: int = 0
    replaying: int = 0
    """Parked events that wait to be given out again."""
    updated_ms: int = 0

    @property
    def has_work(self) -> bool:
        return self.at < self.work_to or self.replaying > 0

    @property
    def due_ms(self) -> int:
        """When a claim may take the target; 0 is now. Says nothing about blocked targets."""
        held_ms = 0 if self.worker is None else self.lease_until_ms
        return max(held_ms, self.deferred_until_ms)

    def is_claimable(self, now_ms: int) -> bool:
        """Whether a claim may take the target now."""
        return self.has_work and not self.blocked and has_passed(self.due_ms, now_ms)

    def free(self, now_ms: int) -> Target:
        """The row without its lease. The number stays: it grows with the next claim."""
        return self._replace(worker=None, lease_until_ms=0, updated_ms=now_ms)

    def moved(self, at: int) -> Target:
        """The row with everything up to `at` processed; an older `at` moves nothing."""
        if at <= self.at:
            return self
        failed = None if self.failed is None or self.failed <= at else self.failed
        waits_from = max(self.waits_from, at + 1)
        return self._replace(at=at, waits_from=waits_from, retry=0, lost=0, failed=failed)

    def blocked_with(self, error: str, now_ms: int) -> Target:
        """The row blocked, out of every worker's reach."""
        return self.free(now_ms)._replace(token=self.token + 1, blocked=True, error=error)


class LeaseRef(NamedTuple):
    """What a token on the wire says, once its signature was checked."""

    group: str
    group_id: int
    target: str
    number: int


class Parked(NamedTuple):
    """An event that was set aside so that its target could go on."""

    target: str
    source: str
    position: int
    error: str
    attempts: int
    parked_ms: int
    replaying: bool = False
    note: str | None = None
    """The note that its computed target was told of it with."""


class LeaseLost(NamedTuple):
    """The lease is no longer current. It does not say who has the target now."""


class GroupGone(NamedTuple):
    """The token names a group that does not exist."""


class AckInvalid(NamedTuple):
    """An ack says what cannot be: 400 `ack_invalid`, and nothing of the request is done."""

    detail: str


LOST = LeaseLost()


def lease_is_current(row: Target | None, number: int) -> bool:
    """Whether the lease with this number still stands: the condition of acks and of appends."""
    return row is not None and row.worker is not None and fence_fits(row.token, number)


def check_lease(group: Group | None, row: Target | None, ref: LeaseRef) -> LeaseLost | None:
    """Whether a lease of this incarnation of the group is lost."""
    if group is None or group.id != ref.group_id or not lease_is_current(row, ref.number):
        return LOST
    return None


# Claims


class Claim(NamedTuple):
    """A worker asks for targets."""

    worker: str
    streams_max: int
    lease_ms: int
    lane: str | None = None
    lagging_share: float = SHARE_AT_FIRST
    cycle: int = 0
    """Counts the claims: very small ones take turns between oldest, most urgent and newest."""
    take: bool = False
    """Take the inbox of a member from the worker that holds it, and also when it is empty."""


class Claimed(NamedTuple):
    """A target that a claim takes: its row from now on, and in which share it was found."""

    row: Target
    leading: bool
    was_lost: bool = False
    """Whether another worker let its lease expire."""


class ClaimDecision(NamedTuple):
    """What a claim comes to."""

    leases: Sequence[Claimed]
    blocked: Sequence[Target]
    """Targets that lost too many workers. They are blocked instead of taken."""


class Slots(NamedTuple):
    """How many targets a claim takes for which reason."""

    fair: int
    urgent: int
    leading: int


_TURNS = (Slots(0, 1, 0), Slots(1, 0, 0), Slots(0, 1, 0), Slots(0, 0, 1))
"""A claim of fewer targets than there are reasons takes them one after the other."""


def share_slots(streams_max: int, lagging_share: float, cycle: int) -> Slots:
    """Divide a claim: for the oldest, for the most urgent, for the newest."""
    if streams_max < FAIR_PART:
        turns = [_TURNS[(cycle * streams_max + slot) % len(_TURNS)] for slot in range(streams_max)]
        return Slots(*(sum(column) for column in zip(*turns, strict=True)))
    share = min(max(lagging_share, SHARE_MIN), SHARE_MAX)
    lagging = min(max(round(streams_max * share), 2), streams_max - 1)
    fair = max(1, lagging // FAIR_PART)
    return Slots(fair, lagging - fair, streams_max - lagging)


def next_share(lagging_events: int, lagging: int, leading_events: int, leading: int) -> float:
    """The lagging share of the next claim, by how much work both kinds were found to have."""
    lagging_mean = lagging_events / lagging if lagging else 0.0
    leading_mean = leading_events / leading if leading else 0.0
    total = lagging_mean + leading_mean
    if total == 0:
        return SHARE_AT_FIRST
    return min(max(lagging_mean / total, SHARE_MIN), SHARE_MAX)


def _age(row: Target) -> tuple[int, str]:
    return row.waits_from, row.target


def _urgency(row: Target) -> tuple[int, int, str]:
    return -row.priority, row.waits_from, row.target


def decide_claim(
    candidates: Iterable[Target], claim: Claim, *, lost_max: int, now_ms: int
) -> ClaimDecision:
    """Which targets a worker gets. No worker ever waits for another one's lease here.

    The candidates may be more than the targets that can be taken, and of every lane. Expired leases
    are among them: taking one counts the worker that let it expire as lost.
    """
    takeable: list[Target] = []
    blocked: list[Target] = []
    for row in candidates:
        if not row.is_claimable(now_ms) or claim.lane not in (None, row.lane):
            continue
        counted = row if row.worker is None else row._replace(lost=row.lost + 1)
        if counted.lost > lost_max:
            blocked.append(counted.blocked_with(lost_error(counted.lost), now_ms))
        else:
            takeable.append(counted)
    chosen = _choose(takeable, share_slots(claim.streams_max, claim.lagging_share, claim.cycle))
    chosen = _apart(chosen, max(1, min(SUSPECT_LOST, lost_max)))
    until_ms = now_ms + claim.lease_ms
    leases = [
        Claimed(
            row._replace(
                token=row.token + 1,
                worker=claim.worker,
                lease_until_ms=until_ms,
                deferred_until_ms=0,
                updated_ms=now_ms,
            ),
            leading,
            row.worker is not None,
        )
        for row, leading in chosen
    ]
    return ClaimDecision(leases, blocked)


class InboxHeld(NamedTuple):
    """Another worker holds the inbox, and the mesh lets the older connection keep it."""


class InboxShared(NamedTuple):
    """The mesh is `allow_concurrent`: each worker reads the inbox from an offset of its own."""


def decide_take(
    row: Target, claim: Claim, *, policy: Policy, now_ms: int
) -> ClaimDecision | InboxHeld | InboxShared:
    """Give the one target of an inbox to a worker, whether there is work or not.

    The number of the lease grows, so the worker that had it before is fenced off.
    """
    if policy == "allow_concurrent":
        return InboxShared()
    held = row.worker not in (None, claim.worker) and not has_passed(row.lease_until_ms, now_ms)
    if held and policy == "prefer_oldest":
        return InboxHeld()
    if row.blocked:
        return ClaimDecision((), ())
    taken = row._replace(
        token=row.token + 1,
        worker=claim.worker,
        lease_until_ms=now_ms + claim.lease_ms,
        deferred_until_ms=0,
        updated_ms=now_ms,
    )
    return ClaimDecision((Claimed(taken, leading=False),), ())


def _choose(rows: list[Target], slots: Slots) -> list[tuple[Target, bool]]:
    if len(rows) <= sum(slots):
        return [(row, False) for row in sorted(rows, key=_age)]
    by_age = sorted(rows, key=_age)
    chosen = {row.target: (row, False) for row in by_age[: slots.fair]}
    for order, wanted, leading in (
        (sorted(rows, key=_urgency), slots.urgent, False),
        (by_age[::-1], slots.leading, True),
    ):
        size = len(chosen) + wanted
        for row in order:
            if len(chosen) == size:
                break
            chosen.setdefault(row.target, (row, leading))
    return list(chosen.values())


def _apart(chosen: list[tuple[Target, bool]], suspect_lost: int) -> list[tuple[Target, bool]]:
    """The targets of a claim, so that one which may kill its worker comes alone.

    The first one is the oldest, so a suspect has its turn when no older work is left.
    """
    if chosen and chosen[0][0].lost >= suspect_lost:
        return chosen[:1]
    return [(row, leading) for row, leading in chosen if row.lost < suspect_lost]


def lost_error(lost: int) -> str:
    """Why a target is blocked that no worker failed on."""
    return (
        f"{lost} workers in a row let the lease of this target expire: "
        "its events may kill them. Look at the next event, park or skip it, then unblock."
    )


def next_due_ms(rows: Iterable[Target], now_ms: int) -> int | None:
    """When the next of some rows can be claimed that cannot be claimed now."""
    waiting = (row.due_ms for row in rows if row.has_work and not row.blocked)
    return min((due_ms for due_ms in waiting if due_ms > now_ms), default=None)


# Renew, release


def decide_renew(row: Target | None, number: int, *, lease_ms: int, now_ms: int) -> Target | None:
    """The row with its lease running from now on; None: the lease is lost."""
    if row is None or not lease_is_current(row, number):
        return None
    until_ms = max(row.lease_until_ms, now_ms + lease_ms)
    return row._replace(lease_until_ms=until_ms, updated_ms=now_ms)


def decide_release(row: Target | None, number: int, *, now_ms: int) -> Target | None:
    """The row without its lease, so that the next claim takes it; None: the lease is lost."""
    if row is None or not lease_is_current(row, number):
        return None
    return row.free(now_ms)


# Correlation


class Correlated(NamedTuple):
    """An event at `position` concerns a target. A lane or priority of None leaves the row's."""

    target: str
    source: str
    position: int
    lane: str | None = None
    priority: int | None = None
    note: str | None = None
    """Tells a computed target of this event alone (`told.py`); None: of its source up to here."""


class CorrelationMoved(NamedTuple):
    """Another worker correlated meanwhile: the watermark is here."""

    watermark: int


class BeyondHead(NamedTuple):
    """The correlation names positions that the log does not have yet."""

    head: int


class CorrelationDecision(NamedTuple):
    """The group with its new watermark, and the rows that changed or are new."""

    group: Group
    rows: Mapping[str, Target]
    new: int
    told: Sequence[Told] = ()


def decide_correlate(
    group: Group,
    rows: Mapping[str, Target],
    found: Sequence[Correlated],
    *,
    after: int,
    until: int,
    head: int,
    targets_max: int,
    lanes_max: int,
    now_ms: int,
) -> CorrelationDecision | CorrelationMoved | BeyondHead | GroupInvalid | LimitExceeded:
    """Note what events from `after` to `until` concern. `rows` holds the rows that exist already.

    A compare-and-swap on the watermark: of two workers that read the same piece of the log, one
    stores it. The watermark never passes the head of the log, or events yet to come would be
    missed.
    """
    if until > head:
        return BeyondHead(head)
    if after != group.watermark:
        return CorrelationMoved(group.watermark)
    if until < after:
        return GroupInvalid(f"until is {until}, which lies before after, {after}")
    changed: dict[str, Target] = {}
    lanes = dict.fromkeys(group.lanes)
    new = 0
    told: list[Told] = []
    if group.settings.targets == "computed":
        found = sorted(found, key=_position)
    for item in found:
        if not after < item.position <= until:
            return GroupInvalid(
                f"the position {item.position} of target {item.target!r} does not lie after "
                f"{after} and up to {until}"
            )
        row = changed.get(item.target) or rows.get(item.target)
        if row is None:
            row = _new_row(group, item)
            new += 1
        elif row.source != item.source:
            source = wider(row.source, item.source)
            if source is None:
                return GroupInvalid(
                    f"the target {item.target!r} has the source {row.source!r}, not {item.source!r}"
                )
            row = row._replace(source=source)
        if item.note is not None:
            refused = _tell(group, row, item, told)
            if refused is not None:
                return refused
        row = _correlate(row, item, now_ms, is_first=item.target not in changed)
        lanes[row.lane] = None
        changed[item.target] = row
    if group.targets_count + new > targets_max:
        return LimitExceeded("group_targets_max", targets_max)
    if len(lanes) > lanes_max:
        return LimitExceeded("lanes_max", lanes_max)
    moved = group._replace(
        watermark=until, targets_count=group.targets_count + new, lanes=tuple(lanes)
    )
    return CorrelationDecision(moved, changed, new, told)


def _position(item: Correlated) -> int:
    return item.position


def _tell(group: Group, row: Target, item: Correlated, told: list[Told]) -> GroupInvalid | None:
    """Add what a target is told of; or why it cannot be told."""
    if group.settings.targets != "computed":
        return GroupInvalid(f"the target {item.target!r} has a note, and is not computed")
    if item.position <= row.work_to:
        return GroupInvalid(f"the target {item.target!r} is told of {item.position} twice")
    if item.position > row.at:
        assert item.note is not None
        covers_from = max(row.work_to, row.at) + 1
        told.append(Told(item.target, item.position, covers_from, item.note))
    return None


def wider(one: str, other: str) -> str | None:
    """The source that holds every stream of both; None when neither holds the other.

    A target that begins as a stream may get the events of other streams later. Its worker sorts out
    which of the wider source's events are for the target.
    """
    if ANY in (one, other):
        return ANY
    if Glob(one).matches(other):
        return one
    return other if Glob(other).matches(one) else None


def _new_row(group: Group, item: Correlated) -> Target:
    # A message is a target of its own: what lies before it in the stream is not its business.
    at = item.position - 1 if group.settings.targets == "message" else group.start
    return Target(item.target, item.source, at=at, token=group.token_floor)


def _correlate(row: Target, item: Correlated, now_ms: int, *, is_first: bool) -> Target:
    waits_from = row.waits_from
    # Between the first item and the others there may be events without an item. A target that
    # stands among them begins behind where it stands, and not at the next item.
    if is_first and row.at >= row.work_to:
        waits_from = max(item.position, row.at + 1)
    return row._replace(
        work_to=max(row.work_to, item.position),
        waits_from=waits_from,
        lane=row.lane if item.lane is None else item.lane,
        priority=row.priority if item.priority is None else item.priority,
        updated_ms=now_ms,
    )


def message_target(source: str, position: int) -> str:
    """The name of a message that is a target of its own."""
    return f"{source}@{position}"
