"""Reading the global log: the rows after a position that fit into one answer.

A read has two steps in one snapshot. First the sizes of the rows from the asked position on decide
how many rows fit. Then the columns of just those rows are gathered, each column by one aggregate,
inside the database and without the interpreter's lock.

The selection decides which rows are looked at, block by block until the answer is full: all rows of
a range, or those of one part (`Span`); the rows of the selected streams, which are looked for in
each block as it comes (`Search`); or, for a few streams in a long log, only the rows that the index
by stream names (`Positions`).

A read that finds nothing in one slice of the log goes on in the next one, in a transaction of its
own, when it is its turn (`scans`). So a read is never long at a time, it ends soon after its client
has left, and it ends at `log_scan_max` positions or `log_comparisons_max` comparisons in all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from fencepost.protocol.limits import Limits
from fencepost.protocol.logs import LogRow, Part, Selection, fitting, fitting_in_row
from fencepost.store.log_contract import (
    BeyondHead,
    LogChunk,
    LogQuery,
    LogRows,
    Named,
    Plan,
    PlanQuery,
    Pruned,
)
from fencepost.store.maintain import purge as purges
from fencepost.store.read import log_plan as plans
from fencepost.store.read.log_events import read_events
from fencepost.store.read.log_rows import Measured, gathered
from fencepost.store.read.log_selection import (
    SHORT_RANGE,
    SLICE_CHARACTERS,
    STREAMS_MAX,
    Found,
    Source,
    ends_of,
    first_place,
    head_of,
    in_range,
    resolve,
    row_start,
    run,
    wanted,
)
from fencepost.store.read.scans import Scans
from fencepost.store.sql import Connection, Row

T = TypeVar("T")


class SqlLogs:
    """The log of one store."""

    def __init__(self, scans: Scans, limits: Limits) -> None:
        self._scans = scans
        self._limits = limits

    async def head(self) -> int:
        return await self._scans.run("", head_of)

    async def read(
        self, query: LogQuery, render: Callable[[LogRows], T]
    ) -> tuple[LogChunk, T | None] | Pruned | BeyondHead:
        if query.events is None and not query.descending:
            return await self._plain(query, render)
        head = await self.head()
        chunk = await read_events(self._plain, query, head, self._limits.log_scan_max)
        if not isinstance(chunk, LogChunk):
            return chunk
        rows = chunk.rows
        if rows is None:
            return chunk, None
        return chunk, await self._scans.run(query.principal, lambda _: render(rows))

    async def _plain(
        self, query: LogQuery, render: Callable[[LogRows], T]
    ) -> tuple[LogChunk, T | None] | Pruned | BeyondHead:
        """All messages of the selection, upwards."""
        progress: Progress | None = None
        while True:
            work = partial(self._read, query=query, render=render, progress=progress)
            found = await self._scans.run(query.principal, work)
            if not isinstance(found, Progress):
                return found
            progress = found

    def _read(
        self,
        connection: Connection,
        query: LogQuery,
        render: Callable[[LogRows], T],
        progress: Progress | None,
    ) -> tuple[LogChunk, T | None] | Pruned | BeyondHead | Progress:
        with connection:  # one snapshot for the head and the rows; over before anything is rendered
            chunk = read_slice(connection, query, self._limits, progress)
        if not isinstance(chunk, LogChunk):
            return chunk
        return chunk, None if chunk.rows is None else render(chunk.rows)

    async def plan(self, query: PlanQuery) -> Plan | BeyondHead:
        return await plans.make(self._scans, query)


class Progress(NamedTuple):
    """How far a read has come that has found nothing yet."""

    after: int
    until: int
    low: int
    """The first position that was not looked at."""
    positions_left: int
    comparisons_left: int

    def beyond(self, span: Span, at: int) -> Progress:
        """The progress after a slice that ended at a position."""
        return self._replace(
            low=at + 1,
            positions_left=self.positions_left - (at + 1 - self.low),
            comparisons_left=self.comparisons_left - span.comparisons,
        )

    @property
    def is_over(self) -> bool:
        """Whether the answer has to be given now, with where to go on."""
        return self.low > self.until or min(self.positions_left, self.comparisons_left) <= 0


def read_log(
    connection: Connection, query: LogQuery, limits: Limits
) -> LogChunk | Pruned | BeyondHead:
    """Read a whole answer, slice by slice. Call it inside a transaction."""
    found = read_slice(connection, query, limits, None)
    while isinstance(found, Progress):
        found = read_slice(connection, query, limits, found)
    return found


def read_slice(
    connection: Connection, query: LogQuery, limits: Limits, progress: Progress | None
) -> LogChunk | Pruned | BeyondHead | Progress:
    """Read one slice: the answer, or how far it has come. Call it inside a transaction."""
    head, newest = ends_of(connection)
    is_first = progress is None
    if progress is None:
        after = head if query.after is None else query.after
        # A writer may know of a position that cannot be read yet.
        if after > newest:
            return BeyondHead(head)
        until = head if query.until is None else min(query.until, head)
        most = limits.log_scan_max, limits.log_comparisons_max
        progress = Progress(after, until, after + 1, *most)
    after, until, low, *_ = progress
    rows, at = None, max(after, until)
    if low <= until:
        span = choose(connection, query, progress, is_first=is_first)
        rows, at = _rows_of(connection, span, query, low)
        reached = progress.beyond(span, at)
        if rows is None and not reached.is_over:
            return reached
    # Rows that went since an earlier slice were there when it found none, so they are not missed.
    pruned = purges.last_purged(connection, query.selection, after + 1, at)
    if pruned is not None and not query.skip_pruned:
        return Pruned(pruned, head)
    return LogChunk(rows, after, at, until, head, pruned)


def _rows_of(
    connection: Connection, span: Span, query: LogQuery, low: int
) -> tuple[LogRows | None, int]:
    """The rows of a span that fit into an answer, and the last position that it then covers."""
    measured = Measured()
    at = span.low
    while at <= span.high:
        # A span may begin with the row that `low` lies in, far below it: the first block has both.
        stop = min(max(at, low) + span.block_positions - 1, span.high)
        block = span.block(at, stop)
        if block is not None:
            measured.add(connection, block)
        at = stop + 1
        if measured.messages > query.messages_max or measured.cost > query.bytes_max:
            return _cut_rows(connection, span, measured, query, low)
        if span.is_enough(at, found=bool(measured.sizes)):
            break
    if not measured.sizes:
        return None, at - 1
    return _gathered(connection, span, measured, query, low, at - 1), at - 1


def _cut_rows(
    connection: Connection,
    span: Span,
    measured: Measured,
    query: LogQuery,
    low: int,
) -> tuple[LogRows, int]:
    rows = fitting(
        measured.counts,
        measured.sizes,
        messages_max=query.messages_max,
        bytes_max=query.bytes_max,
    )
    if rows:
        last = measured.positions[rows] - 1
    else:
        # The first append alone is too much: part of it is an answer too.
        rows = 1
        [row] = run(connection, "one_row", position=measured.positions[0])
        taken, _ = fitting_in_row(
            LogRow(*row), low, messages_max=query.messages_max, bytes_max=query.bytes_max
        )
        last = max(low, measured.positions[0]) + taken - 1
    measured.positions = measured.positions[:rows]
    del measured.sizes[rows:]
    if measured.counts is not None:
        del measured.counts[rows:]
    return _gathered(connection, span, measured, query, low, last), last


def _gathered(
    connection: Connection, span: Span, measured: Measured, query: LogQuery, low: int, last: int
) -> LogRows:
    source = span.rows_at(measured.positions)
    return gathered(connection, source, measured, span.names, query.columns, low, last)


BLOCK_POSITIONS = 8_192
"""Positions that are looked at together."""
FIRST_POSITIONS = 256
"""Positions in the first block of a search; the next one is twice as wide as long as few streams
come up that have not been compared before."""
SEARCH_POSITIONS = 65_536
"""Positions after which a search comes back with what it has found."""
FOUND_SLICES = 8
"""Slices that a search with something to show may take at once, to have more to show."""


class Span:
    """The rows of a range, and how far up they answer for every position."""

    block_positions = BLOCK_POSITIONS
    comparisons = 0
    """Comparisons with patterns that were made so far, at most."""

    def __init__(self, low: int, high: int, part: Part | None = None) -> None:
        self.low = low
        self.high = high
        self.names: dict[int, Named] = {}
        """All streams that have rows here, if they are known."""
        self._part = part

    def is_enough(self, at: int, *, found: bool) -> bool:
        """Whether to come back now that everything below a position was looked at."""
        return not found and at - self.low >= SEARCH_POSITIONS

    def block(self, low: int, high: int) -> Source | None:
        """The rows of a block; None when there are none."""
        return in_range(low, high, self._part)

    def rows_at(self, positions: Sequence[int]) -> Source:
        """These rows, which are all that the blocks had from the first to the last of them."""
        return in_range(positions[0], positions[-1], self._part)


class Search(Span):
    """The rows of streams that are found on the way."""

    def __init__(self, connection: Connection, low: int, high: int, selection: Selection) -> None:
        super().__init__(low, high, selection.part)
        self._connection = connection
        self._selection = selection
        self._are_all = True
        self._others: set[int] = set()
        """Streams that were compared and are not wanted."""
        self._characters = 0
        self.block_positions = FIRST_POSITIONS

    def is_enough(self, at: int, *, found: bool) -> bool:
        most = SLICE_CHARACTERS * (FOUND_SLICES if found else 1)
        return at - self.low >= SEARCH_POSITIONS or self._characters >= most

    def block(self, low: int, high: int) -> Source | None:
        rows = run(self._connection, "distinct_streams", in_range(low, high, self._part))
        known, others = self.names, self._others
        names = {row[0]: known[row[0]] for row in rows if row[0] in known}
        new = [row for row in rows if row[0] not in known and row[0] not in others]
        for stream, path, content_type in wanted(self._selection, new):
            names[stream] = Named(path, content_type)
        self._compared(new)
        others.update(row[0] for row in new if row[0] not in names)
        self.names |= names
        found = Found(names, len(names) == len(rows))
        self._are_all = self._are_all and found.are_all
        return found.source(low, high, self._part) if names else None

    def _compared(self, rows: Sequence[Row]) -> None:
        """Note what was compared, and make the next block as wide as a slice has room for."""
        characters = sum(len(row[1]) for row in rows)
        self._characters += characters
        self.comparisons += len(rows) * self._selection.comparisons_max
        if characters < SLICE_CHARACTERS // 4:
            self.block_positions = min(2 * self.block_positions, BLOCK_POSITIONS)

    def rows_at(self, positions: Sequence[int]) -> Source:
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
        return self.rows_at(self._positions)

    def rows_at(self, positions: Sequence[int]) -> Source:
        return Source("source_positions", {"positions": json.dumps(list(positions))})


def choose(connection: Connection, query: LogQuery, progress: Progress, *, is_first: bool) -> Span:
    """How to look for what a reader wants; only its first slice considers the index."""
    selection = query.selection
    until, low = progress.until, progress.low
    first = row_start(connection, low)
    high = min(until, low + progress.positions_left - 1)
    if not selection.by_path:
        return Span(first, high, selection.part)
    if is_first and until - low >= SHORT_RANGE:
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
