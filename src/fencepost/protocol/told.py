"""What a computed target was told of: its own events, each by its position, with a note.

The server cannot know which events concern a computed target: a worker works it out, by code that
may be other code tomorrow. So what it found is kept, one `Told` for each target and event, until
the target has got past the event. A claim then gives the target these events and no others, and
what the code says by then decides nothing.

Every `Told` covers the positions behind the event that the target was told of before: of these,
only its own position is the target's. What no `Told` covers is not known: workers that give no
notes have told of it, or a reset sent the target back behind events whose rows are gone. There the
target gets all events of its source, and its worker picks those that are its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fencepost.protocol.groups import GroupInvalid

_CONTROL = re.compile(r"[\x00-\x1f]")

NOTE_BYTES_MAX = 4_096
"""Bytes of the note that a worker gives with an event that it tells a target of."""


class Told(NamedTuple):
    """A target was told of the event at `position`."""

    target: str
    position: int
    covers_from: int
    """From here up to `position`, the target was told of nothing else."""
    note: str
    """What the worker that told it wants to know when the event is handled."""


class Stretch(NamedTuple):
    """Positions up to `last` of which it is not known which events are the target's."""

    first: int
    last: int


def check_note(note: str) -> GroupInvalid | None:
    """Why a text is no note."""
    if len(note.encode("utf-8", "replace")) > NOTE_BYTES_MAX:
        return GroupInvalid(f"a note has at most {NOTE_BYTES_MAX} bytes")
    if _CONTROL.search(note):
        return GroupInvalid(f"the note {note[:40]!r} has a control character")
    return None


def stretches(told: Iterable[Told], after: int, until: int) -> list[Told | Stretch]:
    """What lies ahead of a target between two positions, in order, with what is not known."""
    found: list[Told | Stretch] = []
    at = after
    for one in told:
        if not at < one.position <= until:
            continue
        if one.covers_from > at + 1:
            found.append(Stretch(at + 1, one.covers_from - 1))
        found.append(one)
        at = one.position
    if at < until:
        found.append(Stretch(at + 1, until))
    return found
