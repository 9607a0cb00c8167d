"""Upkeep: what has to happen although nobody asks: expiry, purge, folding the write-ahead log.

Each job does a bounded piece at a time, so that no writer waits long behind it. Expiry is also
decided whenever somebody looks at an expired stream; the sweep here is for those that nobody looks
at.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

import apsw

from fencepost.clock import Clock
from fencepost.store.sqlite.database import fetch
from fencepost.store.sqlite.store import SqliteStore

log = logging.getLogger(__name__)

STREAMS_PER_SWEEP_MAX = 1_000
ROWS_PER_PURGE_MAX = 2_000
PAGES_PER_VACUUM_MAX = 1_000


class Upkeep:
    """The background jobs of one embedded store."""

    def __init__(self, store: SqliteStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settings = store.settings

    async def run(self) -> None:
        """Do the jobs until cancelled; one that fails is logged and tried again."""
        interval_s = self._settings.sweep_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s)
            for job in (self.expire, self.purge, self.checkpoint):
                try:
                    await job()
                except Exception as error:
                    log.exception("upkeep failed and will be tried again")
                    self._store.suspect(error)

    async def expire(self) -> int:
        """End the streams whose time is over."""
        now_ms = self._clock.now_ms()
        rows = await self._store.readers.run(
            partial(fetch, query="expired_streams", values=(now_ms, STREAMS_PER_SWEEP_MAX))
        )
        return sum(self._store.expire(path) for (path,) in rows)

    async def purge(self) -> int:
        """Drop rows of streams that were deleted longer ago than the log's retention."""
        before_ms = self._clock.now_ms() - self._settings.log_retention_ms
        rows = await self._store.readers.run(
            partial(fetch, query="purgeable_streams", values=(before_ms, 1))
        )
        if not rows:
            return 0
        [(stream_id,)] = rows
        purged = 0
        while count := await self._store.purge_rows(stream_id, ROWS_PER_PURGE_MAX):
            purged += count
        await self._store.purge_stream(stream_id, pages_max=PAGES_PER_VACUUM_MAX)
        return purged

    async def checkpoint(self) -> None:
        """Fold the write-ahead log into the database when it has grown."""
        if wal_bytes(self._store.file) < self._settings.checkpoint_wal_bytes:
            return
        await self._store.readers.run(partial(_checkpoint, mode="PASSIVE"))
        # A log that is written to all the time is never folded completely from beside; above the
        # limit writers wait for the little that is left.
        if wal_bytes(self._store.file) >= self._settings.wal_bytes_max:
            await self._store.shrink_log()


def wal_bytes(file: Path) -> int:
    """How large the write-ahead log is."""
    try:
        return file.with_name(file.name + "-wal").stat().st_size
    except FileNotFoundError:
        return 0


def _checkpoint(connection: apsw.Connection, mode: str) -> None:
    connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
