"""Results of operations: plain frozen values, with the names of the wire made Python's."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """Where an append went."""

    next_offset: str
    """The tail after it; after a duplicate, the tail now."""
    offset: str | None = None
    """Where the original went, when this was a duplicate and the server remembers."""
    version: int | None = None
    """Number of the stream's last message; -1 when it is empty."""
    position: int | None = None
    """Place of the last message in the order of all streams."""
    closed: bool = False
    duplicate: bool = False
    """Whether the server had it already."""
    matches: bool | None = None
    """For a producer's duplicate: whether the original had the same bytes."""
    epoch: int | None = None
    seq: int | None = None


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to know about a stream without reading it."""

    content_type: str
    next_offset: str
    closed: bool = False
    ttl_seconds: int | None = None
    expires_at: datetime | None = None
    first_offset: str | None = None
    """Where the stream begins, when it was truncated."""
    books_closed: bool = False
    """Whether the stream takes no messages until its books are opened again."""
    is_new: bool | None = None
    """After `create`: whether it made the stream; None when a lost answer leaves that open."""


class Batch(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Messages that came together. `next_offset` is where to go on after all of them."""

    messages: list[T]
    data: bytes
    offset: str
    next_offset: str
    up_to_date: bool = False
    closed: bool = False
    """Whether this was the end of a closed stream."""


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stream in a list."""

    path: str
    content_type: str
    tail: str
    version: int
    size_bytes: int
    closed: bool
    created: datetime
    updated: datetime
    id: int | None = None
    ttl_seconds: int | None = None
    expires_at: datetime | None = None
    forked_from: str | None = None
    books: Literal["closed"] | None = None
    """Shown while the books of the stream are closed."""


class ProducerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A producer in a list: where it is, and where its newest batch went."""

    stream: str
    id: str
    epoch: int
    seq: int
    offset: str | None = None
    updated: datetime | None = None


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An idempotency key in a list; the stream is None for the key of a commit."""

    stream: str | None
    incarnation: int
    principal: str
    key: str
    offset: str
    position: int
    created: datetime
    expires: datetime | None = None


class WriterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A writer: whose and which query's it is, in which run, and how far it came."""

    name: str
    query: str
    epoch: int
    batch: int | None
    digest: str | None
    principal: str
    opened_ms: int
    updated_ms: int


class PositionRange(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of the log that a batch was read from: those after `after`, up to `until`.

    `after` is None when the publisher does not know where its first batch began.
    """

    after: int | None = None
    until: int


class PublishedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in the history of a writer."""

    batch: int
    range: PositionRange | None
    """The positions that it was read from, if its publisher said so."""
    digest: str | None
    published_ms: int


class CommitResult(msgspec.Struct, frozen=True, kw_only=True):
    """Where one append of a commit went."""

    stream: str
    offset: str | None = None
    next_offset: str | None = None
    version: int | None = None
    position: int | None = None
    closed: bool = False
    matches: bool | None = None
    books: str | None = None
    """`closed` while the books of the stream are closed."""


Outcome = Literal["acked", "failed", "blocked", "parked", "lost"]


class AckedItem(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one lease."""

    target: str
    outcome: Outcome
    at: int | None = None


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """All of it was done, now or, as a duplicate, before."""

    appends: list[CommitResult]
    duplicate: bool
    batch: int | None = None
    """For a commit of a writer: the last batch that the writer published."""
    match: bool | None = None
    """Whether this batch, sent again, has its first digest; None where the server cannot tell."""
    range: PositionRange | None = None
    """For a batch that was published before: the positions that it was read from, if known."""
    leases: list[AckedItem] = []
    """What became of the leases that it acked, in their order."""


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a part that waits for its commit."""

    txn: str
    part: str
    chunk: int
    messages: int
    bytes: int
    duplicate: bool


class LogProducer(msgspec.Struct, frozen=True):
    """Who sent a message of the log."""

    id: str
    epoch: int
    seq: int


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A message of any stream, or a marker that says what became of a stream."""

    position: int
    stream: str
    incarnation: int
    timestamp_ms: int
    offset: str
    version: int | None = None
    content_type: str | None = None
    producer: LogProducer | None = None
    data: Any = None
    """The message of a JSON stream."""
    data_base64: str | None = None
    """The message of any other stream."""
    marker: str | None = None
    """closed, deleted, expired or truncated; then there is no data."""


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the log: go on after `next`; `head` is the newest position there is."""

    entries: list[LogEntry]
    next: int
    head: int
    up_to_date: bool


class Split(msgspec.Struct, frozen=True):
    """A range of the log to read by itself."""

    after: int
    until: int
    rows: int
    bytes: int


class PlanTime(msgspec.Struct, frozen=True):
    """Where a time lies in the log: everything after `after` is at that time or later."""

    timestamp_ms: int
    after: int | None = None
    time: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where a bounded read of the log ends, and how it splits evenly."""

    after: int
    until: int
    head: int
    rows: int
    bytes: int
    splits: list[Split]
    pruned: int | None = None
    """The newest position of the range whose row is gone."""
    pruned_rows: int = 0
    """How many rows of the range are gone, markers included; an older server does not say."""
    at: PlanTime | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a producer is stored: as which request, and where the stream ends now.

    Save `epoch` and `seq` of the newest one to go on with them after a restart.
    """

    epoch: int
    seq: int
    messages: int
    next_offset: str
    duplicate: bool = False
    """Whether it was stored by an earlier transmission whose answer was lost."""
