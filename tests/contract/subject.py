"""A store under test, whatever its engine: opened, closed and opened again on the same data.

An engine is a class with `open` and `close`; add one to ENGINES and the whole suite runs on it. The
helpers turn the contract's callbacks into awaits, and give up rather than wait for ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from fencepost.protocol.appends import Append, Appended, ProducerTuple
from fencepost.protocol.batches import Batch, bytes_batch, digest, json_batch
from fencepost.protocol.creates import Create, Created, ForkFrom
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Chunk, Store, StreamInfo
from fencepost.store.maintain.contract import MaintainedStore
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings, SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing.clock import SimClock
from fencepost.testing.postgres import shared_server
from tests.contract.shapes import as_usual

WAIT_SECONDS = 20.0
CHUNK_BYTES = 1 << 20

Outcome = Any
"""What a store answered; each test says which kind it expects."""


class Engine(Protocol):
    """How a kind of store is made on a folder of its own."""

    def __init__(self, folder: Path, clock: SimClock) -> None: ...

    def open(self) -> Store:
        """A store on the data that the last one left."""
        ...

    async def close(self) -> None:
        """Let go of the open store."""
        ...


class SqliteEngine:
    """The embedded store in a temporary folder."""

    def __init__(self, folder: Path, clock: SimClock) -> None:
        self._settings = SqliteSettings(folder=folder)
        self._clock = clock
        self.store: SqliteStore | None = None

    def open(self) -> Store:
        self.store = SqliteStore(self._settings, self._clock)
        return self.store

    async def close(self) -> None:
        assert self.store is not None
        await self.store.close()


class PostgresEngine:
    """The store on a database of its own, in the PostgreSQL that all tests share."""

    def __init__(self, _folder: Path, clock: SimClock) -> None:
        self.settings = PostgresSettings(url=shared_server().new_database())
        self._clock = clock
        self.store: PostgresStore | None = None

    def open(self) -> Store:
        self.store = PostgresStore(self.settings, self._clock, simulated=True)
        return self.store

    async def close(self) -> None:
        assert self.store is not None
        await self.store.close()


ENGINES: dict[str, type[Engine]] = {"sqlite": SqliteEngine, "postgres": PostgresEngine}


class Subject:
    """The store under test, spoken to in awaits."""

    def __init__(self, engine: Engine, clock: SimClock) -> None:
        self._engine = engine
        self.clock = clock
        self.store = engine.open()

    @property
    def kept(self) -> MaintainedStore:
        """The store as its upkeep sees it."""
        return cast(MaintainedStore, self.store)

    async def reopen(self) -> None:
        """Close the store and open another one on the same data."""
        await self._engine.close()
        self.store = self._engine.open()

    async def close(self) -> None:
        await self._engine.close()

    # Writing

    async def create(
        self,
        path: str,
        content_type: str | None = "text/plain",
        *,
        body: bytes = b"",
        lifetime: Lifetime | None = None,
        closed: bool = False,
        fork_from: ForkFrom | None = None,
    ) -> Outcome:
        return await self._asked(
            self.store.create,
            Create(
                path,
                content_type=content_type,
                lifetime=lifetime or Lifetime(),
                closed=closed,
                batch=batch_of(body, content_type or "") if body else None,
                fork_from=fork_from,
            ),
        )

    async def made(self, path: str, content_type: str = "text/plain", **options: Any) -> Created:
        """A stream that did not exist before."""
        outcome = await self.create(path, content_type, **options)
        assert isinstance(outcome, Created), outcome
        return outcome

    async def fork(
        self, path: str, source: str, offset: Offset | None = None, sub_offset: int = 0, **more: Any
    ) -> Outcome:
        return await self.create(path, None, fork_from=ForkFrom(source, offset, sub_offset), **more)

    def appending(
        self, path: str, body: bytes = b"", content_type: str = "text/plain", **options: Any
    ) -> asyncio.Future[Outcome]:
        """Send an append and come back at once; the answer follows its commit."""
        return self.ask(self.store.append, append(path, body, content_type, **options))

    async def append(
        self, path: str, body: bytes = b"", content_type: str = "text/plain", **options: Any
    ) -> Outcome:
        return await answered(self.appending(path, body, content_type, **options))

    async def appended(self, path: str, body: bytes, **options: Any) -> Appended:
        """An append that must be accepted."""
        outcome = await self.append(path, body, **options)
        assert isinstance(outcome, Appended), outcome
        return outcome

    async def delete(self, path: str) -> Outcome:
        return await self._asked(self.store.delete, path)

    # Reading

    async def look(self, path: str, *, touch: bool = False) -> Outcome:
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.store.look(path, touch=touch)

    async def info(self, path: str, *, touch: bool = False) -> StreamInfo:
        """A stream that must be there."""
        info = await self.look(path, touch=touch)
        assert isinstance(info, StreamInfo), info
        return info

    async def read(
        self, path: str, after: Offset = START, *, bytes_max: int = CHUNK_BYTES
    ) -> Outcome:
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.store.read(await self.info(path), after, bytes_max=bytes_max)

    async def content(self, path: str, *, bytes_max: int = CHUNK_BYTES) -> bytes:
        """The whole stream, chunk by chunk, as a reader would put it together."""
        info = await self.info(path)
        parts, at = [], info.first
        while at != info.tail:
            chunk = await self.store.read(info, at, bytes_max=bytes_max)
            assert isinstance(chunk, Chunk), chunk
            assert chunk.start == at
            assert chunk.next.bytes > at.bytes
            parts.append(chunk.data)
            at = chunk.next
        return (b"," if info.is_json else b"").join(parts)

    async def messages(self, path: str) -> list[Any]:
        """The messages of a JSON stream."""
        found: list[Any] = json.loads(b"[%b]" % await self.content(path))
        return found

    def ask(
        self, ask: Callable[[Any, Callable[[Any], None]], None], request: Any
    ) -> asyncio.Future[Outcome]:
        """Send a request and come back at once."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        ask(request, answer.set_result)  # a second answer would raise
        return answer

    async def _asked(self, ask: Callable[[Any, Callable[[Any], None]], None], request: Any) -> Any:
        return await answered(self.ask(ask, request))


async def answered(answer: asyncio.Future[Outcome]) -> Outcome:
    async with asyncio.timeout(WAIT_SECONDS):
        return as_usual(await answer)


def append(
    path: str,
    body: bytes = b"",
    content_type: str = "text/plain",
    *,
    closes: bool = False,
    producer: tuple[str, int, int] | None = None,
    seq: str | None = None,
) -> Append:
    batch = batch_of(body, content_type) if body else None
    return Append(
        path,
        batch,
        content_type if body else None,
        closes,
        None if producer is None else ProducerTuple(*producer),
        seq,
        digest(content_type, closes, body),
    )


def batch_of(body: bytes, content_type: str) -> Batch | None:
    if content_type != "application/json":
        return bytes_batch(body)
    batch = json_batch(body)
    assert batch is None or isinstance(batch, Batch), batch
    return batch
