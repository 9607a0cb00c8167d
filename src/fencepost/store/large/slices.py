"""Slices: what a part of a large commit writes, as rows that need no more deciding.

A slice is a sealed group of a ledger of its own. It is kept on disk until it is carried out. A
store that ended between two slices finishes the commit when it opens again, before its first
request: it writes the rows of the remaining slices, and needs no other state for that. A commit
that was not yet certain has never happened. No watcher of streams runs at that moment, so the
slices stay, marked, until the watchers are told: what they write then goes in the transaction that
drops the slices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from fencepost.protocol.checksums import with_checksum
from fencepost.protocol.offsets import START
from fencepost.store.contract import Published, Watcher
from fencepost.store.large.copies import streams_at
from fencepost.store.records import producer_columns
from fencepost.store.sql import Connection, Row
from fencepost.store.write.ledger import view_of
from fencepost.store.write.ledger_group import LedgerGroup

log = logging.getLogger(__name__)

UNDECIDED, CERTAIN, REDONE = 0, 1, 2
"""The states of a large commit on disk."""
_INSERT_ID, _INSERT_PATH, _OWNER = 12, 13, 21
_CHECKSUM = 16
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
        """The slice as the bytes that are kept on disk."""
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
    decoded = _DECODER.decode(content)
    # A server of the version before wrote neither checksums nor the owners of streams.
    decoded.log = [with_checksum(row) if len(row) == _CHECKSUM else row for row in decoded.log]
    decoded.inserts = [(*row, "") if len(row) == _OWNER else row for row in decoded.inserts]
    return decoded


def tell_made(watcher: Watcher, piece: Slice) -> None:
    """Tell a watcher of the streams that a slice makes, while its group is open."""
    for made in piece.made():
        watcher.created(made.id, made.path, START)


def redo(connection: Connection, write: Callable[[Slice], object]) -> None:
    """Finish what is certain and drop what is not; `write` puts rows into the tables."""
    for first, _, state in connection.fetch("large_commits"):
        if state == UNDECIDED:
            with connection:
                connection.execute("drop_slices", (first,))
                connection.execute("end_large", (first,))
        elif state == CERTAIN:
            log.warning("finishing a large commit at position %d that was under way", first)
            _finish(connection, first, write)
    # A server that ended while it dropped the slices of a refused commit may have left some.
    connection.execute("drop_stray_slices")


def _finish(connection: Connection, first: int, write: Callable[[Slice], object]) -> None:
    # No reader may see a part of it: the positions are held back until the last slice is in.
    while found := connection.fetch("next_slice", (first, 0)):
        [(number, content)] = found
        piece = decode_slice(content)
        with connection:
            write(piece)
            connection.execute("mark_slice", (first, number))
            if piece.is_last:
                connection.execute("turn_large", (REDONE, first))


def tell_redone(
    state: Connection,
    group: LedgerGroup,
    watcher: Watcher,
    published: Callable[[list[Published]], None],
) -> None:
    """Tell a watcher of what was finished at this start; `group` is open, and drops it."""
    for first, _, reached in state.fetch("large_commits"):
        if reached != REDONE:
            continue
        for (number,) in state.fetch("some_slices", (first, -1)):
            [(content,)] = state.fetch("slice_at", (first, number))
            piece = decode_slice(content)
            tell_made(watcher, piece)
            paths = [made.path for made in piece.made()]
            infos = [view_of(stream) for stream in streams_at(state, paths)]
            published([Published(info, info.tail, None) for info in infos])
            group.statements.append(("drop_slice", (first, number)))
        group.statements.append(("end_large", (first,)))
