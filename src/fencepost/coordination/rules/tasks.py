"""A task as claims see it: its state, a claim that an actor holds, and the errors about both.

These are plain values. Which move leads from one state to the next is in `claims.py`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from fencepost.client import state
from fencepost.client.errors import FencepostError, InvalidArgumentError
from fencepost.coordination.rules.entries import Entry, Skipped, instant

Status = Literal["available", "claimed", "heartbeat", "released", "completed"]
HELD: frozenset[Status] = frozenset(("claimed", "heartbeat"))
FREE: frozenset[Status] = frozenset(("available", "released"))
RACES_MAX = 16
"""Races for one task that one call goes into before it says that others are faster."""


class ClaimLostError(FencepostError):
    """The task is no longer yours: another actor took it over, or you gave it up.

    Stop working on it. Nothing of the move was stored.
    """


class ClaimNotWonError(FencepostError):
    """The task is not yours to work on: `found` says who holds it, or that it is completed."""

    def __init__(self, found: Found) -> None:
        super().__init__(str(found))
        self.found = found


class TaskState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task is: its newest move."""

    task: str
    status: Status
    owner: str
    """The actor that made the move; for `available`, the one that offered or reclaimed the task."""
    epoch: int
    version: int
    updated: datetime
    """When the server stored it."""
    since: datetime
    """When its holder claimed it; of a task that is free, when it became free."""
    previous_owner: str | None = None
    """The holder from which this move took the task."""
    reason: str | None = None
    result: Any = None
    """What its holder completed it with."""

    @property
    def is_held(self) -> bool:
        return self.status in HELD

    @property
    def is_free(self) -> bool:
        """Whether anyone may claim it at once."""
        return self.status in FREE


class Held(msgspec.Struct):
    """A task that is ours: where its claim stands, for the next move to go on from."""

    task: str
    owner: str
    epoch: int
    version: int
    status: Status
    last: bytes
    """The newest move that was accepted, as it was sent."""
    pending: tuple[Status, bytes] | None = None
    """A move whose answer is not known; it is sent again before any other."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt to claim found instead of a task that was free."""

    task: str
    outcome: Literal["held", "completed", "mine", "unreadable", "contended"]
    owner: str | None = None
    since: datetime | None = None
    skipped: Skipped | None = None

    def __str__(self) -> str:
        match self.outcome:
            case "held":
                return f"{self.task} is held by {self.owner} since {self.since}"
            case "completed":
                return f"{self.task} was completed by {self.owner}"
            case "mine":
                return f"{self.task} is yours already: this actor claimed it and has not ended it"
            case "contended":
                return f"{self.task}: others were faster {RACES_MAX} times"
            case "unreadable":
                return (
                    f"the claim of {self.task} cannot be read ({self.skipped}):"
                    " Overrides.free takes the task from it"
                )


Outcome = Literal["won", "held", "completed", "mine", "unreadable", "contended"]


class ClaimValue(msgspec.Struct, frozen=True):
    """What the message of a move says about the task."""

    owner: str
    status: Status
    previous_owner: str | None = None
    reason: str | None = None
    result: Any = None


def restored(saved: bytes) -> Held:
    """The claim that `save` gave."""
    try:
        return msgspec.json.decode(saved, type=Held)
    except (msgspec.MsgspecError, TypeError) as error:
        raise InvalidArgumentError(f"this is no claim that `save` gave: {error}") from None


def change_of(move: bytes) -> state.Change:
    """The change that a move is, from its body as it was sent."""
    return msgspec.json.decode(move, type=list[state.Change])[0]


def accepted(claim: Held) -> None:
    """The pending move of a claim was stored: the only place that moves a claim on."""
    assert claim.pending is not None
    (claim.status, claim.last), claim.pending = claim.pending, None
    claim.version += 1


def task_state(entry: Entry) -> TaskState:
    """The state of a task, from its newest move."""
    value = msgspec.convert(entry.value, ClaimValue)
    return TaskState(
        task=entry.change.key,
        status=value.status,
        owner=value.owner,
        epoch=entry.epoch,
        version=entry.version,
        updated=instant(entry.updated_ms),
        since=instant(entry.since_ms),
        previous_owner=value.previous_owner,
        reason=value.reason,
        result=value.result,
    )
