"""Background jobs that every store needs: expiry, retention, purges, and forgetting old keys.

Each job does a bounded piece of work at a time, so that no writer waits long behind it. `Upkeep`
runs them one after the other.

* Expiry: a stream whose time is over also ends when a request finds it expired. The job ends those
  that no request asks for.
* Retention is in `retention.py`. The rows of deleted streams are purged when the log's own
  retention lets go of them.
* Idempotency-Keys, dedupe rows of sends, staged parts and silent producers are forgotten when their
  time is over.
* The rows of a deleted group go in pieces; until then no request finds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from fencepost.clock import Clock
from fencepost.protocol.commits import Part
from fencepost.protocol.meshes import names_root
from fencepost.store.contract import StoreAwayError
from fencepost.store.maintain import purge as purges
from fencepost.store.maintain.contract import MaintainedStore
from fencepost.store.maintain.retention import Keeper, inherited_from
from fencepost.store.mesh_contract import DropMesh
from fencepost.store.read import log_plan as plans
from fencepost.store.sql import Connection, Row
from fencepost.store.write.decider import Decider
from fencepost.store.write.sends import GONE, mesh_from_row

log = logging.getLogger(__name__)

STREAMS_PER_SWEEP_MAX = 1_000
STREAMS_PER_PURGE_MAX = 100
ROWS_PER_PURGE_MAX = 2_000
KEYS_PER_SWEEP_MAX = 5_000
PARTS_PER_SWEEP_MAX = 100
PARTS_PER_LOOK_MAX = 500


GROUP_ROWS_PER_SWEEP_MAX = 2_000


def drop_deleted_group(connection: Connection) -> int:
    """Remove some rows of a group that was deleted; how many there were."""
    with connection:
        found = connection.fetch("deleted_groups")
        if not found:
            return 0
        [(group_id,)] = found
        values = (group_id, GROUP_ROWS_PER_SWEEP_MAX)
        dropped = connection.execute("drop_group_leases", values)
        dropped += connection.execute("drop_group_parked", values)
        dropped += connection.execute("drop_group_told", values)
        if not dropped:
            connection.execute("drop_group_told_count", (group_id,))
            connection.execute("drop_group", (group_id,))
        return dropped


def paths_of(mesh: str, limit: int, connection: Connection) -> list[str]:
    """Some streams of a mesh."""
    root = names_root(mesh)
    rows = connection.fetch("streams_between_paths", (root, root[:-1] + "0", limit))
    return [row[0] for row in rows]


def _purge_mesh(mesh_id: int, connection: Connection) -> int:
    """Remove some dedupe rows of a deleted mesh, and behind the last of them the mesh."""
    with connection:
        purged = connection.execute("purge_sends", (mesh_id, KEYS_PER_SWEEP_MAX))
        if not purged:
            connection.execute("drop_mesh", (mesh_id,))
    return purged


class Upkeep:
    """The background jobs of one store."""

    def __init__(self, store: MaintainedStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settings = store.settings
        self._keeper = Keeper(store, clock)
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
            self.sweep_sends,
            self.sweep_parts,
            self.forget_parts,
            self.drop_groups,
            self.drop_meshes,
        )

    async def run(self) -> None:
        """Do the jobs until cancelled; one that fails is logged and tried again."""
        interval_s = self._settings.sweep_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s)
            for job in self.jobs:
                await self.attempt(job)

    async def drop_groups(self) -> int:
        """Remove a piece of the rows of a deleted group, and the group behind the last of them."""
        if not await self._fetch("deleted_groups"):
            return 0
        return await self._store.between_commits(drop_deleted_group)

    async def drop_meshes(self) -> int:
        """Remove a piece of a mesh that is being deleted: streams first, then dedupe rows."""
        rows = await self._fetch("meshes_to_drop")
        if not rows:
            return 0
        [row] = rows
        mesh, state = mesh_from_row(row), row[2]
        if state == GONE:
            return await self._store.between_commits(partial(_purge_mesh, mesh.id))
        paths = await self._store.readers.run(partial(paths_of, mesh.name, STREAMS_PER_SWEEP_MAX))
        request = DropMesh(mesh.name, paths, is_last=len(paths) < STREAMS_PER_SWEEP_MAX)
        await self._store.decide(lambda decider: decider.meshes.decide(request))
        return len(paths)

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
            await self._store.decide(partial(_save_buckets, weighed))
        return len(weighed)

    async def sweep_keys(self) -> int:
        """Forget Idempotency-Keys whose time is over."""
        now_ms = self._clock.now_ms()
        if not await self._fetch("any_expired_key", now_ms):
            return 0
        return await self._store.between_commits(partial(_sweep_keys, now_ms))

    async def sweep_sends(self) -> int:
        """Forget some sends whose time is over; how many."""
        now_ms = self._clock.now_ms()
        if not await self._fetch("any_expired_send", now_ms):
            return 0
        return await self._store.between_commits(partial(sweep_sends, now_ms))

    async def sweep_parts(self) -> int:
        """Drop staged parts that were not committed in time."""
        before_ms = self._clock.now_ms() - self._settings.staging_ttl_s * 1000
        rows = await self._fetch("abandoned_parts", before_ms, PARTS_PER_SWEEP_MAX)
        if rows:
            # This is a decision, not work between groups: a commit decided meanwhile must see it.
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


def sweep_sends(before_ms: int, connection: Connection) -> int:
    """Forget some sends whose time was over; how many there were."""
    swept = 0
    with connection:
        swept += connection.execute("sweep_sends", (before_ms, KEYS_PER_SWEEP_MAX))
    return swept
