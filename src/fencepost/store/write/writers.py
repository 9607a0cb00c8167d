"""Writers, as they stand after all decisions made so far.

What is on disk lies in the table `writers`; what open groups change about it lies on top, so that a
batch may follow right behind the one before, or behind the run that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fencepost.protocol.writers import Writer
from fencepost.store.sql import Connection


class WritersGroup(Protocol):
    """A group as far as this module writes to it."""

    writers: dict[str, Writer | None]
    statements: list[tuple[str, tuple[object, ...]]]


class Writers:
    """The decided state of writers. `pending` are the groups not yet on disk, oldest first."""

    def __init__(self, connection: Connection, pending: Sequence[WritersGroup]) -> None:
        self._connection = connection
        self._pending = pending
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

    def forget(self, group: WritersGroup, name: str) -> None:
        """A writer goes."""
        group.writers[name] = None
        group.statements.append(("forget_writer", (name,)))
        self.count -= 1


def find_committed(connection: Connection, name: str) -> Writer | None:
    """A writer as it is on disk."""
    rows = connection.fetch("find_writer", (name,))
    return Writer(*rows[0]) if rows else None
