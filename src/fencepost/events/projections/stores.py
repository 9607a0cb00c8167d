"""The user's database: SQLite or PostgreSQL, and how rows, checkpoint and fence change together.

One row per version of a projection holds its checkpoint (the last position that was applied) and
its fence. A worker takes the row by raising the fence. Every batch first changes that row, under
the condition that fence and checkpoint are those that the worker knows, and then calls the
handlers, all in one transaction. A worker that slept through its lease finds another fence: its
transaction changes nothing, whatever its handlers would write.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from fencepost.client.errors import require
from fencepost.events.errors import DefinitionError
from fencepost.events.projections.declared import Projection
from fencepost.events.types import Recorded

STATES = """create table if not exists fencepost_projections (
    app text not null, name text not null, version integer not null,
    position bigint not null, fence bigint not null, live integer not null,
    primary key (app, name, version))"""
PARTS = """create table if not exists fencepost_projection_parts (
    app text not null, name text not null, version integer not null,
    part integer not null, parts integer not null,
    position bigint not null, fence bigint not null,
    primary key (app, name, version, part))"""
"""The parts of a projection that is being built in parallel, each with a checkpoint of its own."""
SCHEMAS = """create table if not exists fencepost_projection_schemas (
    app text not null, name text not null, version integer not null, schema text not null,
    primary key (app, name, version))"""
"""What the tables of a version were made with."""
BUSY_SECONDS = 60.0
OPEN_TRANSACTION_MS = 60_000
"""PostgreSQL ends the transaction of a worker that is silent for so long inside it."""
_ENDING = re.compile(r"\s*(begin|start|commit|end|abort|rollback(?!.*\bto\b))\b", re.I | re.S)
"""Statements by which a handler would leave the transaction of its batch."""

Apply = Callable[[Recorded[Any], "Transaction"], None]


class Cursor(Protocol):
    """The result of a statement, as the database's driver gives it."""

    rowcount: int

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Transaction:
    """The open transaction of a batch. What a handler executes is stored with the checkpoint."""

    def __init__(self, projection: Projection, execute: Callable[..., Cursor]) -> None:
        self._projection = projection
        self._execute = execute

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Run a statement. Parameters are `?` in SQLite and `%s` in PostgreSQL.

        `{orders}` stands for this version's table `orders`.
        """
        if _ENDING.match(sql):
            raise DefinitionError(
                f"the projection {self._projection.name} executes {sql.split()[0]!r}: rows and "
                "checkpoint are one transaction, which is not the handler's to begin or end"
            )
        text = self._projection.sql(sql)
        return self._execute(text, parameters) if parameters else self._execute(text)


class Taken(msgspec.Struct, frozen=True):
    """A projection in the hands of one worker; or one of its parts, of so many."""

    fence: int
    position: int
    live: bool
    part: tuple[int, int] | None = None


class Applied(msgspec.Struct, frozen=True):
    """The batch is stored up to `position`; if an event failed, up to the one before it."""

    position: int
    error: Exception | None = None
    failed: int | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a projection in the database."""

    app: str
    name: str
    version: int
    position: int
    live: bool


class ProjectionStore:
    """A database with projections; safe to use from several threads, one statement at a time."""

    mark = "?"
    begin = "begin immediate"

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.RLock()
        self._connection: Any = None

    def prepare(self, projection: Projection, *, anew: bool = False) -> None:
        """Make the tables of a projection; the first version of one is live at once.

        Raises `DefinitionError` if they were made with another schema, unless they are to be made
        anew.
        """
        key = (projection.app, projection.name)
        with self._transaction() as execute:
            self._wait_for_others(execute)
            for text in (STATES, PARTS, SCHEMAS):
                execute(text)
            known = execute(
                self._sql("select version, live from fencepost_projections where app=? and name=?"),
                key,
            ).fetchall()
            if any(version == projection.version for version, _ in known):
                if not anew:
                    self._compare_schema(execute, projection)
                return
            self._make_tables(execute, projection)
            live = not any(live for _, live in known)
            execute(
                self._sql("insert into fencepost_projections values (?, ?, ?, -1, 0, ?)"),
                (*key, projection.version, int(live)),
            )
            if live:
                self._show(execute, projection)

    def _make_tables(self, execute: Callable[..., Cursor], projection: Projection) -> None:
        for text in map(projection.sql, projection.schema):
            try:
                execute(text)
            except Exception as error:
                raise DefinitionError(
                    f"the schema of the projection {projection.name} v{projection.version} cannot "
                    f"be made: {str(error).splitlines()[0]}, in: {text}"
                ) from error
        where = "where app=? and name=? and version=?"
        execute(self._sql(f"delete from fencepost_projection_schemas {where}"), _key(projection))
        execute(
            self._sql("insert into fencepost_projection_schemas values (?, ?, ?, ?)"),
            (*_key(projection), projection.schema_text),
        )

    def _compare_schema(self, execute: Callable[..., Cursor], projection: Projection) -> None:
        made = execute(
            self._sql(
                "select schema from fencepost_projection_schemas"
                " where app=? and name=? and version=?"
            ),
            _key(projection),
        ).fetchone()
        if made is not None and made[0] != projection.schema_text:
            raise DefinitionError(
                f"the schema of the projection {projection.name} v{projection.version} has "
                "changed: raise its version, and new tables are built beside these, or rebuild it "
                "with after=-1, which makes these anew"
            )

    def take(self, projection: Projection) -> Taken:
        """Take a projection: whatever worker had it before can write no more.

        One that was being built in parallel has no position that holds for all of its events, so
        its tables are made anew.
        """
        with self._transaction() as execute:
            taken = self._raise(execute, projection)
            if self._parts(execute, projection):
                self._make_anew(execute, projection, live=taken.live)
                taken = Taken(taken.fence, -1, taken.live)
        return taken

    def take_parts(self, projection: Projection, count: int) -> list[Taken]:
        """Take a projection in so many parts, or go on with those that are there.

        A part is the events of some streams; all of one stream are in the same part.
        """
        with self._transaction() as execute:
            taken = self._raise(execute, projection)
            known = self._parts(execute, projection)
            if known and len(known) != count:
                self._make_anew(execute, projection, live=taken.live)
                taken, known = Taken(taken.fence, -1, taken.live), []
            if not known:
                known = [(part, taken.position) for part in range(count)]
                for part, position in known:
                    execute(
                        self._sql(
                            "insert into fencepost_projection_parts values (?, ?, ?, ?, ?, ?, ?)"
                        ),
                        (*_key(projection), part, count, position, taken.fence),
                    )
            execute(
                self._sql(
                    "update fencepost_projection_parts set fence=?"
                    " where app=? and name=? and version=?"
                ),
                (taken.fence, *_key(projection)),
            )
        return [Taken(taken.fence, position, taken.live, (part, count)) for part, position in known]

    def part(self, projection: Projection, taken: Taken) -> Taken | None:
        """A part where it is now; None if the projection was taken."""
        assert taken.part is not None
        with self._transaction() as execute:
            row = execute(
                self._sql(
                    "select position from fencepost_projection_parts"
                    " where app=? and name=? and version=? and part=? and fence=?"
                ),
                (*_key(projection), taken.part[0], taken.fence),
            ).fetchone()
        return None if row is None else Taken(taken.fence, row[0], taken.live, taken.part)

    def join_parts(self, projection: Projection, fence: int, until: int) -> bool:
        """Make a whole of parts that have come to `until`; False if the projection was taken."""
        with self._transaction() as execute:
            parts = self._parts(execute, projection)
            if not parts or min(position for _, position in parts) < until:
                return False
            moved = execute(
                self._sql(
                    "update fencepost_projections set position=?"
                    " where app=? and name=? and version=? and fence=?"
                ),
                (until, *_key(projection), fence),
            )
            if moved.rowcount != 1:
                return False
            self._drop_parts(execute, projection)
        return True

    def _raise(self, execute: Callable[..., Cursor], projection: Projection) -> Taken:
        row = execute(
            self._sql(
                "update fencepost_projections set fence=fence+1"
                " where app=? and name=? and version=? returning fence, position, live"
            ),
            _key(projection),
        ).fetchone()
        return Taken(row[0], row[1], bool(row[2]))

    def _parts(
        self, execute: Callable[..., Cursor], projection: Projection
    ) -> list[tuple[int, int]]:
        return execute(
            self._sql(
                "select part, position from fencepost_projection_parts"
                " where app=? and name=? and version=? order by part"
            ),
            _key(projection),
        ).fetchall()

    def _drop_parts(self, execute: Callable[..., Cursor], projection: Projection) -> None:
        execute(
            self._sql(
                "delete from fencepost_projection_parts where app=? and name=? and version=?"
            ),
            _key(projection),
        )

    def _make_anew(
        self, execute: Callable[..., Cursor], projection: Projection, *, live: bool
    ) -> None:
        """Empty tables of this version, which begins again with the log."""
        self._drop_parts(execute, projection)
        for table in reversed(projection.tables):
            if live:  # else the view shows another version
                execute(f"drop view if exists {table}")
            execute(f"drop table if exists {table}_v{projection.version}")
        self._make_tables(execute, projection)
        if live:
            self._show(execute, projection)
        self._put(execute, projection, -1)

    def _put(self, execute: Callable[..., Cursor], projection: Projection, position: int) -> None:
        execute(
            self._sql(
                "update fencepost_projections set position=? where app=? and name=? and version=?"
            ),
            (position, *_key(projection)),
        )

    def _move(
        self, execute: Callable[..., Cursor], projection: Projection, taken: Taken, until: int
    ) -> bool:
        """Move the checkpoint that a worker knows; False if another worker has been there."""
        known: tuple[Any, ...] = (until, *_key(projection), taken.fence, taken.position)
        where = "where app=? and name=? and version=? and fence=? and position=?"
        text = f"update fencepost_projections set position=? {where}"
        if taken.part is not None:
            text = f"update fencepost_projection_parts set position=? {where} and part=?"
            known = (*known, taken.part[0])
        moved = execute(self._sql(text), known)
        return moved.rowcount == 1

    def apply(
        self,
        projection: Projection,
        taken: Taken,
        events: Sequence[Recorded[Any]],
        until: int,
        call: Apply,
    ) -> Applied | None:
        """Apply events and move the checkpoint to `until`; None if the projection was taken."""
        with self._lock:
            applied = self._try(projection, taken, events, until, call)
            if applied is None or applied.error is None or applied.failed is None:
                return applied
            good = [event for event in events if event.position < applied.failed]
            if not good:
                return applied
            # The transaction of the failure is gone: store what came before it.
            before = self._try(projection, taken, good, good[-1].position, call)
            if before is None or before.error is not None:
                return before
            return Applied(before.position, applied.error, applied.failed)

    def _try(
        self,
        projection: Projection,
        taken: Taken,
        events: Sequence[Recorded[Any]],
        until: int,
        call: Apply,
    ) -> Applied | None:
        failed = -1
        try:
            with self._transaction() as execute:
                if not self._move(execute, projection, taken, until):
                    return None
                transaction = Transaction(projection, execute)
                for event in events:
                    failed = event.position
                    call(event, transaction)
        except Exception as error:
            if failed < 0:
                raise
            return Applied(taken.position, error, failed)
        return Applied(until)

    def reset(self, projection: Projection, position: int) -> None:
        """Go back to a position; from the beginning, the tables of this version are made anew."""
        with self._transaction() as execute:
            taken = self._raise(execute, projection)
            if position < 0 or self._parts(execute, projection):
                self._make_anew(execute, projection, live=taken.live)
            else:
                self._put(execute, projection, position)

    def switch(self, projection: Projection, taken: Taken, *, back: bool = False) -> bool:
        """Make this version the live one, in one transaction; False if it was taken.

        Only with `back` it takes the place of a newer one: workers of both may run for a while.
        """
        with self._transaction() as execute:
            newest = execute(
                self._sql(
                    "select max(version) from fencepost_projections"
                    " where app=? and name=? and live=1"
                ),
                (projection.app, projection.name),
            ).fetchone()[0]
            if not back and newest is not None and newest > projection.version:
                return True
            mine = execute(
                self._sql(
                    "update fencepost_projections set live=1"
                    " where app=? and name=? and version=? and fence=?"
                ),
                (*_key(projection), taken.fence),
            )
            if mine.rowcount != 1:
                return False
            execute(
                self._sql(
                    "update fencepost_projections set live=0 where app=? and name=? and version<>?"
                ),
                _key(projection),
            )
            self._show(execute, projection)
        return True

    def statuses(self, app: str) -> list[Status]:
        """Every version of every projection of an app."""
        with self._transaction() as execute:
            self._wait_for_others(execute)
            execute(STATES)
            rows = execute(
                self._sql(
                    "select app, name, version, position, live from fencepost_projections"
                    " where app=? order by name, version"
                ),
                (app,),
            ).fetchall()
        return [
            Status(app=row[0], name=row[1], version=row[2], position=row[3], live=bool(row[4]))
            for row in rows
        ]

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query."""
        with self._transaction() as execute:
            rows: list[Any] = execute(sql, parameters).fetchall()
            return rows

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _wait_for_others(self, execute: Callable[..., Cursor]) -> None:
        """Let one worker at a time make tables: workers of an app start at the same moment."""

    def _show(self, execute: Callable[..., Cursor], projection: Projection) -> None:
        for table in projection.tables:
            execute(f"drop view if exists {table}")
            execute(f"create view {table} as select * from {table}_v{projection.version}")

    def _sql(self, text: str) -> str:
        return text.replace("?", self.mark)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Callable[..., Cursor]]:
        with self._lock:
            connection = self._connected()
            connection.execute(self.begin)
            try:
                yield connection.execute
                connection.execute("commit")
            except BaseException:
                with contextlib.suppress(Exception):
                    connection.execute("rollback")
                raise

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Any:
        raise NotImplementedError


class SqliteProjections(ProjectionStore):
    """Projections in a SQLite file; `:memory:` keeps them in this process."""

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self._address, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.OperationalError as error:
            raise sqlite3.OperationalError(f"{error}: {self._address}") from None
        if self._address != ":memory:":
            connection.execute("pragma journal_mode=wal")
        return connection


class PostgresProjections(ProjectionStore):
    """Projections in a PostgreSQL database (extra `[postgres]`)."""

    mark = "%s"
    begin = "begin"

    def _wait_for_others(self, execute: Callable[..., Cursor]) -> None:
        # `create table if not exists` of two transactions fails in one of them.
        execute("select pg_advisory_xact_lock(hashtext('fencepost_projections'))")

    def _connected(self) -> Any:
        if self._connection is not None and (self._connection.closed or self._connection.broken):
            self._connection = None
        return super()._connected()

    def _connect(self) -> Any:
        import psycopg

        connection = psycopg.connect(self._address, autocommit=True)
        connection.execute(f"set idle_in_transaction_session_timeout = {OPEN_TRANSACTION_MS}")
        return connection


def is_of_database(error: BaseException) -> bool:
    """Whether an error came from the library of one of the databases."""
    return isinstance(error, sqlite3.Error) or type(error).__module__.startswith("psycopg")


def store_at(address: str) -> ProjectionStore:
    """The store at an address: `postgresql://...`, a file, or `:memory:`."""
    if address.startswith(("postgresql://", "postgres://")):
        require(
            importlib.util.find_spec("psycopg") is not None,
            "projections in PostgreSQL need a library that is not installed here:"
            " pip install 'fencepost[postgres]'",
        )
        return PostgresProjections(address)
    require(
        "://" not in address,
        "the database of projections is a file, :memory: or postgresql://..., and not "
        + address.partition("://")[0],
    )
    return SqliteProjections(address)


def _key(projection: Projection) -> tuple[str, str, int]:
    return projection.app, projection.name, projection.version
