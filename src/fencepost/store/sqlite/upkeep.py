"""Upkeep: what has to happen although nobody asks: expiry, purge, folding the write-ahead log.

Each job does a bounded piece at a time, so that no writer waits long behind it. Expiry is also
decided whenever somebody looks at an expired stream; the sweep here is for those that nobody looks
at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import apsw

from fencepost.clock import Clock
from fencepost.protocol.commits import Part
from fencepost.store.sqlite import plans, purges
from fencepost.store.sqlite.database import PAGE_BYTES, QUERIES, fetch
from fencepost.store.sqlite.retention import Keeper, inherited_from
from fencepost.store.sqlite.store import SqliteStore

log = logging.getLogger(__name__)

STREAMS_PER_SWEEP_MAX = 1_000
STREAMS_PER_PURGE_MAX = 100
ROWS_PER_PURGE_MAX = 2_000
PAGES_PER_VACUUM_MAX = 1_000
KEYS_PER_SWEEP_MAX = 5_000
PARTS_PER_SWEEP_MAX = 100


class Upkeep:
    """The background jobs of one embedded store."""

    def __init__(self, store: SqliteStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settings = store.settings
        self._restart_bytes = store.settings.wal_bytes_max
        self._keeper = Keeper(store, clock)

    @property
    def jobs(self) -> tuple[Callable[[], Awaitable[object]], ...]:
        """What is done in turn, each a bounded piece."""
        keeper = self._keeper
        return (
            self.expire,
            self.purge,
            keeper.retain,
            keeper.purge,
            keeper.forget_producers,
            keeper.vacuum,
            self.tally,
            self.sweep_keys,
            self.sweep_parts,
        )

    async def run(self) -> None:
        """Do the jobs until cancelled; one that fails is logged and tried again."""
        interval_s = self._settings.sweep_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s)
            for job in self.jobs:
                await self._attempt(job)

    async def fold(self) -> None:
        """Keep the write-ahead log short until cancelled."""
        while True:
            await self._store.wal_grown.wait()
            self._store.wal_grown.clear()
            await self._attempt(self.checkpoint)

    async def _attempt(self, job: Callable[[], Awaitable[object]]) -> None:
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
            partial(fetch, query="purgeable_streams", values=(before_ms, STREAMS_PER_PURGE_MAX))
        )
        return sum([await self._purge(stream_id, before_ms) for (stream_id,) in rows])

    async def _purge(self, stream_id: int, before_ms: int) -> int:
        purged = 0
        for source_id in await self._store.readers.run(partial(inherited_from, stream_id)):
            # What the stream inherited may have been kept for it alone.
            purged += await self._keeper.purge_beginning(source_id, before_ms)
        while count := await self._store.between_commits(partial(_purge_rows, stream_id)):
            purged += count
        await self._store.between_commits(partial(_purge_stream, stream_id))
        return purged

    async def tally(self) -> int:
        """Write down what the full buckets of the log weigh.

        A purge corrects what is written down, and the two take turns here: so no weight is written
        that was taken before a purge.
        """
        weighed = await self._store.readers.run(plans.untallied)
        if weighed:
            statements = self._store.commits.group.statements
            statements += [(plans.SAVE_BUCKET, values) for values in weighed]
            await self._store.durable()
        return len(weighed)

    async def sweep_keys(self) -> int:
        """Forget Idempotency-Keys whose time is over."""
        now_ms = self._clock.now_ms()
        if not self._store.lookup(QUERIES["any_expired_key"], (now_ms,)):
            return 0
        return await self._store.between_commits(partial(_sweep_keys, now_ms))

    async def sweep_parts(self) -> int:
        """Drop staged parts that nobody committed in time."""
        before_ms = self._clock.now_ms() - self._settings.staging_ttl_s * 1000
        rows = await self._store.readers.run(
            partial(fetch, query="abandoned_parts", values=(before_ms, PARTS_PER_SWEEP_MAX))
        )
        for txn, part in rows:
            await self._store.drop_part(Part(txn, part))
        return len(rows)

    async def checkpoint(self) -> None:
        """Fold the write-ahead log into the database.

        This happens beside the writer, so a log that is written to all the time is never folded
        completely and goes on growing. Above the limit writers wait for the little that is left,
        and the log starts again from its beginning.
        """
        await self._store.readers.run(_fold_beside)
        size = self._store.wal_pages * PAGE_BYTES
        if size < self._restart_bytes:
            return
        restarted = await self._store.restart_log()
        # While a backup reads from it the log can only grow; now and then is often enough to try.
        self._restart_bytes = (
            self._settings.wal_bytes_max
            if restarted
            else size + max(self._settings.checkpoint_wal_bytes, size // 4)
        )


def _purge_rows(stream_id: int, connection: apsw.Connection) -> int:
    """Drop some rows of a deleted stream; how many there were."""
    purged = 0
    with connection:
        purged += purges.purge(connection, stream_id, ROWS_PER_PURGE_MAX)
    return purged


def _purge_stream(stream_id: int, connection: apsw.Connection) -> None:
    """Drop what is left of a deleted stream and give its space back to the file system."""
    with connection:
        for what in ("producers", "remembered", "truncations", "keys", "stream"):
            connection.execute(QUERIES[f"purge_{what}"], (stream_id,))
    connection.execute(f"PRAGMA incremental_vacuum({PAGES_PER_VACUUM_MAX})").fetchall()


def _sweep_keys(before_ms: int, connection: apsw.Connection) -> int:
    """Forget some keys whose time was over; how many there were."""
    swept = 0
    with connection:
        connection.execute(QUERIES["sweep_keys"], (before_ms, KEYS_PER_SWEEP_MAX))
        swept += connection.changes()
    return swept


def _fold_beside(connection: apsw.Connection) -> None:
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
