"""Outbox tables in tests: a database of a user with an order table, in SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from fencepost.outbox.rows import DialectName, schema
from fencepost.testing.postgres import shared_server

ORDERS = "create table orders (id integer primary key, paid integer not null)"
SQLITE, POSTGRES = "sqlite", "postgres"


@contextmanager
def database_of(kind: str, folder: Path) -> Iterator[str]:
    """The address of a fresh database with an outbox and a table of the user."""
    if kind == SQLITE:
        address = str(folder / "shop.db")
        set_up(address)
        yield address
        return
    postgres = shared_server()
    address = postgres.new_database(migrated=False)
    set_up(address)
    try:
        yield address
    finally:
        postgres.drop_database(address)


def set_up(address: str) -> None:
    """Make the tables, as the user's migrations would."""
    if is_postgres(address):
        with psycopg.connect(address) as connection:
            connection.execute(schema("postgresql"))
            connection.execute(ORDERS)
        return
    file = sqlite3.connect(address)
    file.execute("pragma journal_mode = wal")
    file.executescript(schema("sqlite") + ORDERS)
    file.close()


def is_postgres(address: str) -> bool:
    return address.startswith("postgresql://")


def dialect_of(address: str) -> DialectName:
    return "postgresql" if is_postgres(address) else "sqlite"


def connect(address: str) -> Any:
    """A connection of the user: psycopg, or sqlite3 as it comes."""
    if is_postgres(address):
        return psycopg.connect(address)
    return sqlite3.connect(address, timeout=60)


def select(address: str, text: str) -> list[tuple[Any, ...]]:
    """What is committed."""
    connection = connect(address)
    try:
        return [tuple(row) for row in connection.execute(text).fetchall()]
    finally:
        connection.close()


def execute(address: str, text: str) -> None:
    """Run a statement and commit it."""
    connection = connect(address)
    connection.execute(text)
    connection.commit()
    connection.close()


def sent(address: str) -> list[str]:
    """The ids of the sends that are committed, in the order of their rows."""
    found = select(address, "select client_message_id from fencepost_outbox order by id")
    return [row[0] for row in found]
