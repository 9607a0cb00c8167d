"""The outbox as a table of the caller's database: a send is written in the caller's transaction.

`Outbox.table()` makes a `TableOutbox`. Its `send` writes one row and commits nothing: the row is
there with the caller's change or not at all. A relay (`fencepost outbox relay`) delivers it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

from fencepost.client.errors import InvalidArgumentError, require
from fencepost.client.operations import encode_json
from fencepost.clock import SystemClock
from fencepost.outbox.aio.daemons import AsyncDaemonOutbox
from fencepost.outbox.connections import run, run_waiting, target_of
from fencepost.outbox.delivery import read_send, row_of, ulid
from fencepost.outbox.errors import IdUsedError
from fencepost.outbox.rows import Dialect, Rows, Statement, accept
from fencepost.outbox.states import AlreadyDelivered, AlreadyQueued, Conflict, Queued, Row
from fencepost.outbox.sync.daemons import DaemonOutbox
from fencepost.protocol.fingerprints import Kind, Unsendable, refuse_fields
from fencepost.protocol.meshes import refuse_name

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Coroutine
    from typing import TypeAlias

    import psycopg
    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    # Connections of asyncpg and Django have no types of their own.
    Blocking: TypeAlias = sqlite3.Connection | psycopg.Connection[Any] | Connection | Session
    Awaited: TypeAlias = psycopg.AsyncConnection[Any] | AsyncConnection | AsyncSession

MESH_VARIABLE = "FENCEPOST_MESH"
BODY_BYTES_MAX = 1 << 20
"""Bytes of a send as JSON; what the server takes inline by default."""

_clock = SystemClock()


class Destination(NamedTuple):
    """Where a send goes, within its mesh."""

    kind: Kind
    ref: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.ref}"


def topic(name: str) -> Destination:
    """Every member of the topic gets the message into its inbox."""
    return _destination("topic", name)


def queue(name: str) -> Destination:
    """One worker of the queue gets the message."""
    return _destination("queue", name)


def dm(member: str) -> Destination:
    """This member gets the message into its inbox."""
    return _destination("dm", member)


def _destination(kind: str, ref: str) -> Destination:
    refused = refuse_fields(kind, ref, "", "next")
    if refused is not None:
        raise InvalidArgumentError(refused.detail)
    return Destination(kind, ref)  # type: ignore[arg-type]  # refuse_fields took it


def destination_of(to: Destination | str) -> Destination:
    """A destination as such, or as `topic:NAME`, `queue:NAME`, `dm:MEMBER`."""
    if isinstance(to, Destination):
        return to
    kind, _, ref = to.partition(":")
    return _destination(kind, ref)


class Accepted(msgspec.Struct, frozen=True):
    """A send that the outbox has taken over; it counts once the transaction has committed.

    `duplicate`: the same send was accepted before, and nothing was written now. It then has a
    `broker_message_id` if it was delivered.
    """

    client_message_id: str
    duplicate: bool = False
    broker_message_id: str | None = None


class TableOutbox:
    """The outbox in the caller's database, for the sends of one mesh."""

    def __init__(self, mesh: str | None = None, *, wake: bool = True) -> None:
        """`mesh`: else FENCEPOST_MESH.

        `wake=False` never says NOTIFY on PostgreSQL: relays find rows when they look, each second.
        """
        self._mesh = mesh
        self._wake = wake

    @property
    def mesh(self) -> str:
        """The mesh that rows carry."""
        mesh = self._mesh or os.environ.get(MESH_VARIABLE, "")
        require(bool(mesh), f"which mesh? Say Outbox.table(mesh=...), or set {MESH_VARIABLE}")
        refused = refuse_name("mesh", mesh)
        if refused is not None:
            raise InvalidArgumentError(refused.detail)
        return mesh

    @overload
    def send(
        self,
        connection: Blocking,
        to: Destination | str,
        body: Any,
        *,
        id: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Accepted: ...

    @overload
    def send(
        self,
        connection: Awaited,
        to: Destination | str,
        body: Any,
        *,
        id: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Coroutine[Any, Any, Accepted]: ...

    def send(
        self,
        connection: Any,
        to: Destination | str,
        body: Any,
        *,
        id: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Any:
        """Write a send in the transaction that is open on `connection`; with async ones, await it.

        Text goes as `body`, bytes as `body_base64`, anything else as JSON. The same send again
        writes nothing; another one under a used id raises `IdUsedError`. Without an id one is made.
        """
        row = self._row(destination_of(to), body, id, priority, reply_to, meta)
        target = target_of(connection)
        operation = _accepting(target.dialect, row, wakes=self._wake)
        return run_waiting(operation, target) if target.waits else run(operation, target)

    def _row(
        self,
        to: Destination,
        body: Any,
        id: str | None,
        priority: str | None,
        reply_to: str | None,
        meta: Mapping[str, Any] | None,
    ) -> Row:
        data = encode_send(to, body, priority, reply_to, meta)
        send = read_send(data, header_id=id, minted_id=ulid(_clock))
        if isinstance(send, Unsendable):
            raise InvalidArgumentError(send.detail)
        return row_of(send, mesh=self.mesh, row_id="", now_ms=_clock.wall_ms())


def encode_send(
    to: Destination,
    body: Any,
    priority: str | None,
    reply_to: str | None,
    meta: Mapping[str, Any] | None,
) -> bytes:
    """A send as the JSON that the server takes; raises for what it would refuse."""
    fields: dict[str, Any] = {"kind": to.kind, "ref": to.ref}
    more = {"priority": priority, "reply_to": reply_to, "meta": meta}
    fields |= {name: value for name, value in more.items() if value is not None}
    if isinstance(body, str):
        fields["body"] = body
    elif isinstance(body, bytes | bytearray | memoryview):
        fields["body_base64"] = base64.b64encode(body).decode()
    else:
        fields["json"] = body
    data = encode_json(fields)
    require(len(data) <= BODY_BYTES_MAX, f"a send has at most {BODY_BYTES_MAX} bytes as JSON")
    return data


def _accepting(dialect: Dialect, row: Row, *, wakes: bool) -> Generator[Statement, Rows, Accepted]:
    client_message_id = row.client_message_id
    match (yield from accept(dialect, row, wakes=wakes)):
        case Queued():
            return Accepted(client_message_id)
        case AlreadyQueued():
            return Accepted(client_message_id, duplicate=True)
        case AlreadyDelivered(known):
            return Accepted(client_message_id, True, known.broker_message_id)
        case Conflict(conflict, fingerprint_prefix, reason):
            raise IdUsedError(client_message_id, conflict, fingerprint_prefix, reason)


class Outbox:
    """Where a program leaves its sends: in the database that it writes to anyway, or with the
    daemon of this machine."""

    @staticmethod
    def daemon(
        mesh: str | None = None, *, socket: str | Path | None = None, timeout: float = 30.0
    ) -> DaemonOutbox:
        """The daemon that listens on this machine (`fencepost outbox run`).

        `mesh`: else the only one that it serves. `socket`: else FENCEPOST_OUTBOX_SOCKET, else the
        user's own.
        """
        return DaemonOutbox(socket, mesh=mesh, timeout=timeout)

    @staticmethod
    def daemon_async(
        mesh: str | None = None, *, socket: str | Path | None = None, timeout: float = 30.0
    ) -> AsyncDaemonOutbox:
        """The async twin of `daemon`."""
        return AsyncDaemonOutbox(socket, mesh=mesh, timeout=timeout)

    @staticmethod
    def table(mesh: str | None = None, *, wake: bool = True) -> TableOutbox:
        """The outbox in the caller's database, for sends in the caller's own transaction.

        `mesh`: else FENCEPOST_MESH. `wake=False` never wakes an idle relay on PostgreSQL, which
        spares the transaction a NOTIFY; relays then find rows when they look, once a second.
        """
        return TableOutbox(mesh, wake=wake)
