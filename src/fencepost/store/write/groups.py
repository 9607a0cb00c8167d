"""Groups, their targets and parked events, as they stand after all decisions made so far.

What is on disk lies in the tables `groups`, `leases` and `parked` (and in `told`, see `told.py`);
what open groups of the commit change lies on top. There is no copy of all targets in memory: a row
is read when a request names it, and a claim reads the few rows that its order puts first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from fencepost.protocol.groups import Group, GroupSettings
from fencepost.protocol.leases import Parked, Slots, Target
from fencepost.store.sql import Connection, Row
from fencepost.store.write.told import ToldEvents, ToldGroup
from fencepost.store.write.usage import UsageGroup

MESH = "mesh:"
"""What the names of the groups of meshes begin with."""
LIVE, DELETED = 0, 1
IDLE, READY, DUE, BLOCKED = range(4)
"""States of a target's row: by what a claim finds it."""

_SETTINGS = msgspec.json.Decoder(GroupSettings)

LOOKS_KEPT = 1_024
"""Wide looks past which those that have waited long enough are forgotten."""
ROWS_PER_MS = 12
"""Rows of a wide look for which a millisecond is waited; 3 us each, it takes a twentieth."""


class GroupChanges(UsageGroup, ToldGroup, Protocol):
    """An open group of the commit, as far as this module writes to it."""

    groups: dict[int, Group | None]
    leases: dict[int, dict[str, Target | None]]
    parked: dict[tuple[int, str, int], Parked | None]


class GroupRows:
    """Finds rows of groups as they are on disk."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def group(self, name: str) -> Group | None:
        """A group by its name."""
        rows = self.connection.fetch("find_group", (name,))
        return group_from_row(rows[0]) if rows else None

    def target(self, group_id: int, target: str) -> Target | None:
        """The row of a target."""
        rows = self.connection.fetch("find_lease", (group_id, target))
        return target_from_row(rows[0]) if rows else None

    def in_order(
        self,
        group_id: int,
        lane: str,
        slots: Slots,
        now_ms: int,
        changed: Mapping[str, Target | None],
    ) -> Iterator[Target]:
        """The rows of a lane that a claim takes first, without those that changed since."""
        values = (group_id, lane)
        urgent, there_are_more = self._unchanged("claim_urgent", values, sum(slots), changed)
        rows = {row[0]: row for row in urgent}
        if there_are_more:
            # The oldest and the newest may be among the others.
            for query, count in (("claim_oldest", slots.fair), ("claim_newest", slots.leading)):
                found, _ = self._unchanged(query, values, count, changed)
                rows.update((row[0], row) for row in found)
        found, _ = self._unchanged("claim_due", (*values, now_ms), sum(slots), changed)
        rows.update((row[0], row) for row in found)
        return map(target_from_row, rows.values())

    def _unchanged(
        self,
        query: str,
        values: tuple[object, ...],
        wanted: int,
        changed: Mapping[str, Target | None],
    ) -> tuple[list[Row], bool]:
        """The first rows of a query that did not change since, and whether there may be more.

        Those that changed are as they were on disk, and are passed over. A claim that waits for its
        commit took the first ones, so about as many as are leased since are asked for beyond.
        """
        if not wanted:
            return [], True
        limit = wanted + sum(row is not None and row.worker is not None for row in changed.values())
        while True:
            found = self.connection.fetch(query, (*values, limit))
            rows = [row for row in found if row[0] not in changed]
            if len(rows) >= wanted or len(found) < limit:
                return rows[:wanted], len(found) == limit or len(rows) > wanted
            limit += len(changed)

    def due_in_order(self, group_id: int, lane: str, now_ms: int, rows_max: int) -> Sequence[Row]:
        """When rows come due, and whose they are."""
        return self.connection.fetch("next_due", (group_id, lane, now_ms, rows_max))

    def told_count(self, group_id: int) -> int:
        """How many events the targets of a group were told of and have not got past."""
        rows = self.connection.fetch("count_told", (group_id,))
        return int(rows[0][0]) if rows else 0

    def fetch(self, query: str, *values: object) -> list[Target]:
        """The targets that a query finds."""
        return [target_from_row(row) for row in self.connection.fetch(query, values)]


class WideLooks:
    """When claims of a principal may look again at many rows for those that it may read.

    Such a look holds up everything else. The next one of the same principal at the same group waits
    so long that they take a twentieth of the time.
    """

    def __init__(self) -> None:
        self._next_ms: dict[tuple[int, str], int] = {}

    def next_ms(self, group_id: int, principal: str) -> int:
        """From when on one may look."""
        return self._next_ms.get((group_id, principal), 0)

    def looked(self, group_id: int, principal: str, rows: int, now_ms: int) -> None:
        """One has looked at so many rows."""
        if len(self._next_ms) >= LOOKS_KEPT:
            self._next_ms = {key: at for key, at in self._next_ms.items() if at > now_ms}
        self._next_ms[group_id, principal] = now_ms + rows // ROWS_PER_MS


class Groups:
    """The decided state of groups. `pending` are the groups of the commit that are not on disk."""

    def __init__(self, rows: GroupRows, pending: Sequence[GroupChanges]) -> None:
        self._rows = rows
        self._pending = pending
        self.told = ToldEvents(rows, pending)

    @property
    def _connection(self) -> Connection:
        return self._rows.connection

    # Groups

    def find_group(self, name: str) -> Group | None:
        """A group by its name."""
        deleted: set[int] = set()
        for changes in reversed(self._pending):
            for group_id, group in changes.groups.items():
                if group is None:
                    deleted.add(group_id)
                elif group.name == name and group_id not in deleted:
                    return group
        found = self._rows.group(name)
        return None if found is None or found.id in deleted else found

    def count(self) -> int:
        """How many groups exist, without those of meshes."""
        [(count,)] = self._connection.fetch("count_groups")
        assert isinstance(count, int)
        known: dict[int, Group | None] = {}
        for changes in self._pending:
            known |= changes.groups
        for group_id, group in known.items():
            if group is not None and group.name.startswith(MESH):
                continue
            rows = self._connection.fetch("find_group_by_id", (group_id,))
            on_disk = bool(rows) and not rows[0][1].startswith(MESH)
            count += (group is not None) - on_disk
        return count

    def save_group(self, changes: GroupChanges, group: Group) -> None:
        """A group is new, or another than it was."""
        changes.groups[group.id] = group

    def delete_group(self, changes: GroupChanges, group: Group) -> None:
        """A group goes. Its rows stay for the upkeep: no request finds them without the group."""
        changes.groups[group.id] = None
        changes.leases.pop(group.id, None)
        changes.told.pop(group.id, None)
        for place in [place for place in changes.parked if place[0] == group.id]:
            del changes.parked[place]
        values = (*group_columns(group), DELETED)
        changes.bulk.append(("save_group", [values]))

    # Targets

    def find(self, group_id: int, target: str) -> Target | None:
        """The row of a target."""
        for changes in reversed(self._pending):
            rows = changes.leases.get(group_id)
            if rows is not None and target in rows:
                return rows[target]
        return self._rows.target(group_id, target)

    def save(self, changes: GroupChanges, group_id: int, row: Target) -> None:
        """A target is new, or another than it was."""
        changes.leases.setdefault(group_id, {})[row.target] = row

    def save_moved(self, changes: GroupChanges, group: Group, row: Target) -> None:
        """A target may have got past events."""
        self.save(changes, group.id, row)
        if group.settings.targets == "computed":
            self.told.passed(changes, group.id, row)

    def drop(self, changes: GroupChanges, group_id: int, target: str) -> None:
        """A target goes."""
        changes.leases.setdefault(group_id, {})[target] = None

    def candidates(self, group: Group, lane: str | None, slots: Slots, now_ms: int) -> list[Target]:
        """The rows that a claim may take, those first that its order puts first, and some more."""
        lanes = group.lanes if lane is None else (lane,)
        changed = self._changed(group.id)
        found: dict[str, Target] = {}
        for name in lanes:
            for row in self._rows.in_order(group.id, name, slots, now_ms, changed):
                found[row.target] = row
        own = [row for row in changed.values() if row is not None and row.is_claimable(now_ms)]
        return [*found.values(), *own]

    def _changed(self, group_id: int) -> dict[str, Target | None]:
        """The group's rows that are not on disk as they are."""
        changed: dict[str, Target | None] = {}
        for changes in self._pending:
            changed |= changes.leases.get(group_id, {})
        return changed

    def next_due_ms(self, group: Group, lane: str | None, now_ms: int) -> int | None:
        """When the next target can be claimed that cannot be claimed now."""
        changed = self._changed(group.id)
        dues = [
            row.due_ms
            for row in changed.values()
            if row is not None
            and lane in (None, row.lane)
            and state_of(row) == DUE
            and row.due_ms > now_ms
        ]
        for name in group.lanes if lane is None else (lane,):
            on_disk = self._rows.due_in_order(group.id, name, now_ms, len(changed) + 1)
            dues += [due_ms for due_ms, target in on_disk if target not in changed][:1]
        return min(dues, default=None)

    def page(self, group_id: int, after: str, rows_max: int, *, blocked: bool) -> list[Target]:
        """Targets in the order of their names; `blocked`: only such."""
        changed = self._changed(group_id)
        query = "blocked_leases_after" if blocked else "leases_after"
        found = {
            row.target: row
            for row in self._rows.fetch(query, group_id, after, rows_max + len(changed))
        }
        for target, row in changed.items():
            found.pop(target, None)
            if row is not None and target > after and (row.blocked or not blocked):
                found[target] = row
        return [found[target] for target in sorted(found)[:rows_max]]

    # Parked events

    def find_parked(self, group_id: int, target: str, position: int) -> Parked | None:
        """A parked event."""
        place = (group_id, target, position)
        for changes in reversed(self._pending):
            if place in changes.parked:
                return changes.parked[place]
        rows = self._connection.fetch("find_parked", place)
        return parked_from_row(rows[0]) if rows else None

    def parked_of(
        self, group_id: int, target: str, after: int, rows_max: int, *, replaying: bool = False
    ) -> list[Parked]:
        """The parked events of a target behind a position, in order; `replaying`: only those that
        are given out again."""
        changed: dict[int, Parked | None] = {}
        for changes in self._pending:
            for (owner, name, position), event in changes.parked.items():
                if owner == group_id and name == target:
                    changed[position] = event
        values = (group_id, target, after, rows_max + len(changed))
        query = "replaying_of_target" if replaying else "parked_of_target"
        rows = self._connection.fetch(query, values)
        found: dict[int, Parked | None] = {row[2]: parked_from_row(row) for row in rows}
        found |= changed
        return [
            event
            for _, event in sorted(found.items())
            if event is not None and event.position > after and (event.replaying or not replaying)
        ][:rows_max]

    def parked_page(self, group_id: int, after: tuple[str, int], rows_max: int) -> list[Parked]:
        """Parked events in the order of targets and positions."""
        changed: dict[tuple[str, int], Parked | None] = {}
        for changes in self._pending:
            for (owner, name, position), event in changes.parked.items():
                if owner == group_id:
                    changed[name, position] = event
        values = (group_id, *after, rows_max + len(changed))
        rows = self._connection.fetch("parked_after", values)
        found: dict[tuple[str, int], Parked | None] = {
            (row[0], row[2]): parked_from_row(row) for row in rows
        }
        found |= changed
        return [
            event for place, event in sorted(found.items()) if event is not None and place > after
        ][:rows_max]

    def save_parked(self, changes: GroupChanges, group_id: int, event: Parked) -> None:
        """An event is parked, or is parked otherwise than it was."""
        changes.parked[group_id, event.target, event.position] = event

    def drop_parked(self, changes: GroupChanges, group_id: int, target: str, position: int) -> None:
        """An event is parked no more."""
        changes.parked[group_id, target, position] = None

    # Committing

    def seal(self, changes: GroupChanges) -> None:
        """Take down the rows to write."""
        saved = [(*group_columns(group), LIVE) for group in changes.groups.values() if group]
        leases: list[Row] = []
        dropped: list[Row] = []
        for group_id, rows in changes.leases.items():
            for target, row in rows.items():
                if row is None:
                    dropped.append((group_id, target))
                else:
                    leases.append(target_columns(group_id, row))
        parked: list[Row] = []
        unparked: list[Row] = []
        for place, event in changes.parked.items():
            if event is None:
                unparked.append(place)
            else:
                parked.append((place[0], *event))
        for name, values in (
            ("save_group", saved),
            ("save_lease", leases),
            ("drop_lease", dropped),
            ("save_parked", parked),
            ("drop_parked", unparked),
        ):
            if values:
                changes.bulk.append((name, values))
        self.told.seal(changes)


def state_of(row: Target) -> int:
    """By what a claim finds a row."""
    if row.blocked:
        return BLOCKED
    if not row.has_work:
        return IDLE
    return DUE if row.due_ms > 0 else READY


def target_columns(group_id: int, row: Target) -> Row:
    """A target as its row on disk has it."""
    return (group_id, *row, state_of(row), row.due_ms)


def target_from_row(row: Row) -> Target:
    """A target from its row on disk, whose truths may be numbers."""
    return Target._make((*row[:12], bool(row[12]), *row[13:]))


def parked_from_row(row: Row) -> Parked:
    """A parked event from its row on disk."""
    found = Parked(*row)
    return found._replace(replaying=bool(found.replaying))


def group_columns(group: Group) -> Row:
    """A group as its row on disk has it."""
    return (
        group.id,
        group.name,
        msgspec.json.encode(group.settings).decode(),
        group.start,
        group.watermark,
        group.created_ms,
        group.owner,
        group.targets_count,
        group.parked_count,
        msgspec.json.encode(group.lanes).decode(),
        group.token_floor,
    )


def group_from_row(row: Row) -> Group:
    """A group from its row on disk."""
    group_id, name, settings, start, watermark, created_ms, owner, targets, parked, lanes, floor = (
        row
    )
    return Group(
        group_id,
        name,
        _SETTINGS.decode(settings),
        start,
        watermark,
        created_ms,
        owner,
        targets,
        parked,
        tuple(msgspec.json.decode(lanes)),
        floor,
    )
