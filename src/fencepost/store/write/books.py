"""Books in the write path: which groups still need what an append of a commit would cut off.

The facts are rows: the last message of a stream before a place, the watermarks of all groups, the
row of each group whose target is the stream, and the first targets that wait for an event of it.
What open groups of the commit change lies on top of them, as everywhere in the write path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from fencepost.protocol.acks import AckDecision
from fencepost.protocol.batches import message_lengths
from fencepost.protocol.books import BooksCheck, BooksPending, group_lags, target_lags
from fencepost.protocol.globs import Glob
from fencepost.protocol.groups import POSITION_MAX, Group
from fencepost.protocol.leases import NOWHERE, LeaseRef, Target
from fencepost.protocol.offsets import Offset
from fencepost.store.records import MESSAGES
from fencepost.store.sql import Connection, Row
from fencepost.store.write.groups import (
    GroupChanges,
    Groups,
    group_from_row,
    target_from_row,
)

Place = tuple[int, str]
"""A row of a group: its number and the target."""


class LastRow(NamedTuple):
    """An append of a stream: where its messages lie."""

    position: int
    version: int
    start_bytes: int
    messages: int
    size: int
    lengths: bytes | None

    def last_before(self, before: Offset) -> int:
        """The position of its last message before a place."""
        return self.position + min(self.messages, before.messages - self.version) - 1

    def reaches(self, before: Offset) -> bool:
        """Whether a place lies in the append, or at its end."""
        return before.bytes <= self.start_bytes + self.size

    def has_place(self, before: Offset) -> bool:
        """Whether one of its messages ends at a place."""
        wanted, size = before.messages - self.version, before.bytes - self.start_bytes
        if wanted == self.messages:
            return size == self.size
        if self.lengths is None or not 0 < wanted < self.messages:
            return False
        lengths = message_lengths(self.messages, self.size, bytes(self.lengths))
        return sum(islice(lengths, wanted)) == size


class Waiting(NamedTuple):
    """A target that waits for events, and from which position on."""

    group_id: int
    target: str
    source: str
    waits_from: int


class BooksRows:
    """Finds what books need as it is on disk."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def last_row(self, stream_id: int, before_bytes: int) -> LastRow | None:
        """The last append of a stream that begins before a place."""
        rows = self.connection.fetch("last_append_before", (stream_id, before_bytes))
        return LastRow(*rows[0]) if rows else None

    def groups(self) -> list[Group]:
        """All groups."""
        return [group_from_row(row) for row in self.connection.fetch("every_group")]

    def named(self, path: str) -> Mapping[Place, Target]:
        """The rows whose target is a path, at most one of each group."""
        return named_from_rows(self.connection.fetch("leases_of_target", (path,)))

    def waiting(self, path: str, rows_max: int) -> Sequence[Waiting]:
        """Some targets with another name that wait for events of a stream, the oldest first."""
        rows = self.connection.fetch("waiting_on_source", (path, rows_max))
        return [Waiting(*row) for row in rows]

    def patterns(self, path: str) -> Sequence[Waiting]:
        """The target that has waited longest, for each pattern that begins as the path does."""
        found: list[Waiting] = []
        for low, high in pattern_ranges(path):
            rows = self.connection.fetch("waiting_on_patterns", (low, high))
            found += [Waiting(*row) for row in rows]
        return found


def named_from_rows(rows: Sequence[Row]) -> dict[Place, Target]:
    """Rows of targets by their places; the number of the group comes first in each."""
    return {(row[0], row[1]): target_from_row(row[1:]) for row in rows}


def pattern_ranges(path: str) -> list[tuple[str, str]]:
    """Where the patterns lie, in the order of texts, that may match a path.

    What a pattern has before its first star, the path begins with. `+` is the character after `*`.
    """
    return [(path[:end] + "*", path[:end] + "+") for end in range(len(path) + 1)]


class Changes(GroupChanges, Protocol):
    """An open group of the commit, as far as this module reads it."""

    rows: list[Row]

    @property
    def entries(self) -> Mapping[int, object]:
        """The streams that it changes, by their numbers."""
        ...


class Books:
    """Decides what books ask of groups, on the rows as they stand after all decisions so far."""

    def __init__(self, rows: BooksRows, groups: Groups, pending: Sequence[Changes]) -> None:
        self._rows = rows
        self._groups = groups
        self._pending = pending

    def last_row(self, stream_id: int, before: Offset) -> LastRow | None:
        """A stream's last own append that begins before a place."""
        for changes in reversed(self._pending):
            if stream_id not in changes.entries:
                continue
            for row in reversed(changes.rows):
                position, stream, kind, start_bytes, version, count, size, *_, lengths, _ = row
                if stream == stream_id and kind == MESSAGES and start_bytes < before.bytes:
                    return LastRow(position, version, start_bytes, count, size, lengths)
        return self._rows.last_row(stream_id, before.bytes)

    def last_position(self, stream_id: int, before: Offset) -> int:
        """The position of a stream's last own message before a place; -1: it has none."""
        row = self.last_row(stream_id, before)
        return NOWHERE if row is None else row.last_before(before)

    def pending(
        self, checks: Sequence[BooksCheck], acks: Sequence[tuple[LeaseRef, AckDecision]] = ()
    ) -> tuple[int, BooksPending] | None:
        """The first append that a group is not done with, and the group; `acks` count as done."""
        groups, changed = self._live_groups(), self._changed()
        for ref, decision in acks:
            changed[ref.group_id, ref.target] = decision.row
        for check in checks:
            lagging = self._lagging(groups, changed, check)
            if lagging is not None:
                return check.item, BooksPending(lagging.name)
        return None

    def _lagging(
        self,
        groups: Mapping[int, Group],
        changed: Mapping[Place, Target | None],
        check: BooksCheck,
    ) -> Group | None:
        path, last = check.path, check.last
        for group in groups.values():
            if group_lags(group, path, last):
                return group
        named = {at: row for at, row in self._rows.named(path).items() if at not in changed}
        for (group_id, target), row in (*named.items(), *changed.items()):
            if row is None or group_id not in groups:
                continue
            leaves_work = check.retires and target == path and row.has_work
            if leaves_work or target_lags(row, path, last):
                return groups[group_id]
        return None if last == NOWHERE else self._waiting(groups, changed, path, last)

    def _waiting(
        self,
        groups: Mapping[int, Group],
        changed: Mapping[Place, Target | None],
        path: str,
        last: int,
    ) -> Group | None:
        """A group one of whose targets, of any name, waits for an event up to `last`."""
        for found in self._rows.patterns(path):
            waits = found.group_id in groups and found.waits_from <= last
            if waits and Glob(found.source).matches(path):
                return groups[found.group_id]
        rows_max = len(changed) + 1
        while True:
            # Rows that changed, or whose group has just been deleted, may fill the first pages.
            page = self._rows.waiting(path, rows_max)
            for found in page:
                if found.waits_from > last:
                    return None
                if found.group_id in groups and (found.group_id, found.target) not in changed:
                    return groups[found.group_id]
            if len(page) < rows_max:
                return None
            rows_max *= 4

    def retire(self, checks: Sequence[BooksCheck], changes: GroupChanges) -> None:
        """Drop the rows whose target is a stream that is retired.

        A row with parked events stays: without it they could not be replayed.
        """
        paths = [check.path for check in checks if check.retires]
        if not paths:
            return
        groups = self._live_groups()
        for path in paths:
            for group_id in {at[0] for at in (*self._rows.named(path), *self._changed())}:
                group, row = groups.get(group_id), self._groups.find(group_id, path)
                if group is None or row is None:
                    continue
                if group.parked_count and self._groups.parked_of(group_id, path, NOWHERE, 1):
                    continue
                self._groups.drop(changes, group_id, path)
                if group.settings.targets == "computed":
                    self._groups.told.drop(changes, group_id, path, POSITION_MAX)
                groups[group_id] = group.without(row.token)
                self._groups.save_group(changes, groups[group_id])

    def _live_groups(self) -> dict[int, Group]:
        groups = {group.id: group for group in self._rows.groups()}
        for changes in self._pending:
            for group_id, group in changes.groups.items():
                if group is None:
                    groups.pop(group_id, None)
                else:
                    groups[group_id] = group
        return groups

    def _changed(self) -> dict[Place, Target | None]:
        """The rows of groups that are not on disk as they are."""
        changed: dict[Place, Target | None] = {}
        for changes in self._pending:
            for group_id, rows in changes.leases.items():
                for target, row in rows.items():
                    changed[group_id, target] = row
        return changed
