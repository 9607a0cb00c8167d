"""Deciding requests about groups, with the rules of `protocol` on the rows as they are.

What workers ask is here, what operators ask in `group_operator.py`. Each request is decided at
once, in the one write path, and what it changes joins the open group of the commit. So a claim sees
every ack before it, two claims never get the same target, and a lease is checked on the same state
as the append that it fences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fencepost.protocol.acks import (
    Ack,
    AckDecision,
    AckItem,
    Lost,
    acked_item,
    check_ack,
    decide_ack,
)
from fencepost.protocol.claims import AuditEvent
from fencepost.protocol.commits import CommitLeaseLost
from fencepost.protocol.groups import (
    Group,
    GroupExists,
    GroupInvalid,
    GroupLimits,
    GroupMade,
    LimitExceeded,
    decide_group,
)
from fencepost.protocol.leases import (
    AckInvalid,
    BeyondHead,
    CorrelationDecision,
    CorrelationMoved,
    GroupGone,
    InboxHeld,
    InboxShared,
    LeaseLost,
    LeaseRef,
    Target,
    check_lease,
    decide_claim,
    decide_correlate,
    decide_release,
    decide_renew,
    decide_take,
    share_slots,
)
from fencepost.protocol.meshes import Policy
from fencepost.protocol.shares import GROUPS as GROUPS_SHARE
from fencepost.protocol.shares import TARGETS, TOLD_EVENTS
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    AckRefused,
    Aside,
    ClaimDone,
    ClaimTargets,
    Correlate,
    CorrelationDone,
    DeleteGroup,
    ForgetReplays,
    GroupDeleted,
    GroupMissing,
    GroupOutcome,
    GroupRequest,
    MakeGroup,
    Operate,
    ParkEvents,
    RenewDone,
    RenewLeases,
)
from fencepost.store.write.group_counts import GroupCounts
from fencepost.store.write.group_operator import GroupOperator
from fencepost.store.write.groups import MESH, GroupChanges, Groups, WideLooks
from fencepost.store.write.sends import Meshes
from fencepost.store.write.usage import Usage

CANDIDATES_MIN, CANDIDATES_MAX = 1_000, 16_000
"""Rows that a claim looks at when its worker may not read every source: more and more of them, as
long as too few are of sources that it may read."""
ASIDE_MAX = 1_000
"""Parked events of one target that a claim looks at."""


class Numbers(Protocol):
    """The ledger, as far as groups ask it."""

    groups: Groups
    meshes: Meshes
    usage: Usage
    next_position: int
    next_stream: int


class GroupDecider:
    """The decisions about groups of one store."""

    def __init__(
        self,
        ledger: Numbers,
        limits: GroupLimits,
        *,
        tick: Callable[[], int],
        open_group: Callable[[], GroupChanges],
        head: Callable[[], int],
        audit: Callable[[AuditEvent], None],
    ) -> None:
        self._ledger = ledger
        self._groups = ledger.groups
        self._limits = limits
        self._tick = tick
        self._open_group = open_group
        self._head = head
        self._counts = GroupCounts(ledger.groups, ledger.usage, limits, open_group)
        self._operator = GroupOperator(
            ledger.groups,
            ledger.usage,
            self._counts,
            limits,
            tick=tick,
            open_group=open_group,
            head=lambda: ledger.next_position - 1,
            audit=audit,
        )
        self._wide_looks = WideLooks()

    def decide(self, request: GroupRequest) -> GroupOutcome:
        """Decide a request."""
        match request:
            case MakeGroup():
                return self._make(request)
            case Correlate():
                return self._correlate(request)
            case DeleteGroup() | ClaimTargets() | AckLeases() | RenewLeases():
                group = self._groups.find_group(request.group)
                return GroupMissing() if group is None else self._work(group, request)
            case ForgetReplays():
                group = self._groups.find_group(request.group)
                if group is None or group.id != request.group_id:
                    return GroupMissing()
                return self._operator.forget(group, request)
            case Operate() | ParkEvents():
                group = self._groups.find_group(request.group)
                return GroupMissing() if group is None else self._operator.decide(group, request)

    # Making, deleting, correlating

    def _make(self, request: MakeGroup) -> GroupMade | GroupExists | GroupInvalid | LimitExceeded:
        now_ms = self._tick()
        current = self._groups.find_group(request.group)
        of_mesh = request.group.startswith(MESH)
        outcome = decide_group(
            current,
            request.group,
            request.settings,
            group_id=self._ledger.next_stream,
            # Groups of meshes are as many as these have members and queues, which are bounded.
            groups_count=0 if current is not None or of_mesh else self._groups.count(),
            limits=self._limits,
            head=self._head(),
            now_ms=now_ms,
            owner=request.owner,
        )
        if isinstance(outcome, GroupMade) and outcome.fresh:
            refused = self._counts.take_share(outcome.group, {GROUPS_SHARE: 1})
            if refused is not None:
                return refused
            # Incarnations of groups and of streams are numbered together: none comes back.
            self._ledger.next_stream += 1
            self._groups.save_group(self._open_group(), outcome.group)
        return outcome

    def _correlate(
        self, request: Correlate
    ) -> (
        CorrelationDone
        | CorrelationMoved
        | BeyondHead
        | GroupInvalid
        | LimitExceeded
        | GroupMissing
    ):
        now_ms = self._tick()
        group = self._groups.find_group(request.group)
        if group is None:
            return GroupMissing()
        if request.group_id not in (None, group.id):
            # The sources of an older group of the name found this: the new one looks for itself.
            return CorrelationMoved(group.watermark)
        rows: dict[str, Target] = {}
        # A message that lies behind the watermark has no row yet.
        if group.settings.targets != "message" and request.after == group.watermark:
            for name in {item.target for item in request.found}:
                row = self._groups.find(group.id, name)
                if row is not None:
                    rows[name] = row
        outcome = decide_correlate(
            group,
            rows,
            request.found,
            after=request.after,
            until=request.until,
            head=self._head(),
            targets_max=self._limits.group_targets_max,
            lanes_max=self._limits.lanes_max,
            now_ms=now_ms,
        )
        if not isinstance(outcome, CorrelationDecision):
            return outcome
        told_max = self._limits.told_max
        if outcome.told and self._groups.told.count(group.id) + len(outcome.told) > told_max:
            return LimitExceeded("told_max", told_max)
        more = {TARGETS: max(0, outcome.group.targets_count - group.targets_count)}
        if outcome.told:
            more[TOLD_EVENTS] = len(outcome.told)
        refused = self._counts.take_share(group, more)
        if refused is not None:
            return refused
        changes = self._open_group()
        for row in outcome.rows.values():
            self._groups.save(changes, group.id, row)
        self._groups.told.add(changes, group.id, outcome.told)
        if outcome.group != group:
            self._groups.save_group(changes, outcome.group)
        return CorrelationDone(outcome.group)

    # Workers

    def _work(
        self, group: Group, request: DeleteGroup | ClaimTargets | AckLeases | RenewLeases
    ) -> GroupDeleted | ClaimDone | InboxHeld | InboxShared | AckDone | AckRefused | RenewDone:
        match request:
            case DeleteGroup():
                self._tick()
                self._groups.delete_group(self._open_group(), group)
                return GroupDeleted()
            case ClaimTargets(claim=claim):
                return self._take(group, request) if claim.take else self._claim(group, request)
            case AckLeases():
                return self._ack(group, request)
            case RenewLeases():
                return self._renew(group, request)

    def _take(self, group: Group, request: ClaimTargets) -> ClaimDone | InboxHeld | InboxShared:
        """Give the inbox of a member to the worker that asks for it."""
        now_ms = self._tick()
        claim, may_read = request.claim, request.may_read
        [source] = group.settings.sources
        if may_read is not None and not may_read(source):
            return ClaimDone(group, (), (), None, now_ms)
        row = self._groups.find(group.id, source)
        mesh = self._ledger.meshes.find(group.name.split(":")[1])
        policy: Policy = "prefer_newest" if mesh is None else mesh.settings.default_policy
        current = row or Target(source, source, at=group.start, token=group.token_floor)
        decision = decide_take(current, claim, policy=policy, now_ms=now_ms)
        if isinstance(decision, InboxHeld | InboxShared):
            return decision
        for lease in decision.leases:
            self._groups.save(self._open_group(), group.id, lease.row)
        if row is None:
            lanes = (*group.lanes, current.lane) if current.lane not in group.lanes else group.lanes
            group = self._counts.recount(group._replace(lanes=lanes), targets=1)
        aside = [self._aside(group, lease.row) for lease in decision.leases]
        return ClaimDone(group, decision.leases, (), None, now_ms, aside)

    def _claim(self, group: Group, request: ClaimTargets) -> ClaimDone:
        now_ms = self._tick()
        claim, may_read = request.claim, request.may_read
        slots = share_slots(claim.streams_max, claim.lagging_share, claim.cycle)
        look_ms = None
        if may_read is None:
            found = self._groups.candidates(group, claim.lane, slots, now_ms)
        else:
            found, look_ms = self._readable(group, request, may_read, now_ms)
        decision = decide_claim(found, claim, lost_max=group.settings.lost_max, now_ms=now_ms)
        if decision.leases or decision.blocked:
            changes = self._open_group()
            for row in decision.blocked:
                self._groups.save(changes, group.id, row)
            for lease in decision.leases:
                self._groups.save(changes, group.id, lease.row)
        due_ms = None
        if not decision.leases:
            due_ms = self._groups.next_due_ms(group, claim.lane, now_ms)
            if look_ms is not None:
                due_ms = look_ms if due_ms is None else min(due_ms, look_ms)
        aside: list[Aside] = []
        if group.parked_count:
            aside = [self._aside(group, lease.row) for lease in decision.leases]
        return ClaimDone(group, decision.leases, decision.blocked, due_ms, now_ms, aside)

    def _readable(
        self, group: Group, request: ClaimTargets, may_read: Callable[[str], bool], now_ms: int
    ) -> tuple[list[Target], int | None]:
        """Candidates of sources that the worker may read, among many that it may not.

        With it, when to look at more of them; None when no more is to be found.
        """
        claim, owner = request.claim, request.principal
        looked_at, count, rows = -1, CANDIDATES_MIN, 0
        next_ms = self._wide_looks.next_ms(group.id, owner)
        while True:
            wide = share_slots(count, claim.lagging_share, claim.cycle)
            found = self._groups.candidates(group, claim.lane, wide, now_ms)
            readable = [row for row in found if may_read(row.source)]
            is_all = len(found) == looked_at
            rows += len(found)
            is_enough = len(readable) >= claim.streams_max or is_all or count >= CANDIDATES_MAX
            must_wait = not is_enough and now_ms < next_ms and rows > CANDIDATES_MIN // 2
            if is_enough or must_wait:
                if rows > CANDIDATES_MIN:
                    self._wide_looks.looked(group.id, owner, rows, now_ms)
                return readable, next_ms if must_wait else None
            looked_at, count = len(found), 4 * count

    def _aside(self, group: Group, row: Target) -> Aside:
        """The parked events that matter for a lease: those to replay, and those to leave out."""
        find, target = self._groups.parked_of, row.target
        replayed = find(group.id, target, -1, ASIDE_MAX, replaying=True) if row.replaying else []
        ahead = [] if row.at >= row.work_to else find(group.id, target, row.at, ASIDE_MAX)
        return Aside(
            tuple(event.position for event in replayed),
            frozenset(event.position for event in ahead),
            ahead[-1].position if len(ahead) == ASIDE_MAX else None,
            tuple((event.position, event.note) for event in replayed if event.note is not None),
        )

    def _ack(self, group: Group, request: AckLeases) -> AckDone | AckRefused:
        now_ms = self._tick()
        head = self._ledger.next_position - 1
        for index, (_, ack) in enumerate(request.items):
            refused = check_ack(ack, head=head)
            if refused is not None:
                return AckRefused(index, refused.detail)
        drafted: dict[str, Target | None] = {}
        decided: list[tuple[LeaseRef, AckDecision]] = []
        items: list[AckItem] = []
        parked = 0
        for index, (ref, ack) in enumerate(request.items):
            current = group._replace(parked_count=group.parked_count + parked)
            outcome = self._decide_ack(current, ref, ack, drafted, request.random, now_ms)
            if isinstance(outcome, AckInvalid):
                return AckRefused(index, outcome.detail)
            if isinstance(outcome, Lost):
                items.append(AckItem(ref.target, "lost", None))
                continue
            items.append(acked_item(ref.target, ack, outcome))
            drafted[ref.target] = outcome.row
            decided.append((ref, outcome))
            parked += outcome.outcome == "parked"
        group = self._apply_acks(group, decided)
        return AckDone(group, items, self._claim_after(group, request.claim, items))

    def _claim_after(
        self, group: Group, request: ClaimTargets | None, items: Sequence[AckItem]
    ) -> ClaimDone | None:
        """What a worker takes along with its acks."""
        if request is None:
            return None
        if not request.claim.take:
            return self._claim(group, request)
        if not any(item.outcome == "lost" for item in items):
            taken = self._take(group, request)
            if isinstance(taken, ClaimDone):
                return taken
        # An ack does not take back the inbox that another worker has by now.
        return ClaimDone(group, (), (), None)

    def _decide_ack(
        self,
        group: Group,
        ref: LeaseRef,
        ack: Ack,
        drafted: Mapping[str, Target | None],
        random: float,
        now_ms: int,
    ) -> AckDecision | Lost | AckInvalid:
        """Decide one ack, on top of those before it in the request."""
        row = drafted[ref.target] if ref.target in drafted else self._find(group, ref)
        known = {}
        for result in ack.replayed:
            event = self._groups.find_parked(group.id, ref.target, result.position)
            if event is not None:
                known[result.position] = event
        return decide_ack(
            group,
            row,
            ack,
            parked=known,
            parked_max=(
                self._limits.parked_max if ack.failure is None else self._counts.parked_max(group)
            ),
            head=self._ledger.next_position - 1,
            random=random,
            now_ms=now_ms,
        )

    def _find(self, group: Group, ref: LeaseRef) -> Target | None:
        """The row that a token speaks of; none in an earlier incarnation of the group."""
        return None if ref.group_id != group.id else self._groups.find(group.id, ref.target)

    def _apply_acks(self, group: Group, decided: Sequence[tuple[LeaseRef, AckDecision]]) -> Group:
        """Do what acks were decided to do; the group as it then is."""
        if not decided:
            return group
        changes, groups = self._open_group(), self._groups
        aside = 0
        for ref, decision in decided:
            parked = decision.parked
            if decision.row is None:
                group = self._counts.drop(group, ref.target, ref.number)
            else:
                parked = [self._counts.noted(group, event) for event in decision.parked]
                groups.save_moved(changes, group, decision.row)
            for event in parked:
                known = groups.find_parked(group.id, event.target, event.position)
                aside += known is None
                groups.save_parked(changes, group.id, event)
            for position in decision.handled:
                groups.drop_parked(changes, group.id, ref.target, position)
                aside -= 1
        return self._counts.recount(group, parked=aside)

    def _renew(self, group: Group, request: RenewLeases) -> RenewDone:
        now_ms = self._tick()
        ends: list[int | None] = []
        changes = None
        for ref in request.leases:
            row = self._find(group, ref)
            if request.lease_ms is None:
                after = decide_release(row, ref.number, now_ms=now_ms)
            else:
                after = decide_renew(row, ref.number, lease_ms=request.lease_ms, now_ms=now_ms)
            ends.append(None if after is None else after.lease_until_ms)
            if after is not None:
                changes = changes or self._open_group()
                self._groups.save(changes, group.id, after)
        return RenewDone(ends)

    # Fencing: leases as a condition of appends and commits

    def check(self, ref: LeaseRef) -> LeaseLost | GroupGone | None:
        """Whether a lease is lost that an append rests on."""
        group = self._groups.find_group(ref.group)
        if group is None:
            return GroupGone()
        return check_lease(group, self._find(group, ref), ref)

    def prepare(
        self, leases: Sequence[tuple[LeaseRef, Ack]], random: float
    ) -> list[tuple[LeaseRef, AckDecision]] | CommitLeaseLost:
        """Decide the acks of a commit, before anything of it is done."""
        now_ms = self._tick()
        decided: list[tuple[LeaseRef, AckDecision]] = []
        drafted: dict[tuple[int, str], dict[str, Target | None]] = {}
        parked: Counter[int] = Counter()
        for index, (ref, ack) in enumerate(leases):
            group = self._groups.find_group(ref.group)
            if group is None:
                return CommitLeaseLost(index, GroupGone())
            rows = drafted.setdefault((group.id, group.name), {})
            current = group._replace(parked_count=group.parked_count + parked[group.id])
            outcome = self._decide_ack(current, ref, ack, rows, random, now_ms)
            if isinstance(outcome, AckInvalid):
                return CommitLeaseLost(index, outcome)
            if isinstance(outcome, Lost):
                return CommitLeaseLost(index, LeaseLost())
            rows[ref.target] = outcome.row
            parked[group.id] += outcome.outcome == "parked"
            decided.append((ref, outcome))
        return decided

    def apply(self, decided: Sequence[tuple[LeaseRef, AckDecision]]) -> None:
        """Do what `prepare` has decided."""
        for ref, decision in decided:
            group = self._groups.find_group(ref.group)
            assert group is not None, "the lease was checked"
            self._apply_acks(group, [(ref, decision)])
