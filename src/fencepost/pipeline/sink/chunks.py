"""Payloads gathered by stream and cut into chunks, in the order of their rows.

A chunk of a JSON stream is as many messages as fit, joined by commas; on any other stream a row is
a message of its own, so it is a chunk of its own. Nothing here waits or sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fencepost.pipeline.sink.rows import Encoded

CHUNK_ROWS_MAX = 50_000
"""Messages of one chunk: half of what a server takes in one body by default."""
BUFFER_BYTES_MAX = 32 << 20
"""Payloads that a task keeps in memory, over all streams it writes to, before it sends them."""


class Chunk(NamedTuple):
    """Messages of one stream that go up together."""

    stream: str
    rows: int
    body: bytes


class Chunks:
    """The rows of one task on their way to chunks."""

    def __init__(self, stream: str | None, *, chunk_bytes: int, json: bool) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._json = json
        self._pending: dict[str, list[pa.Array]] = {}
        self._bytes: dict[str, int] = {}
        self._buffered = 0
        self.sums: dict[str, RowSum] = {}
        self.payload_bytes = 0

    def add(self, rows: Encoded) -> Iterator[Chunk]:
        """Take rows in; gives the chunks that are full."""
        for stream, payloads in self._by_stream(rows):
            self.sums[stream] = self.sums.get(stream, NOTHING).plus(row_sum(payloads))
            size = _size(payloads)
            self.payload_bytes += size
            self._pending.setdefault(stream, []).append(payloads)
            self._bytes[stream] = self._bytes.get(stream, 0) + size
            self._buffered += size
            if self._bytes[stream] >= self._chunk_bytes:
                yield from self._take(stream, whole=False)
        if self._buffered > BUFFER_BYTES_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[Chunk]:
        """Everything that is left, in chunks that may be small."""
        for stream in list(self._pending):
            yield from self._take(stream, whole=True)

    def _by_stream(self, rows: Encoded) -> Iterator[tuple[str, pa.Array]]:
        if len(rows.payloads) == 0:
            return
        if rows.streams is None:
            assert self._stream is not None
            yield self._stream, rows.payloads
            return
        encoded = rows.streams.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        if len(names) == 1:
            yield names[0], rows.payloads
            return
        indices = encoded.indices.to_numpy()
        order = np.argsort(indices, kind="stable")  # rows of a stream keep their order
        payloads = rows.payloads.take(pa.array(order))
        ends = np.cumsum(np.bincount(indices, minlength=len(names)))
        start = 0
        for name, end in zip(names, ends.tolist(), strict=True):
            yield name, payloads.slice(start, end - start)
            start = end

    def _take(self, stream: str, *, whole: bool) -> Iterator[Chunk]:
        arrays = self._pending.pop(stream)
        self._buffered -= self._bytes.pop(stream)
        payloads = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        if not self._json:
            for data in payloads.to_pylist():
                yield Chunk(stream, 1, data)
            return
        lengths = pc.binary_length(payloads).to_numpy().astype(np.int64)
        cuts = cut_points(lengths, self._chunk_bytes, CHUNK_ROWS_MAX)
        if not whole:
            left = payloads.slice(cuts[-2])
            self._pending[stream] = [left]
            self._bytes[stream] = _size(left)
            self._buffered += self._bytes[stream]
            cuts.pop()
        if len(cuts) < 2:
            return
        lists = pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), payloads)
        bodies = pc.binary_join(lists, b",")
        for index in range(len(bodies)):
            body = bodies[index].as_buffer().to_pybytes()
            yield Chunk(stream, cuts[index + 1] - cuts[index], body)


def cut_points(lengths: np.ndarray, bytes_max: int, rows_max: int) -> list[int]:
    """Where to cut rows of these lengths: each piece within both bounds, or a single row.

    From 0 to the number of rows, both included.
    """
    ends = np.cumsum(lengths + 1)  # the comma behind each
    cuts = [0]
    count = len(lengths)
    while cuts[-1] < count:
        start = cuts[-1]
        before = int(ends[start - 1]) if start else 0
        fit = int(np.searchsorted(ends, before + bytes_max, side="right"))
        cuts.append(min(max(fit, start + 1), start + rows_max, count))
    return cuts


def _size(payloads: pa.Array) -> int:
    return int(pc.sum(pc.binary_length(payloads)).as_py() or 0)


HASH_MASK = (1 << 64) - 1


class RowSum(NamedTuple):
    """Rows of one stream: how many, and the sum of their hashes modulo 2^64."""

    rows: int
    hashes: int

    def plus(self, other: RowSum) -> RowSum:
        return RowSum(self.rows + other.rows, (self.hashes + other.hashes) & HASH_MASK)


NOTHING = RowSum(0, 0)


def row_sum(payloads: pa.Array) -> RowSum:
    """The sum over an Arrow array of binary payloads."""
    if len(payloads) == 0:
        return NOTHING
    # Only tasks with rows need it. Spark starts processes for the rest of a write too,
    # and pandas would be half of what it takes to start them.
    import pandas as pd  # type: ignore[import-untyped]

    # Keyed SipHash in C: the fastest hash of many short texts that the pipeline's own
    # dependencies bring, and the same in every process and on every platform.
    objects = payloads.to_numpy(zero_copy_only=False)
    hashes = pd.util.hash_array(objects, categorize=False)
    return RowSum(len(payloads), int(hashes.sum()) & HASH_MASK)


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
