"""The rows of outbox.db: every change is a rule of `states`, carried out in one transaction.

The methods that begin with `do_` are jobs for the writer: they run in its thread, on its
connection, and touch nothing else. What they return is true once the transaction is on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from fencepost.outbox.daemon.database import File
from fencepost.outbox.states import (
    AlreadyDelivered,
    AlreadyQueued,
    Conflict,
    Dropped,
    Event,
    IdUsed,
    Looked,
    NotOpen,
    Queued,
    Requeued,
    Restarted,
    Row,
    Status,
    Step,
    Successor,
    Taken,
    advance,
    decide_accept,
    decide_drop,
    decide_requeue,
    facts_of,
)

NEVER_MS = 2**62
"""The age of rows whose mesh has not said yet how long it remembers ids: no row is sent to it."""
AGED_MAX = 200
"""Rows that die of age in one transaction."""
SWEPT_MAX = 500

Lane = tuple[str, str, str]


class Change(NamedTuple):
    """A row before and after; without a `before` it is new."""

    before: Status | None
    row: Row


class Settled(NamedTuple):
    """What came of an attempt, and the next row of the lane, in flight already or not due yet."""

    step: Step
    changes: tuple[Change, ...]
    taken: Row | None
    due_ms: int | None
    """When the next row of the lane is due; None when the lane is empty."""


def columns(row: Row) -> tuple[Any, ...]:
    """A row in the order of its columns."""
    return (
        row.id,
        row.mesh,
        row.client_message_id,
        row.request_fingerprint,
        row.destination,
        row.payload,
        row.priority,
        row.enqueued_ms,
        row.next_attempt_ms,
        row.attempts,
        row.status,
        row.last_error,
        row.delivered_ms,
        row.broker_message_id,
        row.aborted_ms,
        row.aborted_by,
        row.superseded_by,
    )


def row_from(found: tuple[Any, ...]) -> Row:
    return Row(*found)


def do_accept(file: File, offered: Row) -> Queued | AlreadyQueued | AlreadyDelivered | Conflict:
    """Insert a send if its id is new; else say what became of the send that has it."""
    outcome = decide_accept(find(file, offered.mesh, offered.client_message_id), offered)
    if isinstance(outcome, Queued):
        file.execute("insert", *columns(outcome.row))
    return outcome


def do_take(file: File, lane: Lane, *, now_ms: int, max_age_ms: int) -> Settled:
    """Begin an attempt of the oldest row of a lane, if it is due."""
    return _take(file, lane, now_ms, max_age_ms, Step(_NOTHING), [])


def do_settle(
    file: File, row: Row, event: Event, *, now_ms: int, max_age_ms: int, goes_on: bool
) -> Settled:
    """Note what came of an attempt, and begin the next one of the lane if it `goes_on`."""
    current = get(file, row.id)
    assert current is not None, "a row in flight is never deleted"
    step = advance(current, event, now_ms=now_ms, max_age_ms=max_age_ms)
    changes = [_store(file, current, step, now_ms)]
    if goes_on:
        return _take(file, row.lane, now_ms, max_age_ms, step, changes)
    head = file.fetch("head", *row.lane)
    return Settled(step, tuple(changes), None, row_from(head[0]).next_attempt_ms if head else None)


def _take(
    file: File, lane: Lane, now_ms: int, max_age_ms: int, step: Step, changes: list[Change]
) -> Settled:
    while True:
        head = file.fetch("head", *lane)
        if not head:
            return Settled(step, tuple(changes), None, None)
        row = row_from(head[0])
        if row.status == "inflight" or row.next_attempt_ms > now_ms:
            return Settled(step, tuple(changes), None, row.next_attempt_ms)
        taken = advance(row, Taken(), now_ms=now_ms, max_age_ms=max_age_ms)
        changes.append(_store(file, row, taken, now_ms))
        if taken.row.status == "inflight":
            return Settled(step, tuple(changes), taken.row, taken.row.next_attempt_ms)
        if len(changes) > AGED_MAX:
            return Settled(step, tuple(changes), None, now_ms)


def do_look(file: File, mesh: str, *, now_ms: int, max_age_ms: int) -> tuple[Change, ...]:
    """Let rows die whose time is over, oldest first in each lane."""
    changes: list[Change] = []
    for lane in lanes(file):
        while lane[0] == mesh and len(changes) < AGED_MAX:
            head = file.fetch("head", *lane)
            if not head:
                break
            row = row_from(head[0])
            step = advance(row, Looked(), now_ms=now_ms, max_age_ms=max_age_ms)
            if step.row is row:
                break
            changes.append(_store(file, row, step, now_ms))
    return tuple(changes)


def do_restart(file: File, *, now_ms: int, latest_ms: int) -> int:
    """Put what was in flight back; nothing waits longer than until `latest_ms`."""
    file.execute("hasten", now_ms, latest_ms)
    restarted = 0
    for found in file.fetch("restart"):
        row = row_from(found)
        _store(file, row, advance(row, Restarted(), now_ms=now_ms, max_age_ms=NEVER_MS), now_ms)
        restarted += 1
    return restarted


class NoRow(NamedTuple):
    """There is no row with this id."""


class Done(NamedTuple):
    """What a person did with a row, and the status that it had until then."""

    before: Status
    outcome: Requeued | Dropped


def do_requeue(
    file: File, row_id: str, successor: Successor, *, by: str, now_ms: int
) -> Done | NotOpen | IdUsed | NoRow:
    """Abort a row and insert its successor, both or neither."""
    row = get(file, row_id)
    if row is None:
        return NoRow()
    used = find(file, row.mesh, successor.client_message_id) is not None
    outcome = decide_requeue(row, successor, id_is_used=used, by=by, now_ms=now_ms)
    if isinstance(outcome, Requeued):
        _update(file, outcome.old)
        file.execute("insert", *columns(outcome.new))
        facts = {**facts_of(outcome.old), "superseded_by": outcome.new.id}
        add_event(file, "requeued", row.mesh, now_ms, facts)
        return Done(row.status, outcome)
    return outcome


def do_drop(file: File, row_id: str, *, by: str, now_ms: int) -> Done | NotOpen | NoRow:
    """Abort a row for good."""
    row = get(file, row_id)
    if row is None:
        return NoRow()
    outcome = decide_drop(row, by=by, now_ms=now_ms)
    if isinstance(outcome, Dropped):
        _update(file, outcome.row)
        add_event(file, "dropped", row.mesh, now_ms, facts_of(outcome.row))
        return Done(row.status, outcome)
    return outcome


def do_sweep(file: File, *, done_before_ms: int, events_before_ms: int) -> int:
    """Forget delivered rows, events and runs whose time is over; how many rows."""
    swept = file.execute("sweep_done", done_before_ms, SWEPT_MAX)
    file.execute("events_sweep", events_before_ms, SWEPT_MAX)
    file.execute("sweep_runs", events_before_ms, SWEPT_MAX)
    return swept


def add_event(file: File, kind: str, mesh: str, at_ms: int, data: Mapping[str, object]) -> None:
    """Tell those who read events, in the transaction in which it happens."""
    file.execute("events_add", kind, mesh, at_ms, msgspec.json.encode(data))


def _store(file: File, before: Row, step: Step, now_ms: int) -> Change:
    if step.row is not before:
        _update(file, step.row)
    for notice in step.notices:
        if notice.kind == "dead":
            facts = {**facts_of(step.row), "detail": notice.detail}
            add_event(file, "dead", before.mesh, now_ms, facts)
    return Change(before.status, step.row)


def _update(file: File, row: Row) -> None:
    file.execute("update", *columns(row)[8:], row.id)


# Looking. These run on either connection.


def find(file: File, mesh: str, client_message_id: str) -> Row | None:
    found = file.fetch("find", mesh, client_message_id)
    return row_from(found[0]) if found else None


def get(file: File, row_id: str) -> Row | None:
    found = file.fetch("get", row_id)
    return row_from(found[0]) if found else None


def lanes(file: File) -> dict[Lane, int]:
    """The lanes that have open rows, and when the oldest of each is due."""
    return {(row[0], row[1], row[2]): row[4] for row in file.fetch("lanes")}


def counts(file: File) -> Counter[str]:
    return Counter(dict(file.fetch("counts")))


def newest(file: File) -> str | None:
    found: str | None = file.fetch("newest")[0][0]
    return found


def oldest_ms(file: File) -> int | None:
    found: int | None = file.fetch("oldest")[0][0]
    return found


def listed(
    file: File, status: str | None, mesh: str | None, after: str, limit: int
) -> list[dict[str, object]]:
    """What is shown of rows. Their payloads stay in the file: a page of them may be a gigabyte."""
    if status is None:
        found = file.fetch("list", after, mesh, limit)
    else:
        found = file.fetch("list_status", after, mesh, limit, status)
    return [{**facts_of(row_from(row[:-1])), "bytes": row[-1]} for row in found]


CHAIN_MAX = 100
"""Rows that are shown of a chain of successors."""


def chain(file: File, row_id: str) -> list[Row]:
    """A row and those that superseded it, one after the other."""
    found: list[Row] = []
    at: str | None = row_id
    while at is not None and len(found) < CHAIN_MAX:
        row = get(file, at)
        if row is None:
            break
        found.append(row)
        at = row.superseded_by
    return found


def note(file: File, name: str, value: object) -> None:
    """Remember a small fact."""
    file.execute("note", name, msgspec.json.encode(value))


def noted(file: File, name: str) -> Any:
    """A fact that was noted; None if none was."""
    found = file.fetch("noted", name)
    return msgspec.json.decode(found[0][0]) if found else None


_NOTHING = Row("", "", "", b"", "", b"", "next", 0, 0)
