"""Retention: how much of a stream is kept, and what it means to drop the rest.

Truncating a stream moves its first offset forwards; nothing else about it changes. Versions and
offsets go on, producers and closure stay, and a place below the first offset is gone for readers.
A retention says when that happens by itself: a stream has one of its own, or the first policy that
fits its path. Policies drop whole appends, oldest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from fencepost.protocol.globs import Glob
from fencepost.protocol.offsets import Offset


class Retention(NamedTuple):
    """What a stream may hold at most, whichever is reached first; None is no bound."""

    age_s: int | None = None
    bytes: int | None = None
    messages: int | None = None


KEEP_ALL = Retention()


class Policy(NamedTuple):
    """A retention for all streams that a pattern fits and that have none of their own."""

    glob: Glob
    retention: Retention


def retention_of(path: str, own: Retention, policies: Sequence[Policy]) -> Retention:
    """What holds for the stream at `path`: its own retention as a whole, or the first policy's."""
    if own != KEEP_ALL:
        return own
    for policy in policies:
        if policy.glob.matches(path):
            return policy.retention
    return KEEP_ALL


class Kept(NamedTuple):
    """An append that is still kept: where it starts, and when it was written."""

    start: Offset
    at_ms: int


def is_within(retention: Retention, row: Kept, tail: Offset, now_ms: int) -> bool:
    """Whether a stream that begins with `row` and ends at `tail` is within its bounds.

    Once true for an append it is true for all later ones, so the first one can be searched for.
    """
    size, messages = retention.bytes, retention.messages
    return (
        not is_too_old(retention, row.at_ms, now_ms)
        and (size is None or tail.bytes - row.start.bytes <= size)
        and (messages is None or tail.messages - row.start.messages <= messages)
    )


def is_too_old(retention: Retention, at_ms: int, now_ms: int) -> bool:
    """Whether what was written at `at_ms` is past its age."""
    return retention.age_s is not None and at_ms <= now_ms - retention.age_s * 1000


def first_to_keep(
    retention: Retention, first_within: Kept | None, newest: Kept, tail: Offset, now_ms: int
) -> Offset:
    """Where a stream should begin, given its first append within bounds and its newest one.

    An append that alone is larger than the bounds is kept as long as it is the newest: bounds on
    bytes and messages never empty a stream before a reader could read it. Age does.
    """
    if first_within is not None:
        return first_within.start
    return tail if is_too_old(retention, newest.at_ms, now_ms) else newest.start


class Cut(NamedTuple):
    """The stream begins at `first` now; everything before is gone for readers."""

    first: Offset
    tail: Offset


class Uncut(NamedTuple):
    """Nothing to drop: the stream begins at `first` already, at or behind the asked place."""

    first: Offset
    tail: Offset


class BeyondTail(NamedTuple):
    """The asked place is past the end of the stream."""

    tail: Offset


def decide_truncation(first: Offset, tail: Offset, before: Offset) -> Cut | Uncut | BeyondTail:
    """What dropping everything before `before` does to a stream.

    Whether `before` is a place of the stream at all is for the store to say, which has its rows.
    """
    if before.bytes > tail.bytes or (before.bytes == tail.bytes and before != tail):
        return BeyondTail(tail)
    if before.bytes <= first.bytes:
        return Uncut(first, tail)
    return Cut(before, tail)


class IdGlobs:
    """Patterns over producer ids: `*` stands for any run of characters, slashes included."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._expressions = [
            re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
            for pattern in patterns
        ]

    def matches(self, producer_id: str) -> bool:
        """Whether any of the patterns fits the whole id."""
        return any(expression.fullmatch(producer_id) for expression in self._expressions)
