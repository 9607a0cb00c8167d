"""Data folders as an older version left them: for tests of what a newer one makes of them."""

from pathlib import Path

import apsw

from fencepost.store.sql import load_migrations
from fencepost.store.sqlite.connection import FILE


def make_older(folder: Path, version: int) -> None:
    """Rewrite a folder that no server uses into the schema of an older version.

    The schema is made by the migrations of that time, so that a later one needs no change here.
    Rows keep the columns that the older tables have; tables that came later go.
    """
    file = folder / FILE
    newer = file.with_suffix(".newer")
    whole = apsw.Connection(str(file))
    whole.pragma("journal_mode", "delete")  # what is in the write-ahead log comes into the file
    whole.close()
    file.rename(newer)
    connection = apsw.Connection(str(file))
    try:
        connection.pragma("auto_vacuum", "incremental")
        for number, _, script in load_migrations("fencepost.store.sqlite.migrations"):
            if number <= version:
                connection.execute(script)
        connection.pragma("user_version", version)
        connection.execute("ATTACH ? AS newer", (str(newer),))
        with connection:
            _copy_rows(connection)
        connection.execute("DETACH newer")
    finally:
        connection.close()
    newer.unlink()


def _copy_rows(connection: apsw.Connection) -> None:
    triggers = connection.execute("SELECT name, sql FROM main.sqlite_schema WHERE type = 'trigger'")
    counting = triggers.fetchall()
    for name, _ in counting:
        connection.execute(f"DROP TRIGGER {name}")
    for table in _tables(connection, "main"):
        connection.execute(f"DELETE FROM main.{table}")
        columns = ", ".join(
            column
            for column in _columns(connection, "main", table)
            if column in _columns(connection, "newer", table)
        )
        connection.execute(
            f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM newer.{table}"
        )
    for _, script in counting:
        connection.execute(str(script))


def _tables(connection: apsw.Connection, schema: str) -> list[str]:
    found = connection.execute(
        f"SELECT name FROM {schema}.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    return [name for (name,) in found]


def _columns(connection: apsw.Connection, schema: str, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA {schema}.table_info({table})")]
