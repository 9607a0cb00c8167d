"""Requests to the daemon of this machine, as operations without I/O, and what they answer.

The daemon answers when a send is on its disk. Sending the same again is always safe, so these
requests are retried like all others of the client.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import platformdirs

from fencepost.client.effects import Operation
from fencepost.client.errors import KeyReusedError
from fencepost.client.http import Address, Request, target_of
from fencepost.client.meshes import envelope_of
from fencepost.client.operations import decoded, encode_json, new_key
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings, Retries, Timeouts
from fencepost.outbox.errors import IdUsedError

SOCKET_VARIABLE = "FENCEPOST_OUTBOX_SOCKET"
FOLDER_VARIABLE = "FENCEPOST_OUTBOX_FOLDER"
RETRIES = Retries(attempts_max=4, seconds_max=10.0, delay_seconds_max=0.5)
"""A daemon that restarts is back soon; one that is not there is not waited for."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A send that is on the disk of the daemon. `duplicate`: since an earlier one with its id."""

    id: str
    mesh: str
    client_message_id: str
    status: Literal["queued", "done"]
    duplicate: bool
    broker_message_id: str | None = None


class RowInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the outbox as lists show it."""

    id: str
    mesh: str
    client_message_id: str
    destination: str
    priority: str
    status: Literal["pending", "inflight", "done", "dead", "aborted"]
    attempts: int
    enqueued_ms: int
    bytes: int
    request_fingerprint: str
    next_attempt_ms: int | None = None
    last_error: str | None = None
    delivered_ms: int | None = None
    broker_message_id: str | None = None
    aborted_ms: int | None = None
    aborted_by: str | None = None
    superseded_by: str | None = None


class RowDetails(RowInfo, frozen=True, kw_only=True):
    """A row with its payload, and those that superseded it one after the other."""

    payload: dict[str, Any]
    successors: list[RowInfo] = []


class RequeuedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The row that was aborted, and the one that is sent in its place."""

    old: RowInfo
    new: RowInfo


class InboxMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that came in; `seq` is its place in this inbox."""

    seq: int
    mesh: str
    received_ms: int
    message: dict[str, Any]


def socket_of(given: str | Path | None) -> str:
    """Where the daemon listens: as given, else by the variables, else in the user's folder."""
    if given is not None:
        return str(given)
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return str(Path(named).expanduser())
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return str(Path(folder).expanduser() / "outbox.sock")
    return str(platformdirs.user_data_path("fencepost", appauthor=False) / "outbox" / "outbox.sock")


def answers(path: str) -> bool:
    """Whether a daemon listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def settings_of(given: str | Path | None, timeout: float) -> ClientSettings:
    """Settings of a client that talks to the daemon of this machine."""
    return ClientSettings(
        address=Address("localhost", 80, None, "", socket=socket_of(given)),
        timeouts=Timeouts(connect=min(5.0, timeout), answer=timeout),
        retries=RETRIES,
    )


def send(
    settings: ClientSettings,
    to: str,
    body: Any,
    message_id: str | None,
    mesh: str | None,
    more: Mapping[str, Any],
) -> Operation[Taken]:
    """Have a message taken; raises `IdUsedError` when its id stands for another."""
    chosen = message_id or new_key(settings)
    data = encode_json(envelope_of(to, body, chosen, more))
    target = target_of("/v1/send", () if mesh is None else (("mesh", mesh),))
    request = Request("POST", target, (("Content-Type", JSON),), data)
    try:
        answer = yield from exchange(settings, request, Kind.WRITE)
    except KeyReusedError as error:
        problem = error.problem
        if "conflict" not in problem:
            raise
        raise IdUsedError(
            chosen, problem["conflict"], problem["fingerprint_prefix"], problem.get("reason")
        ) from error
    return decoded(answer.response, Taken)


def get(settings: ClientSettings, path: str, kind: type[Any]) -> Operation[Any]:
    """GET an endpoint of the daemon, and decode its answer as `kind`."""
    answer = yield from exchange(settings, Request("GET", path), Kind.READ)
    return decoded(answer.response, kind)


def change(
    settings: ClientSettings, row_id: str, what: str, values: Mapping[str, Any], kind: type[Any]
) -> Operation[Any]:
    """Requeue or drop a row. Not repeated: it would be another change."""
    given = {name: value for name, value in values.items() if value is not None}
    target = target_of(f"/v1/outbox/{row_id}/{what}")
    request = Request("POST", target, (("Content-Type", JSON),), encode_json(given))
    answer = yield from exchange(settings, request, Kind.ONCE)
    return decoded(answer.response, kind)
