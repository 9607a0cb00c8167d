"""The schema of a data folder: looked at without changing it, or brought up to date."""

from __future__ import annotations

from pathlib import Path

import apsw

from fencepost.store.schema import Schema, schema_at
from fencepost.store.sql import load_migrations
from fencepost.store.sqlite.connection import (
    BUSY_MS_MAX,
    FILE,
    FolderLock,
    connect,
    fold,
    make_folder,
    migrate,
)


def schema_of(folder: Path) -> Schema:
    """Where the schema stands; a folder without data is at 0, and is not made."""
    file = folder / FILE
    current = _version_of(file) if file.exists() else 0
    return schema_at(current, load_migrations("fencepost.store.sqlite.migrations"))


def _version_of(file: Path) -> int:
    connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        connection.set_busy_timeout(BUSY_MS_MAX)
        version: int = connection.pragma("user_version")
    finally:
        connection.close()
    return version


def migrate_folder(folder: Path) -> Schema:
    """Bring the schema up to date, making the folder when it is not there; what there was to do.

    No server may be using the folder: it would not know what changed under it.
    """
    make_folder(folder)
    lock = FolderLock(folder)
    try:
        before = schema_of(folder)
        connection = connect(folder / FILE)
        try:
            migrate(connection)
            fold(connection)
        finally:
            connection.close()
    finally:
        lock.release()
    return before
