"""Rows of an outbox in a database: their table, and how SQLite and PostgreSQL take a new one over.

A statement is text with `?` for each value; a `Dialect` turns it into what a driver wants. The
numbers of rows say in which order they were written, and nothing else: rows are found by their
status, so one whose transaction commits late is found when it is there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple

from fencepost.outbox.states import (
    AlreadyDelivered,
    AlreadyQueued,
    Conflict,
    Queued,
    Row,
    decide_accept,
)
from fencepost.protocol.fingerprints import PRIORITIES, Priority

TABLE = "fencepost_outbox"
STATE_TABLE = "fencepost_outbox_state"
VERSION = 1
CHANNEL = "fencepost_outbox"
"""PostgreSQL: where relays are told that a transaction with sends has committed."""
ACCEPT_TRIES_MAX = 3

DialectName = Literal["sqlite", "postgresql"]
Marks = Literal["qmark", "format", "dollar"]


class Dialect(NamedTuple):
    """A database and the way in which its driver writes parameters."""

    name: DialectName
    marks: Marks

    def sql(self, text: str) -> str:
        """A statement as the driver wants it."""
        if self.marks == "qmark":
            return text
        if self.marks == "format":
            return text.replace("?", "%s")
        numbers = itertools.count(1)
        return re.sub(r"\?", lambda _: f"${next(numbers)}", text)


class Statement(NamedTuple):
    """A statement and its values. What it returns is sent back to the operation."""

    text: str
    values: Sequence[Any]


Rows = Sequence[Sequence[Any]]
Operation = Generator[Statement, Rows, Any]


def lane_of(mesh: str, destination: str, priority: Priority) -> str:
    """The column `lane`: rows with the same one keep their order. Names hold neither / nor :."""
    return f"{mesh}/{destination}/{PRIORITIES.index(priority)}"


COLUMNS = (
    "id, mesh, client_message_id, request_fingerprint, destination, payload, priority,"
    " enqueued_ms, next_attempt_ms, attempts, status, last_error, delivered_ms, broker_message_id,"
    " aborted_ms, aborted_by, superseded_by"
)
NOW = "(extract(epoch from clock_timestamp()) * 1000)::bigint"
"""The clock of PostgreSQL: the machines of callers and relays may disagree."""


def row_from(values: Sequence[Any]) -> Row:
    """A row out of what a select of `COLUMNS` returned."""
    number, mesh, client_message_id, mark, destination, payload, *rest = values
    return Row(
        str(number), mesh, client_message_id, bytes(mark), destination, bytes(payload), *rest
    )


_INSERT = f"""insert into {TABLE} (mesh, client_message_id, request_fingerprint, destination, lane,
 payload, priority, enqueued_ms, next_attempt_ms) values (?, ?, ?, ?, ?, ?, ?, {{now}}, {{now}})
 on conflict (mesh, client_message_id) do nothing returning id"""
_INSERT_SQLITE = _INSERT.format(now="?")
_INSERT_POSTGRES = _INSERT.format(now=NOW)
# Transactions that say NOTIFY commit one after the other, so only a relay that waits is told.
_INSERT_AND_WAKE = f"""with accepted as ({_INSERT_POSTGRES})
 select id, case when exists (select from {STATE_TABLE} where waiting_until_ms > {NOW})
 then pg_notify('{CHANNEL}', '')::text end from accepted"""
FIND = f"select {COLUMNS} from {TABLE} where mesh = ? and client_message_id = ?"


def insert(dialect: Dialect, row: Row, *, wakes: bool) -> Statement:
    """Write a new row, unless its mesh has one with its id; returns the number of the row.

    `wakes`: relays that wait are told when the transaction commits.
    """
    values = (
        row.mesh,
        row.client_message_id,
        row.request_fingerprint,
        row.destination,
        lane_of(*row.lane),
        row.payload,
        row.priority,
    )
    if dialect.name == "sqlite":
        return Statement(_INSERT_SQLITE, (*values, row.enqueued_ms, row.enqueued_ms))
    return Statement(_INSERT_AND_WAKE if wakes else _INSERT_POSTGRES, values)


def accept(
    dialect: Dialect, row: Row, *, wakes: bool
) -> Generator[Statement, Rows, Queued | AlreadyQueued | AlreadyDelivered | Conflict]:
    """Take a row over, in the transaction that is open; a known id is answered by its row."""
    for _ in range(ACCEPT_TRIES_MAX):
        written = yield insert(dialect, row, wakes=wakes)
        if written:
            return Queued(row)
        # The transaction that used the id has ended, so its row can be seen. It may have been
        # pruned since: then the id is free here again, and the insert is tried once more.
        found = yield Statement(FIND, (row.mesh, row.client_message_id))
        if found:
            outcome = decide_accept(row_from(found[0]), row)
            assert not isinstance(outcome, Queued)
            return outcome
    raise AssertionError("the row of an id comes and goes")


# The table

_SCHEMA = """create table {table} (
    id {serial},
    mesh text not null,
    client_message_id text {c} not null,
    request_fingerprint {bytes} not null,
    destination text not null,
    lane text {c} not null,
    payload {bytes} not null,
    priority text not null,
    enqueued_ms bigint not null,
    next_attempt_ms bigint not null,
    attempts integer not null default 0,
    status text not null default 'pending'
        check (status in ('pending', 'inflight', 'done', 'dead', 'aborted')),
    last_error text,
    delivered_ms bigint,
    broker_message_id text,
    aborted_ms bigint,
    aborted_by text,
    superseded_by text,
    lease_token text,
    lease_until_ms bigint,
    unique (mesh, client_message_id)
);
create index {table}_pending on {table} (lane, id) where status = 'pending';
create index {table}_inflight on {table} (lane, id) where status = 'inflight';
create index {table}_done on {table} (delivered_ms) where status = 'done';
create index {table}_dead on {table} (id) where status = 'dead';
create index {table}_aborted on {table} (id) where status = 'aborted';
create table {state_table} (version integer not null, waiting_until_ms bigint not null);
insert into {state_table} (version, waiting_until_ms) values ({version}, 0);
"""


def schema(name: DialectName) -> str:
    """The statements that make the table, for the user's own migrations."""
    is_postgres = name == "postgresql"
    return _SCHEMA.format(
        table=TABLE,
        state_table=STATE_TABLE,
        version=VERSION,
        serial=(
            "bigint generated by default as identity primary key"
            if is_postgres
            else "integer primary key autoincrement"
        ),
        bytes="bytea" if is_postgres else "blob",
        c='collate "C"' if is_postgres else "collate binary",
    )


def schema_statements(name: DialectName) -> list[str]:
    """The same, one by one."""
    return [text.strip() for text in schema(name).split(";\n") if text.strip()]


def drop_statements() -> list[str]:
    """Statements that drop the table, with every send in it."""
    return [f"drop table {TABLE}", f"drop table {STATE_TABLE}"]
