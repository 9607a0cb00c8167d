"""Connections to PostgreSQL: how they are made and configured, and what their errors mean.

An acknowledged write must survive, so a connection that writes is refused when the server does not
sync its log to disk before a commit returns. Statements are prepared once for each connection, and
results come in binary. A connection is used by one thread at a time.

No connection waits for ever. The server bounds its own work by timeouts, and the kernel notices a
peer that is gone; neither helps against a server that is stopped, or whose disk hangs, while its
machine still acknowledges packets. So silence is counted here, in the intervals at which psycopg
looks up from waiting, and a connection that was silent for too long is closed. A COMMIT that was
under way on it then has an unknown outcome, because its answer may still have been on its way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper

from fencepost.store.postgres.driver.statements import Statement, register_arrays, statement
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Row, Values

T = TypeVar("T")

VERSION_MIN = 140_000
"""The oldest server that we test the SQL for, as PostgreSQL numbers it: 14.0."""
DURABLE = ("on", "remote_write", "remote_apply")
"""Values of synchronous_commit with which COMMIT returns after the log was synced."""

AWAY_STATES = frozenset(
    {
        "25006",  # read only: a standby, or a primary that has become one
        "25P03",  # idle too long in a transaction: the server ended the session
        "53300",  # too many connections
        "57P01",  # shut down by an administrator
        "57P02",  # another session crashed
        "57P03",  # starting up or shutting down
        "57P04",  # the database was dropped
        "57P05",  # idle too long
    }
)
DISK_FULL = "53100"
INTERVAL_S = 0.1
"""How often psycopg looks up from waiting."""

OPTIONS: dict[str, Any] = {
    # An address that gives an `application_name` of its own has the last word.
    "fallback_application_name": "fencepost",
    "client_encoding": "UTF8",
    "prepare_threshold": 0,  # every statement is prepared when it is first used
    # A peer that is gone without a word is noticed in half a minute.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
"""How every connection is made."""
PLANNING = {
    # Compiling would take longer than any of our queries.
    "jit": "off",
    # Every query is written for an index, and is planned once. A plan that was good for the few
    # rows of the beginning would go on reading whole tables when they have grown.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
STATEMENTS_MAX = 1_000
"""Prepared statements of a connection: more than there are."""
SERVER = (
    b"SELECT current_setting('server_version_num')::int, current_setting('server_encoding'),"
    b" pg_is_in_recovery(), current_setting('fsync'), current_setting('synchronous_commit'),"
    b" pg_postmaster_start_time()::text"
)
"""The query whose answer `judge` takes, but for the last column, by which servers differ."""


class UnusableDatabaseError(psycopg.OperationalError):
    """The database cannot be used as it is: its text says what to change.

    A running node treats it as a database that is away: after a failover another one may answer.
    """


class NotDurableError(UnusableDatabaseError):
    """Commits would return before they are on disk: change the named setting of the server."""


class StandbyError(psycopg.OperationalError):
    """The server is a standby: it may become the primary, or its name may point to that later."""


class SilentError(psycopg.OperationalError):
    """The database has not answered in the time that it was given: it may come back."""


def connect(
    settings: PostgresSettings, *, readonly: bool = False, wait_ms_max: int | None = None
) -> PostgresConnection:
    """A connection with our settings; one that writes only to a server that keeps commits.

    With `wait_ms_max` no answer is waited for longer, nor a lock.

    Raises an error of psycopg, for `is_away` to look at, or one whose text says what to change.
    """
    raw = PatientConnection.connect(
        settings.url,
        autocommit=True,
        cursor_factory=psycopg.RawCursor,
        **OPTIONS,
        connect_timeout=settings.connect_timeout_s,
    )
    lock_timeout_ms, statement_timeout_ms = settings.turn_wait_ms, settings.read_timeout_ms
    raw.silence_s_max = settings.silence_s_max
    if wait_ms_max is not None:
        lock_timeout_ms = statement_timeout_ms = wait_ms_max
        # The database says first that it takes too long, if it says anything.
        raw.silence_s_max = wait_ms_max / 1000 + 5 * INTERVAL_S
    try:
        adapt(raw)
        row = raw.execute(SERVER, prepare=False).fetchone()
        assert row is not None
        *server, started = row
        judge(server, writes=not readonly)
        text, values = session(
            synchronous_commit=server[-1],
            lock_timeout_ms=lock_timeout_ms,
            statement_timeout_ms=statement_timeout_ms,
            idle_in_transaction_timeout_ms=settings.turn_idle_ms,
        )
        raw.execute(text, values, prepare=False)
    except BaseException:
        raw.close()
        raise
    return PostgresConnection(raw, writes=not readonly, server=started)


def adapt(raw: psycopg.Connection[Row] | psycopg.AsyncConnection[Row]) -> None:
    """Send numbers, texts and packed arrays as what they are in our tables, whatever the value."""
    raw.prepared_max = STATEMENTS_MAX
    raw.adapters.register_dumper(int, Int8BinaryDumper)
    raw.adapters.register_dumper(str, StrBinaryDumper)
    register_arrays(raw)


def judge(server: Sequence[Any], *, writes: bool) -> None:
    """Raise unless a server that answers `SERVER` like this can be used, and be written to."""
    version, encoding, is_standby, fsync, synchronous_commit = server
    if version < VERSION_MIN:
        raise UnusableDatabaseError(
            f"the server is PostgreSQL {version // 10_000}: Fencepost needs 14 or newer"
        )
    if encoding != "UTF8":
        raise UnusableDatabaseError(
            f"the database has the encoding {encoding}: make one with ENCODING 'UTF8'"
        )
    if is_standby:
        raise StandbyError("the server is a standby: name the primary in the address of the store")
    if not writes:
        return
    if fsync != "on":
        raise NotDurableError(
            "the server runs with fsync = off and may lose what it has committed: "
            "set fsync = on in its configuration and restart it"
        )
    if synchronous_commit not in DURABLE:
        raise NotDurableError(
            f"synchronous_commit is {synchronous_commit}, so that commits return before they are "
            "on disk: set it to on, for the server, the database or the role"
        )


def session(
    *,
    synchronous_commit: str,
    lock_timeout_ms: int,
    statement_timeout_ms: int,
    idle_in_transaction_timeout_ms: int,
) -> tuple[bytes, list[str]]:
    """A query that makes these the settings of a session, and its values."""
    settings = {
        # Set for the session, so that a change of the server's configuration does not reach it.
        "synchronous_commit": synchronous_commit,
        "lock_timeout": str(lock_timeout_ms),
        "statement_timeout": str(statement_timeout_ms),
        "idle_in_transaction_session_timeout": str(idle_in_transaction_timeout_ms),
        "TimeZone": "UTC",
        # A node that waited for its turn must then see what other nodes wrote meanwhile.
        "default_transaction_isolation": "read committed",
        **PLANNING,
    }
    calls = (f"set_config('{name}', ${place}, false)" for place, name in enumerate(settings, 1))
    return f"SELECT {', '.join(calls)}".encode(), list(settings.values())


class PatientConnection(psycopg.Connection[Row]):
    """A connection for one thread."""

    silence_s_max: float | None = None
    """How long the server may say nothing while it is waited for; None is for ever."""

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return super().wait(_listening(self, gen), *args, **options)


class PatientAsyncConnection(psycopg.AsyncConnection[Row]):
    """A connection on the event loop."""

    silence_s_max: float | None = None
    """How long the server may say nothing while it is waited for; None is for ever."""

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return await super().wait(_listening(self, gen), *args, **options)


def _listening(
    connection: PatientConnection | PatientAsyncConnection, gen: Generator[Any, Any, T]
) -> Generator[Any, Any, T]:
    """Pass psycopg's waiting on, and end it when the server was silent for too long."""
    if connection.silence_s_max is None:
        return (yield from gen)
    silent_intervals_max = connection.silence_s_max / INTERVAL_S
    silent_intervals = 0
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            silent_intervals = 0 if ready else silent_intervals + 1
            if silent_intervals > silent_intervals_max:
                connection.pgconn.finish()
                raise SilentError(
                    f"the database has said nothing for {connection.silence_s_max:g} s"
                )
            wanted = gen.send(ready)
    except StopIteration as end:
        answer: T = end.value
        return answer


class PostgresConnection:
    """A connection as the store uses it; `raw` is psycopg's own, `server` tells the server from
    another one that has taken its place."""

    after_every_text = "\U0010ffff" * 1025
    """The last character, more often than it fits into any text that we keep an order of."""

    def __init__(self, raw: PatientConnection, *, writes: bool, server: str) -> None:
        self.raw = raw
        self.server = server
        self._begin = b"BEGIN" if writes else b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
        self._cursor = raw.cursor(binary=True)
        self._entered: list[bool] = []  # for each `with` block, whether it began the transaction
        self._began = False
        self._pipelines = 0

    # Queries

    def fetch(self, query: str, values: Values = (), *, rows: str | None = None) -> list[Row]:
        prepared = statement(query, rows)
        return self._run(prepared, prepared.values(values)).fetchall()

    def execute(self, query: str, values: Values = ()) -> int:
        """Carry out a named statement; how many rows it changed. In a pipeline it waits."""
        prepared = statement(query)
        return self._run(prepared, self._values(prepared, values)).rowcount

    def send(self, query: str, values: Values = ()) -> None:
        """Carry out a named statement; in a pipeline without waiting for it."""
        prepared = statement(query)
        self._run(prepared, self._values(prepared, values))

    def execute_many(self, query: str, rows: Sequence[Row]) -> None:
        """Carry out a named statement for each of these values; in a pipeline without waiting."""
        if not rows:
            return
        prepared = statement(query)
        if prepared.by_columns:
            self._run(prepared, prepared.columns(rows))
        else:
            values = [prepared.values(row) for row in rows]
            self.raw.cursor(binary=True).executemany(prepared.text, values)

    @staticmethod
    def _values(prepared: Statement, values: Values) -> Sequence[Any]:
        if prepared.by_columns:
            assert isinstance(values, Sequence), "a row for columns has no names"
            return prepared.columns([tuple(values)])
        return prepared.values(values)

    def _run(self, prepared: Statement, values: Sequence[Any]) -> psycopg.Cursor[Row]:
        # In a pipeline every statement needs a cursor of its own to find its result.
        cursor = self.raw.cursor(binary=True) if self._pipelines else self._cursor
        return cursor.execute(prepared.text, values)

    # Transactions

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, also when its beginning is still in a pipeline."""
        return self._began or self.raw.info.transaction_status != TransactionStatus.IDLE

    def begin(self) -> None:
        """Begin a transaction that `commit` or `rollback` ends."""
        self._say(self._begin)
        self._began = True

    def commit(self) -> None:
        """End the transaction; an error from here may leave open whether it took effect."""
        self._began = False
        if self.raw.info.transaction_status == TransactionStatus.INERROR:
            # The server would roll back, and answer as if nothing were wrong.
            self._say(b"ROLLBACK")
            raise errors.InFailedSqlTransaction("a statement of this transaction failed before")
        self._say(b"COMMIT")

    def rollback(self) -> None:
        """Undo the open transaction; nothing happens when there is none, or no connection."""
        self._began = False
        if not self.raw.closed and self.raw.info.transaction_status != TransactionStatus.IDLE:
            self._say(b"ROLLBACK")

    def _say(self, text: bytes) -> None:
        self.raw.execute(text, prepare=False)

    @contextlib.contextmanager
    def pipeline(self) -> Iterator[None]:
        """Send statements without waiting for each; an error shows at the latest at the end."""
        self._pipelines += 1
        try:
            with self.raw.pipeline():
                yield
        finally:
            self._pipelines -= 1

    def __enter__(self) -> Self:
        # Inside a transaction that is already open, everything belongs to that transaction.
        begins = not self.in_transaction
        if begins:
            self.begin()
        self._entered.append(begins)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if not self._entered.pop():
            return None
        if error is None:
            self.commit()
        else:
            # The caller needs the first error, not one of the rollback.
            with contextlib.suppress(psycopg.Error):
                self.rollback()
        return None

    def be_patient(self) -> None:
        """Wait for every answer from here on, however long it takes."""
        self.raw.silence_s_max = None

    def close(self) -> None:
        self.raw.close()


def is_away(error: BaseException) -> bool:
    """Whether the database cannot be reached now; a new connection may reach it later."""
    if isinstance(error, psycopg.InterfaceError):
        return True
    if isinstance(error, errors.PipelineAborted) or not isinstance(error, psycopg.OperationalError):
        return sqlstate_of(error) in AWAY_STATES
    state = error.sqlstate
    # Without a state the connection itself failed; class 08 says so as well.
    return state is None or state in AWAY_STATES or state.startswith("08")


def ends_session(error: BaseException) -> bool:
    """Whether this error ends the session, and not only the statement that met it."""
    if isinstance(error, errors.PipelineAborted):
        return False  # a statement before this one failed
    state = sqlstate_of(error)
    return state is None or state == "25P03" or state.startswith(("57P", "08"))


def is_full(error: BaseException) -> bool:
    """Whether the server has no room left."""
    return sqlstate_of(error) == DISK_FULL


def sqlstate_of(error: BaseException) -> str | None:
    """The five characters by which the server says what went wrong, if it was the server."""
    return error.sqlstate if isinstance(error, psycopg.Error) else None
