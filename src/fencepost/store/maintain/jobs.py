"""Upkeep: what has to happen although nobody asks: expiry, purge, sweeps.

Each job does a bounded piece at a time, so that no writer waits long behind it. Expiry is also
decided whenever somebody looks at an expired stream; the sweep here is for those that nobody looks
at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from fencepost.clock import Clock
from fencepost.protocol.commits import Part
from fencepost.store.contract import StoreAwayError
from fencepost.store.database import Connection, Row
from fencepost.store.maintain import purge as purges
from fencepost.store.maintain import retention
from fencepost.store.maintain.interface import Upkept
from fencepost.store.read import log_plan as plans
from fencepost.store.write.decider import Decider

log = logging.getLogger(__name__)

STREAMS_PER_SWEEP_MAX = 1_000
STREAMS_PER_PURGE_MAX = 100
ROWS_PER_PURGE_MAX = 2_000
KEYS_PER_SWEEP_MAX = 5_000
PARTS_PER_SWEEP_MAX = 100
PARTS_PER_LOOK_MAX = 500


class Upkeep:
    """The background jobs of one store."""

    def __init__(self, store: Upkept, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settings = store.settings
        self._keeper = retention.Keeper(store, clock)
        self._parts_seen = ("", "")

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
            self.tally,
            self.sweep_keys,
            self.sweep_parts,
            self.forget_parts,
        )

    async def run(self) -> None:
        """Do the jobs until cancelled; one that fails is logged and tried again."""
        interval_s = self._settings.sweep_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s)
            for job in self.jobs:
                await self.attempt(job)

    async def attempt(self, job: Callable[[], Awaitable[object]]) -> None:
        """Do a job; when it fails it is logged, and tried again with the next round."""
        try:
            await job()
        except StoreAwayError as error:
            log.warning("upkeep waits for the store: %s", error)
        except Exception as error:
            log.exception("upkeep failed and will be tried again")
            self._store.suspect(error)

    async def _fetch(self, query: str, *values: object) -> list[Row]:
        return await self._store.readers.run(lambda connection: connection.fetch(query, values))

    async def expire(self) -> int:
        """End the streams whose time is over."""
        now_ms = self._clock.now_ms()
        rows = await self._fetch("expired_streams", now_ms, STREAMS_PER_SWEEP_MAX)
        if not rows:
            return 0
        return await self._store.decide(
            lambda decider: sum(decider.expire(path) for (path,) in rows)
        )

    async def purge(self) -> int:
        """Drop rows of streams that were deleted longer ago than the log's retention."""
        before_ms = self._clock.now_ms() - self._settings.log_retention_ms
        rows = await self._fetch("purgeable_streams", before_ms, STREAMS_PER_PURGE_MAX)
        return sum([await self._purge(stream_id, before_ms) for (stream_id,) in rows])

    async def _purge(self, stream_id: int, before_ms: int) -> int:
        purged = 0
        for source_id in await self._store.readers.run(
            partial(retention.inherited_from, stream_id)
        ):
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
            await self._store.decide(partial(_save_buckets, weighed))
        return len(weighed)

    async def sweep_keys(self) -> int:
        """Forget Idempotency-Keys whose time is over."""
        now_ms = self._clock.now_ms()
        if not await self._fetch("any_expired_key", now_ms):
            return 0
        return await self._store.between_commits(partial(_sweep_keys, now_ms))

    async def sweep_parts(self) -> int:
        """Drop staged parts that nobody committed in time."""
        before_ms = self._clock.now_ms() - self._settings.staging_ttl_s * 1000
        rows = await self._fetch("abandoned_parts", before_ms, PARTS_PER_SWEEP_MAX)
        if rows:
            # As a decision, not between groups: a commit decided meanwhile must see it.
            await self._store.decide(partial(_drop_parts, [Part(txn, part) for txn, part in rows]))
        return len(rows)

    async def forget_parts(self) -> int:
        """Forget some parts that were committed, once nothing can come of it; how many.

        A part that is known to be committed cannot be committed again. One whose data is purged can
        be committed again only by uploading it again, so it is remembered for as long as the key of
        its commit would be, counted from when it had to be committed at the latest.
        """
        settings = self._settings
        if settings.key_retention_s == 0:
            return 0
        kept_s = settings.staging_ttl_s + settings.key_retention_s
        before_ms = self._clock.now_ms() - kept_s * 1000
        after = self._parts_seen
        rows = await self._fetch("used_parts_after", *after, PARTS_PER_LOOK_MAX)
        self._parts_seen = ("", "")
        if len(rows) == PARTS_PER_LOOK_MAX:
            self._parts_seen = (rows[-1][0], rows[-1][1])
        if not any(staged_ms <= before_ms for _, _, staged_ms in rows):
            return 0
        values = (*after, rows[-1][0], rows[-1][1], before_ms)
        return await self._store.between_commits(partial(_forget_parts, values))


def _forget_parts(values: Row, connection: Connection) -> int:
    forgotten = 0
    with connection:
        connection.execute("forget_chunks", values)
        forgotten += connection.execute("forget_parts", values)
    return forgotten


def _save_buckets(weighed: list[tuple[int, int, int]], decider: Decider) -> None:
    decider.group.statements += [("save_bucket", values) for values in weighed]


def _drop_parts(parts: list[Part], decider: Decider) -> None:
    for part in parts:
        decider.drop_part(part)


def _purge_rows(stream_id: int, connection: Connection) -> int:
    """Drop some rows of a deleted stream; how many there were."""
    purged = 0
    with connection:
        purged += purges.purge(connection, stream_id, ROWS_PER_PURGE_MAX)
    return purged


def _purge_stream(stream_id: int, connection: Connection) -> None:
    """Drop what is left of a deleted stream."""
    with connection:
        for what in ("producers", "remembered", "truncations", "keys", "stream"):
            connection.execute(f"purge_{what}", (stream_id,))


def _sweep_keys(before_ms: int, connection: Connection) -> int:
    """Forget some keys whose time was over; how many there were."""
    swept = 0
    with connection:
        swept += connection.execute("sweep_keys", (before_ms, KEYS_PER_SWEEP_MAX))
    return swept
