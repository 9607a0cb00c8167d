"""Rows of one task, gathered by stream and cut into the bodies of uploads, with their checksums.

On a JSON stream a chunk is an array of as many messages as fit, joined once and sent as it is. On
any other stream each row is a chunk of its own, because there a body is one message.

A batch is recognised by its digest: for each stream the count of its rows and the sum of their
hashes. Both are the same however Spark divides, retries and orders the batch, and differ when a row
differs. The server keeps the digest text of a writer's newest batch and compares a replay with it.
This module does no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from fencepost.pipeline.sink.rows import Encoded

CHUNK_ROWS_MAX = 50_000
"""Messages of one chunk: half of what a server takes in one body by default."""
BUFFER_BYTES_MAX = 64 << 20
"""Payloads that a task keeps in memory, over all streams it writes to, before it sends them. A task
of the source reads half of that: what it has for a stream is one chunk, unless that is full."""
HASH_MASK = (1 << 64) - 1


class Chunk(NamedTuple):
    """The body of one upload: messages of one stream."""

    stream: str
    rows: int
    body: bytes


class RowSum(NamedTuple):
    """Rows of one stream: their count, and the sum of their hashes modulo 2^64."""

    rows: int
    hashes: int

    def plus(self, other: RowSum) -> RowSum:
        """The sum over the rows of both."""
        return RowSum(self.rows + other.rows, (self.hashes + other.hashes) & HASH_MASK)


NOTHING = RowSum(0, 0)


class _Rows(NamedTuple):
    """Rows that are not in a chunk yet, of many streams."""

    streams: np.ndarray
    """The number of each row's stream."""
    payloads: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    """Zero for rows whose hashes are in the sums already."""

    def at(self, places: np.ndarray | slice) -> _Rows:
        """Some of the rows, or all of them in another order."""
        return _Rows(*(column[places] for column in self))


class Chunks:
    """Turns the encoded rows of one task into chunks, and sums them up by stream.

    Rows are put in the order of their streams when chunks are made of them, and not for each record
    batch: one of 10,000 rows may have a row or two for each of thousands of streams.
    """

    def __init__(self, stream: str | None, *, chunk_bytes: int, json: bool) -> None:
        self._chunk_bytes = chunk_bytes
        self._json = json
        self._names: list[str] = [] if stream is None else [stream]
        self._numbers: dict[str, int] = {}
        self._waiting: list[_Rows] = []
        self._bytes = np.zeros(len(self._names), np.int64)  # that wait, by stream
        self.sums: dict[str, RowSum] = {}
        """Complete when the rest of the chunks is made."""
        self.payload_bytes = 0

    def add(self, rows: Encoded) -> Iterator[Chunk]:
        """Take rows in, and yield the chunks that are full."""
        if len(rows.payloads) == 0:
            return
        waiting = _Rows(
            self._numbered(rows), rows.payloads, rows.lengths, row_hashes(rows.payloads)
        )
        self.payload_bytes += int(waiting.lengths.sum())
        self._wait(waiting)
        full = self._bytes >= self._chunk_bytes
        if full.any():
            yield from self._cut(self._taken(full), whole=False)
        if self._bytes.sum() > BUFFER_BYTES_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[Chunk]:
        """Yield everything that is left, in chunks that may be small."""
        yield from self._cut(self._taken(self._bytes >= 0), whole=True)

    def _numbered(self, rows: Encoded) -> np.ndarray:
        """The number of each row's stream."""
        if rows.streams is None:
            return np.zeros(len(rows.payloads), np.int64)
        encoded = rows.streams.dictionary_encode()
        numbers = self._numbers
        found = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
        self._names += islice(numbers, len(self._names), None)
        self._bytes.resize(len(self._names), refcheck=False)
        streams: np.ndarray = np.array(found)[encoded.indices.to_numpy()]
        return streams

    def _wait(self, rows: _Rows) -> None:
        self._waiting.append(rows)
        if len(self._names) == 1:
            self._bytes += rows.lengths.sum()
        else:
            sizes = np.bincount(rows.streams, weights=rows.lengths, minlength=len(self._names))
            self._bytes += sizes.astype(np.int64)

    def _taken(self, streams: np.ndarray) -> _Rows | None:
        """All rows of some streams, which wait no longer; each stream's in their order."""
        waiting, self._waiting = self._waiting, []
        self._bytes[streams] = 0
        taken = []
        takes_all = bool(streams.all())
        for rows in waiting:
            mine = streams[rows.streams]
            if takes_all or mine.all():
                taken.append(rows)
            else:
                taken.append(rows.at(mine))
                self._waiting.append(rows.at(~mine))
        return _Rows(*map(_joined, zip(*taken, strict=True))) if taken else None

    def _cut(self, rows: _Rows | None, *, whole: bool) -> Iterator[Chunk]:
        """Make chunks of rows; unless they are the `whole` rest, the last of a stream waits on."""
        if rows is None:
            return
        streams = rows.streams
        if len(self._names) > 1:
            # A stable sort: the rows of a stream keep their order. NumPy sorts short numbers fast.
            is_short = len(self._names) <= np.iinfo(np.uint16).max
            order = np.argsort(streams.astype(np.uint16) if is_short else streams, kind="stable")
            rows = rows.at(order)
        counts = np.bincount(streams)
        present = np.flatnonzero(counts)
        starts = np.cumsum(counts)[present] - counts[present]
        payloads = rows.payloads.tolist()
        for number, start, count, size, hashes in zip(
            present.tolist(),
            starts.tolist(),
            counts[present].tolist(),
            np.add.reduceat(rows.lengths, starts).tolist(),
            np.add.reduceat(rows.hashes, starts).tolist(),
            strict=True,
        ):
            name = self._names[number]
            cuts = [0, count]
            # With a comma or bracket behind each row, and the bracket before the first.
            if self._json and (size + count >= self._chunk_bytes or count > CHUNK_ROWS_MAX):
                lengths = rows.lengths[start : start + count]
                cuts = cut_points(lengths, self._chunk_bytes, CHUNK_ROWS_MAX)
            if self._json and not whole:
                cuts.pop()
                self._wait_on(rows, start + cuts[-1], start + count)
            self.sums[name] = self.sums.get(name, NOTHING).plus(RowSum(cuts[-1], hashes))
            for first, last in pairwise(start + cut for cut in cuts):
                if self._json:
                    yield Chunk(name, last - first, json_array(payloads[first:last]))
                else:
                    yield from (Chunk(name, 1, data) for data in payloads[first:last])

    def _wait_on(self, rows: _Rows, first: int, last: int) -> None:
        left = rows.at(slice(first, last))
        self._wait(left._replace(hashes=np.zeros_like(left.hashes)))


def json_array(rows: list[bytes]) -> bytes:
    """The body of an upload: JSON texts as one array, joined in one pass."""
    rows[0] = b"[" + rows[0]
    rows[-1] += b"]"
    return b",".join(rows)


def cut_points(lengths: np.ndarray, bytes_max: int, rows_max: int) -> list[int]:
    """Where to cut rows of these lengths: each piece within both bounds, or a single row.

    The list goes from 0 to the number of rows, both included.
    """
    ends = np.cumsum(lengths + 1)  # the comma or bracket behind each
    fitting = bytes_max - 1  # the bracket before the first
    cuts = [0]
    count = len(lengths)
    while cuts[-1] < count:
        start = cuts[-1]
        before = int(ends[start - 1]) if start else 0
        fit = int(np.searchsorted(ends, before + fitting, side="right"))
        cuts.append(min(max(fit, start + 1), start + rows_max, count))
    return cuts


def row_hashes(payloads: np.ndarray) -> Any:
    """A hash of 64 bits for each payload."""
    # Only tasks with rows need pandas. Spark starts processes for the rest of a write too, and
    # importing pandas would be half of what it takes to start them.
    import pandas as pd  # type: ignore[import-untyped]

    # Keyed SipHash in C: the fastest hash of many short texts that the pipeline's own
    # dependencies bring, and the same in every process and on every platform.
    return pd.util.hash_array(payloads, categorize=False)


def row_sum(payloads: np.ndarray) -> RowSum:
    """The sum over an array of payloads."""
    if len(payloads) == 0:
        return NOTHING
    return RowSum(len(payloads), int(row_hashes(payloads).sum()) & HASH_MASK)


def merged(sums: Iterable[Mapping[str, RowSum]]) -> dict[str, RowSum]:
    """The sums of several tasks as one."""
    total: dict[str, RowSum] = {}
    for one in sums:
        for stream, added in one.items():
            total[stream] = total.get(stream, NOTHING).plus(added)
    return total


def digest_text(sums: Mapping[str, RowSum]) -> str:
    """A batch as the text that the server keeps: readable counts, and one hash over all streams."""
    digest = hashlib.sha256()
    rows = 0
    present = {stream: one for stream, one in sums.items() if one.rows}
    for stream in sorted(present):
        one = present[stream]
        rows += one.rows
        # No path holds a NUL, so one stream's line cannot be read as another's.
        digest.update(f"{stream}\0{one.rows}\0{one.hashes}\0".encode())
    return f"v1 rows={rows} streams={len(present)} {digest.hexdigest()[:32]}"


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
