"""`fencepost check` on PostgreSQL: does what the servers share hold together?

What must hold in the tables is what must hold in every store (`store/checks`), and a few things
that only servers which share a database have. Pages, keys and indexes are PostgreSQL's own business
(`pg_amcheck` looks at them). All is read in one transaction that only reads: the passes see one
moment, while servers go on writing. Rows come through cursors of the server, some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count

from psycopg import RawServerCursor, sql

from fencepost.store.check.passes import Checker
from fencepost.store.check.report import Progress, Report, Rows, UnreadableError, ignore
from fencepost.store.postgres.driver.connection import PLANNING, PostgresConnection, connect
from fencepost.store.postgres.driver.statements import prepare
from fencepost.store.postgres.migrate import migrate
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Row, load_queries

QUERIES = load_queries("fencepost.store.check", "check.sql") | load_queries(
    "fencepost.store.postgres", "check.sql"
)
ROWS_PER_FETCH = 100
"""Few enough for rows of the largest size, many enough for the way to the server."""


def check(settings: PostgresSettings, *, progress: Progress = ignore) -> Report:
    """Look at everything."""
    report = Report()
    with closing(connect(settings, readonly=True)) as connection:
        schema = migrate(connection, dry_run=True)
        if schema.current == 0:
            raise UnreadableError("this database has no tables of Fencepost: name another one")
        if schema.is_older:
            raise UnreadableError(
                f"the database has schema version {schema.current}, this Fencepost checks"
                f" {schema.newest}: run `fencepost migrate` first"
            )
        # A look at everything takes as long as it takes.
        connection.be_patient()
        with connection:
            _take_time(connection)
            rows = _reader(connection)
            checker = Checker(rows, report, progress)
            checker.streams_and_log()
            checker.subscriptions()
            _check_shared(rows, report)
    return report


def _take_time(connection: PostgresConnection) -> None:
    """No limits of time, and plans for whole tables, until the end of the transaction."""
    settings = dict.fromkeys(PLANNING, sql.SQL("DEFAULT"))
    settings |= dict.fromkeys(
        ("statement_timeout", "idle_in_transaction_session_timeout"), sql.SQL("0")
    )
    for name, value in settings.items():
        query = sql.SQL("SET LOCAL {} TO {}").format(sql.Identifier(name), value)
        connection.raw.execute(query, prepare=False)


def _reader(connection: PostgresConnection) -> Rows:
    numbers = count()

    def rows(query: str, *values: object) -> Iterator[Row]:
        statement = prepare(QUERIES[query])
        with RawServerCursor(connection.raw, f"check_{next(numbers)}") as cursor:
            cursor.itersize = ROWS_PER_FETCH
            cursor.execute(statement.text, statement.values(values), binary=True)
            yield from cursor

    return rows


def _check_shared(rows: Rows, report: Report) -> None:
    """What only servers that share a database have: their turns, and commits beside them."""
    for name, number, found in rows("numbers_behind"):
        report.add("counter_behind", name, f"{number}, and there is {found}")
    for first, last in rows("large_commits_of_nobody"):
        report.add(
            "large_commit_wrong",
            f"large commit at {first}",
            f"readers of the log wait for the positions up to {last}, and none is under way",
        )
