"""What the messages of a State stream do to rows, as pure rules; Spark only carries them.

A row of a current-state table is the newest change of its stream and key. Two things take rows away
that no change names: the stream was deleted and made again, or a control message cleared it (a
reset, or a snapshot that came to its end). Both are kept for each stream as two bounds, so that a
table can be brought forward a piece at a time and comes out as if it were made in one go:

    a row stays while its position is at least `since` and its offset is at least `floor`.

Bounds only rise. A reset to a place before an earlier reset therefore brings nothing back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from fencepost.client import state
from fencepost.pipeline.jobs.tables.files import STREAMS

CONTROLS = ("snapshot-start", "snapshot-end", "reset")


class StreamState(NamedTuple):
    """How far a stream was folded, and which of its rows still count."""

    since: int = -1
    """The position at which its present incarnation begins."""
    offset: str = ""
    """Where the newest message starts that was folded."""
    floor: str = ""
    """Rows whose change starts below it are gone."""
    snapshot: str | None = None
    """Where the snapshot began that has not come to its end yet."""


class Event(NamedTuple):
    """A message that may move the bounds of its stream: a control, or the first of a piece."""

    position: int
    offset: str
    control: str | None = None
    target: str | None = None
    """The offset that a reset says to begin again at."""


def advance(known: StreamState, events: Iterable[Event], newest: str) -> StreamState:
    """The state of a stream after a piece of it, given what in it may move bounds, in order.

    An offset that is not greater than the one before it is another incarnation's. `newest` is where
    the last message of the piece starts.
    """
    since, offset, floor, snapshot = known
    for event in events:
        if event.offset <= offset:
            since, floor, snapshot = event.position, "", None
        offset = event.offset
        if event.control == "snapshot-start":
            snapshot = event.offset
        elif event.control == "snapshot-end":
            floor = max(floor, snapshot or "")
            snapshot = None
        elif event.control == "reset":
            floor = max(floor, event.target or event.offset)
            snapshot = None
    return StreamState(since, max(offset, newest), floor, snapshot)


def is_kept(bounds: StreamState, position: int, offset: str) -> bool:
    """Whether a row whose newest change is there still counts."""
    return position >= bounds.since and offset >= bounds.floor


class Parsed(NamedTuple):
    """A message of a State stream, its value still as JSON text."""

    kind: Literal["change", "control", "invalid"]
    type: str | None = None
    key: str | None = None
    operation: str | None = None
    value: str | None = None
    control: str | None = None
    target: str | None = None


INVALID = Parsed("invalid")


class _Change(msgspec.Struct, frozen=True):
    """A change as the client has it, but for the value, which nobody here looks into."""

    type: state.Name
    key: state.Name
    headers: state.ChangeHeaders
    value: msgspec.Raw | UnsetType = UNSET


_CHANGES = msgspec.json.Decoder(_Change)


def parse(message: bytes) -> Parsed:
    """What a message says, by the rules of `fencepost.client.state`."""
    try:
        if b'"control"' in message:
            # Only a look at the whole of it tells a control message from a value with such a word.
            parsed = state.parse(msgspec.json.decode(message))
            if isinstance(parsed, state.Control):
                target = parsed.headers.offset
                return Parsed(
                    "control", control=parsed.control, target=None if target is UNSET else target
                )
        change = _CHANGES.decode(message)
        operation = change.headers.operation
        # A type of our own table's name would be lost in it.
        if change.type == STREAMS or (change.value is UNSET and operation != "delete"):
            return INVALID
        value = None if change.value is UNSET else bytes(change.value).decode()
    except (msgspec.DecodeError, state.StateMessageError, UnicodeDecodeError, RecursionError):
        return INVALID
    return Parsed("change", change.type, change.key, operation, value)
