"""Columns of values as PostgreSQL's binary arrays, packed at once.

A batch of rows travels as one array for each column, of a type that the SQL names. Packing here
knows that type, so it neither looks at the values to find one out nor makes an object for each, and
a column of nulls is still a column of its type: the prepared statement stays the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.pq import Format

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
    """So many lengths and numbers in turn."""
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
"""Type by name: the class of a packed array, the number of its type and of its elements' type."""

ARRAY_TYPES: dict[type, int] = {kind: array_type for kind, array_type, _, _ in _KINDS.values()}
"""The number of its type by the class of a packed array."""

Packer = Callable[[Sequence[Any]], _Array]


def packer(type_name: str) -> Packer:
    """What packs values of a type, known by its name in SQL."""
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


def register(context: AdaptContext) -> None:
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
