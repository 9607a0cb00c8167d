"""The report of `fencepost check`: its findings, and what its passes know of each stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Segment
from fencepost.store.sql import Row

FINDINGS_KEPT_MAX = 1_000
"""Findings that are kept in full; beyond it they are only counted, by code."""

Progress = Callable[[str, int, int], None]
"""Told which pass is under way, how far it is, and how far it goes."""


def ignore(_step: str, _done: int, _total: int) -> None:
    """Show no progress."""


class UnreadableError(Exception):
    """There is nothing that can be checked: no database, no permission, or not one of ours."""


class Rows(Protocol):
    """The rows of a query of the store's check.sql, as they come; all of them see one moment."""

    def __call__(self, query: str, *values: object) -> Iterable[Row]: ...


class Finding(NamedTuple):
    """Something that does not hold. `code` is stable, `where` names the place."""

    code: str
    where: str
    detail: str


class Report:
    """What was looked at and what was found."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.codes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, code: str, where: str, detail: str) -> None:
        """One more finding."""
        self.codes[code] += 1
        if len(self.findings) < FINDINGS_KEPT_MAX:
            self.findings.append(Finding(code, where, detail))

    @property
    def findings_count(self) -> int:
        """All findings, also those that were only counted."""
        return self.codes.total()

    @property
    def is_clean(self) -> bool:
        return not self.codes


class StreamState:
    """A stream as its row tells of it, and what the log has shown of it so far."""

    __slots__ = (
        "base",
        "books_closed_at",
        "closed",
        "closed_at",
        "ended_at",
        "first",
        "forked_from",
        "id",
        "is_json",
        "next",
        "own_first",
        "path",
        "purged",
        "segments",
        "state",
        "tail",
        "truncated_to",
    )

    def __init__(
        self, stream_id: int, path: str, state: int, tail: Offset, first: Offset, base: Offset
    ) -> None:
        self.id = stream_id
        self.path = path
        self.state = state
        self.tail = tail
        self.first = first
        self.base = base  # where its own rows begin: 0, or the place it was forked at
        self.is_json = False
        self.closed = False
        self.books_closed_at: int | None = None
        self.forked_from: int | None = None
        self.segments: tuple[Segment, ...] = ()
        self.purged = -1  # rows up to this position are gone on purpose
        # Filled by the pass over the log:
        self.own_first: Offset | None = None
        self.next: Offset | None = None
        self.closed_at: int | None = None
        self.ended_at: int | None = None
        self.truncated_to: Offset | None = None

    @property
    def name(self) -> str:
        return f"stream {self.id} ({self.path})"
