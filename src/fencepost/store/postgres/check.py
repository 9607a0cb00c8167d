"""`fencepost check` on PostgreSQL: does what the servers share hold together?

Pages, keys and indexes are PostgreSQL's own business (`pg_amcheck` looks at them). What is ours is
asked for in SQL, one query for each thing that must hold, all in one transaction that only reads:
they see one moment, while servers go on writing. Nothing is repaired.
"""

from __future__ import annotations

from contextlib import closing

from psycopg import sql

from fencepost.store.checks.report import Progress, Report, UnreadableError, ignore
from fencepost.store.engine.log_sources import WIDTH
from fencepost.store.postgres.database import PostgresConnection, connect
from fencepost.store.postgres.schema import migrate
from fencepost.store.postgres.settings import PostgresSettings
from fencepost.store.postgres.statements import prepare
from fencepost.store.sql import load_queries

CHECKS = load_queries("fencepost.store.postgres", "check.sql")
COUNTED = ("streams", "log", "producers", "keys", "subscriptions")
NOTES = {"weights_wrong": (WIDTH,)}
"""Values that a check is given."""


def check(settings: PostgresSettings, *, progress: Progress = ignore) -> Report:
    """Look at everything that can be asked for in SQL."""
    report = Report()
    with closing(connect(settings, readonly=True)) as connection:
        schema = migrate(connection, dry_run=True)
        if schema.is_older:
            raise UnreadableError(
                f"the database has schema version {schema.current}, this Fencepost checks"
                f" {schema.newest}: run `fencepost migrate` first"
            )
        # A look at everything takes as long as it takes.
        connection.be_patient()
        with connection:
            connection.raw.execute(b"SET LOCAL statement_timeout = 0", prepare=False)
            for done, code in enumerate(CHECKS):
                progress("checks", done, len(CHECKS))
                _check(connection, code, report)
            progress("checks", len(CHECKS), len(CHECKS))
            for table in COUNTED:
                _count(connection, table, report)
    return report


def _check(connection: PostgresConnection, code: str, report: Report) -> None:
    text = prepare(CHECKS[code]).text
    with connection.raw.cursor() as cursor:
        cursor.execute(text, NOTES.get(code, ()), prepare=False)
        while rows := cursor.fetchmany(1_000):
            for where, detail in rows:
                report.add(code, where, detail)


def _count(connection: PostgresConnection, table: str, report: Report) -> None:
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))
    row = connection.raw.execute(query, prepare=False).fetchone()
    assert row is not None
    name = "rows" if table == "log" else table
    report.counts[name] = int(row[0])
