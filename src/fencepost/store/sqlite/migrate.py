"""The schema of a data folder: read its version, or bring it up to date by migrations."""

from __future__ import annotations

from pathlib import Path

import apsw

from fencepost.store.sql import Schema, SchemaTooNewError, load_migrations, schema_at
from fencepost.store.sqlite.connection import (
    BUSY_MS_MAX,
    FILE,
    FolderLock,
    connect,
    fold,
    make_folder,
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


def migrate(connection: apsw.Connection) -> None:
    """Bring the schema up to this version's; each step is a transaction of its own."""
    current = connection.pragma("user_version")
    migrations = load_migrations("fencepost.store.sqlite.migrations")
    newest = migrations[-1][0]
    if current > newest:
        raise SchemaTooNewError(
            f"the data folder has schema version {current}, this server knows {newest}: "
            "run the newer version, or restore a backup"
        )
    for number, _, script in migrations:
        if number > current:
            with connection:
                connection.execute(script)
                connection.pragma("user_version", number)
