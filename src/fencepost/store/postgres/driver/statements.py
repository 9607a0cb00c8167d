"""Named SQL made ready for PostgreSQL: values numbered, arrays known by their types.

In the files a value is `:name` or `$1`; here it is always a number. A value that the SQL casts to
an array is packed as one (`arrays.py`). A statement that unnests its values is written for many
rows: it takes a column of values for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from fencepost.store.database import Row, Values
from fencepost.store.postgres.driver.arrays import Packer, packer
from fencepost.store.sql import load_queries

QUERIES: dict[str, str] = {}
for _file in (
    "queries",
    "keys",
    "logs",
    "lists",
    "retention",
    "subscriptions",
    "turns",
    "leading",
    "large",
    "others",
):
    _queries = load_queries("fencepost.store.postgres", f"{_file}.sql")
    assert not QUERIES.keys() & _queries.keys(), f"{_file}.sql uses a name again"
    QUERIES |= _queries

# A name behind one colon: two of them are a cast.
_NAME = re.compile(r"(?<!:):([a-z_]+)")
_ARRAY = re.compile(r"\$(\d+)::(\w+)\[\]")


class Statement(NamedTuple):
    """A statement as PostgreSQL takes it."""

    text: bytes
    names: tuple[str, ...]  # of its values, in the order of their numbers; none when they have none
    packers: Mapping[int, Packer]  # of those values that are arrays
    by_columns: bool  # it unnests its values

    def values(self, given: Values) -> Sequence[Any]:
        """The values in order, ready to be sent."""
        if isinstance(given, Mapping):
            given = [given[name] for name in self.names]
        if not self.packers:
            return given
        packed: list[Any] = list(given)
        for place, pack in self.packers.items():
            value = packed[place]
            # What the engine's own queries have as an array is JSON: the embedded store takes that.
            packed[place] = pack(json.loads(value) if isinstance(value, str) else value)
        return packed

    def columns(self, rows: Sequence[Row]) -> Sequence[Any]:
        """Rows of values turned into the columns that the statement takes."""
        columns = list(zip(*rows, strict=True))
        assert len(columns) == len(self.packers), "a row has a value for each column"
        return [self.packers[place](column) for place, column in enumerate(columns)]


@cache
def statement(query: str, rows: str | None = None) -> Statement:
    """A named query, over the rows that the query called `rows` selects."""
    text = QUERIES[query]
    if rows is not None:
        text = text.replace("/*rows*/", QUERIES[rows])
    return prepare(text)


def prepare(text: str) -> Statement:
    """SQL with its values numbered."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = _NAME.sub(number, text)
    packers = {int(place) - 1: packer(kind) for place, kind in _ARRAY.findall(text)}
    return Statement(text.encode(), tuple(names), packers, "unnest(" in text)
