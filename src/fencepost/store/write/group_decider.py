"""Deciding requests about groups, with the rules of `protocol` on the rows as they are.

Each request is decided at once, in the one write path, and what it changes joins the open group of
the commit. So a claim sees every ack before it, two claims never get the same target, and a lease
is checked on the same state as the append that it fences.
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
from fencepost.protocol.grants import GROUPS
from fencepost.protocol.group_operations import (
    decide_defer,
    decide_park,
    decide_prioritize,
    decide_replay,
    decide_reset,
    decide_skip,
    decide_unblock,
    unparked_by_reset,
)
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
    DEFAULT_LANE,
    AckInvalid,
    BeyondHead,
    CorrelationDecision,
    CorrelationMoved,
    GroupGone,
    InboxHeld,
    InboxShared,
    LeaseLost,
    LeaseRef,
    Parked,
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
from fencepost.protocol.shares import PARKED_EVENTS, TARGETS, Amounts
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    AckRefused,
    Aside,
    Changed,
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
    TargetMissing,
)
from fencepost.store.write.groups import MESH, GroupChanges, Groups, WideLooks
from fencepost.store.write.sends import Meshes
from fencepost.store.write.usage import Usage

CANDIDATES_MIN, CANDIDATES_MAX = 1_000, 16_000
"""Rows that a claim looks at when its worker may not read every source: more and more of them, as
long as too few are of sources that it may read."""
AUDITED = frozenset(("unblock", "reset", "skip", "park"))
"""What operators do that the audit stream tells of."""
ASIDE_MAX = 1_000
"""Parked events of one target that a claim looks at, and rows that one request with a filter looks
through."""


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
        self._audit = audit
        self._wide_looks = WideLooks()

    def decide(self, request: GroupRequest) -> GroupOutcome:
        """What a request comes to."""
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
                return self._forget(group, request)
            case Operate() | ParkEvents():
                group = self._groups.find_group(request.group)
                if group is None:
                    return GroupMissing()
                outcome = self._operate(group, request)
                if isinstance(outcome, Changed) and outcome.targets:
                    self._tell(request, outcome)
                return outcome

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
            refused = self._take_share(outcome.group, {GROUPS_SHARE: 1})
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
        more = {TARGETS: max(0, outcome.group.targets_count - group.targets_count)}
        refused = self._take_share(group, more)
        if refused is not None:
            return refused
        changes = self._open_group()
        for row in outcome.rows.values():
            self._groups.save(changes, group.id, row)
        if outcome.group != group:
            self._groups.save_group(changes, outcome.group)
        return CorrelationDone(outcome.group)

    def _take_share(self, group: Group, more: Amounts) -> LimitExceeded | None:
        """Let the owner of a group take so much more; or why it may not."""
        if not group.owner or group.name.startswith(MESH):
            return None
        refused = self._ledger.usage.refuse(group.owner, more)
        if refused is None:
            self._ledger.usage.add(self._open_group(), group.owner, more)
        return refused

    def _parked_max(self, group: Group) -> int:
        """How many events a group may set aside: no more than now when its owner's share is used
        up."""
        if group.owner and not group.name.startswith(MESH):
            refused = self._ledger.usage.refuse(group.owner, {PARKED_EVENTS: 1})
            if refused is not None:
                return min(group.parked_count, self._limits.parked_max)
        return self._limits.parked_max

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
            group = self._recount(group._replace(lanes=lanes), targets=1)
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
        """What one ack comes to, on top of those before it in the request."""
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
                self._limits.parked_max if ack.failure is None else self._parked_max(group)
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
            if decision.row is None:
                group = self._drop(group, ref.target, ref.number)
            else:
                groups.save(changes, group.id, decision.row)
            for event in decision.parked:
                known = groups.find_parked(group.id, event.target, event.position)
                aside += known is None
                groups.save_parked(changes, group.id, event)
            for position in decision.handled:
                groups.drop_parked(changes, group.id, ref.target, position)
                aside -= 1
        return self._recount(group, parked=aside)

    def _drop(self, group: Group, target: str, token: int) -> Group:
        """Let the row of a target go, whose last number is known; the group as it then is."""
        changes, without = self._open_group(), group.without(token)
        self._groups.drop(changes, group.id, target)
        self._groups.save_group(changes, without)
        return without

    def _recount(self, group: Group, *, targets: int = 0, parked: int = 0) -> Group:
        if not targets and not parked:
            return group
        counted = group._replace(
            targets_count=group.targets_count + targets, parked_count=group.parked_count + parked
        )
        self._groups.save_group(self._open_group(), counted)
        if parked > 0 and group.owner and not group.name.startswith(MESH):
            self._ledger.usage.add(self._open_group(), group.owner, {PARKED_EVENTS: parked})
        return counted

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
        """What the acks of a commit come to, before anything of it is done."""
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

    # Operators

    def _tell(self, request: Operate | ParkEvents, changed: Changed) -> None:
        """Put what an operator did into the audit stream, in the same commit."""
        kind = "replay" if isinstance(request, ParkEvents) and request.replay else "park"
        if isinstance(request, Operate):
            kind = request.operation
        if request.principal is None or kind not in AUDITED:
            return
        self._audit(
            AuditEvent(
                kind=f"group_{kind}",
                at_ms=self._tick(),
                principal=request.principal,
                stream=f"{GROUPS}/{request.group}",
                producer="",
                old_epoch=None,
                new_epoch=0,
                holder="",
                reason=request.reason,
                targets=tuple(changed.targets),
            )
        )

    def _operate(
        self, group: Group, request: Operate | ParkEvents
    ) -> Changed | TargetMissing | BeyondHead | GroupInvalid | LimitExceeded:
        now_ms = self._tick()
        if isinstance(request, ParkEvents):
            return (
                self._replay(group, request, now_ms)
                if request.replay
                else self._park(group, request, now_ms)
            )
        head = self._ledger.next_position - 1
        if request.operation in ("reset", "skip") and request.at is not None and request.at > head:
            return BeyondHead(head)
        next_target = None
        if request.targets is None:
            rows_max = request.rows_max
            blocked = request.filter.blocked is True
            rows = self._groups.page(group.id, request.after, rows_max, blocked=blocked)
            next_target = rows[-1].target if len(rows) == rows_max else None
            rows = [
                row
                for row in rows
                if request.filter.matches(row.target, row.source, row.lane, blocked=row.blocked)
            ]
        else:
            rows = []
            for name in request.targets:
                row = self._groups.find(group.id, name)
                if row is None:
                    return TargetMissing(name)
                if request.operation == "skip" and request.at is None and row.failed is None:
                    return GroupInvalid(f"skip needs at: the target {name!r} failed on no event")
                rows.append(row)
        changed: list[str] = []
        for row in rows:
            after = _operated(group, row, request, now_ms)
            if after is not None:
                self._store_operated(group, request, after)
                changed.append(row.target)
        return Changed(changed, next_target)

    def _store_operated(self, group: Group, request: Operate, row: Target) -> None:
        changes, groups = self._open_group(), self._groups
        if request.operation == "reset":
            gone = self._parked_behind(group, row) if group.parked_count else []
            for event in gone:
                groups.drop_parked(changes, group.id, row.target, event.position)
            replayed = sum(event.replaying for event in gone)
            row = row._replace(replaying=max(0, row.replaying - replayed))
            current = groups.find_group(group.name) or group
            self._recount(current, parked=-len(gone))
        if group.settings.targets == "message" and not row.has_work:
            self._drop(groups.find_group(group.name) or group, row.target, row.token)
            return
        groups.save(changes, group.id, row)

    def _parked_behind(self, group: Group, row: Target) -> list[Parked]:
        """All parked events that a reset target gets again in its order, read page by page."""
        found: list[Parked] = []
        after = row.at
        while True:
            page = self._groups.parked_of(group.id, row.target, after, ASIDE_MAX)
            found += [event for event in page if unparked_by_reset(row, event)]
            if len(page) < ASIDE_MAX:
                return found
            after = page[-1].position

    def _park(
        self, group: Group, request: ParkEvents, now_ms: int
    ) -> Changed | TargetMissing | LimitExceeded:
        """Set events aside; a filter parks the event that each of its targets failed on."""
        events, following = list(request.events or ()), None
        if request.events is None:
            events, following = self._failed_events(group, request)
        # Every name is looked up before the first event is set aside: a refusal changes nothing.
        new = 0
        for name, position in dict.fromkeys(events):
            found = self._groups.find(group.id, name)
            if found is None:
                return TargetMissing(name)
            if decide_park(group, found, position=position, now_ms=now_ms) is not None:
                new += self._groups.find_parked(group.id, name, position) is None
        if group.parked_count + new > self._limits.parked_max:
            return LimitExceeded("parked_max", self._limits.parked_max)
        if new and group.owner and not group.name.startswith(MESH):
            refused = self._ledger.usage.refuse(group.owner, {PARKED_EVENTS: new})
            if refused is not None:
                return refused
        changed: list[str] = []
        for name, position in events:
            found = self._groups.find(group.id, name)
            if found is None:
                continue  # The row of a message went with the event before this one.
            group = self._groups.find_group(group.name) or group
            decision = decide_park(group, found, position=position, now_ms=now_ms)
            if decision is None:
                continue
            changes = self._open_group()
            known = self._groups.find_parked(group.id, name, position)
            row = decision.row
            self._groups.save_parked(changes, group.id, decision.event)
            group = self._recount(group, parked=known is None)
            if row is None:
                self._drop(group, name, found.token)
            else:
                self._groups.save(changes, group.id, row)
            changed.append(name)
        return Changed(changed, following, len(changed))

    def _failed_events(
        self, group: Group, request: ParkEvents
    ) -> tuple[list[tuple[str, int]], str | None]:
        """The events that targets failed on, piece by piece; the target to go on after."""
        blocked = request.filter.blocked is True
        page = self._groups.page(group.id, request.after[0], ASIDE_MAX, blocked=blocked)
        found: list[tuple[str, int]] = []
        for row in page:
            if row.failed is not None and request.filter.matches(
                row.target, row.source, row.lane, blocked=row.blocked
            ):
                found.append((row.target, row.failed))
                if len(found) == request.limit:
                    return found, row.target
        return found, page[-1].target if len(page) == ASIDE_MAX else None

    def _replay(self, group: Group, request: ParkEvents, now_ms: int) -> Changed | TargetMissing:
        """Have parked events given out again: those named, or some of those that a filter takes."""
        events: list[Parked] = []
        following = None
        if request.events is not None:
            for name, position in request.events:
                event = self._groups.find_parked(group.id, name, position)
                if event is None:
                    return TargetMissing(f"{name}@{position}")
                events.append(event)
        else:
            events, following = self._waiting_aside(group, request)
        changed: list[str] = []
        for event in events:
            row = self._groups.find(group.id, event.target)
            decision = decide_replay(group, row, event, now_ms=now_ms)
            if decision is None:
                continue
            changes = self._open_group()
            current = self._groups.find_group(group.name) or group
            if decision.event is None:
                self._groups.drop_parked(changes, group.id, event.target, event.position)
                current = self._recount(current, parked=-1)
            else:
                self._groups.save_parked(changes, group.id, decision.event)
            self._groups.save(changes, group.id, decision.row)
            if decision.row.lane not in current.lanes:
                current = current._replace(lanes=(*current.lanes, decision.row.lane))
            self._recount(current, targets=row is None)
            changed.append(event.target)
        return Changed(changed, following, len(changed))

    def _waiting_aside(self, group: Group, request: ParkEvents) -> tuple[list[Parked], str | None]:
        """Parked events that a filter takes, piece by piece; the place to go on after."""
        chosen = request.filter
        # Rows are looked up only where the filter asks what the event itself does not say.
        by_row = chosen.lane is not None or chosen.blocked is not None
        of_event = chosen._replace(lane=None, blocked=None)
        page = self._groups.parked_page(group.id, request.after, ASIDE_MAX)
        found: list[Parked] = []
        for event in page:
            if event.replaying or not of_event.matches(
                event.target, event.source, DEFAULT_LANE, blocked=False
            ):
                continue
            if by_row:
                row = self._groups.find(group.id, event.target)
                lane, blocked = (row.lane, row.blocked) if row else (DEFAULT_LANE, False)
                if not chosen.matches(event.target, event.source, lane, blocked=blocked):
                    continue
            found.append(event)
            if len(found) == request.limit:
                return found, f"{event.target}@{event.position}"
        if len(page) < ASIDE_MAX:
            return found, None
        return found, f"{page[-1].target}@{page[-1].position}"

    def _forget(self, group: Group, request: ForgetReplays) -> Changed:
        """Let parked events go that cannot be given out again."""
        changed: list[str] = []
        for name, position in request.events:
            event = self._groups.find_parked(group.id, name, position)
            if event is None or not event.replaying:
                continue
            group = self._groups.find_group(group.name) or group
            self._groups.drop_parked(self._open_group(), group.id, name, position)
            group = self._recount(group, parked=-1)
            changed.append(name)
            row = self._groups.find(group.id, name)
            if row is None:
                continue
            row = row._replace(replaying=max(0, row.replaying - 1), updated_ms=self._tick())
            is_message = group.settings.targets == "message"
            if is_message and row.worker is None and not row.has_work:
                self._drop(group, name, row.token)
            else:
                self._groups.save(self._open_group(), group.id, row)
        return Changed(changed, None, len(changed))


def _operated(group: Group, row: Target, request: Operate, now_ms: int) -> Target | None:
    match request.operation:
        case "unblock":
            return decide_unblock(row, now_ms=now_ms)
        case "reset":
            return decide_reset(group, row, at=request.at, now_ms=now_ms)
        case "defer":
            return decide_defer(row, until_ms=request.until_ms, now_ms=now_ms)
        case "prioritize":
            return decide_prioritize(row, priority=request.priority, now_ms=now_ms)
        case "skip":
            return decide_skip(row, position=request.at, now_ms=now_ms)
