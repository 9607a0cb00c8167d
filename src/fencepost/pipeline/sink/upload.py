"""Uploading the chunks of one task attempt to staging, several at a time.

Each attempt of a task has a transaction with a random name, and in it one part for each stream that
it writes to. No other attempt touches these parts: the driver commits the parts of the attempts
that Spark calls the winners, and the parts of the others expire.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from fencepost.client.errors import FencepostError, ResponseError
from fencepost.client.operations import stage
from fencepost.client.results import Staged
from fencepost.client.settings import NO_RETRIES
from fencepost.client.sync import Client
from fencepost.pipeline.connection import Connection
from fencepost.pipeline.errors import SinkError
from fencepost.pipeline.sink.chunks import Chunk

UPLOADS_AT_ONCE = 3
"""Chunks of one task on their way: while one is stored the next is sent and a third is made."""
PART_CHUNKS_MAX = 16_384
"""Chunks of one part, as the server has it by default; then the next part begins."""
TOKEN_BYTES = 16
DROPS_MAX = 1_000
"""Parts that are dropped one by one after a failure; more of them are left to expire."""


class StagedPart(NamedTuple):
    """A part as the commit will name it."""

    stream: str
    txn: str
    part: str
    chunks: int


@dataclass(slots=True)
class _Target:
    part: str
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
                for chunk in chunks:
                    part, number = self._place(chunk.stream)
                    flying.append(pool.submit(self._stage, chunk, part, number))
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
            yield StagedPart(stream, self.txn, target.part, target.chunks)

    def _place(self, stream: str) -> tuple[str, int]:
        target = self._targets.get(stream)
        if target is None or target.chunks >= PART_CHUNKS_MAX:
            if target is not None:
                self._full.append(StagedPart(stream, self.txn, target.part, target.chunks))
            target = self._targets[stream] = _Target(f"p{self._names}")
            self._names += 1
        number = target.chunks
        target.chunks += 1
        return target.part, number

    def _stage(self, chunk: Chunk, part: str, number: int) -> None:
        driver = self._client._driver
        # The chunk is the body already: `client.stage` would encode it once more.
        asked = stage(driver.settings, self.txn, part, number, chunk.body, self._content_type)
        try:
            staged: Staged = driver.run(asked)
        except ResponseError as error:
            error.add_note(f"while {chunk.rows} rows for the stream {chunk.stream} were uploaded")
            raise
        if staged.messages != chunk.rows:
            raise SinkError(
                f"{chunk.rows} rows for {chunk.stream} became {staged.messages} messages"
            )


def drop(connection: Connection, parts: Iterable[StagedPart]) -> None:
    """Drop parts that nothing refers to, as far as that can be done at once.

    The server refuses to drop what a commit used. What cannot be dropped now expires.
    """
    with connection.client(retries=NO_RETRIES) as client:
        for part in islice(parts, DROPS_MAX):
            with contextlib.suppress(ResponseError):
                try:
                    client.unstage(part.txn, part.part)
                except ResponseError:
                    raise
                except FencepostError:
                    return  # the server does not answer: the rest cannot be dropped either
