"""Writers, as they stand after all decisions made so far.

What is on disk lies in the tables `writers` and `writer_history`; what open groups change about it
lies on top, so that a batch may follow right behind the one before, or behind the run that it
belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fencepost.protocol.writers import NextBatch, PositionRange, PublishedBatch, Writer
from fencepost.store.sql import Connection, Row

TRIM_BATCHES = 100
"""A history is cut to its size with every so many batches, because that costs more than a batch."""


class HistoryChanges:
    """What a group changes about the history of one writer."""

    __slots__ = ("batches", "dropped")

    def __init__(self) -> None:
        self.batches: dict[int, PublishedBatch] = {}
        self.dropped = False  # all that was published before this group is dropped


class WritersGroup(Protocol):
    """A group as far as this module writes to it."""

    writers: dict[str, Writer | None]
    histories: dict[str, HistoryChanges]
    statements: list[tuple[str, tuple[object, ...]]]


class Writers:
    """The decided state of writers. `pending` are the groups not yet on disk, oldest first."""

    def __init__(
        self, connection: Connection, pending: Sequence[WritersGroup], *, history_max: int
    ) -> None:
        self._connection = connection
        self._pending = pending
        self.history_max = history_max
        self._untrimmed: dict[str, int] = {}  # batches since the history was cut, by writer
        self._count: int | None = None

    def reset(self) -> None:
        """Forget everything that is not on disk; the next question counts again."""
        self._count = None

    @property
    def count(self) -> int:
        """How many there are."""
        if self._count is None:
            [(self._count,)] = self._connection.fetch("count_writers")
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        self._count = count

    def find(self, name: str) -> Writer | None:
        """A writer by its name."""
        for group in reversed(self._pending):
            if name in group.writers:
                return group.writers[name]
        return find_committed(self._connection, name)

    def save(self, group: WritersGroup, writer: Writer) -> None:
        """A writer is new, or another than it was."""
        self.count += self.find(writer.name) is None
        group.writers[writer.name] = writer
        group.statements.append(("save_writer", tuple(writer)))

    def find_batch(self, name: str, batch: int) -> PublishedBatch | None:
        """A batch in the history of a writer."""
        for group in reversed(self._pending):
            changes = group.histories.get(name)
            if changes is None:
                continue
            if batch in changes.batches:
                return changes.batches[batch]
            if changes.dropped:
                return None
        rows = self._connection.fetch("find_writer_batch", (name, batch))
        return published_batch(rows[0]) if rows else None

    def publish(self, group: WritersGroup, following: NextBatch) -> None:
        """A writer has published a batch."""
        writer, published = following
        name = writer.name
        self.save(group, writer)
        _changes(group, name).batches[published.batch] = published
        after, until = published.range or (None, None)
        row = (name, published.batch, after, until, published.digest, published.published_ms)
        group.statements.append(("save_writer_batch", row))
        # The first batch that this ledger sees trims as well: it does not know what came before.
        count = self._untrimmed.get(name, TRIM_BATCHES)
        if count >= TRIM_BATCHES and published.batch >= self.history_max:
            group.statements.append(("trim_writer_history", (name, self.history_max)))
            count = 0
        self._untrimmed[name] = count + 1

    def begin_anew(self, group: WritersGroup, writer: Writer) -> None:
        """Another query takes a name over: nothing that the old one published counts any more."""
        self.save(group, writer)
        self._drop_history(group, writer.name)

    def forget(self, group: WritersGroup, name: str) -> None:
        """A writer goes, and its history."""
        group.writers[name] = None
        group.statements.append(("forget_writer", (name,)))
        self._drop_history(group, name)
        self.count -= 1

    def _drop_history(self, group: WritersGroup, name: str) -> None:
        changes = _changes(group, name)
        changes.batches.clear()
        changes.dropped = True
        group.statements.append(("drop_writer_history", (name,)))
        self._untrimmed.pop(name, None)


def find_committed(connection: Connection, name: str) -> Writer | None:
    """A writer as it is on disk."""
    rows = connection.fetch("find_writer", (name,))
    return Writer(*rows[0]) if rows else None


def published_batch(row: Row) -> PublishedBatch:
    """A batch from the columns of its row."""
    batch, after, until, digest, published_ms = row
    read = None if until is None else PositionRange(after, until)
    return PublishedBatch(batch, read, digest, published_ms)


def _changes(group: WritersGroup, name: str) -> HistoryChanges:
    return group.histories.setdefault(name, HistoryChanges())
