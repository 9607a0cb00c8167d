"""Who works on which task: the rules and operations of claims, without I/O.

Every actor competes on the producer id of the task. A move is accepted under one epoch and one
number only, so of two that race one loses; what a task went through is therefore one line of moves:

| move | from | to | epoch | version | by |
|---|---|---|---|---|---|
| claim | nothing known | claimed | 0 | 0 | anyone; the first wins |
| claim | available, released | claimed | the same | + 1 | anyone; the first wins |
| heartbeat | claimed, heartbeat | heartbeat | the same | + 1 | the holder |
| release | claimed, heartbeat | released | the same | + 1 | the holder |
| complete | claimed, heartbeat | completed | the same | + 1 | the holder |
| take over | claimed, heartbeat; stale | claimed | + 1 | 0 | anyone, if it is still there |
| reclaim | claimed, heartbeat; stale | available | + 1 | 0 | a service, if it is still there |
| none | completed | | | | completed is final |

"If it is still there" is Producer-If: the epoch is raised over the move that was seen, never over a
newer one. Nothing can follow `completed`, because every move names the one before it, by its number
or by Producer-If, and no move names a `completed`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from fencepost.client import state
from fencepost.client.effects import Operation
from fencepost.client.errors import FencepostError, ResponseError
from fencepost.client.operations import Condition, Producing
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.entries import (
    Entries,
    Entry,
    Move,
    Verdict,
    attempt,
    instant,
    make,
    new_move,
    server_now_ms,
)
from fencepost.coordination.rules.ids import claim_id

Kind = Literal["task", "tool"]
Status = Literal["available", "claimed", "heartbeat", "released", "completed"]
HELD: frozenset[Status] = frozenset(("claimed", "heartbeat"))
FREE: frozenset[Status] = frozenset(("available", "released"))
CLAIM_SECONDS = 30.0
"""How long a holder may be silent before `claim_with_timeout` takes its task over."""
RECLAIM_SECONDS = 60.0
"""How long a holder may be silent before `reclaim_stale` makes its task available."""
RACES_MAX = 16
"""Races for one task that one call goes into before it says that others are faster."""


class ClaimLostError(FencepostError):
    """The task is no longer yours: another actor took it over, or you gave it up.

    Stop working on it. Nothing of the move was stored.
    """


class TaskState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task is: its newest move."""

    task: str
    status: Status
    owner: str
    """Who made the move; of `available`, who reclaimed it."""
    epoch: int
    version: int
    updated: datetime
    """When the server stored it."""
    previous_owner: str | None = None
    """From whom it was taken with this move."""
    reason: str | None = None

    @property
    def is_held(self) -> bool:
        return self.status in HELD

    @property
    def is_free(self) -> bool:
        """Whether anyone may claim it at once."""
        return self.status in FREE


class Claim(msgspec.Struct):
    """A task that is yours. Its moves are made through the claims that gave it out.

    It can be encoded with msgspec and saved: a process that comes back with it goes on where it
    was, and `own` says whether the task still is its own.
    """

    task: str
    owner: str
    epoch: int
    version: int
    status: Status
    last: bytes
    """The newest move that was accepted, as it was sent."""
    pending: tuple[Status, bytes] | None = None
    """A move whose answer is not known; it is sent again before any other."""


class _Value(msgspec.Struct, frozen=True):
    owner: str
    status: Status
    previous_owner: str | None = None
    reason: str | None = None


class Claiming:
    """The claims of one actor on one stream: what sync and async share."""

    def __init__(self, settings: ClientSettings, path: str, owner: str, kind: Kind) -> None:
        self._settings = settings
        self._path = path
        self._owner = owner
        self._kind = kind
        self._type = f"{kind}_claim"
        self._entries = Entries(settings, path, self._id_of)
        self._pending: dict[str, tuple[Move, tuple[int, int] | None]] = {}

    # Claims

    def claim(self, task: str) -> Operation[Claim | None]:
        """The task as a claim of ours; None when another holds it or it is completed."""
        claim, _read = yield from self._compete(task)
        return claim

    def claim_with_timeout(self, task: str, timeout: float) -> Operation[Claim | None]:
        """The same, and a claim whose holder was silent for `timeout` seconds is taken over."""
        claim, read = yield from self._compete(task)
        if claim is not None:
            return claim
        if not read:
            yield from self.refresh()
        known = self.known(task)
        if known is None or not known.is_held:
            return None
        now_ms = yield from server_now_ms(self._settings)
        if not self._is_stale(known, now_ms, timeout):
            return None
        move = self._move(task, known.epoch + 1, 0, "claimed", previous_owner=known.owner)
        taken = yield from self._open(task, move, (known.epoch, known.version))
        return taken if isinstance(taken, Claim) else None

    def _compete(self, task: str) -> Operation[tuple[Claim | None, bool]]:
        """Race for a task that is free; with the claim, whether the stream was read for it."""
        pending = self._pending.pop(task, None)
        if pending is not None:
            again = yield from self._open(task, *pending)
            if isinstance(again, Claim):
                return again, False
        read = False
        for _race in range(RACES_MAX):
            known = self.known(task)
            if known is None or known.is_free:
                place = (0, 0) if known is None else (known.epoch, known.version + 1)
                opened = yield from self._open(task, self._move(task, *place, "claimed"), None)
                if isinstance(opened, Claim):
                    return opened, read
                # Only a claim can follow what is free: the one that took this number holds it.
                if opened == "taken" or (known is None and read):
                    return None, False
            elif read:
                return None, True
            yield from self.refresh()
            read = True
        return None, False

    def own(self, claim: Claim) -> Operation[bool]:
        """Whether the task still is ours, by sending our newest move again; nothing is read."""
        if claim.status not in HELD:
            return False
        try:
            while claim.pending is not None:
                yield from self._settle(claim)
        except ClaimLostError:
            return False
        producer = self._producer(claim.task, claim.epoch, claim.version)
        again = Move(producer, claim.last, msgspec.json.decode(claim.last, type=_ONE)[0])
        return claim.status in HELD and (yield from make(self._settings, self._path, again))

    def heartbeat(self, claim: Claim) -> Operation[None]:
        return self._go_on(claim, "heartbeat")

    def release(self, claim: Claim) -> Operation[None]:
        return self._go_on(claim, "released")

    def complete(self, claim: Claim) -> Operation[None]:
        return self._go_on(claim, "completed")

    def completion(self, claim: Claim) -> Operation[Move]:
        """The move that completes a claim, for a commit of its own; the claim has ended with it.

        It is not left pending: it must not be sent without what it is committed with.
        """
        while claim.pending is not None:
            yield from self._settle(claim)
        if claim.status not in HELD:
            raise ClaimLostError(f"the claim of {claim.task} has ended: it is {claim.status}")
        move = self._move(claim.task, claim.epoch, claim.version + 1, "completed")
        claim.status, claim.last = "completed", move.body
        claim.version += 1
        return move

    def _open(
        self, task: str, move: Move, producer_if: tuple[int, int] | None
    ) -> Operation[Claim | Verdict]:
        """Try to become the holder. A move whose answer is not known is the next one to send."""
        condition = Condition(producer=move.producer, producer_if=producer_if)
        try:
            verdict = yield from attempt(self._settings, self._path, move, condition)
        except BaseException as error:
            refused = isinstance(error, ResponseError) and not error.uncertain
            if not refused:
                self._pending[task] = (move, producer_if)
            raise
        if verdict != "mine":
            return verdict
        at = move.producer
        return Claim(task, self._owner, at.epoch, at.seq, "claimed", move.body)

    def _go_on(self, claim: Claim, status: Status) -> Operation[None]:
        while claim.pending is not None:
            yield from self._settle(claim)
        if claim.status == status and status not in HELD:
            return  # the answer to the first time was lost, and it was done
        if claim.status not in HELD:
            raise ClaimLostError(f"the claim of {claim.task} has ended: it is {claim.status}")
        move = self._move(claim.task, claim.epoch, claim.version + 1, status)
        claim.pending = mine = (status, move.body)
        while claim.pending is mine:
            yield from self._settle(claim)

    def _settle(self, claim: Claim) -> Operation[None]:
        """Send the move whose answer is not known, and move the claim on when it is accepted."""
        pending = claim.pending
        if pending is None:
            return
        status, body = pending
        producer = self._producer(claim.task, claim.epoch, claim.version + 1)
        move = Move(producer, body, msgspec.json.decode(body, type=_ONE)[0])
        end: Literal["released", "completed"] | None = None
        if status in ("released", "completed"):
            end = status
        mine = yield from make(self._settings, self._path, move, claim_end=end)
        if claim.pending is not pending:
            return  # a heartbeat beside us sent the same move and got its answer first
        if not mine:
            raise ClaimLostError(f"{claim.task} was taken over from {claim.owner}")
        accepted(claim)

    # What others hold

    def refresh(self) -> Operation[None]:
        return self._entries.refresh()

    def known(self, task: str) -> TaskState | None:
        """Where a task was when the stream was last read; None when it was not known."""
        entry = self._entries.get(self._type, task)
        return None if entry is None else _shown(entry)

    def get(self, task: str) -> Operation[TaskState | None]:
        yield from self.refresh()
        return self.known(task)

    def open(self) -> Operation[list[TaskState]]:
        yield from self.refresh()
        found = (_shown(entry) for entry in self._entries.of(self._type))
        return [one for one in found if one.is_held]

    def stale(self, timeout: float) -> Operation[list[TaskState]]:
        held = yield from self.open()
        now_ms = yield from server_now_ms(self._settings)
        return [one for one in held if self._is_stale(one, now_ms, timeout)]

    def reclaim_stale(self, timeout: float) -> Operation[list[str]]:
        """Make tasks available whose holders were silent for `timeout` seconds."""
        reclaimed = []
        for held in (yield from self.stale(timeout)):
            done = yield from self.reclaim(held)
            if done:
                reclaimed.append(held.task)
        return reclaimed

    def reclaim(self, held: TaskState, reason: str | None = None) -> Operation[bool]:
        """Take a task from its holder and leave it available; False when it has moved since."""
        move = self._move(
            held.task, held.epoch + 1, 0, "available", previous_owner=held.owner, reason=reason
        )
        # With authorization, too, any actor may claim it then: no principal holds its id.
        return (
            yield from make(
                self._settings,
                self._path,
                move,
                producer_if=(held.epoch, held.version),
                claim_end="released",
                reason=reason,
            )
        )

    @staticmethod
    def _is_stale(held: TaskState, now_ms: int, timeout: float) -> bool:
        return now_ms - held.updated.timestamp() * 1000 >= timeout * 1000 or timeout <= 0

    # Moves

    def _move(
        self,
        task: str,
        epoch: int,
        version: int,
        status: Status,
        previous_owner: str | None = None,
        reason: str | None = None,
    ) -> Move:
        value = {"owner": self._owner, "status": status}
        if previous_owner is not None:
            value["previous_owner"] = previous_owner
        if reason is not None:
            value["reason"] = reason
        producer = self._producer(task, epoch, version)
        operation: Literal["insert", "update"] = "update" if epoch or version else "insert"
        return new_move(self._settings, producer, operation, self._type, task, value)

    def _producer(self, task: str, epoch: int, version: int) -> Producing:
        return Producing(claim_id(self._kind, task), epoch, version)

    def _id_of(self, change: state.Change) -> str | None:
        if change.type != self._type:
            return None
        try:
            msgspec.convert(change.value, _Value)
        except msgspec.ValidationError:
            return None  # a message of another format under this type tells us nothing
        return claim_id(self._kind, change.key)


_ONE = list[state.Change]


def accepted(claim: Claim) -> None:
    """The pending move of a claim was stored: the only place that moves a claim on."""
    assert claim.pending is not None
    (claim.status, claim.last), claim.pending = claim.pending, None
    claim.version += 1


def _shown(entry: Entry) -> TaskState:
    value = msgspec.convert(entry.value, _Value)
    return TaskState(
        task=entry.change.key,
        status=value.status,
        owner=value.owner,
        epoch=entry.epoch,
        version=entry.version,
        updated=instant(entry.updated_ms),
        previous_owner=value.previous_owner,
        reason=value.reason,
    )
