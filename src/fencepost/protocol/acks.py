"""Acks and failures: how a worker ends its lease, and what becomes of an event that fails.

An ack says how far the worker got, and ends the lease unless it keeps it (`keep_ms`). A failure
says which event it failed on; the progress before that event counts, in the same decision. Retries
have a budget per event. When it is used up, the group's setting decides: `block` keeps the order
and waits for an operator, `park` sets the event aside and goes on behind it, `retry` goes on trying
at the longest wait.

Parked events that are given out again (replayed) are answered one by one in the ack. They never
move `at`, and one that fails again is parked again at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fencepost.protocol.groups import Group
from fencepost.protocol.leases import (
    DEFAULT_LANE,
    AckInvalid,
    LeaseRef,
    Parked,
    Target,
    lease_is_current,
)
from fencepost.protocol.timing import delay_ms

Word = Literal["acked", "failed", "blocked", "parked", "lost"]


class Failure(NamedTuple):
    """An event that a worker could not handle."""

    position: int
    error: str
    permanent: bool = False
    """Another attempt would fail as well."""
    park: bool = False
    """Set the event aside at once."""
    delay_ms: int | None = None
    """The wait before the next attempt, instead of the group's backoff; the cap bounds it."""


class ReplayResult(NamedTuple):
    """How a replayed event ended; `error` is None when it was handled."""

    position: int
    error: str | None = None


class Ack(NamedTuple):
    """A worker is done with a lease. `at` None: no progress."""

    number: int
    at: int | None = None
    failure: Failure | None = None
    replayed: Sequence[ReplayResult] = ()
    keep_ms: int | None = None
    """Go on with the lease for so long, unless something failed; None: the lease ends."""


class AckDecision(NamedTuple):
    """What an ack comes to: the row from now on (None: it goes), and the parked events."""

    outcome: Word
    row: Target | None
    at: int
    parked: Sequence[Parked] = ()
    """Parked events that are new or changed."""
    handled: Sequence[int] = ()
    """Positions of parked events that were handled now: their rows go."""


class AckItem(NamedTuple):
    """What one item of an ack came to, as its answer and the counts have it."""

    target: str
    outcome: Word
    at: int | None
    failed: int | None = None
    has_work: bool = False
    """Whether the target can be claimed again, now or later."""
    lane: str = DEFAULT_LANE


class Lost(NamedTuple):
    """The lease was not current. Nothing happened, and the answer says so."""

    outcome: Word = "lost"


LOST_ACK = Lost()


def decide_ack(
    group: Group,
    row: Target | None,
    ack: Ack,
    *,
    parked: Mapping[int, Parked],
    parked_max: int,
    head: int,
    random: float,
    now_ms: int,
) -> AckDecision | Lost | AckInvalid:
    """End a lease. `parked` holds the target's parked events that the ack names."""
    refused = check_ack(ack, head=head)
    if refused is not None:
        return refused
    if row is None or not lease_is_current(row, ack.number):
        return LOST_ACK
    answered = _answer_replays(row, ack.replayed, parked, now_ms)
    if isinstance(answered, AckInvalid):
        return answered
    row, again, handled = answered
    if ack.keep_ms is None or ack.failure is not None:
        row = row.free(now_ms)
    else:
        row = row._replace(lease_until_ms=now_ms + ack.keep_ms, updated_ms=now_ms)
    if ack.at is not None:
        row = row.moved(ack.at)
    failure = ack.failure
    if failure is None:
        # A wait that is here now was set by an operator during the lease, and stays.
        row = row._replace(retry=0, lost=0, error=None, failed=None)
        return AckDecision("acked", _kept(group, row), row.at, again, handled)
    if failure.position <= row.at:
        return AckInvalid(
            f"the failure at {failure.position} does not lie after {row.at}, which is processed"
        )
    if failure.position > row.work_to:
        return AckInvalid(
            f"the failure at {failure.position} lies after {row.work_to}, the target's last event"
        )
    full = group.parked_count >= parked_max
    decided = _decide_failure(group, row, failure, full=full, random=random, now_ms=now_ms)
    return decided._replace(parked=(*again, *decided.parked), handled=handled)


def acked_item(target: str, ack: Ack, decision: AckDecision) -> AckItem:
    """What the ack of a target came to."""
    row = decision.row
    return AckItem(
        target,
        decision.outcome,
        decision.at,
        None if ack.failure is None else ack.failure.position,
        row is not None and row.has_work and not row.blocked,
        DEFAULT_LANE if row is None else row.lane,
    )


def acked_items(
    asked: Sequence[tuple[LeaseRef, Ack]], decided: Sequence[tuple[LeaseRef, AckDecision]]
) -> tuple[AckItem, ...]:
    """What the acks of a commit came to."""
    return tuple(
        acked_item(ref.target, ack, decision)
        for (ref, ack), (_, decision) in zip(asked, decided, strict=True)
    )


def check_ack(ack: Ack, *, head: int) -> AckInvalid | None:
    """Why an ack cannot be, whatever its lease: it names events that do not exist yet."""
    if ack.at is not None and not -1 <= ack.at <= head:
        return AckInvalid(f"at is {ack.at}, and the log ends at {head}")
    failure = ack.failure
    if failure is not None and not 0 <= failure.position <= head:
        return AckInvalid(f"the failure is at {failure.position}, and the log ends at {head}")
    positions = [result.position for result in ack.replayed]
    if len(set(positions)) < len(positions):
        return AckInvalid("replayed names a position twice")
    return None


def _kept(group: Group, row: Target) -> Target | None:
    """A message's row goes with its work, so that the number of rows is the work that is open."""
    return None if group.settings.targets == "message" and not row.has_work else row


def _answer_replays(
    row: Target, results: Sequence[ReplayResult], parked: Mapping[int, Parked], now_ms: int
) -> tuple[Target, list[Parked], list[int]] | AckInvalid:
    again: list[Parked] = []
    handled: list[int] = []
    for result in results:
        event = parked.get(result.position)
        if event is None or not event.replaying:
            return AckInvalid(f"the event at {result.position} of {row.target!r} is not replayed")
        if result.error is None:
            handled.append(result.position)
        else:
            again.append(
                event._replace(
                    error=result.error,
                    attempts=event.attempts + 1,
                    parked_ms=now_ms,
                    replaying=False,
                )
            )
    return row._replace(replaying=max(0, row.replaying - len(results))), again, handled


def _decide_failure(
    group: Group, row: Target, failure: Failure, *, full: bool, random: float, now_ms: int
) -> AckDecision:
    settings = group.settings
    row = row._replace(retry=row.retry + 1, error=failure.error, failed=failure.position)
    exhausted = failure.permanent or row.retry > settings.retries_max
    forever = settings.on_exhausted == "retry" and not failure.permanent
    if failure.park or (exhausted and settings.on_exhausted == "park"):
        if not full:
            return _park(group, row, failure, now_ms)
        # Nothing is dropped for want of room: the target waits with its event.
        full_error = f"parked_max is reached, so the target is blocked. {failure.error}"
        return AckDecision("blocked", row.blocked_with(full_error, now_ms), row.at)
    if exhausted and not forever:
        return AckDecision("blocked", row.blocked_with(failure.error, now_ms), row.at)
    wait_ms = settings.backoff.cap_ms
    if failure.delay_ms is not None:
        wait_ms = min(failure.delay_ms, wait_ms)
    elif not exhausted:
        wait_ms = delay_ms(settings.backoff, row.retry, random)
    until_ms = max(row.deferred_until_ms, now_ms + wait_ms)
    return AckDecision("failed", row._replace(deferred_until_ms=until_ms), row.at)


def _park(group: Group, row: Target, failure: Failure, now_ms: int) -> AckDecision:
    event = Parked(row.target, row.source, failure.position, failure.error, row.retry, now_ms)
    gone_on = row.moved(failure.position)._replace(error=None)
    return AckDecision("parked", _kept(group, gone_on), gone_on.at, (event,))
