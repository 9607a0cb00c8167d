"""The global log: which rows a reader asks for, where an answer ends, how a range is split.

A row of the log is one append: messages at consecutive positions of one stream, or a marker that
takes one position. A reader names positions, not rows, so a range may begin and end inside an
append. Everything here works on plain numbers; the store finds the rows, the server renders them.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple, Protocol

from fencepost.protocol.globs import Glob, Globs, literal_prefix

POSITION_MAX = 2**53 - 1
BEFORE_ALL = -1
"""The position to read after when one wants everything."""

MESSAGE, CLOSED, DELETED, EXPIRED, TRUNCATED = range(5)
MARKERS = {CLOSED: "closed", DELETED: "deleted", EXPIRED: "expired", TRUNCATED: "truncated"}
"""Rows of the log that hold no messages: each says what happened to its stream."""

COLUMNS = frozenset(
    (
        *("stream", "offset", "version", "position", "timestamp", "content_type"),
        *("producer_id", "producer_epoch", "producer_seq", "value", "marker"),
    )
)
"""What a reader is given of a message."""
SIZE = "size"
"""The bytes of a payload, for a reader that names its columns and does not want the payload."""

ROW_BYTES = 100
"""What a message is taken to cost beside its payload, where answers are bounded and ranges split:
a million empty messages are not nothing."""

_POSITION = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_PART = re.compile(r"(0|[1-9][0-9]{0,5})/([1-9][0-9]{0,5})", re.ASCII)
_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)


Range = tuple[str, str | None]
"""Texts from the first on, below the second (None: no end)."""


class Part(NamedTuple):
    """A share of all streams: those whose incarnation modulo `shares` is `share`."""

    share: int
    shares: int

    def holds(self, stream_id: int) -> bool:
        return stream_id % self.shares == self.share


class Selection:
    """Which streams a reader wants: exact paths and patterns together; with neither, all."""

    __slots__ = ("_matcher", "globs", "part", "paths")

    def __init__(
        self, paths: Iterable[str] = (), globs: Iterable[Glob] = (), part: Part | None = None
    ) -> None:
        self.paths = frozenset(paths)
        self.globs = tuple(globs)
        self.part = part
        self._matcher = Globs(self.globs)

    @property
    def by_path(self) -> bool:
        """Whether the path of a stream matters at all."""
        return bool(self.paths or self.globs)

    @property
    def comparisons_max(self) -> int:
        """Comparisons with a pattern that it takes at most to say whether a path is wanted."""
        return max(1, self._matcher.comparisons_max)

    @property
    def key(self) -> tuple[object, ...]:
        """Selections of one principal with the same key want the same streams."""
        return self.paths, frozenset(glob.text for glob in self.globs), self.part

    def takes_path(self, path: str) -> bool:
        """Whether a stream at `path` may be wanted, its part aside."""
        if path in self.paths or self._matcher.matches(path):
            return True
        return not self.by_path

    def takes(self, stream_id: int, path: str) -> bool:
        """Whether this incarnation at this path is wanted."""
        return (self.part is None or self.part.holds(stream_id)) and self.takes_path(path)

    def path_ranges(self) -> list[Range]:
        """Where wanted paths can lie.

        The ranges are in order and do not overlap, however many patterns have the same beginning.
        """
        ranges: list[Range] = [(path, next_text(path)) for path in self.paths]
        ranges += {text_range(literal_prefix(glob)) for glob in self.globs}
        return joined_ranges(ranges)


def joined_ranges(ranges: Iterable[Range]) -> list[Range]:
    """What several ranges of texts cover, in order and without overlaps."""
    joined: list[Range] = []
    for first, last in sorted(ranges, key=lambda one: one[0]):
        if joined:
            before, end = joined[-1]
            if end is None or first < end:
                longer = None if end is None or last is None else max(end, last)
                joined[-1] = before, longer
                continue
        joined.append((first, last))
    return joined


def common_ranges(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What ranges of texts and others have in common; each list is in order, without overlaps."""
    found = []
    for first, last in some:
        for other_first, other_last in others:
            low, ends = max(first, other_first), [end for end in (last, other_last) if end]
            if not ends or low < min(ends):
                found.append((low, min(ends, default=None)))
    return found


def next_text(text: str) -> str:
    """The first text behind this one: no text that we keep holds a NUL."""
    return text + "\x01"


def text_range(prefix: str) -> Range:
    """The range of all texts that begin with `prefix`, in the order of their code points."""
    for end in range(len(prefix), 0, -1):
        following = ord(prefix[end - 1]) + 1
        if following == 0xD800:
            following = 0xE000  # no text holds half a surrogate pair
        if following <= 0x10FFFF:
            return prefix, prefix[: end - 1] + chr(following)
    return prefix, None


def parse_position(text: str) -> int | None:
    """A position as a client writes it, or None."""
    if not _POSITION.fullmatch(text) or int(text) > POSITION_MAX:
        return None
    return int(text)


def parse_part(text: str, *, parts_max: int) -> Part | None:
    """A share `i/n` with 0 <= i < n, or None."""
    match = _PART.fullmatch(text)
    if match is None:
        return None
    part = Part(int(match[1]), int(match[2]))
    return part if part.share < part.shares <= parts_max else None


def parse_instant_ms(text: str) -> int | None:
    """A time as milliseconds since 1970 or as RFC 3339, or None."""
    number = parse_position(text)
    if number is not None:
        return number
    if not _RFC3339.fullmatch(text):
        return None
    try:
        instant = datetime.fromisoformat(text.upper())
    except ValueError:
        return None
    # Whole numbers all the way: the instant after the last millisecond counts as that millisecond.
    seconds = int(instant.replace(microsecond=0).timestamp())
    return seconds * 1000 + instant.microsecond // 1000


class LogRow(NamedTuple):
    """What splitting needs of a row: its place, its messages and their sizes."""

    position: int
    messages: int
    size: int
    lengths: bytes | None


def fitting(
    counts: Sequence[int] | None, sizes: Sequence[int], *, messages_max: int, bytes_max: int
) -> int:
    """How many rows from the first on fit whole; without `counts` each is one message."""
    messages = range(1, len(sizes) + 1) if counts is None else list(accumulate(counts))
    payload = list(accumulate(sizes))
    low, high = 0, bisect_right(messages, messages_max)
    # Both sums grow along the rows, so the first row past the bound is found by halving.
    while low < high:
        middle = (low + high) // 2
        if payload[middle] + ROW_BYTES * messages[middle] <= bytes_max:
            low = middle + 1
        else:
            high = middle
    return low


def fitting_in_row(
    row: LogRow, first: int, *, messages_max: int, bytes_max: int
) -> tuple[int, int]:
    """Of one row from position `first` on: messages that fit, at least one, and their bytes."""
    taken = size = 0
    for _, length in messages_of((row,), first, row.position + row.messages - 1):
        cost = size + length + ROW_BYTES * (taken + 1)
        if taken and (taken >= messages_max or cost > bytes_max):
            break
        taken += 1
        size += length
    return taken, size


def messages_of(rows: Iterable[LogRow], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Position and size of each message from `low` to `high`."""
    for position, count, size, lengths in rows:
        sizes: Sequence[int] = (size,) if lengths is None else array("I", lengths)
        start = max(low - position, 0)
        stop = min(high - position + 1, count)
        for index in range(start, stop):
            yield position + index, sizes[index]


class Weight(NamedTuple):
    """Rows and payload bytes in a stretch of the log."""

    rows: int
    bytes: int

    def __add__(self, other: object) -> Weight:
        assert isinstance(other, Weight)
        return Weight(self.rows + other.rows, self.bytes + other.bytes)

    def minus(self, other: Weight) -> Weight:
        return Weight(self.rows - other.rows, self.bytes - other.bytes)

    @property
    def cost(self) -> int:
        """Payload bytes and so many more for each row: ranges are split into equal costs."""
        return self.bytes + ROW_BYTES * self.rows


NOTHING = Weight(0, 0)


class Stretch(NamedTuple):
    """The rows that start from `first` to `last`, weighed together."""

    first: int
    last: int
    weight: Weight


class Split(NamedTuple):
    """A range to read by itself: the positions above `after` up to `until`."""

    after: int
    until: int
    weight: Weight


class End(NamedTuple):
    """Where a bounded read ends, and what it holds."""

    position: int
    weight: Weight


class Scale(Protocol):
    """Weighs more closely than stretch by stretch; each call reads one stretch."""

    def messages(self, stretch: Stretch) -> Sequence[tuple[int, int]]:
        """Position and size of each message of the rows that start in a stretch, in order."""
        ...

    def last_position(self, stretch: Stretch) -> int:
        """Where the last message of the rows that start in a stretch lies, or the stretch ends."""
        ...


def bounded_end(
    stretches: Sequence[Stretch],
    scale: Scale,
    *,
    until: int,
    rows_max: int | None,
    bytes_max: int | None,
) -> End:
    """The end of a read of at most so many rows and payload bytes, but of one row at least."""
    total = NOTHING
    for stretch in stretches:
        whole = total + stretch.weight
        if _within(whole, rows_max, bytes_max):
            total = whole
            continue
        messages = scale.messages(stretch)
        return _end_within(messages, total, stretch.last, rows_max, bytes_max)
    return End(until, total)


def _end_within(
    messages: Sequence[tuple[int, int]],
    before: Weight,
    last: int,
    rows_max: int | None,
    bytes_max: int | None,
) -> End:
    """Where the bound falls among the messages of a stretch that does not fit whole."""
    sums = list(accumulate((size for _, size in messages), initial=before.bytes))
    fits = len(messages)
    if rows_max is not None:
        fits = min(fits, rows_max - before.rows)
    if bytes_max is not None:
        fits = min(fits, bisect_right(sums, bytes_max) - 1)
    if before.rows == 0:
        fits = max(fits, 1)
    fits = min(fits, len(messages))
    # The end is just below the message that does not fit, whatever streams lie between. All of them
    # are taken only where the first one alone is too much already.
    end = messages[fits][0] - 1 if fits < len(messages) else messages[-1][0] if messages else last
    return End(end, Weight(before.rows + fits, sums[fits]))


def _within(weight: Weight, rows_max: int | None, bytes_max: int | None) -> bool:
    return (rows_max is None or weight.rows <= rows_max) and (
        bytes_max is None or weight.bytes <= bytes_max
    )


def up_to(stretches: Iterable[Stretch], end: End) -> list[Stretch]:
    """The stretches of a read that ends early."""
    kept = []
    left = end.weight
    for stretch in stretches:
        if stretch.weight.rows >= left.rows:
            kept.append(Stretch(stretch.first, end.position, left))
            break
        kept.append(stretch)
        left = left.minus(stretch.weight)
    return kept


def even_splits(
    stretches: Sequence[Stretch], scale: Scale, *, after: int, end: End, parts: int
) -> list[Split]:
    """At most `parts` ranges of about the same cost that cover (after, end] exactly, in order."""
    total = end.weight.cost
    # With many stretches to a part, where they end is near enough to an even cut.
    fine = len(stretches) < 64 * parts
    cuts: list[End] = []
    before = NOTHING
    target = 1
    for stretch in stretches:
        whole = before + stretch.weight
        if target < parts and whole.cost * parts >= target * total:
            if fine:
                cuts += _cuts_within(scale.messages(stretch), before, target, total, parts)
            else:
                cuts.append(End(scale.last_position(stretch), whole))
            target = whole.cost * parts // total + 1 if total else parts
        before = whole
    return _between(cuts, after, end)


def _cuts_within(
    messages: Sequence[tuple[int, int]], before: Weight, target: int, total: int, parts: int
) -> Iterator[End]:
    sums = list(accumulate((size for _, size in messages), initial=before.bytes))

    def cost(index: int) -> int:
        """`parts` times what all messages up to this one cost."""
        return (sums[index + 1] + ROW_BYTES * (before.rows + index + 1)) * parts

    while target < parts:
        index = bisect_left(range(len(messages)), target * total, key=cost)
        if index == len(messages):
            return
        yield End(messages[index][0], Weight(before.rows + index + 1, sums[index + 1]))
        target = cost(index) // total + 1


def _between(cuts: Iterable[End], after: int, end: End) -> list[Split]:
    splits = []
    at = End(after, NOTHING)
    for cut in cuts:
        if cut.position < end.position and at.weight.rows < cut.weight.rows < end.weight.rows:
            splits.append(Split(at.position, cut.position, cut.weight.minus(at.weight)))
            at = cut
    if end.position > at.position:
        splits.append(Split(at.position, end.position, end.weight.minus(at.weight)))
    return splits
