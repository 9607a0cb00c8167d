"""What operators ask of a group, decided on the rows as they are, whatever workers do meanwhile.

A request names targets or events, or a filter takes them piece by piece. What it changes joins the
open group of the commit, as what workers do does (`group_decider.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost.protocol.claims import AuditEvent
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
from fencepost.protocol.groups import Group, GroupInvalid, GroupLimits, LimitExceeded
from fencepost.protocol.leases import DEFAULT_LANE, BeyondHead, Parked, Target
from fencepost.protocol.shares import PARKED_EVENTS, TOLD_EVENTS
from fencepost.protocol.told import Told
from fencepost.store.group_contract import (
    Changed,
    ForgetReplays,
    Operate,
    ParkEvents,
    TargetMissing,
)
from fencepost.store.write.group_counts import GroupCounts
from fencepost.store.write.groups import MESH, GroupChanges, Groups
from fencepost.store.write.usage import Usage

AUDITED = frozenset(("unblock", "reset", "skip", "park"))
"""What operators do that the audit stream tells of."""
ROWS_MAX = 1_000
"""Rows that one request with a filter looks through."""


Operated = Changed | TargetMissing | BeyondHead | GroupInvalid | LimitExceeded


class GroupOperator:
    """Carries out the requests of operators."""

    def __init__(
        self,
        groups: Groups,
        usage: Usage,
        counts: GroupCounts,
        limits: GroupLimits,
        *,
        tick: Callable[[], int],
        open_group: Callable[[], GroupChanges],
        head: Callable[[], int],
        audit: Callable[[AuditEvent], None],
    ) -> None:
        self._groups = groups
        self._usage = usage
        self._counts = counts
        self._limits = limits
        self._tick = tick
        self._open_group = open_group
        self._head = head
        self._audit = audit

    def decide(self, group: Group, request: Operate | ParkEvents) -> Operated:
        """Decide a request of an operator."""
        outcome = self._operate(group, request)
        if isinstance(outcome, Changed) and outcome.targets:
            self._tell(request, outcome)
        return outcome

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

    def _operate(self, group: Group, request: Operate | ParkEvents) -> Operated:
        now_ms = self._tick()
        if isinstance(request, ParkEvents):
            return (
                self._replay(group, request, now_ms)
                if request.replay
                else self._park(group, request, now_ms)
            )
        head = self._head()
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
        gone: list[Parked] = []
        if request.operation == "reset":
            gone = self._parked_behind(group, row) if group.parked_count else []
            for event in gone:
                groups.drop_parked(changes, group.id, row.target, event.position)
            replayed = sum(event.replaying for event in gone)
            row = row._replace(replaying=max(0, row.replaying - replayed))
            current = groups.find_group(group.name) or group
            self._counts.recount(current, parked=-len(gone))
        if group.settings.targets == "message" and not row.has_work:
            self._counts.drop(groups.find_group(group.name) or group, row.target, row.token)
            return
        if request.operation not in ("reset", "skip"):
            groups.save(changes, group.id, row)
            return
        groups.save_moved(changes, group, row)
        # What a target was told of and has set aside is its own still, whatever code runs by now.
        again = [told for event in gone if (told := self._told_again(group, event))]
        groups.told.add(changes, group.id, again)
        if again and group.owner:
            self._usage.add(changes, group.owner, {TOLD_EVENTS: len(again)})

    def _told_again(self, group: Group, event: Parked) -> Told | None:
        """What lets a parked event come again in the order of its target."""
        if event.note is None or self._groups.told.find(group.id, event.target, event.position):
            return None  # The target has not got past it: it knows of the event.
        return Told(event.target, event.position, event.position, event.note)

    def _parked_behind(self, group: Group, row: Target) -> list[Parked]:
        """All parked events that a reset target gets again in its order, read page by page."""
        found: list[Parked] = []
        after = row.at
        while True:
            page = self._groups.parked_of(group.id, row.target, after, ROWS_MAX)
            found += [event for event in page if unparked_by_reset(row, event)]
            if len(page) < ROWS_MAX:
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
            refused = self._usage.refuse(group.owner, {PARKED_EVENTS: new})
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
            event = decision.event if known is None else decision.event._replace(note=known.note)
            self._groups.save_parked(changes, group.id, self._counts.noted(group, event))
            group = self._counts.recount(group, parked=known is None)
            if row is None:
                self._counts.drop(group, name, found.token)
            else:
                self._groups.save_moved(changes, group, row)
            changed.append(name)
        return Changed(changed, following, len(changed))

    def _failed_events(
        self, group: Group, request: ParkEvents
    ) -> tuple[list[tuple[str, int]], str | None]:
        """The events that targets failed on, piece by piece; the target to go on after."""
        blocked = request.filter.blocked is True
        page = self._groups.page(group.id, request.after[0], ROWS_MAX, blocked=blocked)
        found: list[tuple[str, int]] = []
        for row in page:
            if row.failed is not None and request.filter.matches(
                row.target, row.source, row.lane, blocked=row.blocked
            ):
                found.append((row.target, row.failed))
                if len(found) == request.limit:
                    return found, row.target
        return found, page[-1].target if len(page) == ROWS_MAX else None

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
                current = self._counts.recount(current, parked=-1)
            else:
                self._groups.save_parked(changes, group.id, decision.event)
            self._groups.save(changes, group.id, decision.row)
            if decision.row.lane not in current.lanes:
                current = current._replace(lanes=(*current.lanes, decision.row.lane))
            self._counts.recount(current, targets=row is None)
            changed.append(event.target)
        return Changed(changed, following, len(changed))

    def _waiting_aside(self, group: Group, request: ParkEvents) -> tuple[list[Parked], str | None]:
        """Parked events that a filter takes, piece by piece; the place to go on after."""
        chosen = request.filter
        # Rows are looked up only where the filter asks what the event itself does not say.
        by_row = chosen.lane is not None or chosen.blocked is not None
        of_event = chosen._replace(lane=None, blocked=None)
        page = self._groups.parked_page(group.id, request.after, ROWS_MAX)
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
        if len(page) < ROWS_MAX:
            return found, None
        return found, f"{page[-1].target}@{page[-1].position}"

    def forget(self, group: Group, request: ForgetReplays) -> Changed:
        """Let parked events go that cannot be given out again."""
        changed: list[str] = []
        for name, position in request.events:
            event = self._groups.find_parked(group.id, name, position)
            if event is None or not event.replaying:
                continue
            group = self._groups.find_group(group.name) or group
            self._groups.drop_parked(self._open_group(), group.id, name, position)
            group = self._counts.recount(group, parked=-1)
            changed.append(name)
            row = self._groups.find(group.id, name)
            if row is None:
                continue
            row = row._replace(replaying=max(0, row.replaying - 1), updated_ms=self._tick())
            is_message = group.settings.targets == "message"
            if is_message and row.worker is None and not row.has_work:
                self._counts.drop(group, name, row.token)
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
