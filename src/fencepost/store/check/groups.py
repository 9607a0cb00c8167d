"""Groups, their targets, parked events and what targets were told of: what must hold in the tables.

The rows of a group that was deleted are removed in pieces by the upkeep, so of them only the group
itself must exist. Of a live group every row must agree with itself, with the log, and with what the
group's row counts. Rows come in the order of their groups, and memory is bounded by the number of
groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Target, wider
from fencepost.store.check.report import Report, Rows
from fencepost.store.sql import Row
from fencepost.store.write.groups import DELETED, group_from_row, state_of, target_from_row

_GROUP_COLUMNS = 11
_TARGET_COLUMNS = 18


class GroupCheck:
    """The groups of one database. `next_position` and `last_ms` are its counters."""

    def __init__(self, report: Report, rows: Rows, next_position: int, last_ms: int) -> None:
        self._report = report
        self._rows = rows
        self._head = next_position - 1
        self._last_ms = last_ms
        self._groups: dict[int, Group] = {}
        self._ended: set[int] = set()
        """Groups whose rows say nothing: they were deleted, or their own row cannot be read."""
        self._targets: Counter[int] = Counter()
        self._parked: Counter[int] = Counter()

    @property
    def newest(self) -> int:
        """The highest number that a group has; streams and groups are numbered together."""
        return max([*self._groups, *self._ended], default=0)

    def run(self) -> None:
        """Look at all of them."""
        self._load()
        for row in self._rows("leases"):
            self._check_target(row)
        for row in self._rows("parked_events"):
            self._check_parked(row)
        for group in self._groups.values():
            self._check_counts(group)
        self._report.counts["groups"] = len(self._groups)
        self._report.counts["targets"] = self._targets.total()

    def floors(self) -> None:
        """Where the numbers of new rows begin, in databases that have it."""
        for group_id, name, floor in self._rows("group_floors"):
            if floor < 0:
                detail = f"new rows begin at number {floor}"
                self._report.add("group_count_wrong", f"group {group_id} ({name})", detail)

    def told(self) -> None:
        """What computed targets were told of, in databases that have it."""
        found: Counter[int] = Counter()
        before: tuple[int, str, int] = (0, "", 0)
        for group_id, target, position, covers_from, work_to in self._rows("told"):
            found[group_id] += 1
            where = f"event {position} that target {target} of group {group_id} was told of"
            group = self._owner(group_id, where)
            if group is None:
                continue
            low = before[2] + 1 if before[:2] == (group_id, target) else 0
            before = (group_id, target, position)
            add = self._report.add
            if group.settings.targets != "computed" or work_to is None:
                add("told_without_target", where, "there is no such computed target")
            elif not low <= covers_from <= position <= work_to:
                detail = f"covers from {covers_from}, the one before from {low}, work to {work_to}"
                add("told_wrong", where, detail)
        counted: dict[int, int] = dict(self._rows("told_counts"))
        for group in self._groups.values():
            said = counted.get(group.id, 0)
            if said != found[group.id]:
                where = f"group {group.id} ({group.name})"
                detail = f"says its targets were told of {said} events, there are {found[group.id]}"
                self._report.add("group_count_wrong", where, detail)

    # Groups

    def _load(self) -> None:
        names: set[str] = set()
        for row in self._rows("groups"):
            group_id, name = row[:2]
            where = f"group {group_id} ({name})"
            if row[_GROUP_COLUMNS] == DELETED:
                self._ended.add(group_id)
                continue
            try:
                group = group_from_row(row[:_GROUP_COLUMNS])
            except msgspec.DecodeError as error:
                self._report.add("group_unreadable", where, f"its row cannot be read: {error}")
                self._ended.add(group_id)
                continue
            self._groups[group_id] = group
            if name in names:
                self._report.add("group_taken_twice", where, "another group has this name too")
            names.add(name)
            if not -1 <= group.start <= group.watermark <= self._head:
                self._report.add(
                    "watermark_wrong",
                    where,
                    f"begins at {group.start}, knows the targets up to {group.watermark},"
                    f" the log ends at {self._head}",
                )
            if group.created_ms > self._last_ms:
                detail = f"made {group.created_ms}, now {self._last_ms}"
                self._report.add("group_time_wrong", where, detail)

    def _check_counts(self, group: Group) -> None:
        where = f"group {group.id} ({group.name})"
        for what, said, found in (
            ("targets", group.targets_count, self._targets[group.id]),
            ("parked events", group.parked_count, self._parked[group.id]),
        ):
            if said != found:
                detail = f"says {said} {what}, there are {found}"
                self._report.add("group_count_wrong", where, detail)
        if len(set(group.lanes)) != len(group.lanes):
            detail = f"a lane comes twice: {', '.join(group.lanes)}"
            self._report.add("group_count_wrong", where, detail)

    def _owner(self, group_id: int, where: str) -> Group | None:
        """The live group of a row; None where there is none, or nothing to compare with."""
        group = self._groups.get(group_id)
        if group is None and group_id not in self._ended:
            self._report.add("lease_without_group", where, f"there is no group {group_id}")
        return group

    # Targets

    def _check_target(self, row: Row) -> None:
        group_id, *columns = row
        target = target_from_row(tuple(columns[:_TARGET_COLUMNS]))
        state, due_ms, replaying = columns[_TARGET_COLUMNS:]
        where = f"target {target.target} of group {group_id}"
        group = self._owner(group_id, where)
        if group is None:
            return
        self._targets[group_id] += 1
        for code, detail in self._wrong_with(group, target):
            self._report.add(code, where, detail)
        if target.replaying != replaying:
            detail = f"says that {target.replaying} parked events are replayed, {replaying} are"
            self._report.add("replaying_wrong", where, detail)
        if (state, due_ms) != (state_of(target), target.due_ms):
            detail = (
                f"claims find it as state {state}, due at {due_ms};"
                f" it is {state_of(target)}, due at {target.due_ms}"
            )
            self._report.add("lease_state_wrong", where, detail)

    def _wrong_with(self, group: Group, row: Target) -> Iterator[tuple[str, str]]:
        """What does not hold in the row of one target, each with its code."""
        if not -1 <= row.at <= self._head or row.work_to > group.watermark:
            yield (
                "lease_position_wrong",
                f"at {row.at} with work to {row.work_to}, the targets are known up to"
                f" {group.watermark}, the log ends at {self._head}",
            )
        elif row.at < row.work_to and not row.at < row.waits_from <= row.work_to:
            yield (
                "lease_position_wrong",
                f"at {row.at} with work to {row.work_to}, read from {row.waits_from}",
            )
        if row.failed is not None and not row.at < row.failed <= row.work_to:
            yield (
                "lease_position_wrong",
                f"failed at {row.failed}, at {row.at} with work to {row.work_to}",
            )
        if (row.worker is None) != (row.lease_until_ms == 0):
            yield "lease_wrong", f"worker {row.worker}, held until {row.lease_until_ms}"
        if row.token < (row.worker is not None or row.blocked):
            yield "lease_wrong", f"number {row.token}, and it was claimed or blocked"
        if min(row.retry, row.lost, row.replaying, row.deferred_until_ms) < 0:
            yield (
                "lease_wrong",
                f"retry {row.retry}, lost {row.lost}, replaying {row.replaying}, deferred until"
                f" {row.deferred_until_ms}",
            )
        if row.blocked and (row.worker is not None or row.error is None):
            yield "blocked_wrong", f"blocked with worker {row.worker} and error {row.error!r}"
        if row.lane not in group.lanes:
            yield "lane_unknown", f"in lane {row.lane}, which its group does not know"
        if row.updated_ms > self._last_ms:
            yield "group_time_wrong", f"changed {row.updated_ms}, now {self._last_ms}"

    # Parked events

    def _check_parked(self, row: Row) -> None:
        group_id, name, position, source, attempts, parked_ms, replaying, of_source, work_to = row
        where = f"parked event {position} of target {name} of group {group_id}"
        group = self._owner(group_id, where)
        if group is None:
            return
        self._parked[group_id] += 1
        add = self._report.add
        if work_to is None:
            # The row of a message goes when the message is parked, and comes back for a replay.
            if group.settings.targets != "message" or replaying:
                add("parked_without_target", where, "its target does not exist")
            work_to = group.watermark
        elif wider(source, of_source) != of_source:
            # The source of a computed target may have grown since.
            add("parked_wrong", where, f"of {source}, the target is of {of_source}")
        if not 0 <= position <= work_to or position > self._head:
            add("parked_wrong", where, f"work reaches {work_to}, the log ends at {self._head}")
        if attempts < 0:
            add("parked_wrong", where, f"{attempts} attempts")
        if parked_ms > self._last_ms:
            add("group_time_wrong", where, f"parked {parked_ms}, now {self._last_ms}")
