"""The life of a row in an outbox, pure: a row and an event give the next row.

A row is accepted as `pending`, goes `inflight` with each attempt, and ends as `done` (the server
has the message), `dead` (the server will not take it, or its time is over) or `aborted` (a person
dropped it, or requeued it under another id). A row is never deleted while it is dead or aborted,
and its id is never free again: the daemon does not choose a new id by itself, because that would
hide an error of the caller.

Every pair of status and event has an answer. An event that comes too late changes nothing: above
all, an answer of the server does not bring an aborted row back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from fencepost.protocol.fingerprints import PRIORITIES, Priority, prefix
from fencepost.protocol.timing import Backoff, delay_ms

Status = Literal["pending", "inflight", "done", "dead", "aborted"]
STATUSES: tuple[Status, ...] = ("pending", "inflight", "done", "dead", "aborted")

BACKOFF = Backoff("exponential", base_ms=500, cap_ms=30_000, jitter=0.25)
RETRY_AFTER_MS_MAX = 3_600_000
"""A server that asks for a longer wait than this is asked again after this long."""
ERROR_CHARACTERS_MAX = 1_000

_RETRIED = (408, 425, 429)


class Row(msgspec.Struct, frozen=True, gc=False):
    """One send in an outbox. (mesh, client_message_id) is unique, for ever."""

    id: str
    mesh: str
    client_message_id: str
    request_fingerprint: bytes
    destination: str
    payload: bytes
    priority: Priority
    enqueued_ms: int
    next_attempt_ms: int
    attempts: int = 0
    status: Status = "pending"
    last_error: str | None = None
    delivered_ms: int | None = None
    broker_message_id: str | None = None
    aborted_ms: int | None = None
    aborted_by: str | None = None
    superseded_by: str | None = None

    @property
    def lane(self) -> tuple[str, str, Priority]:
        """The rows among which the order is kept."""
        return self.mesh, self.destination, self.priority


_TOLD_IF_SET = (
    "last_error",
    "delivered_ms",
    "broker_message_id",
    "aborted_ms",
    "aborted_by",
    "superseded_by",
)


def facts_of(row: Row) -> dict[str, object]:
    """A row as programs and people see it, without its payload."""
    facts: dict[str, object] = {
        "id": row.id,
        "mesh": row.mesh,
        "client_message_id": row.client_message_id,
        "destination": row.destination,
        "priority": row.priority,
        "status": row.status,
        "attempts": row.attempts,
        "enqueued_ms": row.enqueued_ms,
        "bytes": len(row.payload),
        "request_fingerprint": row.request_fingerprint.hex(),
    }
    if row.status == "pending":
        facts["next_attempt_ms"] = row.next_attempt_ms
    told = ((name, getattr(row, name)) for name in _TOLD_IF_SET)
    return facts | {name: value for name, value in told if value is not None}


# Accepting a send.


class Queued(NamedTuple):
    """202: the id is new; insert the row."""

    row: Row


class AlreadyQueued(NamedTuple):
    """202: the same send waits for its delivery."""

    row: Row


class AlreadyDelivered(NamedTuple):
    """200: the same send was delivered."""

    row: Row


class Conflict(NamedTuple):
    """409 `idempotency_key_reused`: the id stands for another send, or for one that has failed."""

    conflict: str
    fingerprint_prefix: str
    reason: str | None


def decide_accept(
    known: Row | None, offered: Row
) -> Queued | AlreadyQueued | AlreadyDelivered | Conflict:
    """What becomes of a send; `known` is the row that has its mesh and id already."""
    if known is None:
        return Queued(offered)
    assert (known.mesh, known.client_message_id) == (offered.mesh, offered.client_message_id)
    matches = known.request_fingerprint == offered.request_fingerprint
    if matches and known.status in ("pending", "inflight"):
        return AlreadyQueued(known)
    if matches and known.status == "done":
        return AlreadyDelivered(known)
    return Conflict(
        f"outbox_{known.status}_fingerprint_{'match' if matches else 'mismatch'}",
        prefix(known.request_fingerprint),
        known.last_error if known.status == "dead" else None,
    )


# What happens to a row.


class Taken(NamedTuple):
    """An attempt begins."""


class Restarted(NamedTuple):
    """The daemon starts: what was in flight may or may not have arrived, so it is sent again."""


class Stored(NamedTuple):
    """The server has the message, since now or (`duplicate`) since earlier."""

    broker_message_id: str
    duplicate: bool = False
    history_available: bool = True


class Failed(NamedTuple):
    """The attempt failed in a way that may pass. `random` lies between 0 and 1."""

    error: str
    random: float
    retry_after_ms: int | None = None


class Rejected(NamedTuple):
    """The server refuses the message for good."""

    error: str


class Looked(NamedTuple):
    """Time went by: a row that is too old dies."""


Event = Taken | Restarted | Stored | Failed | Rejected | Looked


class Notice(NamedTuple):
    """Something that a person or a counter should learn."""

    kind: Literal["dead", "duplicate", "history_pruned", "late"]
    level: Literal["info", "warning", "error"]
    detail: str


class Step(NamedTuple):
    """The row after an event."""

    row: Row
    notices: tuple[Notice, ...] = ()


def advance(row: Row, event: Event, *, now_ms: int, max_age_ms: int) -> Step:
    """The row after `event`; the same row when the event does not concern its status."""
    match row.status, event:
        case "pending", Taken():
            if is_too_old(row, now_ms, max_age_ms):
                return _too_old(row)
            taken = msgspec.structs.replace(row, status="inflight", attempts=row.attempts + 1)
            return Step(taken)
        case "inflight", Restarted():
            return Step(msgspec.structs.replace(row, status="pending", next_attempt_ms=now_ms))
        case (("pending" | "inflight"), Stored()):
            return _stored(row, event, now_ms)
        case "inflight", Failed():
            return _failed(row, event, now_ms, max_age_ms)
        case "inflight", Rejected(error):
            return _dead(row, error)
        case "pending", Looked() if is_too_old(row, now_ms, max_age_ms):
            return _too_old(row)
        case (("dead" | "aborted"), Stored()):
            detail = f"the server has {row.client_message_id!r}, which is {row.status} here"
            return Step(row, (Notice("late", "warning", detail),))
        case _:
            return Step(row)


def is_too_old(row: Row, now_ms: int, max_age_ms: int) -> bool:
    """Whether the row has waited longer than the server would recognise it for."""
    return now_ms - row.enqueued_ms >= max_age_ms


def event_of_answer(
    status: int, body: Mapping[str, object], *, random: float, retry_after_ms: int | None = None
) -> Stored | Failed | Rejected:
    """What an answer of the server means for the row.

    An answer that no server of ours gives, a redirect for instance, is tried again: something in
    between is set up wrongly, and the message itself is not refused.
    """
    message_id = body.get("broker_message_id")
    if status in (200, 201) and isinstance(message_id, str):
        available = body.get("history_available", True) is not False
        return Stored(message_id, duplicate=status == 200, history_available=available)
    error = f"{status} {body.get('code', '')} {body.get('detail', '')}".strip()
    if 400 <= status < 500 and status not in _RETRIED:
        return Rejected(error)
    return Failed(error, random, retry_after_ms)


def _stored(row: Row, event: Stored, now_ms: int) -> Step:
    done = msgspec.structs.replace(
        row,
        status="done",
        delivered_ms=now_ms,
        broker_message_id=event.broker_message_id,
        last_error=None,
    )
    if not event.duplicate:
        return Step(done)
    named = f"{row.client_message_id!r} was stored before as {event.broker_message_id}"
    if event.history_available:
        return Step(done, (Notice("duplicate", "info", named),))
    detail = f"{named}, and its stream no longer holds it"
    return Step(done, (Notice("history_pruned", "warning", detail),))


def _failed(row: Row, event: Failed, now_ms: int, max_age_ms: int) -> Step:
    wait_ms = delay_ms(BACKOFF, max(row.attempts, 1), event.random)
    if event.retry_after_ms is not None:
        wait_ms = max(wait_ms, min(event.retry_after_ms, RETRY_AFTER_MS_MAX))
    failed = msgspec.structs.replace(
        row,
        status="pending",
        next_attempt_ms=now_ms + wait_ms,
        last_error=event.error[:ERROR_CHARACTERS_MAX],
    )
    return _too_old(failed) if is_too_old(failed, now_ms, max_age_ms) else Step(failed)


def _too_old(row: Row) -> Step:
    before = f"; the last attempt: {row.last_error}" if row.last_error else ""
    return _dead(row, f"not delivered within its time, after {row.attempts} attempts{before}")


def _dead(row: Row, error: str) -> Step:
    dead = msgspec.structs.replace(row, status="dead", last_error=error[:ERROR_CHARACTERS_MAX])
    detail = f"{row.client_message_id!r} to {row.destination} is dead: {error}"
    return Step(dead, (Notice("dead", "error", detail),))


# What a person does with a row.


class Requeued(NamedTuple):
    """One transaction: the old row is aborted, the new one waits for its delivery."""

    old: Row
    new: Row


class Dropped(NamedTuple):
    """The row is aborted and has no successor."""

    row: Row


class NotOpen(NamedTuple):
    """A row that is done or aborted can be neither requeued nor dropped."""

    status: Status


class IdUsed(NamedTuple):
    """The new id belongs to a row of this mesh already."""

    client_message_id: str


class Successor(NamedTuple):
    """What the new row of a requeue has of its own; payload and fingerprint only when patched."""

    row_id: str
    client_message_id: str
    payload: bytes | None = None
    request_fingerprint: bytes | None = None


def decide_requeue(
    row: Row, successor: Successor, *, id_is_used: bool, by: str, now_ms: int
) -> Requeued | NotOpen | IdUsed:
    """Send a row's message under a fresh id, to the same destination.

    `id_is_used`: the mesh of the row has a row with the new id, in whatever status.
    """
    if row.status in ("done", "aborted"):
        return NotOpen(row.status)
    if id_is_used or successor.client_message_id == row.client_message_id:
        return IdUsed(successor.client_message_id)
    patched = successor.payload is not None
    assert patched == (successor.request_fingerprint is not None), "a new payload has a new one"
    new = Row(
        id=successor.row_id,
        mesh=row.mesh,
        client_message_id=successor.client_message_id,
        request_fingerprint=successor.request_fingerprint or row.request_fingerprint,
        destination=row.destination,
        payload=row.payload if successor.payload is None else successor.payload,
        priority=row.priority,
        enqueued_ms=now_ms,
        next_attempt_ms=now_ms,
    )
    return Requeued(_aborted(row, by, now_ms, superseded_by=new.id), new)


def decide_drop(row: Row, *, by: str, now_ms: int) -> Dropped | NotOpen:
    """Give a row up. Its id stays used."""
    if row.status in ("done", "aborted"):
        return NotOpen(row.status)
    return Dropped(_aborted(row, by, now_ms))


def _aborted(row: Row, by: str, now_ms: int, superseded_by: str | None = None) -> Row:
    return msgspec.structs.replace(
        row, status="aborted", aborted_ms=now_ms, aborted_by=by, superseded_by=superseded_by
    )


# Which rows are sent next.


def choose(
    rows: Iterable[Row],
    *,
    now_ms: int,
    destination_max: int,
    rows_max: int,
) -> list[Row]:
    """The rows to send now, given all that are pending or in flight.

    By priority, then age. The oldest open row of a lane holds up those behind it, so the order
    within a destination and priority is kept; `destination_max` bounds how many a destination has
    in flight, so a slow one does not hold up the others.
    """
    ordered = sorted(rows, key=_turn)
    busy: dict[tuple[str, str], int] = {}
    lanes = set()
    for row in ordered:
        if row.status == "inflight":
            place = row.mesh, row.destination
            busy[place] = busy.get(place, 0) + 1
            lanes.add(row.lane)
    room = rows_max - sum(busy.values())
    chosen: list[Row] = []
    for row in ordered:
        if len(chosen) >= room:
            break
        if row.status != "pending" or row.lane in lanes:
            continue
        lanes.add(row.lane)
        place = row.mesh, row.destination
        if row.next_attempt_ms <= now_ms and busy.get(place, 0) < destination_max:
            busy[place] = busy.get(place, 0) + 1
            chosen.append(row)
    return chosen


_RANKS = {priority: rank for rank, priority in enumerate(PRIORITIES)}


def _turn(row: Row) -> tuple[int, int, str]:
    return _RANKS[row.priority], row.enqueued_ms, row.id
