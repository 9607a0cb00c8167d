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
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fencepost.pipeline.sink.rows import Encoded

CHUNK_ROWS_MAX = 50_000
"""Messages of one chunk: half of what a server takes in one body by default."""
BUFFER_BYTES_MAX = 32 << 20
"""Payloads that a task keeps in memory, over all streams it writes to, before it sends them."""
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


class _Piece(NamedTuple):
    """Rows of one stream that arrived together."""

    stream: str
    payloads: np.ndarray
    lengths: np.ndarray
    bytes: int
    sum: RowSum


class _Waiting:
    """Rows of one stream that are not in a chunk yet."""

    def __init__(self) -> None:
        self.payloads: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self.bytes = 0


class Chunks:
    """Turns the encoded rows of one task into chunks, and sums them up by stream."""

    def __init__(self, stream: str | None, *, chunk_bytes: int, json: bool) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._json = json
        self._waiting: dict[str, _Waiting] = {}
        self._buffered = 0
        self.sums: dict[str, RowSum] = {}
        self.payload_bytes = 0

    def add(self, rows: Encoded) -> Iterator[Chunk]:
        """Take rows in, and yield the chunks that are full."""
        for piece in self._by_stream(rows):
            self.sums[piece.stream] = self.sums.get(piece.stream, NOTHING).plus(piece.sum)
            self.payload_bytes += piece.bytes
            self._keep(piece.stream, piece.payloads, piece.lengths, piece.bytes)
            if self._waiting[piece.stream].bytes >= self._chunk_bytes:
                yield from self._take(piece.stream, whole=False)
        if self._buffered > BUFFER_BYTES_MAX:
            yield from self.rest()

    def rest(self) -> Iterator[Chunk]:
        """Yield everything that is left, in chunks that may be small."""
        for stream in list(self._waiting):
            yield from self._take(stream, whole=True)

    def _by_stream(self, rows: Encoded) -> Iterator[_Piece]:
        count = len(rows.payloads)
        if count == 0:
            return
        hashes = row_hashes(rows.payloads)
        if rows.streams is None:
            assert self._stream is not None
            names, order, starts = [self._stream], None, np.zeros(1, np.int64)
        else:
            encoded = rows.streams.dictionary_encode()
            names = encoded.dictionary.to_pylist()
            indices = encoded.indices.to_numpy()
            # A stable sort: the rows of a stream keep their order.
            order = np.argsort(indices, kind="stable") if len(names) > 1 else None
            counts = np.bincount(indices, minlength=len(names))
            starts = np.cumsum(counts) - counts
        payloads, lengths = rows.payloads, rows.lengths
        if order is not None:
            payloads, lengths, hashes = payloads[order], lengths[order], hashes[order]
        sizes = np.add.reduceat(lengths, starts).tolist()
        sums = np.add.reduceat(hashes, starts).tolist()
        ends = [*starts[1:].tolist(), count]
        for name, start, end, size, added in zip(
            names, starts.tolist(), ends, sizes, sums, strict=True
        ):
            found = RowSum(end - start, added & HASH_MASK)
            yield _Piece(name, payloads[start:end], lengths[start:end], size, found)

    def _keep(self, stream: str, payloads: np.ndarray, lengths: np.ndarray, size: int) -> None:
        waiting = self._waiting.setdefault(stream, _Waiting())
        waiting.payloads.append(payloads)
        waiting.lengths.append(lengths)
        waiting.bytes += size
        self._buffered += size

    def _take(self, stream: str, *, whole: bool) -> Iterator[Chunk]:
        """Cut what waits for a stream; unless it is the `whole` rest, the last piece waits on."""
        waiting = self._waiting.pop(stream)
        self._buffered -= waiting.bytes
        payloads, lengths = _joined(waiting.payloads), _joined(waiting.lengths)
        if not self._json:
            for data in payloads.tolist():
                yield Chunk(stream, 1, data)
            return
        cuts = cut_points(lengths, self._chunk_bytes, CHUNK_ROWS_MAX)
        if not whole:
            start = cuts[-2]
            self._keep(stream, payloads[start:], lengths[start:], int(lengths[start:].sum()))
            cuts.pop()
        for start, end in pairwise(cuts):
            yield Chunk(stream, end - start, json_array(payloads[start:end].tolist()))


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


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
