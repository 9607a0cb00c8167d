"""The relay's side of an outbox table: rows are leased, their outcomes written, done ones pruned.

What a relay writes is one `turn`, a transaction: the outcomes of sends that have ended, leases that
are renewed, rows whose lease ran out, and rows that are leased now. Turns of several relays
come one after the other, by an advisory lock on PostgreSQL and by the write lock on SQLite, so that
each sees what the one before leased. That keeps the order of a lane: as long as one relay holds
rows of it, no other one takes any.

Each lease has a token of its own. A relay that was frozen for longer than its lease finds other
tokens in its rows, and changes nothing. Time is that of the database, where it has a clock.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fencepost.clock import Clock
from fencepost.outbox.errors import OutboxDatabaseError
from fencepost.outbox.rows import (
    COLUMNS,
    FIND,
    NOW,
    STATE_TABLE,
    TABLE,
    VERSION,
    Dialect,
    insert,
    row_from,
)
from fencepost.outbox.states import (
    Dropped,
    Event,
    IdUsed,
    Notice,
    NotOpen,
    Requeued,
    Restarted,
    Row,
    Status,
    Successor,
    Taken,
    advance,
    decide_drop,
    decide_requeue,
)

BUSY_SECONDS = 60.0
TURN_LOCK = 0x66656E6365706F  # "fencepo": the advisory lock of turns
LEASED_BYTES_MAX = 4 << 20
"""Bytes of payloads that are leased from one lane at once; a single row may have more."""
PRUNED_MAX = 1_000
"""Done rows that one turn deletes."""


class Finished(NamedTuple):
    """A row that a relay held, and what came of it; None: it was not sent, and is given back."""

    row: Row
    event: Event | None
    token: str
    """The token of the lease under which the relay held the row."""


class Lease(NamedTuple):
    """Rows of one lane in the hands of a relay, in their order."""

    token: str
    lane: str
    rows: list[Row]


class Turn(msgspec.Struct):
    """Result of a turn: leases that were taken, and rows whose outcome was noted."""

    leases: list[Lease]
    notices: list[tuple[Row, Notice]]
    lost: int = 0
    """Outcomes that were not written: the row's lease had gone to another relay, or a person."""
    pruned: int = 0
    busy: bool = False
    """Whether another relay has rows in its hands, and will see what is committed meanwhile."""
    wait_ms: int | None = None
    """When the next row that waits for a retry is due; None: none waits."""


class Wanted(NamedTuple):
    """The leases that a relay asks for in a turn."""

    max_ages_ms: Mapping[str, int]
    """The meshes that it serves, each with the age at which a row dies."""
    lanes_max: int
    """Lanes to lease now."""
    destination_max: int
    """Lanes of one destination that all relays together may hold."""
    rows_max: int
    """Rows of one lane."""


class Depth(NamedTuple):
    """How many rows of a mesh have a status, and when the oldest of them was accepted."""

    mesh: str
    status: Status
    rows: int
    oldest_ms: int


class OutboxDatabase:
    """A database with an outbox table; safe to use from several threads, one call at a time."""

    dialect: Dialect
    begin: str

    def __init__(self, address: str, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._lock = threading.RLock()
        self._connection: Any = None

    # A relay's turn

    def turn(
        self,
        finished: Iterable[Finished],
        renewed: Iterable[Lease],
        wanted: Wanted,
        *,
        lease_ms: int,
        keep_done_ms: int,
        stops_waiting: bool = False,
    ) -> Turn:
        """Write outcomes, renew leases, lease rows that are due.

        `stops_waiting`: once rows are leased, callers need not tell of their commits any more.
        Rows of `finished` are as they were leased: in flight, with this attempt counted.
        """
        turn = Turn([], [])
        with self._transaction() as execute:
            now_ms = self._locked(execute)
            for row, event, token in finished:
                self._finish(execute, row, event, token, now_ms, wanted, turn)
            for lease in renewed:
                for row in lease.rows:
                    execute(_RENEW, (now_ms + lease_ms, int(row.id), lease.token))
            self._lease(execute, wanted, now_ms, lease_ms, turn)
            if stops_waiting and turn.leases:
                execute(_STOP_WAITING, ())
            done = execute(_PRUNE, (now_ms - keep_done_ms, PRUNED_MAX)).fetchall()
            turn.pruned = len(done)
        return turn

    def _finish(
        self,
        execute: Execute,
        row: Row,
        event: Event | None,
        token: str,
        now_ms: int,
        wanted: Wanted,
        turn: Turn,
    ) -> None:
        if event is None:
            row = msgspec.structs.replace(row, status="pending", attempts=row.attempts - 1)
            notices: tuple[Notice, ...] = ()
        else:
            max_age_ms = wanted.max_ages_ms[row.mesh]
            row, notices = advance(row, event, now_ms=now_ms, max_age_ms=max_age_ms)
        written = execute(_FINISH, (*_state(row), int(row.id), token))
        if written.rowcount == 1:
            turn.notices += [(row, notice) for notice in notices]
        else:
            turn.lost += 1

    def _lease(
        self, execute: Execute, wanted: Wanted, now_ms: int, lease_ms: int, turn: Turn
    ) -> None:
        busy: dict[str, int] = {}
        lanes_held = set()
        for lane, number, until_ms in execute(_INFLIGHT, ()).fetchall():
            mesh = lane.partition("/")[0]
            if until_ms <= now_ms and mesh in wanted.max_ages_ms:
                # Its relay was killed or frozen: it may have been sent, and the server knows.
                (row,) = self._rows(execute, [number])
                self._write(execute, advance(row, Restarted(), now_ms=now_ms, max_age_ms=0).row)
            elif lane not in lanes_held:
                lanes_held.add(lane)
                place = lane.rpartition("/")[0]
                busy[place] = busy.get(place, 0) + 1
        room = wanted.lanes_max
        waits: list[int] = []
        for lane, _, due_ms in self._heads(execute, wanted):
            place = lane.rpartition("/")[0]
            if lane in lanes_held:
                continue
            if due_ms > now_ms:
                waits.append(due_ms - now_ms)
            elif room > 0 and busy.get(place, 0) < wanted.destination_max:
                lease = self._lease_lane(execute, lane, wanted, now_ms, lease_ms, turn)
                if lease.rows:
                    room -= 1
                    busy[place] = busy.get(place, 0) + 1
                    turn.leases.append(lease)
        turn.busy = bool(lanes_held)
        turn.wait_ms = min(waits, default=None)

    def _heads(self, execute: Execute, wanted: Wanted) -> list[tuple[str, int, int]]:
        """The oldest pending row of each lane: by priority, then age."""
        heads: list[tuple[str, int, int]] = []
        for mesh in wanted.max_ages_ms:
            # Behind the slash comes 0 in the order of characters.
            ends = (f"{mesh}/", f"{mesh}0")
            heads += execute(HEADS, (*ends, ends[1])).fetchall()
        return sorted(heads, key=lambda head: (head[0][-1], head[1]))

    def _lease_lane(
        self,
        execute: Execute,
        lane: str,
        wanted: Wanted,
        now_ms: int,
        lease_ms: int,
        turn: Turn,
    ) -> Lease:
        numbers: list[int] = []
        size = 0
        for number, due_ms, length in execute(_OF_LANE, (lane, wanted.rows_max)).fetchall():
            size += length
            if due_ms > now_ms or (numbers and size > LEASED_BYTES_MAX):
                break
            numbers.append(number)
        lease = Lease(self._clock.token(16).hex(), lane, [])
        for row in self._rows(execute, numbers):
            max_age_ms = wanted.max_ages_ms[row.mesh]
            taken, notices = advance(row, Taken(), now_ms=now_ms, max_age_ms=max_age_ms)
            turn.notices += [(taken, notice) for notice in notices]
            if taken.status == "inflight":
                lease.rows.append(taken)
                execute(_LEASE, (lease.token, now_ms + lease_ms, int(row.id)))
            else:
                self._write(execute, taken)
        return lease

    # Looking

    def has_work(self) -> bool:
        """Whether any row is pending or in flight. Nothing is locked."""
        with self._lock:
            return bool(self._connected().execute(_ANY_OPEN).fetchall())

    def wait(self, wait_ms: int) -> bool:  # noqa: ARG002  (SQLite tells of every commit)
        """Ask callers to tell of their commits for so long; False: no need to ask."""
        return False

    def check(self) -> None:
        """Raise `OutboxDatabaseError` if the table is missing or of another version."""
        with self._lock:
            connection = self._connected()
            try:
                found = connection.execute(f"select max(version) from {STATE_TABLE}").fetchone()
                connection.execute(f"select lease_token from {TABLE} where id = 0").fetchall()
            except Exception as error:
                if not self._is_missing(error):
                    raise
                command = f"fencepost outbox schema --dialect {self.dialect.name}"
                raise OutboxDatabaseError(
                    f"the database has no table {TABLE}: `{command}` prints it for your migrations"
                ) from None
            if found[0] != VERSION:
                raise OutboxDatabaseError(
                    f"the outbox of the database has version {found[0]}, and this Fencepost knows"
                    f" version {VERSION}: use the same version of Fencepost everywhere"
                )

    def depths(self) -> tuple[list[Depth], int]:
        """How many rows are open, dead or aborted, and the time of the database.

        Done rows are not counted: there may be millions.
        """
        with self._transaction(reads=True) as execute:
            rows = execute(_DEPTHS, ()).fetchall()
            return [Depth(*row) for row in rows], self._now_ms(execute)

    def rows(
        self, statuses: Sequence[Status], *, mesh: str | None, after: int, limit: int
    ) -> list[Row]:
        """Rows in the order in which they were accepted, for people."""
        marks = ", ".join("?" for _ in statuses)
        text = f"select {COLUMNS} from {TABLE} where status in ({marks}) and id > ?"
        values: list[Any] = [*statuses, after]
        if mesh is not None:
            text += " and mesh = ?"
            values.append(mesh)
        with self._transaction(reads=True) as execute:
            found = execute(f"{text} order by id limit ?", (*values, limit)).fetchall()
            return [row_from(one) for one in found]

    def row(self, row_id: str) -> Row | None:
        """One row."""
        if not row_id.isascii() or not row_id.isdigit() or len(row_id) > 18:
            return None
        with self._transaction(reads=True) as execute:
            return next(iter(self._rows(execute, [int(row_id)])), None)

    def row_of(self, mesh: str, client_message_id: str) -> Row | None:
        """The row that has an id."""
        with self._transaction(reads=True) as execute:
            found = execute(FIND, (mesh, client_message_id)).fetchall()
            return row_from(found[0]) if found else None

    # What a person does

    def requeue(
        self, row_id: str, successor: Successor, *, by: str
    ) -> Requeued | NotOpen | IdUsed | None:
        """Send a row's message under another id, in one transaction; None: there is no such row.

        The number of the new row is given by the table, and not by `successor`.
        """
        with self._transaction() as execute:
            now_ms = self._locked(execute)
            row = next(iter(self._rows(execute, [int(row_id)])), None)
            if row is None:
                return None
            is_used = bool(execute(FIND, (row.mesh, successor.client_message_id)).fetchall())
            outcome = decide_requeue(row, successor, id_is_used=is_used, by=by, now_ms=now_ms)
            if not isinstance(outcome, Requeued):
                return outcome
            statement = insert(self.dialect, outcome.new, wakes=True)
            number = str(execute(statement.text, statement.values).fetchall()[0][0])
            outcome = Requeued(
                msgspec.structs.replace(outcome.old, superseded_by=number),
                msgspec.structs.replace(outcome.new, id=number),
            )
            self._write(execute, outcome.old)
            return outcome

    def drop(self, row_id: str, *, by: str) -> Dropped | NotOpen | None:
        """Give a row up; None: there is no such row."""
        with self._transaction() as execute:
            now_ms = self._locked(execute)
            row = next(iter(self._rows(execute, [int(row_id)])), None)
            if row is None:
                return None
            outcome = decide_drop(row, by=by, now_ms=now_ms)
            if isinstance(outcome, Dropped):
                self._write(execute, outcome.row)
            return outcome

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _rows(self, execute: Execute, numbers: Sequence[int]) -> list[Row]:
        if not numbers:
            return []
        marks = ", ".join("?" for _ in numbers)
        text = f"select {COLUMNS} from {TABLE} where id in ({marks}) order by id"
        return [row_from(values) for values in execute(text, numbers).fetchall()]

    def _write(self, execute: Execute, row: Row) -> None:
        """The state of a row that this turn holds, or that a person decided on; its lease ends."""
        execute(
            _WRITE, (*_state(row), row.aborted_ms, row.aborted_by, row.superseded_by, int(row.id))
        )

    @contextlib.contextmanager
    def _transaction(self, *, reads: bool = False) -> Iterator[Execute]:
        with self._lock:
            connection = self._connected()
            connection.execute("begin" if reads else self.begin)
            try:
                yield lambda text, values: connection.execute(self.dialect.sql(text), values)
                connection.execute("commit")
            except BaseException:
                with contextlib.suppress(Exception):
                    connection.execute("rollback")
                raise

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _locked(self, _execute: Execute) -> int:
        """Wait until it is this relay's turn; the time of the database."""
        raise NotImplementedError

    def _now_ms(self, _execute: Execute) -> int:
        raise NotImplementedError

    def _connect(self) -> Any:
        raise NotImplementedError

    def _is_missing(self, error: Exception) -> bool:
        raise NotImplementedError

    def is_away(self, error: Exception) -> bool:
        """Whether the database cannot be reached, so that trying again later may help."""
        raise NotImplementedError


Execute = Callable[[str, Sequence[Any]], Any]


class SqliteOutbox(OutboxDatabase):
    """An outbox in a SQLite file. The file is there already: it is the caller's."""

    dialect = Dialect("sqlite", "qmark")
    begin = "begin immediate"

    def _locked(self, _execute: Execute) -> int:
        return self._clock.wall_ms()

    def _now_ms(self, _execute: Execute) -> int:
        return self._clock.wall_ms()

    def version(self) -> int:
        """A number that changes when another connection commits."""
        with self._lock:
            (version,) = self._connected().execute("pragma data_version").fetchone()
            return int(version)

    def _connect(self) -> sqlite3.Connection:
        path = Path(self.address)
        if not path.is_file():
            raise OutboxDatabaseError(f"there is no database file {path}")
        return sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _is_missing(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError) and "no such" in str(error)

    def is_away(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError)


class PostgresOutbox(OutboxDatabase):
    """An outbox in a PostgreSQL database (extra `[postgres]`)."""

    dialect = Dialect("postgresql", "format")
    begin = "begin isolation level read committed"

    def _locked(self, _execute: Execute) -> int:
        _execute("select pg_advisory_xact_lock(?)", (TURN_LOCK,))
        # A statement of its own: it sees what the turn before has committed.
        return self._now_ms(_execute)

    def _now_ms(self, _execute: Execute) -> int:
        (now_ms,) = _execute(f"select {NOW}", ()).fetchone()
        return int(now_ms)

    def wait(self, wait_ms: int) -> bool:
        with self._lock:
            self._connected().execute(_WAIT, (wait_ms,))
        return True

    def _connected(self) -> Any:
        if self._connection is not None and (self._connection.closed or self._connection.broken):
            self._connection = None
        return super()._connected()

    def _connect(self) -> Any:
        import psycopg

        return psycopg.connect(
            self.address, autocommit=True, connect_timeout=10, application_name="fencepost-relay"
        )

    def _is_missing(self, error: Exception) -> bool:
        import psycopg.errors

        return isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn)

    def is_away(self, error: Exception) -> bool:
        import psycopg

        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def open_outbox(address: str, clock: Clock) -> OutboxDatabase:
    """The database at an address: a file, `sqlite:///FILE`, or `postgresql://...`."""
    scheme, found, rest = address.partition("://")
    if not found:
        return SqliteOutbox(address, clock)
    # As SQLAlchemy writes it, with the name of a driver: postgresql+psycopg://...
    scheme = scheme.partition("+")[0]
    if scheme == "sqlite":
        return SqliteOutbox(rest.removeprefix("/"), clock)
    if scheme in ("postgresql", "postgres"):
        return PostgresOutbox(f"postgresql://{rest}", clock)
    raise OutboxDatabaseError(
        f"{scheme}:// is no database of an outbox: give a file or postgresql://"
    )


def _state(row: Row) -> tuple[Any, ...]:
    return (
        row.status,
        row.attempts,
        row.next_attempt_ms,
        row.last_error,
        row.delivered_ms,
        row.broker_message_id,
    )


_SET = (
    "status = ?, attempts = ?, next_attempt_ms = ?, last_error = ?, delivered_ms = ?,"
    " broker_message_id = ?, lease_token = null, lease_until_ms = null"
)
_FINISH = f"update {TABLE} set {_SET} where id = ? and status = 'inflight' and lease_token = ?"
_WRITE = (
    f"update {TABLE} set {_SET}, aborted_ms = ?, aborted_by = ?, superseded_by = ? where id = ?"
)
_LEASE = (
    f"update {TABLE} set status = 'inflight', attempts = attempts + 1, lease_token = ?,"
    " lease_until_ms = ? where id = ?"
)
_RENEW = (
    f"update {TABLE} set lease_until_ms = ? where id = ? and status = 'inflight'"
    " and lease_token = ?"
)
_ANY_OPEN = (
    f"select 1 where exists (select 1 from {TABLE} where status = 'pending')"
    f" or exists (select 1 from {TABLE} where status = 'inflight')"
)
_INFLIGHT = f"select lane, id, lease_until_ms from {TABLE} where status = 'inflight'"
_OF_LANE = (
    f"select id, next_attempt_ms, length(payload) from {TABLE}"
    " where status = 'pending' and lane = ? order by id limit ?"
)
_PRUNE = (
    f"delete from {TABLE} where id in (select id from {TABLE} where status = 'done'"
    " and delivered_ms < ? order by delivered_ms limit ?) returning id"
)
_WAIT = f"update {STATE_TABLE} set waiting_until_ms = {NOW} + %s"
_STOP_WAITING = f"update {STATE_TABLE} set waiting_until_ms = 0 where waiting_until_ms > 0"
# From lane to lane along the index, however many rows one of them has.
HEADS = f"""with recursive lanes (lane) as (
    select min(lane) from {TABLE} where status = 'pending' and lane > ? and lane < ?
    union all
    select (select min(t.lane) from {TABLE} t
            where t.status = 'pending' and t.lane > lanes.lane and t.lane < ?)
    from lanes where lanes.lane is not null
)
select lanes.lane, head.id, head.next_attempt_ms from lanes
join {TABLE} head on head.id = (
    select min(t.id) from {TABLE} t where t.status = 'pending' and t.lane = lanes.lane
)"""
# One index for each status; SQLite does not see that one for several would do.
_DEPTHS = " union all ".join(
    f"select mesh, status, count(*), min(enqueued_ms) from {TABLE} where status = '{status}'"
    " group by mesh, status"
    for status in ("pending", "inflight", "dead", "aborted")
)
