"""`fencepost check`: does a data folder hold together?

SQLite looks at its pages itself; what must hold in the tables is what must hold in every store
(`store/check`). It may run beside a server. The streams, the log and what hangs on them are read
in one transaction, so that what belongs together is seen together; subscriptions follow in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fencepost.store.check.passes import Checker
from fencepost.store.check.report import Progress, Report, UnreadableError, ignore
from fencepost.store.sql import load_migrations, load_queries
from fencepost.store.sqlite.connection import BUSY_MS_MAX, FILE

QUERIES = load_queries("fencepost.store.check", "check.sql") | load_queries(
    "fencepost.store.sqlite", "check.sql"
)
INTEGRITY_FINDINGS_MAX = 100


class DamagedError(UnreadableError):
    """SQLite itself cannot read the file: it is cut off, or overwritten in its first pages."""


def find_file(place: Path) -> Path:
    """The database that `place` stands for: a data folder, or a backup."""
    file = place / FILE if place.is_dir() else place
    if not file.is_file():
        raise UnreadableError(f"there is no Fencepost database at {place}")
    return file


@contextmanager
def open_to_read(file: Path) -> Iterator[apsw.Connection]:
    """A connection that cannot write, to a database that a server may be using."""
    try:
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
    except apsw.Error as error:
        raise UnreadableError(f"{file} cannot be opened: {error}") from error
    try:
        connection.set_busy_timeout(BUSY_MS_MAX)
        _know_schema(file, connection)
        yield connection
    finally:
        connection.close()


def _know_schema(file: Path, connection: apsw.Connection) -> None:
    newest = load_migrations("fencepost.store.sqlite.migrations")[-1][0]
    try:
        version = connection.pragma("user_version")
        tables = {name for (name,) in connection.execute(QUERIES["tables"])}
    except apsw.CorruptError as error:
        raise DamagedError(str(error)) from error
    except apsw.Error as error:
        raise UnreadableError(f"{file} cannot be read: {error}") from error
    if version > newest:
        raise UnreadableError(
            f"{file} has schema version {version}, this Fencepost knows {newest}:"
            " use the newer version"
        )
    if version < 1 or "streams" not in tables or "log" not in tables:
        raise UnreadableError(f"{file} is not a Fencepost database")


def check(place: Path, *, quick: bool = False, progress: Progress = ignore) -> Report:
    """Look at everything. `quick` leaves out the slow half of SQLite's own check of its pages."""
    report = Report()
    try:
        with open_to_read(find_file(place)) as connection:

            def rows(query: str, *values: object) -> apsw.Cursor:
                return connection.execute(QUERIES[query], values)

            checker = Checker(rows, report, progress)
            progress("pages", 0, 1)
            _pages(connection, report, quick=quick)
            progress("pages", 1, 1)
            with connection:
                checker.streams_and_log()
            with connection:
                checker.subscriptions()
    except (DamagedError, apsw.CorruptError) as error:
        report.add("file_damaged", FILE, f"SQLite cannot go on: {error}")
    except apsw.Error as error:
        raise UnreadableError(f"{place} cannot be read: {error}") from error
    return report


def _pages(connection: apsw.Connection, report: Report, *, quick: bool) -> None:
    """SQLite's own check: pages, order of keys, indexes against tables, types."""
    pragma = "quick_check" if quick else "integrity_check"
    for (text,) in connection.execute(f"PRAGMA {pragma}({INTEGRITY_FINDINGS_MAX})"):
        if text != "ok":
            report.add("file_damaged", FILE, text)
