"""The schema on PostgreSQL, for whoever has settings and no connection: looked at, or brought up to
date. How a step is taken while other servers start or run is in `database.py`.
"""

from __future__ import annotations

import contextlib

import psycopg

from fencepost.store.contract import StoreAwayError
from fencepost.store.postgres.database import (
    PostgresConnection,
    StandbyError,
    UnusableDatabaseError,
    connect,
    is_away,
    migrate,
)
from fencepost.store.postgres.settings import PostgresSettings
from fencepost.store.schema import Schema


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
