"""A store with its upkeep at hand, for the tests of truncation and retention."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.offsets import Offset
from fencepost.store.contract import Store
from fencepost.store.maintain.retention import Keeper
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing.clock import SimClock
from tests.contract.subject import Subject, answered
from tests.engines import engine as engine

JSON = "application/json"
LOG_MS = 60_000


class Engine:
    """An embedded store with settings of the test's own."""

    def __init__(self, folder: Path, clock: SimClock, **settings: Any) -> None:
        self._settings = SqliteSettings(folder=folder, **settings)
        self._clock = clock
        self.store: SqliteStore | None = None

    def open(self) -> Store:
        self.store = SqliteStore(self._settings, self._clock)
        return self.store

    async def close(self) -> None:
        assert self.store is not None
        await self.store.close()


class Kept(Subject):
    """A store under test with its upkeep at hand."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        clock = SimClock()
        self.folder = folder
        self.engine = Engine(folder, clock, log_retention_ms=LOG_MS, **settings)
        super().__init__(self.engine, clock)

    @property
    def sqlite(self) -> SqliteStore:
        assert self.engine.store is not None
        return self.engine.store

    @property
    def keeper(self) -> Keeper:
        return Keeper(self.sqlite, self.clock)

    async def truncate(self, path: str, before: Offset | None) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.store.truncate(path, before, answer.set_result)
        return await answered(answer)

    async def retain(self) -> int:
        """Go round all streams once."""
        count = await self.keeper.retain()
        assert await self.sqlite.durable() is None
        return count

    async def purge_all(self) -> int:
        """Let the log's retention pass, and drop everything that may go."""
        self.clock.advance(LOG_MS)
        purged = 0
        while count := await self.keeper.purge():
            purged += count
        return purged

    def rows(self, path: str) -> int:
        """Messages of any incarnation at a path that are still in the log."""
        [(count,)] = self.sqlite._lookups.raw.execute(
            "SELECT count(*) FROM log WHERE kind = 0 AND stream IN"
            " (SELECT id FROM streams WHERE path = ?)",
            (path,),
        )
        return int(count)

    def truncations(self) -> int:
        [(count,)] = self.sqlite._lookups.raw.execute("SELECT count(*) FROM truncations")
        return int(count)

    async def assert_whole(self) -> None:
        """What is on disk holds together, also after a restart."""
        assert await self.sqlite.durable() is None
        assert check(self.folder).findings == []
        await self.reopen()


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    subject = Kept(tmp_path / "data")
    yield subject
    await subject.close()
    assert check(tmp_path / "data").findings == []


async def numbers(kept: Kept, path: str, count: int, *, start: int = 0, every_ms: int = 0) -> None:
    for number in range(start, start + count):
        kept.clock.advance(every_ms)
        await kept.appended(path, b"[%d]" % number, content_type=JSON, producer=("p", 0, number))
