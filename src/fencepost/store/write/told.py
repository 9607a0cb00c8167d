"""What computed targets were told of, as it stands after all decisions made so far.

The rows lie in the table `told`. What open groups of the commit change lies on top: the rows that
are new, and for each target the position up to which all rows that were there before are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fencepost.protocol.leases import NOWHERE, Target
from fencepost.protocol.told import Told
from fencepost.store.sql import Connection, Row


class ToldChanges:
    """What an open group changes of one target."""

    __slots__ = ("passed", "rows")

    def __init__(self) -> None:
        self.passed = NOWHERE
        self.rows: dict[int, Told] = {}


class ToldGroup(Protocol):
    """An open group of the commit, as far as this module writes to it."""

    told: dict[int, dict[str, ToldChanges]]
    bulk: list[tuple[str, list[Row]]]


class ToldRows(Protocol):
    """Finds what is on disk."""

    @property
    def connection(self) -> Connection: ...

    def told_count(self, group_id: int) -> int:
        """How many rows a group has."""
        ...


class ToldEvents:
    """The decided state. `pending` are the groups of the commit that are not on disk."""

    def __init__(self, rows: ToldRows, pending: Sequence[ToldGroup]) -> None:
        self._rows = rows
        self._pending = pending

    def find(self, group_id: int, target: str, position: int) -> Told | None:
        """Whether a target was told of an event and has not got past it, and with which note."""
        for changes in reversed(self._pending):
            changed = changes.told.get(group_id, {}).get(target)
            if changed is None:
                continue
            if position in changed.rows:
                return changed.rows[position]
            if position <= changed.passed:
                return None
        rows = self._rows.connection.fetch("find_told", (group_id, target, position))
        return Told(*rows[0]) if rows else None

    def count(self, group_id: int) -> int:
        """How many there are of a group, at most: what is not on disk yet takes nothing away."""
        pending = sum(
            len(changed.rows)
            for changes in self._pending
            for changed in changes.told.get(group_id, {}).values()
        )
        return self._rows.told_count(group_id) + pending

    def add(self, changes: ToldGroup, group_id: int, told: Iterable[Told]) -> None:
        """Targets are told of events."""
        for one in told:
            self._changed(changes, group_id, one.target).rows[one.position] = one

    def passed(self, changes: ToldGroup, group_id: int, row: Target) -> None:
        """A target is processed up to where it stands."""
        self.drop(changes, group_id, row.target, row.at)

    def drop(self, changes: ToldGroup, group_id: int, target: str, until: int) -> None:
        """What a target was told of up to a position goes."""
        changed = self._changed(changes, group_id, target)
        changed.passed = max(changed.passed, until)
        if changed.rows:
            changed.rows = {at: one for at, one in changed.rows.items() if at > until}

    def _changed(self, changes: ToldGroup, group_id: int, target: str) -> ToldChanges:
        rows = changes.told.setdefault(group_id, {})
        found = rows.get(target)
        if found is None:
            found = rows[target] = ToldChanges()
        return found

    def seal(self, changes: ToldGroup) -> None:
        """Take down the rows to write: what goes before what comes."""
        gone: list[Row] = []
        new: list[Row] = []
        for group_id, targets in changes.told.items():
            for target, changed in targets.items():
                if changed.passed > NOWHERE:
                    gone.append((group_id, target, changed.passed))
                new += [(group_id, *one) for one in changed.rows.values()]
        for name, rows in (("drop_told", gone), ("save_told", new)):
            if rows:
                changes.bulk.append((name, rows))
