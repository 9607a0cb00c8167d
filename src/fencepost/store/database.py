"""The interface of a database connection: named queries, and transactions.

Each store brings its own SQL under the same names, so that the code that decides, reads and
maintains is written once. A connection is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

Row = tuple[Any, ...]
Values = Sequence[object] | Mapping[str, object]


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
