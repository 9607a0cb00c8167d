"""Another user of the machine reads no stream from the files, whatever folder they are in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.clock import SystemClock
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite import backup
from fencepost.store.sqlite.store import SqliteStore


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that all may look into, made by a process that keeps no rights back."""
    before = os.umask(0)
    folder = tmp_path / "data"
    folder.mkdir(mode=0o777)
    yield folder
    os.umask(before)


def rights(folder: Path) -> dict[str, str]:
    return {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}


def _open_to_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o666)


async def test_all_files_of_a_store_are_its_owners_alone(open_folder: Path) -> None:
    store = SqliteStore(SqliteSettings(folder=open_folder), SystemClock())
    try:
        found = rights(open_folder)
    finally:
        await store.close()

    assert {"fencepost.db", "fencepost.db-wal", "lock"} <= set(found)
    assert set(found.values()) == {"0o600"}, found


async def test_files_that_were_open_to_all_are_closed_by_the_next_start(open_folder: Path) -> None:
    await SqliteStore(SqliteSettings(folder=open_folder), SystemClock()).close()
    _open_to_all(open_folder)

    await SqliteStore(SqliteSettings(folder=open_folder), SystemClock()).close()

    assert set(rights(open_folder).values()) == {"0o600"}


async def test_a_backup_and_what_is_restored_from_it_are_their_owners_alone(
    open_folder: Path, tmp_path: Path
) -> None:
    await SqliteStore(SqliteSettings(folder=open_folder), SystemClock()).close()
    copies, restored = tmp_path / "copies", tmp_path / "restored"
    copies.mkdir(mode=0o777)

    backup.backup(open_folder, copies / "copy.db")
    backup.restore(copies / "copy.db", restored)

    assert rights(copies) == {"copy.db": "0o600"}
    assert set(rights(restored).values()) == {"0o600"}
    assert stat.S_IMODE(restored.stat().st_mode) == 0o700
