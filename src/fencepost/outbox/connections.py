"""The caller's connection: run the statements of the outbox in the transaction that is open there.

No driver is imported: a caller who hands a connection over has loaded its driver. Nothing is
committed and nothing rolled back. A connection that commits each statement by itself is refused,
because the send would then not be part of the caller's change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from fencepost.outbox.errors import NoTransactionError, UnknownConnectionError
from fencepost.outbox.rows import Dialect, Rows, Statement

T = TypeVar("T")

_SQLITE = Dialect("sqlite", "qmark")
_PSYCOPG = Dialect("postgresql", "format")
_ASYNCPG = Dialect("postgresql", "dollar")
_MARKS = {
    "qmark": "qmark",
    "format": "format",
    "pyformat": "format",
    "numeric_dollar": "dollar",
}
_DIALECTS = {"sqlite": "sqlite", "postgresql": "postgresql"}


class Target(NamedTuple):
    """A connection that is understood. `execute` returns rows; with `waits` it is awaited."""

    dialect: Dialect
    execute: Callable[[Statement], Any]
    waits: bool = False


def target_of(connection: Any) -> Target:
    """Find out how to run a statement on this connection: the type of the connection decides."""
    for module, name, understand in _KNOWN:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(connection, kind):
            return understand(connection)
    raise UnknownConnectionError(
        f"{type(connection).__module__}.{type(connection).__qualname__} is no connection that the"
        " outbox knows: pass one of sqlite3, psycopg, asyncpg, SQLAlchemy or Django"
    )


def run(operation: Generator[Statement, Rows, T], target: Target) -> T:
    """Run an operation on a connection that blocks."""
    try:
        statement = next(operation)
        while True:
            statement = operation.send(target.execute(statement))
    except StopIteration as ended:
        result: T = ended.value
        return result


async def run_waiting(operation: Generator[Statement, Rows, T], target: Target) -> T:
    """Run an operation on a connection that is awaited."""
    try:
        statement = next(operation)
        while True:
            statement = operation.send(await target.execute(statement))
    except StopIteration as ended:
        result: T = ended.value
        return result


def _refuse_autocommit(driver: str, commits_alone: bool) -> None:
    if commits_alone:
        raise NoTransactionError(
            f"this connection of {driver} commits each statement by itself, and the send would not"
            " be part of your change: begin a transaction first"
        )


def _sqlite3(connection: Any) -> Target:
    legacy = getattr(connection, "autocommit", -1) == -1
    alone = connection.isolation_level is None if legacy else connection.autocommit is True
    _refuse_autocommit("sqlite3", alone and not connection.in_transaction)

    def execute(statement: Statement) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        rows: Rows = cursor.execute(statement.text, statement.values).fetchall()
        return rows

    return Target(_SQLITE, execute)


def _psycopg(connection: Any) -> Target:
    _refuse_psycopg(connection)
    from psycopg.rows import tuple_row

    def execute(statement: Statement) -> Rows:
        with connection.cursor(row_factory=tuple_row) as cursor:
            rows: Rows = cursor.execute(_PSYCOPG.sql(statement.text), statement.values).fetchall()
            return rows

    return Target(_PSYCOPG, execute)


def _psycopg_async(connection: Any) -> Target:
    _refuse_psycopg(connection)
    from psycopg.rows import tuple_row

    async def execute(statement: Statement) -> Rows:
        async with connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(_PSYCOPG.sql(statement.text), statement.values)
            rows: Rows = await cursor.fetchall()
            return rows

    return Target(_PSYCOPG, execute, waits=True)


def _refuse_psycopg(connection: Any) -> None:
    from psycopg.pq import TransactionStatus

    idle = connection.info.transaction_status == TransactionStatus.IDLE
    _refuse_autocommit("psycopg", connection.autocommit and idle)


def _asyncpg(connection: Any) -> Target:
    _refuse_autocommit("asyncpg", not connection.is_in_transaction())

    async def execute(statement: Statement) -> Rows:
        rows = await connection.fetch(_ASYNCPG.sql(statement.text), *statement.values)
        return [tuple(row.values()) for row in rows]

    return Target(_ASYNCPG, execute, waits=True)


def _sqlalchemy(connection: Any) -> Target:
    dialect = _alchemy_dialect(connection)

    def execute(statement: Statement) -> Rows:
        done = connection.exec_driver_sql(dialect.sql(statement.text), tuple(statement.values))
        return [tuple(row) for row in done.fetchall()]

    return Target(dialect, execute)


def _sqlalchemy_session(session: Any) -> Target:
    return _sqlalchemy(session.connection())


def _sqlalchemy_async(connection: Any) -> Target:
    dialect = _alchemy_dialect(connection.sync_connection)

    async def execute(statement: Statement) -> Rows:
        text, values = dialect.sql(statement.text), tuple(statement.values)
        done = await connection.exec_driver_sql(text, values)
        return [tuple(row) for row in done.fetchall()]

    return Target(dialect, execute, waits=True)


def _sqlalchemy_async_session(session: Any) -> Target:
    dialect = _dialect_of(session.get_bind().dialect)

    async def execute(statement: Statement) -> Rows:
        rows: Rows = await _sqlalchemy_async(await session.connection()).execute(statement)
        return rows

    return Target(dialect, execute, waits=True)


def _alchemy_dialect(connection: Any) -> Dialect:
    # `get_isolation_level` would ask the database.
    level = connection.get_execution_options().get("isolation_level")
    level = level or getattr(connection.dialect, "_on_connect_isolation_level", None)
    _refuse_autocommit("SQLAlchemy", level == "AUTOCOMMIT")
    return _dialect_of(connection.dialect)


def _dialect_of(dialect: Any) -> Dialect:
    if dialect.name not in _DIALECTS or dialect.paramstyle not in _MARKS:
        raise UnknownConnectionError(
            f"the outbox is for SQLite and PostgreSQL, not {dialect.name} with {dialect.driver}"
        )
    return Dialect(_DIALECTS[dialect.name], _MARKS[dialect.paramstyle])  # type: ignore[arg-type]


def _django(connection: Any) -> Target:
    if connection.vendor not in _DIALECTS:
        raise UnknownConnectionError(
            f"the outbox is for SQLite and PostgreSQL, not {connection.vendor}"
        )
    _refuse_autocommit("Django", connection.get_autocommit() and not connection.in_atomic_block)
    # Django's SQLite takes %s as well.
    dialect = Dialect(_DIALECTS[connection.vendor], "format")  # type: ignore[arg-type]

    def execute(statement: Statement) -> Rows:
        with connection.cursor() as cursor:
            cursor.execute(dialect.sql(statement.text), statement.values)
            rows: Rows = cursor.fetchall()
            return rows

    return Target(dialect, execute)


def _django_proxy(proxy: Any) -> Target:
    # `django.db.connection` stands for the connection of the thread that asks.
    return _django(sys.modules["django.db"].connections[proxy._alias])


_KNOWN: tuple[tuple[str, str, Callable[[Any], Target]], ...] = (
    ("sqlite3", "Connection", _sqlite3),
    ("psycopg", "Connection", _psycopg),
    ("psycopg", "AsyncConnection", _psycopg_async),
    ("asyncpg", "Connection", _asyncpg),
    ("asyncpg.pool", "PoolConnectionProxy", _asyncpg),
    ("sqlalchemy.engine", "Connection", _sqlalchemy),
    ("sqlalchemy.orm", "Session", _sqlalchemy_session),
    ("sqlalchemy.orm", "scoped_session", _sqlalchemy_session),
    ("sqlalchemy.ext.asyncio", "AsyncConnection", _sqlalchemy_async),
    ("sqlalchemy.ext.asyncio", "AsyncSession", _sqlalchemy_async_session),
    ("django.db.backends.base.base", "BaseDatabaseWrapper", _django),
    ("django.utils.connection", "ConnectionProxy", _django_proxy),
)
