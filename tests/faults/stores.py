"""Short words for the fault tests that drive a store directly."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fencepost.clock import Clock
from fencepost.protocol.appends import Append, Appended, ProducerTuple
from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.creates import Create
from fencepost.protocol.offsets import START
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Chunk, StreamInfo
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing import FaultVfs, SimClock
from tests.faults.recovery import ask

TYPE = "application/octet-stream"


@asynccontextmanager
async def opened(
    folder: Path, vfs: FaultVfs | None = None, clock: Clock | None = None
) -> AsyncIterator[SqliteStore]:
    """A store that is closed at the end, whatever became of it."""
    settings = SqliteSettings(folder=folder, vfs=vfs.name if vfs is not None else None)
    store = SqliteStore(settings, clock or SimClock())
    try:
        yield store
    finally:
        if vfs is not None:
            vfs.rules.clear()
        await store.close()
        if store.failure.done() and not store.failure.cancelled():
            store.failure.exception()


def an_append(path: str, data: bytes, *, seq: int | None = None, closes: bool = False) -> Append:
    """An append of bytes, by producer `p` when it has a sequence number."""
    return Append(
        path,
        bytes_batch(data),
        TYPE,
        closes=closes,
        producer=None if seq is None else ProducerTuple("p", 0, seq),
        digest=digest(TYPE, closes, data),
    )


async def create(store: SqliteStore, path: str, ttl_s: int | None = None) -> Any:
    """Make a stream of bytes."""
    return await ask(lambda done: store.create(Create(path, TYPE, Lifetime(ttl_s)), done))


async def append(store: SqliteStore, path: str, data: bytes, seq: int | None = None) -> Any:
    """Append bytes and wait for the answer."""
    return await ask(lambda done: store.append(an_append(path, data, seq=seq), done))


async def appended(store: SqliteStore, path: str, data: bytes, seq: int | None = None) -> None:
    """Append bytes, which must be accepted."""
    outcome = await append(store, path, data, seq)
    assert isinstance(outcome, Appended), outcome


async def delete(store: SqliteStore, path: str) -> Any:
    """Remove a stream."""
    return await ask(lambda done: store.delete(path, done))


async def content(store: SqliteStore, path: str) -> bytes:
    """All bytes of a stream, which must be there."""
    info = await store.look(path, touch=False)
    assert isinstance(info, StreamInfo), info
    chunk = await store.read(info, START, bytes_max=1 << 30)
    assert isinstance(chunk, Chunk), chunk
    return chunk.data
