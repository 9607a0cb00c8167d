"""The schema on PostgreSQL: looked at, or brought up to date while other servers start or run.

Who takes steps holds an advisory lock meanwhile, so of several servers that start at once one takes
them and the others find them taken; each is a transaction of its own. A step named `pre` is safe
for servers of the version before; it may not wait long for a table that they use, because everybody
else would wait behind it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import psycopg
from psycopg import errors

from fencepost.store.contract import StoreAwayError
from fencepost.store.postgres.driver.connection import (
    PostgresConnection,
    StandbyError,
    UnusableDatabaseError,
    connect,
    is_away,
)
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Schema, SchemaTooNewError, Step, load_migrations, schema_at

log = logging.getLogger(__name__)

MIGRATION_LOCK = 0x66656E6365
"""The number of the advisory lock: any, as long as it is always the same."""
TABLE_LOCK_TIMEOUT_S = 5.0
STEPS = load_migrations("fencepost.store.postgres.migrations")


def schema_of(settings: PostgresSettings) -> Schema:
    """Where the schema stands; nothing is changed."""
    with contextlib.closing(_connect(settings)) as connection:
        return migrate(connection, dry_run=True)


def migrate_database(settings: PostgresSettings) -> Schema:
    """Bring the schema up to date; what there was to do."""
    with contextlib.closing(_connect(settings)) as connection:
        return migrate(connection)


def _connect(settings: PostgresSettings) -> PostgresConnection:
    try:
        return connect(settings)
    except (UnusableDatabaseError, StandbyError):
        raise
    except psycopg.Error as error:
        if is_away(error):
            raise StoreAwayError(str(error).strip()) from error
        raise


def migrate(connection: PostgresConnection, *, dry_run: bool = False) -> Schema:
    """Bring the schema up to this version's, unless it is only to be looked at; what there was to
    do."""
    before = schema_at(_schema_version(connection), STEPS)
    if before.current > before.newest:
        raise SchemaTooNewError(
            f"the database has schema version {before.current}, this server knows {before.newest}: "
            "run the newer version, or restore a backup"
        )
    if dry_run or not before.pending:
        return before
    with _migrating(connection):
        for step in schema_at(_schema_version(connection), STEPS).pending:
            _take(connection, step)
    return before


def _schema_version(connection: PostgresConnection) -> int:
    """The number of the newest step that the database has seen; 0 when it is empty."""
    # A transaction of its own: only its beginning drops what the session remembers of the tables.
    with connection:
        if _value(connection, "SELECT (to_regclass('migrations') IS NULL)::int"):
            return 0
        return _value(connection, "SELECT COALESCE(max(number), 0) FROM migrations")


@contextlib.contextmanager
def _migrating(connection: PostgresConnection) -> Iterator[None]:
    """Hold the lock, waiting for as long as another server takes."""
    connection.be_patient()
    with connection:
        _say(connection, "SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0")
        _say(connection, f"SELECT pg_advisory_lock({MIGRATION_LOCK})")
    try:
        yield
    finally:
        # A connection that is lost has let go of it already.
        with contextlib.suppress(psycopg.Error):
            _say(connection, f"SELECT pg_advisory_unlock({MIGRATION_LOCK})")


def _take(connection: PostgresConnection, step: Step) -> None:
    try:
        with connection:
            _take_within(connection, step)
    except errors.LockNotAvailable as error:
        raise UnusableDatabaseError(
            f"step {step.number} ({step.name}) of its schema needs a table that another session has"
            f" been using for {TABLE_LOCK_TIMEOUT_S:g} s, a backup for instance: nothing was"
            " changed, try again when that is over"
        ) from error
    log.info("schema version %d (%s)", step.number, step.name)


def _take_within(connection: PostgresConnection, step: Step) -> None:
    # A step over much data has no bound of its own.
    _say(connection, "SET LOCAL statement_timeout = 0")
    _say(connection, f"SET LOCAL lock_timeout = {TABLE_LOCK_TIMEOUT_S * 1000:.0f}")
    _say(
        connection,
        "CREATE TABLE IF NOT EXISTS migrations ("
        "number bigint PRIMARY KEY, name text NOT NULL, at timestamptz NOT NULL)",
    )
    _say(connection, step.sql)
    _say(connection, f"INSERT INTO migrations VALUES ({step.number}, '{step.name}', now())")


def _say(connection: PostgresConnection, text: str) -> None:
    connection.raw.execute(text.encode(), prepare=False)


def _value(connection: PostgresConnection, text: str) -> int:
    row = connection.raw.execute(text.encode(), prepare=False).fetchone()
    assert row is not None
    return int(row[0])
