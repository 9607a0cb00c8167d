"""What every engine says of its schema: where it stands, and which steps are still to be made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Step(NamedTuple):
    """One migration: its number, its name, and what it runs."""

    number: int
    name: str
    sql: str


class Schema(NamedTuple):
    """The version that the data has, the newest that this version knows, and the way there."""

    current: int
    newest: int
    pending: tuple[Step, ...]

    @property
    def is_older(self) -> bool:
        return bool(self.pending)


def schema_at(current: int, migrations: Iterable[tuple[int, str, str]]) -> Schema:
    """Where data of the version `current` stands among all migrations, which are in order."""
    steps = [Step(*migration) for migration in migrations]
    pending = tuple(step for step in steps if step.number > current)
    return Schema(current, steps[-1].number, pending)
