"""Who works on which task: the rules and operations of claims, without I/O.

Every actor competes on the producer id of the task. A move is accepted under one epoch and one
number only, so of two that race one loses; what a task went through is therefore one line of moves:

| move | from | to | epoch | version | by |
|---|---|---|---|---|---|
| offer | nothing known | available | 0 | 0 | anyone |
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

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import msgspec

from fencepost.client import state
from fencepost.client.effects import Operation
from fencepost.client.errors import (
    EpochGuardedError,
    InvalidArgumentError,
    ResponseError,
)
from fencepost.client.operations import Condition, Producing, encode_json
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.checks import check_seconds
from fencepost.coordination.rules.entries import (
    Entries,
    Move,
    Verdict,
    attempt,
    instant,
    make,
    new_move,
    server_now_ms,
)
from fencepost.coordination.rules.ids import check_name, claim_id
from fencepost.coordination.rules.tasks import (
    HELD,
    RACES_MAX,
    ClaimLostError,
    ClaimValue,
    Found,
    Held,
    Status,
    TaskState,
    accepted,
    change_of,
    task_state,
)

Kind = Literal["task", "tool"]
KINDS: tuple[Kind, ...] = ("task", "tool")
CLAIM_SECONDS = 30.0
"""How long a holder may be silent before `claim_with_timeout` takes its task over."""
RECLAIM_SECONDS = 60.0
"""How long a holder may be silent before `reclaim_stale` makes its task available."""
POLL_SECONDS = 1.0
"""How often a worker that has nothing to do looks for tasks."""


class _Tasks:
    """The producer ids of tasks, and the messages about them."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._type = f"{kind}_claim"
        self.ids = f"{kind}:*"

    def id_of(self, key: str) -> str:
        return claim_id(self._kind, key)

    def goes_on(self, change: state.Change) -> bool:
        return change.value["status"] in ("heartbeat", "completed")

    def read(self, key: str, data: Any) -> state.Change | str:
        """A State message, or the plain object that the published patterns show.

        Those say `executorId` for the owner of a tool call, and `previousOwner`.
        """
        if not isinstance(data, dict):
            return "it is no object"
        value: Any = data
        about = data.get("taskId", data.get("toolCallId"))
        if "headers" in data:
            about, value = data.get("key"), data.get("value")
        if about != key:
            return "it is about another task"
        if not isinstance(value, dict):
            return "it has no value"
        said = {name: value.get(other, value.get(name)) for name, other in _THEIRS.items()}
        given = {name: one for name, one in {**value, **said}.items() if one is not None}
        try:
            msgspec.convert(given, ClaimValue)
        except msgspec.ValidationError as error:
            return f"it does not say who claimed it: {error}"
        headers = state.ChangeHeaders(operation="update")
        return state.Change(type=self._type, key=key, value=given, headers=headers)


_THEIRS = {"owner": "executorId", "previous_owner": "previousOwner"}
"""What the published patterns call some of our fields."""


class Claiming:
    """The claims of one actor on one stream: what sync and async share."""

    def __init__(self, settings: ClientSettings, path: str, owner: str, kind: Kind) -> None:
        if kind not in KINDS:
            raise InvalidArgumentError(
                f"the kind of a claim is one of {', '.join(KINDS)}, not {kind!r}"
            )
        check_name(owner, "the owner of claims")
        self.settings = settings
        self._path = path
        self._owner = owner
        self._kind = kind
        self._type = f"{kind}_claim"
        self._entries = Entries(settings, path, _Tasks(kind))
        self._pending: dict[str, tuple[Move, tuple[int, int] | None]] = {}
        self._mine: dict[str, Held] = {}

    # Claims

    def claim(self, task: str) -> Operation[Held | Found]:
        """The task as ours, or what was found instead."""
        return self._compete(task)

    def claim_with_timeout(self, task: str, timeout: float) -> Operation[Held | Found]:
        """The same, and a claim whose holder was silent for `timeout` seconds is taken over."""
        check_seconds(timeout, "timeout", zero=True)
        found = yield from self._compete(task)
        known = self.known(task)
        if not isinstance(found, Found) or found.outcome != "held" or known is None:
            return found
        now_ms = yield from server_now_ms(self.settings)
        if not self._is_stale(known, now_ms, timeout):
            return found
        move = self._move(task, known.epoch + 1, 0, "claimed", previous_owner=known.owner)
        try:
            taken = yield from self._open(task, move, (known.epoch, known.version))
        except EpochGuardedError:
            yield from self._moved_since(known)
            return self._found(task)
        if isinstance(taken, Held):
            return taken
        yield from self.refresh()
        return self._found(task)

    def _moved_since(self, seen: TaskState) -> Operation[None]:
        """After a refusal to raise an epoch: return if the task has moved, else raise the refusal.

        A holder that came to life in the meantime is no mistake of ours.
        """
        refusal = sys.exc_info()[1]
        yield from self.refresh()
        if self._entries.place(seen.task) == (seen.epoch, seen.version):
            assert refusal is not None
            raise refusal

    def _compete(self, task: str) -> Operation[Held | Found]:
        """Race for a task that is free."""
        pending = self._pending.pop(task, None)
        if pending is not None:
            again = yield from self._open(task, *pending)
            if isinstance(again, Held):
                return again
        read = False
        for _race in range(RACES_MAX):
            known, place = self.known(task), self._entries.place(task)
            if place is None or (known is not None and known.is_free and not self._hides(task)):
                at = (0, 0) if place is None else (place[0], place[1] + 1)
                opened = yield from self._open(task, self._move(task, *at, "claimed"), None)
                if isinstance(opened, Held):
                    return opened
                yield from self.refresh()
                if self._entries.place(task) == place:
                    yield from self._entries.explain(task)
            elif read:
                return self._found(task)
            else:
                yield from self.refresh()
            read = True
        return Found(task=task, outcome="contended")

    def _hides(self, task: str) -> bool:
        return self._entries.skipped(task) is not None

    def _found(self, task: str) -> Found:
        """Why this actor cannot have the task, as far as the stream was read."""
        skipped, known, mine = self._entries.skipped(task), self.known(task), self._mine.get(task)
        if skipped is not None:
            return Found(task=task, outcome="unreadable", skipped=skipped)
        if known is None or known.is_free:
            return Found(task=task, outcome="contended")
        outcome: Literal["held", "completed", "mine"] = "held"
        if known.status == "completed":
            outcome = "completed"
        elif mine is not None and mine.epoch == known.epoch and mine.status in HELD:
            outcome = "mine"
        return Found(task=task, outcome=outcome, owner=known.owner, since=known.since)

    def offer(self, task: str) -> Operation[bool]:
        """Make a task known that no actor has claimed yet; False when it was known before."""
        move = self._move(task, 0, 0, "available")
        return (yield from make(self.settings, self._path, move, claim_end="released"))

    def own(self, claim: Held) -> Operation[bool]:
        """Whether the task still is ours, by sending our newest move again; nothing is read."""
        if claim.status not in HELD:
            return False
        try:
            while claim.pending is not None:
                yield from self._settle(claim)
        except ClaimLostError:
            return False
        producer = self._producer(claim.task, claim.epoch, claim.version)
        again = Move(producer, claim.last, change_of(claim.last))
        return claim.status in HELD and (yield from make(self.settings, self._path, again))

    def heartbeat(self, claim: Held, seconds_max: float | None = None) -> Operation[None]:
        """Say that we still work on it; `seconds_max` bounds the retries."""
        if seconds_max is None:
            return self._go_on(claim, "heartbeat")
        retries = self.settings.retries
        retries = replace(retries, seconds_max=min(retries.seconds_max, seconds_max))
        settings = replace(self.settings, retries=retries)
        return self._go_on(claim, "heartbeat", settings=settings)

    def release(self, claim: Held) -> Operation[None]:
        return self._go_on(claim, "released")

    def complete(self, claim: Held, result: Any = None) -> Operation[None]:
        return self._go_on(claim, "completed", result)

    def completion(self, claim: Held) -> Operation[Move]:
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
    ) -> Operation[Held | Verdict]:
        """Try to become the holder. A move whose answer is not known is the next one to send."""
        condition = Condition(producer=move.producer, producer_if=producer_if)
        try:
            verdict = yield from attempt(self.settings, self._path, move, condition)
        except BaseException as error:
            refused = isinstance(error, ResponseError) and not error.uncertain
            if not refused:
                self._pending[task] = (move, producer_if)
            raise
        if verdict != "mine":
            return verdict
        at = move.producer
        held = Held(task, self._owner, at.epoch, at.seq, "claimed", move.body)
        self._mine[task] = held
        return held

    def _go_on(
        self,
        claim: Held,
        status: Status,
        result: Any = None,
        settings: ClientSettings | None = None,
    ) -> Operation[None]:
        while claim.pending is not None:
            yield from self._settle(claim, settings)
        if claim.status == status and status not in HELD:
            if result is not None and change_of(claim.last).value.get("result") != _as_read(result):
                raise ClaimLostError(
                    f"the claim of {claim.task} has ended: it is completed with another result"
                )
            return  # the answer to the first time was lost, and it was done
        if claim.status not in HELD:
            raise ClaimLostError(f"the claim of {claim.task} has ended: it is {claim.status}")
        move = self._move(claim.task, claim.epoch, claim.version + 1, status, result=result)
        claim.pending = mine = (status, move.body)
        while claim.pending is mine:
            yield from self._settle(claim, settings)

    def _settle(self, claim: Held, settings: ClientSettings | None = None) -> Operation[None]:
        """Send the move whose answer is not known, and move the claim on when it is accepted."""
        pending = claim.pending
        if pending is None:
            return
        status, body = pending
        producer = self._producer(claim.task, claim.epoch, claim.version + 1)
        move = Move(producer, body, change_of(body))
        end: Literal["released", "completed"] | None = None
        if status in ("released", "completed"):
            end = status
        mine = yield from make(settings or self.settings, self._path, move, claim_end=end)
        if claim.pending is not pending:
            return  # a heartbeat beside us sent the same move and got its answer first
        if not mine:
            self._mine.pop(claim.task, None)
            raise ClaimLostError(f"{claim.task} was taken over from {claim.owner}")
        accepted(claim)
        if claim.status not in HELD:
            self._mine.pop(claim.task, None)

    # What others hold

    def refresh(self) -> Operation[None]:
        return self._entries.refresh()

    def known(self, task: str) -> TaskState | None:
        """Where a task was when the stream was last read; None when it was not known."""
        entry = self._entries.get(task)
        return None if entry is None else task_state(entry)

    def get(self, task: str) -> Operation[TaskState | None]:
        yield from self.refresh()
        return self.known(task)

    def open(self) -> Operation[list[TaskState]]:
        yield from self.refresh()
        return [one for one in self._readable() if one.is_held]

    def available(self) -> Operation[list[TaskState]]:
        yield from self.refresh()
        return [one for one in self._readable() if one.is_free]

    def workable(self, timeout: float) -> Operation[list[TaskState]]:
        """The tasks that `claim_with_timeout` would get: free ones, then stale ones."""
        free = yield from self.available()
        now_ms = yield from server_now_ms(self.settings)
        held = (one for one in self._readable() if one.is_held and one.task not in self._mine)
        return free + [one for one in held if self._is_stale(one, now_ms, timeout)]

    def freed(self, stopped: Callable[[], bool]) -> Operation[list[TaskState]]:
        """The tasks that become free next, waiting for them as long as it takes."""
        self._entries.stopped = stopped
        while not stopped():
            shown = [task_state(entry) for entry in (yield from self._entries.next())]
            if free := [one for one in shown if one.is_free]:
                return free
        return []

    def beside(self) -> Claiming:
        """Another view of the same claims, for a reader that must not miss what this one reads."""
        return Claiming(self.settings, self._path, self._owner, self._kind)

    def stale(self, timeout: float) -> Operation[list[TaskState]]:
        check_seconds(timeout, "timeout", zero=True)
        held = yield from self.open()
        now_ms = yield from server_now_ms(self.settings)
        return [one for one in held if self._is_stale(one, now_ms, timeout)]

    def reclaim_stale(self, timeout: float) -> Operation[list[str]]:
        """Make tasks available whose holders were silent for `timeout` seconds."""
        stale = yield from self.stale(timeout)
        return (yield from self.reclaim_all(stale))

    def reclaim_all(self, stale: list[TaskState]) -> Operation[list[str]]:
        """Make these tasks available, but for those that have moved since; which were."""
        reclaimed = []
        for held in stale:
            try:
                done = yield from self.reclaim(held)
            except EpochGuardedError:
                yield from self._moved_since(held)
                continue
            if done:
                reclaimed.append(held.task)
        return reclaimed

    def reclaim(self, held: TaskState, reason: str | None = None) -> Operation[bool]:
        """Take a task from its holder and leave it available; False when it has moved since."""
        seen = (held.epoch, held.version)
        return self._free(held.task, seen, previous_owner=held.owner, reason=reason)

    def free(self, task: str, reason: str) -> Operation[bool | None]:
        """Take a task from what holds it, readable or not; None when it has moved meanwhile."""
        yield from self.refresh()
        if self._entries.place(task) is None:
            yield from self._entries.explain(task)
        known, skipped = self.known(task), self._entries.skipped(task)
        if skipped is not None:
            told = f"{reason} (over what cannot be read, {skipped})"
            done = yield from self._free(task, skipped.place, reason=told, audited=reason)
        elif known is None or not known.is_held:
            return False
        else:
            done = yield from self.reclaim(known, reason)
        return True if done else None

    def _free(
        self,
        task: str,
        seen: tuple[int, int],
        *,
        previous_owner: str | None = None,
        reason: str | None = None,
        audited: str | None = None,
    ) -> Operation[bool]:
        move = self._move(
            task, seen[0] + 1, 0, "available", previous_owner=previous_owner, reason=reason
        )
        # With authorization, too, any actor may claim it then: no principal holds its id.
        return (
            yield from make(
                self.settings,
                self._path,
                move,
                producer_if=seen,
                claim_end="released",
                reason=audited or reason,
            )
        )

    def _readable(self) -> Iterator[TaskState]:
        """The tasks whose newest message can be read."""
        return (
            task_state(entry) for entry in self._entries.all() if not self._hides(entry.change.key)
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
        result: Any = None,
    ) -> Move:
        value: dict[str, Any] = {"owner": self._owner, "status": status}
        if status in HELD:
            # For actors of other makings, who judge by it whether a holder is alive. Ours go by the
            # time at which the server stored the message.
            at = instant(self.settings.clock.now_ms()).isoformat(timespec="milliseconds")
            value["claimedAt"] = at.replace("+00:00", "Z")
        more = {"previous_owner": previous_owner, "reason": reason, "result": result}
        value |= {name: one for name, one in more.items() if one is not None}
        producer = self._producer(task, epoch, version)
        operation: Literal["insert", "update"] = "update" if epoch or version else "insert"
        return new_move(self.settings, producer, operation, self._type, task, value)

    def _producer(self, task: str, epoch: int, version: int) -> Producing:
        return Producing(claim_id(self._kind, task), epoch, version)


def _as_read(value: Any) -> Any:
    """A JSON value as its readers get it: encoded, then decoded."""
    return msgspec.json.decode(encode_json(value))
