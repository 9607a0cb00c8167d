"""SQL: what a connection can do, named queries in files, and numbered migrations.

Each store brings its own SQL under the same names, so that the code that decides, reads and
maintains is written once against `Connection`. A query lives in a .sql file under the line
`-- name: some_name`; comment lines below that line describe it. What both databases understand word
for word is in `shared.sql`. A migration is a file of its own, named `0001_first.sql` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

Row = tuple[Any, ...]
Values = Sequence[object] | Mapping[str, object]

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


class Connection(Protocol):
    """One connection to the database of a store."""

    @property
    def after_every_text(self) -> str | bytes:
        """A value that the database orders behind every text."""
        ...

    def fetch(self, query: str, values: Values = (), *, rows: str | None = None) -> list[Row]:
        """All rows of a named query, over the rows that the query called `rows` selects."""
        ...

    def execute(self, query: str, values: Values = ()) -> int:
        """Carry out a named statement; how many rows it changed."""
        ...

    def execute_many(self, query: str, rows: Sequence[Row]) -> None:
        """Carry out a named statement for each of these values."""
        ...

    def __enter__(self) -> Self:
        """Begin a transaction: one view of the database for what is read in it, and for what is
        written all or nothing."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None: ...


def load_queries(package: str, file: str) -> dict[str, str]:
    """The queries of one file, by name."""
    text = resources.files(package).joinpath(file).read_text()
    parts = _NAME.split(text)[1:]
    names = parts[::2]
    assert len(set(names)) == len(names), f"a query name is used twice in {file}"
    return {name: _statement(body) for name, body in zip(names, parts[1::2], strict=True)}


def load_store_queries(package: str, files: Iterable[str]) -> dict[str, str]:
    """The queries that both databases share, and those that a store has in its own files."""
    found = load_queries("fencepost.store", "shared.sql")
    for file in files:
        queries = load_queries(package, f"{file}.sql")
        assert not found.keys() & queries.keys(), f"{file}.sql uses a name again"
        found |= queries
    return found


def load_migrations(package: str) -> list[tuple[int, str, str]]:
    """The migrations of a package in order: number, name, SQL."""
    found = []
    for entry in resources.files(package).iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append((int(match[1]), match[2], entry.read_text()))
    return sorted(found)


def _statement(body: str) -> str:
    lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
    return "\n".join(lines).strip().rstrip(";")


class SchemaTooNewError(Exception):
    """The data was written by a newer Fencepost: run that version, or restore a backup."""


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
