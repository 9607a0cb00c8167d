"""Background jobs of the embedded store: those of every store, and those of its SQLite file.

SQLite needs four more: fold the write-ahead log into the database, give free pages back, index the
newest Idempotency-Keys, and load the filter of keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import apsw

from fencepost.clock import Clock
from fencepost.store.maintain.jobs import KEYS_PER_SWEEP_MAX, Upkeep
from fencepost.store.sqlite.connection import PAGE_BYTES, SqliteConnection
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write.keys import KeyFilter, KeyPlace, KeyTable, read_piece

FREE_PAGES_KEPT = 256
"""Free pages that are not worth giving back: the next messages will want them."""
PAGES_PER_VACUUM_MAX = 1_000


class SqliteUpkeep(Upkeep):
    """The background jobs of one embedded store."""

    def __init__(self, store: SqliteStore, clock: Clock) -> None:
        super().__init__(store, clock)
        self._file = store
        self._restart_bytes = store.settings.wal_bytes_max
        self._swept_to = 0
        self._written_to = -1

    @property
    def jobs(self) -> tuple[Callable[[], Awaitable[object]], ...]:
        return (*super().jobs, self.write_behind, self.vacuum, self.learn_keys, self.index_keys)

    async def purge(self) -> int:
        purged = await super().purge()
        if purged:
            await self._file.between_commits(_vacuum)
        return purged

    async def run(self) -> None:
        # Not only with the first round: until then every key is looked for on disk.
        await self.attempt(self.learn_keys)
        await super().run()

    async def fold(self) -> None:
        """Keep the write-ahead log short until cancelled."""
        while True:
            await self._file.wal_grown.wait()
            self._file.wal_grown.clear()
            await self.attempt(self.checkpoint)

    async def checkpoint(self) -> None:
        """Fold the write-ahead log into the database.

        This happens beside the writer, so a log that is written to all the time is never folded
        completely and goes on growing. Above the limit writers wait for the little that is left,
        and the log starts again from its beginning.
        """
        await self._file.readers.run(_fold_beside)
        size = self._file.wal_pages * PAGE_BYTES
        if size < self._restart_bytes:
            return
        settings = self._file.settings
        restarted = await self._file.restart_log()
        # While a backup reads from it the log can only grow; now and then is often enough to try.
        self._restart_bytes = (
            settings.wal_bytes_max
            if restarted
            else size + max(settings.checkpoint_wal_bytes, size // 4)
        )

    async def write_behind(self) -> bool:
        """Write the rows of streams and producers that commits left for later, if none of them were
        written since the last time; whether that was so."""
        behind = self._file.behind
        is_late = bool(behind) and behind.written_to == self._written_to
        self._written_to = behind.written_to
        if is_late:
            await self._file.settle()
        return is_late

    async def learn_keys(self) -> int:
        """Let the filters of keys and of sends know those on disk; how many there were."""
        ledger = self._file.ledger
        learned = await self._learn(self._file.keys, ledger.kept_keys)
        return learned + await self._learn(self._file.sends, ledger.sends.kept)

    async def _learn(self, keys: KeyFilter, kept: Callable[[], list[KeyPlace]]) -> int:
        table = keys.table
        if keys.is_complete and keys.is_full:
            [(count,)] = await self._fetch(table.count_rows)
            # The keys of a large commit are for some time neither on disk nor in a group.
            if self._file.decider.holds.held is None:
                keys.begin_again(count, kept())
        learned = 0
        while (after := keys.next_piece) is not None:
            piece = partial(read_piece, after=after, table=table)
            hashes, last = await self._file.readers.run(piece)
            keys.learn(hashes, last)
            learned += len(hashes)
        return learned

    async def index_keys(self, *, at_least: int | None = None) -> int:
        """Put the keys and sends that came last into their index, if they are enough; how many."""
        enough = self._file.settings.key_index_keys
        indexed = 0
        for keys in (self._file.keys, self._file.sends):
            recent = keys.recent
            if len(recent) < (enough if at_least is None else at_least):
                continue
            recent.begin_indexing()
            piece = partial(_index_some, enough, keys.table)
            while count := await self._file.between_commits(piece):
                indexed += count
            recent.end_indexing()
        return indexed

    async def sweep_keys(self) -> int:
        """Forget some Idempotency-Keys whose time is over.

        Keys are looked at in the order of their use, a piece at a time, and mostly it is the oldest
        one that tells that there is nothing to do.
        """
        now_ms = self._clock.now_ms()
        if not await self._is_any_due(self._swept_to, now_ms):
            if self._swept_to == 0 or not await self._is_any_due(0, now_ms):
                self._swept_to = 0
                return 0
            self._swept_to = 0
        after = self._swept_to
        [(last,)] = await self._fetch("last_of_keys_after", after, KEYS_PER_SWEEP_MAX)
        rows = await self._fetch("expired_keys_between", after, last, now_ms)
        if rows:
            ids = [(id_, now_ms) for (id_,) in rows]
            await self._file.between_commits(partial(_forget_keys, ids))
        self._swept_to = last
        return len(rows)

    async def _is_any_due(self, after: int, now_ms: int) -> bool:
        """Whether keys used after one may be due. Those used after one that is not yet, and that is
        kept for as long as keys are kept now, are due later still."""
        rows = await self._fetch("oldest_key_after", after)
        if not rows:
            return False
        [(created_ms, expires_ms)] = rows
        kept_ms = self._settings.key_retention_s * 1000
        if expires_ms is None:
            return kept_ms != 0
        is_due: bool = expires_ms <= now_ms
        return is_due or expires_ms != created_ms + kept_ms

    async def vacuum(self) -> bool:
        """Give some free pages at the end of the file back; whether there was enough to do."""
        free, total = await self._file.readers.run(_pages)
        if free <= max(FREE_PAGES_KEPT, total // 8):
            return False
        await self._file.between_commits(_vacuum)
        return True


def _index_some(count_max: int, table: KeyTable, connection: SqliteConnection) -> int:
    """Put some keys into the index; how many there were."""
    with connection:
        [(last,)] = connection.fetch(table.last_to_index, (count_max,))
        if last is None:
            return 0
        indexed = connection.execute(table.index_rows, (last,))
        connection.execute(table.mark_indexed, (last,))
    return indexed


def _forget_keys(ids: list[tuple[int, int]], connection: SqliteConnection) -> None:
    with connection:
        connection.execute_many("forget_key", ids)


def _pages(connection: SqliteConnection) -> tuple[int, int]:
    return connection.raw.pragma("freelist_count"), connection.raw.pragma("page_count")


def _vacuum(connection: SqliteConnection) -> None:
    connection.raw.execute(f"PRAGMA incremental_vacuum({PAGES_PER_VACUUM_MAX})").fetchall()


def _fold_beside(connection: SqliteConnection) -> None:
    connection.raw.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
