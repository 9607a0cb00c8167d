"""Uploading the chunks of one task attempt to staging, several at a time.

Each attempt of a task has a transaction with a random name, and in it one part for each stream that
it writes to. No other attempt touches these parts: the driver commits the parts of the attempts
that Spark calls the winners, and the parts of the others expire.

A task that writes to thousands of streams has little for each. Small chunks, of whichever streams,
share an upload: a bundle, which the server takes apart when it receives it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from fencepost.client.effects import Operation
from fencepost.client.errors import FencepostError, RateLimitedError, ResponseError
from fencepost.client.operations import BundledChunk, stage, stage_bundle, unstage_pieces
from fencepost.client.results import Staged
from fencepost.client.settings import NO_RETRIES, ClientSettings
from fencepost.client.sync import Client
from fencepost.pipeline.connection import Connection
from fencepost.pipeline.errors import CommitTooLargeError, SinkError
from fencepost.pipeline.sink.chunks import Chunk

UPLOADS_AT_ONCE = 3
"""Chunks of one task on their way: while one is stored the next is sent and a third is made."""
BUNDLE = "p"
"""What the parts of a transaction are named after: `p.0`, `p.1` and so on."""
PIECE_BYTES_MAX = 256 << 10
"""A chunk up to this size may share an upload."""
BUNDLE_BYTES_MAX = 1 << 20
BUNDLE_PIECES_MAX = 512
"""Chunks of one bundle, as the server has it by default."""
PART_CHUNKS_MAX = 16_384
"""Chunks of one part, as the server has it by default; then the next part begins."""
TOKEN_BYTES = 16
COMMIT_STREAMS_MAX = 100_000
"""Streams that one batch may write to: the appends of one commit."""
SMALLER = (
    "set maxRowsPerTrigger (or maxBytesPerTrigger) of the source lower, so that batches shrink"
)


class StagedPart(NamedTuple):
    """A part as the commit will name it."""

    stream: str
    txn: str
    part: str
    chunks: int


class Placed(NamedTuple):
    """A chunk, the piece that names its part, and its number in the part."""

    chunk: Chunk
    piece: int
    number: int


@dataclass(slots=True)
class _Target:
    piece: int
    chunks: int = 0


class Uploads:
    """The uploads of one task's attempt."""

    def __init__(self, client: Client, content_type: str) -> None:
        self._client = client
        self._content_type = content_type
        self.txn = "spark-" + secrets.token_hex(TOKEN_BYTES)
        self._targets: dict[str, _Target] = {}
        self._full: list[StagedPart] = []
        self._names = 0

    def send(self, chunks: Iterable[Chunk]) -> list[StagedPart]:
        """Upload every chunk; returns the parts when all of them are stored."""
        with ThreadPoolExecutor(UPLOADS_AT_ONCE, thread_name_prefix="fencepost-upload") as pool:
            flying: deque[Future[None]] = deque()
            try:
                for bundle in bundled(map(self._placed, chunks)):
                    flying.append(pool.submit(self._stage, bundle))
                    if len(flying) >= UPLOADS_AT_ONCE:
                        flying.popleft().result()
                while flying:
                    flying.popleft().result()
            except BaseException:
                for future in flying:
                    future.cancel()
                raise
        return list(self.parts())

    def parts(self) -> Iterator[StagedPart]:
        """The parts so far, those of a stream in the order of its rows."""
        yield from self._full
        for stream, target in self._targets.items():
            yield self._part(stream, target)

    def _placed(self, chunk: Chunk) -> Placed:
        target = self._targets.get(chunk.stream)
        if target is None or target.chunks >= PART_CHUNKS_MAX:
            if target is not None:
                self._full.append(self._part(chunk.stream, target))
            elif len(self._targets) >= COMMIT_STREAMS_MAX:
                raise CommitTooLargeError(
                    f"one task has rows for more than {COMMIT_STREAMS_MAX} streams, and one commit"
                    f" takes as many (COMMIT_STREAMS_MAX): {SMALLER}"
                )
            target = self._targets[chunk.stream] = _Target(self._names)
            self._names += 1
        number = target.chunks
        target.chunks += 1
        return Placed(chunk, target.piece, number)

    def _part(self, stream: str, target: _Target) -> StagedPart:
        return StagedPart(stream, self.txn, f"{BUNDLE}.{target.piece}", target.chunks)

    def _stage(self, bundle: list[Placed]) -> None:
        driver = self._client._driver
        rows = sum(placed.chunk.rows for placed in bundle)
        try:
            staged: Staged = driver.run(self._upload(driver.settings, bundle))
        except RateLimitedError as error:
            if error.code != "too_many_parts":
                raise
            raise CommitTooLargeError(
                f"the server holds as many parts as it may ({error.detail}). Each task has a part"
                " for each stream it writes to: repartition by stream before the write, so that a"
                f" stream is in one task; or {SMALLER}; or raise staged_parts_max"
            ) from error
        except ResponseError as error:
            streams = {placed.chunk.stream for placed in bundle}
            more = f" and {len(streams) - 1} more" if len(streams) > 1 else ""
            error.add_note(f"while {rows} rows for the stream {min(streams)}{more} were uploaded")
            raise
        if staged.messages != rows:
            raise SinkError(f"{rows} rows became {staged.messages} messages")

    def _upload(self, settings: ClientSettings, bundle: list[Placed]) -> Operation[Staged]:
        if len(bundle) == 1:
            # The chunk is the body already: `client.stage` would encode it once more.
            [(chunk, piece, number)] = bundle
            part = f"{BUNDLE}.{piece}"
            return stage(settings, self.txn, part, number, chunk.body, self._content_type)
        pieces = [
            BundledChunk(piece, number, chunk.stream, self._content_type, chunk.body)
            for chunk, piece, number in bundle
        ]
        return stage_bundle(settings, self.txn, BUNDLE, pieces)


def bundled(chunks: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Chunks by the upload that they go with: large ones alone, small ones together."""
    small: list[Placed] = []
    size = 0
    for placed in chunks:
        length = len(placed.chunk.body)
        if length > PIECE_BYTES_MAX:
            yield [placed]
            continue
        small.append(placed)
        size += length
        if size >= BUNDLE_BYTES_MAX or len(small) == BUNDLE_PIECES_MAX:
            yield small
            small, size = [], 0
    if small:
        yield small


def drop(connection: Connection, parts: Iterable[StagedPart]) -> None:
    """Drop parts that nothing refers to, as far as that can be done at once.

    The server refuses to drop what a commit used. What cannot be dropped now expires.
    """
    pieces: dict[str, list[int]] = {}
    for part in parts:
        pieces.setdefault(part.txn, []).append(int(part.part.removeprefix(f"{BUNDLE}.")))
    with connection.client(retries=NO_RETRIES) as client, contextlib.suppress(FencepostError):
        driver = client._driver
        for txn, numbers in pieces.items():
            for first in range(min(numbers), max(numbers) + 1, BUNDLE_PIECES_MAX):
                # A commit used them all or none: one that is refused says so of the others.
                driver.run(unstage_pieces(driver.settings, txn, BUNDLE, first, BUNDLE_PIECES_MAX))
