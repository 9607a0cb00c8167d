"""What operators do to the targets of a group, whatever a worker is doing at the time.

Each rule takes a row and returns the next one, or None when there is nothing to change, so that an
operation counts the rows that it changed. Unblock, reset and skip make the token grow: a worker
that holds the lease then finds it lost, and its late effects are refused. Defer and prioritize
leave a lease alone, because they speak of the next claim only.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Parked, Target


def decide_unblock(row: Target, *, now_ms: int) -> Target | None:
    """Let a blocked target go on where it stopped, with a new budget of retries."""
    if not row.blocked:
        return None
    return _afresh(row, now_ms)


def decide_reset(group: Group, row: Target, *, at: int | None, now_ms: int) -> Target:
    """Send a target back to the beginning of its group, or to `at`: the only way that `at` moves
    backwards. Events behind `at` are given out again, so those of them that are parked are no
    longer (`unparked_by_reset`).
    """
    back_to = group.start if at is None else at
    if group.settings.targets == "message":
        back_to = row.work_to - 1
    return _afresh(row, now_ms)._replace(at=back_to, waits_from=back_to + 1)


def unparked_by_reset(row: Target, event: Parked) -> bool:
    """Whether a reset target gets a parked event in its order again."""
    return row.at < event.position <= row.work_to


def decide_skip(row: Target, *, position: int | None, now_ms: int) -> Target | None:
    """Move a target past one event without handling it: the one at `position`, or the one that
    failed last. None: the target is past it already, or no event is known to have failed.
    """
    past = row.failed if position is None else position
    if past is None or past <= row.at or past > row.work_to:
        return None
    return _afresh(row, now_ms).moved(past)


def decide_defer(row: Target, *, until_ms: int, now_ms: int) -> Target | None:
    """Keep a target from claims until a time; 0, or a time that is past, ends the wait."""
    if row.deferred_until_ms == until_ms:
        return None
    return row._replace(deferred_until_ms=until_ms, updated_ms=now_ms)


def decide_prioritize(row: Target, *, priority: int, now_ms: int) -> Target | None:
    """Give a target another priority."""
    if row.priority == priority:
        return None
    return row._replace(priority=priority, updated_ms=now_ms)


class ParkDecision(NamedTuple):
    """The event that is set aside, and the row of its target (None: it goes)."""

    event: Parked
    row: Target | None


def decide_park(group: Group, row: Target, *, position: int, now_ms: int) -> ParkDecision | None:
    """Set one event aside. None: the target is past it, or it does not concern the target yet.

    If it is the event that the target failed on, the target goes on behind it, blocked or not.
    Another event stays ahead: `at` does not move over events that lie before it, and a claim leaves
    the parked event out when it gets there. A worker that may have the event in hand loses its
    lease, or the event could be handled now and once more when it is replayed.
    """
    if not row.at < position <= row.work_to:
        return None
    error = row.error if row.failed == position and row.error else "parked by an operator"
    attempts = row.retry if row.failed == position else 0
    event = Parked(row.target, row.source, position, error, attempts, now_ms)
    if position not in (row.failed, row.waits_from):
        if row.worker is not None:
            row = row.free(now_ms)._replace(token=row.token + 1)
        return ParkDecision(event, row)
    gone_on = _afresh(row, now_ms).moved(position)
    is_done = group.settings.targets == "message" and not gone_on.has_work
    return ParkDecision(event, None if is_done else gone_on)


class ReplayDecision(NamedTuple):
    """A parked event that will be given out again, and the row under whose lease it will be.

    The event is None where it is parked no more, because its target has yet to come to it.
    """

    event: Parked | None
    row: Target


def decide_replay(
    group: Group, row: Target | None, event: Parked, *, now_ms: int
) -> ReplayDecision | None:
    """Give a parked event out again. None: it is being replayed already.

    `at` does not move. A message's row went when the message was parked, and comes back for this.
    An event that lies ahead of `at` is not parked any more, and comes in its order: if it were
    replayed, it would be handled once more when `at` gets there. A worker that may have a lease
    without the event loses it, or its ack would pass the event.
    """
    if event.replaying:
        return None
    if row is not None and row.at < event.position:
        if row.worker is not None:
            row = row.free(now_ms)._replace(token=row.token + 1)
        return ReplayDecision(None, row._replace(updated_ms=now_ms))
    if row is None:
        position = event.position
        row = Target(
            event.target,
            event.source,
            at=position,
            work_to=position,
            waits_from=position,
            token=group.token_floor,
        )
    waiting = row._replace(replaying=row.replaying + 1, updated_ms=now_ms)
    return ReplayDecision(event._replace(replaying=True), waiting)


def _afresh(row: Target, now_ms: int) -> Target:
    """The row without lease, block, wait and counts, and with a number that no worker has."""
    return row.free(now_ms)._replace(
        token=row.token + 1,
        retry=0,
        lost=0,
        blocked=False,
        error=None,
        failed=None,
        deferred_until_ms=0,
    )
