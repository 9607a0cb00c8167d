"""Executing the tool calls of a session, each with one result: the rules, without I/O.

An executor reads the session, claims a call on the coordination stream, carries it out, and commits
the result to the session together with the completion of the claim: both are stored or neither. The
completion names the epoch and number of the claim, so an executor that was taken over while it
worked stores nothing, and a session never holds two results for one call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from fencepost.client import operations
from fencepost.client.effects import Call, Operation, Sleep
from fencepost.client.errors import (
    CommitPartialError,
    ResponseError,
    StreamClosedError,
)
from fencepost.client.operations import CommitAppend
from fencepost.client.reading import START, Follower, Reader
from fencepost.client.results import Batch
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.claims import Claiming
from fencepost.coordination.rules.entries import LOST
from fencepost.coordination.rules.tasks import ClaimLostError, Found, Held

CALL = "tool_call"
RESULT = "tool_result"
ERROR = "tool_error"
POLL_SECONDS = 1.0
"""How often calls that other executors hold are looked at again."""
_LOG = logging.getLogger("fencepost.coordination")
_SESSION_ITEM = 0
"""Which append of the commit is the one to the session."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that is yours to carry out."""

    id: str
    message: dict[str, Any]
    """The message of the session."""
    claim: Held


Handler = Callable[[ToolCall], Any] | Callable[[ToolCall], Awaitable[Any]]


class _Failed(msgspec.Struct, frozen=True):
    error: Exception


class _Commit(msgspec.Struct, frozen=True):
    """What ends a call. It is sent as it is, however often, under one key."""

    items: list[CommitAppend]
    key: str


class Executing:
    """One executor of one session: what sync and async share."""

    def __init__(
        self,
        settings: ClientSettings,
        session: str,
        coordination: str,
        owner: str,
        handler: Handler,
        timeout: float,
    ) -> None:
        self._settings = settings
        self._session = session
        self._coordination = coordination
        self._owner = owner
        self._handler = handler
        self._timeout = timeout
        self._offset = START
        self._open: dict[str, dict[str, Any]] = {}
        self._unsettled: dict[str, _Commit] = {}
        self.refused: list[dict[str, Any]] = []
        self.claims = Claiming(settings, coordination, owner, "tool")

    def step(self) -> Operation[int]:
        """Carry out the calls of the session that no other executor has; how many got a result."""
        yield from self._read()
        done = 0
        for call_id in list(self._open):
            if call_id in self._open:
                done += yield from self._attend(call_id)
        return done

    def run(self, poll: float) -> Operation[None]:
        """Carry out calls as they come, until the session is closed and none is left."""
        while True:
            if (yield from self.step()):
                continue
            if self._open:
                # Others hold them; whether those are alive only time can tell.
                yield Sleep(poll)
                continue
            follower: Follower[Any] = Follower(
                self._settings, self._session, self._offset, None, live="long-poll"
            )
            batch = yield from follower.next()
            if batch is None:
                return
            self._take(batch)

    def _read(self) -> Operation[None]:
        reader: Reader[Any] = Reader(self._settings, self._session, self._offset, None)
        while (batch := (yield from reader.next())) is not None:
            self._take(batch)

    def _take(self, batch: Batch[Any]) -> None:
        """Note the calls of a batch, and forget those that have a result in it."""
        for message in batch.messages:
            if not isinstance(message, dict):
                continue
            if message.get("type") == CALL:
                call_id = message.get("id")
                if isinstance(call_id, str) and call_id:
                    self._open[call_id] = message
                else:
                    self.refused.append(message)
                    _LOG.warning("%s: a tool_call without a text as id: %s", self._session, message)
            elif message.get("type") in (RESULT, ERROR):
                self._open.pop(message.get("toolCallId", ""), None)
        if batch.closed:
            self._open.clear()  # nothing more can be answered
        self._offset = batch.next_offset

    def _attend(self, call_id: str) -> Operation[bool]:
        """Get a call its result, if it is ours to give."""
        unsettled = self._unsettled.pop(call_id, None)
        if unsettled is not None:
            return (yield from self._commit(call_id, unsettled))
        claim = yield from self.claims.claim_with_timeout(call_id, self._timeout)
        if isinstance(claim, Found):
            if claim.outcome == "completed":
                # Its result is in the session, for it was committed with the completion.
                del self._open[call_id]
            return False
        call = ToolCall(call_id, self._open[call_id], claim)
        outcome: Any = yield Call(lambda: _attempt(self._handler, call))
        try:
            commit = yield from self._ending(call, outcome)
        except ClaimLostError:
            return False
        return (yield from self._commit(call_id, commit))

    def _ending(self, call: ToolCall, outcome: Any) -> Operation[_Commit]:
        """The result or error of a call, with the completion of its claim."""
        if isinstance(outcome, _Failed) and isinstance(outcome.error, ClaimLostError):
            raise outcome.error
        move = yield from self.claims.completion(call.claim)
        about = {"toolCallId": call.id, "executorId": self._owner}
        result: dict[str, Any]
        if isinstance(outcome, _Failed):
            told = str(outcome.error) or type(outcome.error).__name__
            result = {"type": ERROR, **about, "error": told}
        else:
            result = {"type": RESULT, **about, "result": outcome}
        items = [
            CommitAppend(stream=self._session, messages=[result]),
            CommitAppend(
                stream=self._coordination,
                messages=[move.change],
                producer=move.producer,
                claim_end="completed",
            ),
        ]
        return _Commit(items, operations.new_key(self._settings))

    def _commit(self, call_id: str, commit: _Commit) -> Operation[bool]:
        """Store both or neither; False when the call was taken over."""
        try:
            yield from operations.commit(self._settings, commit.items, commit.key)
        except (*LOST, CommitPartialError):
            return False
        except StreamClosedError as error:
            if error.item != _SESSION_ITEM:
                raise
            self._open.clear()  # nothing more can be answered
            return False
        except BaseException as error:
            if not isinstance(error, ResponseError) or error.uncertain:
                self._unsettled[call_id] = commit
            raise
        self._open.pop(call_id, None)
        return True


def _attempt(handler: Handler, call: ToolCall) -> Any:
    """What the handler makes of a call, or why it failed; awaitable if the handler is."""
    try:
        made = handler(call)
        return _awaited(made) if hasattr(made, "__await__") else _checked(made)
    except Exception as error:
        return _Failed(error)


async def _awaited(made: Awaitable[Any]) -> Any:
    try:
        return _checked(await made)
    except Exception as error:
        return _Failed(error)


def _checked(result: Any) -> Any:
    """The result as it will be stored; raises now what encoding it would raise later."""
    return msgspec.Raw(msgspec.json.encode(result))
