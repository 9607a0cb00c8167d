"""Which rows of the log a selection means, as named pieces of SQL with their values.

A selection by path becomes a set of incarnations: all of them when they are few, else those that
have rows in the stretch being looked at. So a pattern over a million streams costs what the stretch
costs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fencepost.protocol.logs import Part, Selection
from fencepost.store.log_contract import Named
from fencepost.store.sql import Connection, Row

SHORT_RANGE = 16_384
"""Up to so many positions a look at every row is cheaper than the index by stream."""
STREAMS_MAX = 64
"""Streams whose rows are found one by one; for more of them the range is scanned."""
CANDIDATES_MAX = 1_000
"""Paths that are compared with a pattern before its streams are looked for in the log instead."""
SLICE_CHARACTERS = 32_768
"""Characters of paths that are compared before a scan lets other scans have a turn: some
milliseconds."""
SLICE_POSITIONS = 4_096
"""Positions in which a plan looks for streams before it lets other scans have a turn."""
REST_CHARACTERS = 8_192
"""Characters after which a thread rests, so that the event loop and the other threads, which share
one interpreter with it, get to run at once instead of after the interpreter's switch interval."""
REST_S = 0.0005
_REST = threading.Event()  # never set: a thread waits for it to rest
WIDTH = 4_096
"""Positions in a bucket of `log_buckets`; part of the format on disk."""


def run(
    connection: Connection, query: str, source: Source | None = None, **values: object
) -> list[Row]:
    """All rows of a named query, over `source` where the query says so."""
    if source is None:
        return connection.fetch(query, values)
    return connection.fetch(query, source.values | values, rows=source.name)


def head_of(connection: Connection) -> int:
    """The newest position that may be read in this connection's view."""
    return ends_of(connection)[0]


def ends_of(connection: Connection) -> tuple[int, int]:
    """The newest position that may be read, and the newest that a writer was told of."""
    [(head, newest)] = run(connection, "head")
    assert isinstance(head, int)
    assert isinstance(newest, int)
    return head, newest


class Source(NamedTuple):
    """Which rows to look at: a named piece of SQL and its values."""

    name: str
    values: dict[str, object]


def in_range(low: int, high: int, part: Part | None, ids: Iterable[int] | None = None) -> Source:
    """The rows that start in a range: of these streams, of this part, or all."""
    values: dict[str, object] = {"low": low, "high": high}
    if ids is not None:
        return Source("source_streams", values | {"streams": json.dumps(list(ids))})
    if part is not None:
        return Source("source_part", values | {"parts": part.shares, "part": part.share})
    return Source("source_scan", values)


def row_start(connection: Connection, position: int) -> int:
    """Where to begin so that an append that a position lies inside is not missed."""
    found = run(connection, "row_over", position=position)
    if found:
        [(start,)] = found
        [(start, count, _, _)] = run(connection, "one_row", position=start)
        if start + count > position:
            return int(start)
    return position


def end_of(connection: Connection, last: str | None) -> str | bytes:
    """The end of a range of texts for a query: what comes after every text when there is none."""
    return connection.after_every_text if last is None else last


def resolve(connection: Connection, selection: Selection, ids_max: int) -> list[int] | None:
    """The selected incarnations when they are few and easily found, else None."""
    ids: set[int] = set()
    left = CANDIDATES_MAX
    for first, last in selection.path_ranges():
        end = end_of(connection, last)
        for query in ("live_ids", "deleted_ids"):
            found = run(connection, query, first=first, last=end, limit=left + 1)
            left -= len(found)
            if left < 0:
                return None
            ids.update(row[0] for row in wanted(selection, found))
    return sorted(ids) if len(ids) <= ids_max else None


def wanted(selection: Selection, rows: Sequence[Row]) -> list[Row]:
    """The rows, of a stream and its path first, that a selection takes."""
    taken: list[Row] = []
    characters = 0
    for row in rows:
        characters += len(row[1])
        if characters > REST_CHARACTERS:
            characters = 0
            _REST.wait(REST_S)
        if selection.takes(row[0], row[1]):
            taken.append(row)
    return taken


class Found(NamedTuple):
    """The selected incarnations that have rows in a range, and whether there are no others."""

    names: dict[int, Named]
    are_all: bool

    def source(self, low: int, high: int, part: Part | None) -> Source:
        """Their rows in the range, or in part of it."""
        # Where all streams are wanted no row has to be compared.
        return in_range(low, high, part, None if self.are_all else self.names)


def streams_between(connection: Connection, selection: Selection, low: int, high: int) -> Found:
    """Look for the selected incarnations in a range."""
    found = run(connection, "distinct_streams", in_range(low, high, selection.part))
    names = {
        stream: Named(path, content_type) for stream, path, content_type in wanted(selection, found)
    }
    return Found(names, len(names) == len(found))


def selected(connection: Connection, selection: Selection, low: int, high: int) -> Source:
    """The selected rows that start in a range."""
    if not selection.by_path:
        return in_range(low, high, selection.part)
    return streams_between(connection, selection, low, high).source(low, high, selection.part)


def first_place(connection: Connection, stream: int, position: int) -> int | None:
    """The byte offset of a stream's first row at or after a position; None when there is none.

    Offsets and positions of one stream grow together, so the place is found by halving.
    """
    last = run(connection, "row_up_to_place", stream=stream, place=2**62)
    if not last or last[0][1] < position:
        return None
    low, high = 0, int(last[0][0])
    while low < high:
        middle = (low + high) // 2
        [(place, at)] = run(connection, "row_from_place", stream=stream, place=middle)
        if at >= position:
            high = middle
        else:
            low = place + 1
    return low


def bucket_of(position: int) -> int:
    """The bucket that a row starting at a position counts in."""
    return position // WIDTH
