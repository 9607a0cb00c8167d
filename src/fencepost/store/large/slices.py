"""Slices: what a part of a large commit writes, as rows that need no more deciding.

A slice is a sealed group of a ledger of its own. It is kept on disk until it is carried out. After
a crash between two slices the next start carries out the rest: it writes the rows of the slices,
and needs no other state for that.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fencepost.store.database import Row
from fencepost.store.records import producer_columns
from fencepost.store.write.ledger import LedgerGroup

_INSERT_ID, _INSERT_PATH = 12, 13
"""Where these are among the values of `insert_stream`."""


class Slice(msgspec.Struct, array_like=True):
    """Rows for the tables, in the order of the statements that write them."""

    updates: list[Row]
    inserts: list[Row]
    log: list[Row]
    producers: list[Row]
    keys: list[Row]
    statements: list[tuple[str, Row]]
    is_last: bool

    @property
    def rows_count(self) -> int:
        return (
            len(self.updates)
            + len(self.inserts)
            + len(self.log)
            + len(self.producers)
            + len(self.keys)
            + len(self.statements)
        )

    def made(self) -> list[Made]:
        """The streams that the slice makes."""
        return [Made(row[_INSERT_ID], row[_INSERT_PATH]) for row in self.inserts]

    def encode(self) -> bytes:
        """As it is kept on disk."""
        return _ENCODER.encode(self)


class Made(NamedTuple):
    """A stream that a large commit makes."""

    id: int
    path: str


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Slice)


def slice_of(sealed: LedgerGroup, *, is_last: bool) -> Slice:
    """What a sealed group writes, but for the counters."""
    return Slice(
        sealed.updates,
        sealed.inserts,
        sealed.rows,
        [
            producer_columns(stream_id, producer)
            for (stream_id, _), producer in sealed.producers.items()
        ],
        sealed.key_rows,
        sealed.statements,
        is_last,
    )


def decode_slice(content: bytes) -> Slice:
    """A slice as it was kept."""
    return _DECODER.decode(content)
