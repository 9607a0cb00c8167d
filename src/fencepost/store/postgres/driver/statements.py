"""Named SQL made ready for PostgreSQL: values numbered, columns of values packed as binary arrays.

In the files a value is `:name` or `$1`; here it is always a number. A statement that unnests its
values is written for many rows: it takes a column of values for each. A batch of rows then travels
as one array for each column, of the type that the SQL names. Because that type is known, packing
neither looks at the values to find one out nor makes an object for each, and a column of nulls is
still a column of its type: the prepared statement stays the same. A statement with its values is a
parcel, which a pipeline sends.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.pq import Format

from fencepost.store.sql import Row, Values, load_store_queries

QUERIES = load_store_queries(
    "fencepost.store.postgres",
    (
        "queries",
        "keys",
        "logs",
        "lists",
        "retention",
        "subscriptions",
        "groups",
        "meshes",
        "books",
        "turns",
        "leading",
        "large",
        "others",
    ),
)

# A name behind one colon: two of them are a cast.
_NAME = re.compile(r"(?<!:):([a-z_]+)")
_ARRAY = re.compile(r"\$(\d+)::(\w+)\[\]")


Packer = Callable[[Sequence[Any]], "_Array"]
"""Packs a column of values."""


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
            # Queries that both stores share pass an array as JSON, which SQLite takes.
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


# Arrays as PostgreSQL sends them in binary

_HEADER = struct.Struct(">iiIii")
_EMPTY = struct.Struct(">iiI")
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)
_TRUE, _FALSE = b"\x00\x00\x00\x01\x01", b"\x00\x00\x00\x01\x00"


class _Array(bytes):
    """An array, packed."""

    __slots__ = ()


class BigintArray(_Array):
    """bigint[]"""


class TextArray(_Array):
    """text[]"""


class ByteaArray(_Array):
    """bytea[]"""


class BooleanArray(_Array):
    """boolean[]"""


# Each of these packs the elements of an array, of which none is null.


def _bigints(values: Sequence[Any]) -> bytes:
    numbers = [8] * (2 * len(values))
    numbers[1::2] = values
    return _pairs(len(values)).pack(*numbers)


@lru_cache(maxsize=1024)
def _pairs(count: int) -> struct.Struct:
    """`count` pairs of a length and a number."""
    return struct.Struct(">" + "iq" * count)


def _byteas(values: Sequence[Any]) -> bytes:
    pieces: list[Any] = [b""] * (2 * len(values))
    pieces[::2] = map(_LENGTH.pack, map(len, values))
    pieces[1::2] = values
    return b"".join(pieces)


def _texts(values: Sequence[Any]) -> bytes:
    return _byteas([value.encode() for value in values])


def _booleans(values: Sequence[Any]) -> bytes:
    return b"".join([_TRUE if value else _FALSE for value in values])


_KINDS: dict[str, tuple[type[_Array], int, int, Callable[[Sequence[Any]], bytes]]] = {
    "bigint": (BigintArray, 1016, 20, _bigints),
    "text": (TextArray, 1009, 25, _texts),
    "bytea": (ByteaArray, 1001, 17, _byteas),
    "boolean": (BooleanArray, 1000, 16, _booleans),
}
"""By the name of a type: the class of a packed array, PostgreSQL's number of the array's type, that
of its elements' type, and what packs the elements."""

ARRAY_TYPES: dict[type, int] = {kind: array_type for kind, array_type, _, _ in _KINDS.values()}
"""PostgreSQL's number of the type, by the class of a packed array."""


def packer(type_name: str) -> Packer:
    """The function that packs values of a type, which is given by its name in SQL."""
    kind, _, element, pack_elements = _KINDS[type_name]
    empty = kind(_EMPTY.pack(0, 0, element))

    def pack(values: Sequence[Any]) -> _Array:
        count = len(values)
        if not count:
            return empty
        nulls_count = values.count(None)
        header = _HEADER.pack(1, nulls_count > 0, element, count, 1)
        if not nulls_count:
            return kind(header + pack_elements(values))
        if nulls_count == count:
            return kind(header + _NULL * count)
        pieces = [_NULL if value is None else pack_elements((value,)) for value in values]
        return kind(header + b"".join(pieces))

    return pack


def register_arrays(context: AdaptContext) -> None:
    """Let a connection send packed arrays."""
    adapters = context.adapters
    assert adapters is not None
    for kind, array_oid, _, _ in _KINDS.values():
        adapters.register_dumper(kind, _dumper(array_oid))


@lru_cache
def _dumper(array_oid: int) -> type[Dumper]:
    class PackedDumper(Dumper):
        format = Format.BINARY
        oid = array_oid

        def dump(self, obj: bytes) -> bytes:
            return obj

    return PackedDumper


# Statements with their values

_bigint = struct.Struct(">q").pack

Query = tuple[str, Sequence[Any]]
"""The name of a query, and its values, of which none is an array."""


class Parcel(NamedTuple):
    """A statement and its values, ready to be sent."""

    text: bytes
    types: tuple[int, ...]
    values: list[bytes | None]


def packed(text: bytes, values: Sequence[Any]) -> Parcel:
    """A statement with values that are numbers, texts, bytes, truths or packed arrays."""
    types: list[int] = []
    sent: list[bytes | None] = []
    for value in values:
        kind = type(value)
        array_type = ARRAY_TYPES.get(kind)
        if array_type is not None:
            types.append(array_type)
            sent.append(value)
        elif value is None:
            types.append(0)
            sent.append(None)
        elif kind is int:
            types.append(20)
            sent.append(_bigint(value))
        elif kind is str:
            types.append(25)
            sent.append(value.encode())
        elif kind is bool:
            types.append(16)
            sent.append(b"\x01" if value else b"\x00")
        else:
            types.append(17)
            sent.append(bytes(memoryview(value)))
    return Parcel(text, tuple(types), sent)


def asked(queries: Iterable[Query]) -> list[Parcel]:
    """Named queries with their values."""
    found = [(statement(name), values) for name, values in queries]
    return [packed(query.text, query.values(values)) for query, values in found]


def parcels(statements: Iterable[tuple[str, Sequence[Row]]]) -> Iterator[Parcel]:
    """Named statements with all their rows: those over arrays once, others for each row."""
    for name, rows in statements:
        found = statement(name)
        if found.by_columns:
            yield packed(found.text, found.columns(rows))
        else:
            for row in rows:
                yield packed(found.text, found.values(row))
