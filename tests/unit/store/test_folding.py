"""When the write-ahead log is folded in: by how much it has grown, and not after every commit."""

import asyncio
from pathlib import Path

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Append
from fencepost.protocol.batches import bytes_batch
from fencepost.protocol.creates import Create
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore

BYTES = "application/octet-stream"
GROWTH = 256 * 1024


async def test_the_log_is_folded_each_time_it_has_grown_by_so_much(tmp_path: Path) -> None:
    """Folding syncs the database: after every commit it would cost as much as the commits."""
    settings = SqliteSettings(folder=tmp_path, checkpoint_wal_bytes=GROWTH)
    store = SqliteStore(settings, SystemClock())
    await _create(store)
    commits_before: list[int] = []

    for _ in range(3):
        commits = 0
        while not store.wal_grown.is_set():
            await _append(store)
            commits += 1
        store.wal_grown.clear()
        commits_before.append(commits)
    await store.restart_log()
    await _append(store)

    assert min(commits_before) > 2
    assert not store.wal_grown.is_set()
    await store.close()


async def _create(store: SqliteStore) -> None:
    done = asyncio.get_running_loop().create_future()
    store.create(Create("s", content_type=BYTES), done.set_result)
    await done


async def _append(store: SqliteStore) -> None:
    done = asyncio.get_running_loop().create_future()
    store.append(Append("s", bytes_batch(b"x" * 20_000), BYTES), done.set_result)
    await done
