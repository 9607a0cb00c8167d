"""Which rows of the log an answer is made of, block by block until it is full.

That depends on the selection: all of a range, or those of a part (`Span`); those of the selected
streams, which are looked for in each block as it comes (`Search`); or, for a few streams in a long
log, only those that the index by stream names (`Positions`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from fencepost.protocol.limits import Limits
from fencepost.protocol.logs import Part, Selection
from fencepost.store.database import Connection
from fencepost.store.log_contract import LogQuery, Named
from fencepost.store.read.log_selection import (
    SHORT_RANGE,
    STREAMS_MAX,
    Found,
    Source,
    first_place,
    in_range,
    resolve,
    row_start,
    run,
    streams_between,
)

BLOCK_POSITIONS = 8_192
"""Positions that are looked at together."""
SEARCH_POSITIONS = 65_536
"""Positions after which a search that has found something comes back with it."""


class Span:
    """The rows of a range, and how far up they answer for every position."""

    block_positions = BLOCK_POSITIONS
    enough_positions = 2**53
    """Positions after which to come back with what there is."""

    def __init__(self, low: int, high: int, part: Part | None = None) -> None:
        self.low = low
        self.high = high
        self.names: dict[int, Named] = {}
        """All streams that have rows here, if they are known."""
        self._part = part

    def block(self, low: int, high: int) -> Source | None:
        """The rows of a block; None when there are none."""
        return in_range(low, high, self._part)

    def of(self, positions: Sequence[int]) -> Source:
        """These rows, which are all that the blocks had from the first to the last of them."""
        return in_range(positions[0], positions[-1], self._part)


class Search(Span):
    """The rows of streams that are found on the way."""

    enough_positions = SEARCH_POSITIONS

    def __init__(self, connection: Connection, low: int, high: int, selection: Selection) -> None:
        super().__init__(low, high, selection.part)
        self._connection = connection
        self._selection = selection
        self._are_all = True

    def block(self, low: int, high: int) -> Source | None:
        found = streams_between(self._connection, self._selection, low, high)
        self.names |= found.names
        self._are_all = self._are_all and found.are_all
        return found.source(low, high, self._part) if found.names else None

    def of(self, positions: Sequence[int]) -> Source:
        found = Found(self.names, self._are_all)
        return found.source(positions[0], positions[-1], self._part)


class Positions(Span):
    """Rows that are known by their positions."""

    block_positions = 2**53

    def __init__(self, low: int, high: int, positions: Sequence[int]) -> None:
        super().__init__(low, high)
        self._positions = positions

    def block(self, low: int, high: int) -> Source:
        assert (low, high) == (self.low, self.high)
        return self.of(self._positions)

    def of(self, positions: Sequence[int]) -> Source:
        return Source("source_positions", {"positions": json.dumps(list(positions))})


def choose(connection: Connection, query: LogQuery, low: int, until: int, limits: Limits) -> Span:
    """How to look for what a reader wants."""
    selection = query.selection
    first = row_start(connection, low)
    high = min(until, low + limits.log_scan_max - 1)
    if not selection.by_path:
        return Span(first, high, selection.part)
    if until - low >= SHORT_RANGE:
        ids = resolve(connection, selection, STREAMS_MAX)
        if ids is not None:
            return _by_index(connection, ids, first, until, query.messages_max)
    return Search(connection, first, high, selection)


def _by_index(
    connection: Connection, ids: Sequence[int], low: int, until: int, rows_max: int
) -> Span:
    positions: list[int] = []
    high = until
    for stream in ids:
        positions += _of_stream(connection, stream, low, high, rows_max + 1)
        positions.sort()
        if len(positions) > rows_max:
            # What is beyond the bound is not asked for: nor need the other streams give it.
            high = positions[rows_max] - 1
            del positions[rows_max:]
    return Positions(low, high, positions)


def _of_stream(
    connection: Connection, stream: int, low: int, high: int, limit: int
) -> Iterator[int]:
    """The positions of a stream's rows in a range, messages first, then markers."""
    place = first_place(connection, stream, low)
    if place is not None:
        for (position,) in run(
            connection, "positions_of_stream", stream=stream, place=place, limit=limit
        ):
            if position > high:
                break
            yield position
    for (position,) in run(
        connection, "markers_of_stream", stream=stream, low=low, high=high, limit=limit
    ):
        yield position
