"""The books of a stream: whether it takes messages, and from where on it keeps them.

Closed books are not the end of a stream. Its readers go on waiting, and one append opens the books
again: it says so, and names the tail that it expects, so that no writer opens them by accident. A
commit closes the books, opens them, or lets a stream begin later (`truncate_before`), beside the
message that says why.

Work that a group has not done yet must not be cut off. So the books of a stream do not close while
a group lags on it, and nothing of it goes that a group has not consumed. A group lags while its
watermark lies before the events in question, because then it is not known whom they concern, and
while one of its targets still waits for an event among them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fencepost.protocol.globs import Glob
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import NOWHERE, Target
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import BeyondTail, Cut, decide_truncation

NOW: Literal["now"] = "now"


class BooksRequest(NamedTuple):
    """What an append of a commit asks for beside its messages."""

    state: Literal["close", "open"] | None = None
    truncate_before: Offset | Literal["now"] | None = None
    """Where the stream is to begin; "now" is where this append begins."""

    def mark(self) -> bytes:
        """Bytes that are equal for a repeated request, and differ for another one."""
        return f"{self.state}\0{self.truncate_before}".encode()


class BooksChange(NamedTuple):
    """What an accepted append does to the books."""

    closed: bool
    """Whether they are closed from now on."""
    closes: bool
    """Whether they were open, so that no group may lag."""
    first: Offset | None
    """Where the stream begins from now on; None: where it did."""
    retires: bool
    """Whether the stream ends its life so: everything goes and the books stay closed."""


class BooksClosed(NamedTuple):
    """The books are closed, and the append does not open them."""

    tail: Offset


class BooksPending(NamedTuple):
    """A group has work left on the stream that would be cut off."""

    group: str


class CutInvalid(NamedTuple):
    """`truncate_before` names no place of the stream, or one behind the beginning of the append."""

    tail: Offset


class BooksCheck(NamedTuple):
    """A condition of one append of a commit: no group has work left on the stream up to `last`."""

    item: int
    path: str
    last: int
    """The last position of the stream that every group must be past; -1: there is none."""
    retires: bool


def may_change(request: BooksRequest, *, has_data: bool, names_tail: bool) -> bool:
    """Whether an append is accepted although the books are closed.

    One that opens them must say which tail it expects. One that only drops what the stream holds
    adds nothing, so it leaves them closed.
    """
    if request.state == "open":
        return names_tail
    return request.state is None and not has_data


def decide_books(
    request: BooksRequest, *, closed: bool, first: Offset, start: Offset, has_data: bool
) -> BooksChange | CutInvalid:
    """What an append that begins at `start` does to the books of its stream."""
    after = closed if request.state is None else request.state == "close"
    cut: Offset | None = None
    before = start if request.truncate_before == NOW else request.truncate_before
    if before is not None:
        outcome = decide_truncation(first, start, before)
        if isinstance(outcome, BeyondTail):
            return CutInvalid(start)
        cut = outcome.first if isinstance(outcome, Cut) else None
    retires = closed and after and request.truncate_before == NOW and not has_data
    return BooksChange(after, after and not closed, cut, retires)


# Groups that lag


def takes_source(group: Group, path: str) -> bool:
    """Whether a stream is a source. The server's own streams are sources for meshes alone."""
    if path.startswith("__") and not group.name.startswith("mesh:"):
        return False
    return any(Glob(source).matches(path) for source in group.settings.sources)


def group_lags(group: Group, path: str, last: int) -> bool:
    """Whether it is not known yet whom the events of a stream up to `last` concern."""
    return group.watermark < last and takes_source(group, path)


def target_lags(row: Target, path: str, last: int) -> bool:
    """Whether a target still waits for an event of a stream up to `last`."""
    if last == NOWHERE or not row.at < row.work_to or row.waits_from > last:
        return False
    return row.source == path or ("*" in row.source and Glob(row.source).matches(path))
