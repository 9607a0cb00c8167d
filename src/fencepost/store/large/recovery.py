"""Recovery: when a store opens, finish the large commit that was under way when it ended.

A commit that was certain is carried out from its slices on disk, before the first request; one that
was not certain has never happened. The watchers of streams are not there yet at that moment, so the
slices stay, marked, until the watchers are told: what they write then goes in the transaction that
drops the slices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fencepost.protocol.offsets import START
from fencepost.store.contract import Published, Watcher
from fencepost.store.database import Connection
from fencepost.store.large.copies import streams_at
from fencepost.store.large.slices import Slice, decode_slice
from fencepost.store.write.ledger import LedgerGroup, view_of

log = logging.getLogger(__name__)

UNDECIDED, CERTAIN, REDONE = 0, 1, 2
"""The states of a large commit on disk."""


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
