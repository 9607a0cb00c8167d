"""The contract of a store that is read across its streams: the global log, its plans, and lists.

Every method reads one committed state. Positions become visible in their order: a reader that was
told that the head is at some position never sees a row appear at or below it later. Rows leave the
log only by a purge after its retention, which is recorded; an answer that would miss such a row is
`Pruned` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from fencepost.protocol.batches import split
from fencepost.protocol.globs import Glob
from fencepost.protocol.log_filters import EventFilter
from fencepost.protocol.logs import COLUMNS, End, Selection, Split
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Lifetime
from fencepost.protocol.writers import PublishedBatch, Writer

T = TypeVar("T")


class LogQuery(NamedTuple):
    """A read of the log: positions above `after` up to `until`; None is the head, for both.

    `events` takes only some of the messages. `descending`: from `until` downwards. `columns` are
    those that the reader looks at.
    """

    selection: Selection
    after: int | None
    until: int | None
    messages_max: int
    bytes_max: int
    skip_pruned: bool = False
    principal: str = ""
    """The principal that reads, or its address without authorization: its share of the threads."""
    events: EventFilter | None = None
    descending: bool = False
    columns: frozenset[str] = COLUMNS


class Named(NamedTuple):
    """What the rows of one incarnation have in common."""

    path: str
    content_type: str


class Integers:
    """A column of whole numbers as the store wrote it: JSON, parsed only when it is needed."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def has_nulls(self) -> bool:
        return "null" in self.text

    def values(self) -> list[int]:
        """The numbers; only of a column without nulls."""
        return _INTEGERS.decode(self.text)

    def values_or_nulls(self) -> list[int | None]:
        return _INTEGERS_OR_NULLS.decode(self.text)


_INTEGERS = msgspec.json.Decoder(list[int])
_INTEGERS_OR_NULLS = msgspec.json.Decoder(list[int | None])


class LogRows(msgspec.Struct, gc=False):
    """Rows of the log by columns: one entry for each append or marker, in the order of positions.

    A column is None where it says the same of every row: `counts` when each is one message, `kinds`
    when none is a marker, the three of producers when there are none. Payloads are either `joined`
    without anything between them, or, where there are batches, `batches` of lengths and data. The
    first `skip` messages are not asked for, and after them `take` are. What only columns need that
    the query did not name is empty or None.
    """

    positions: Sequence[int]
    sizes: list[int]
    counts: list[int] | None
    kinds: list[int] | None
    streams: Integers
    starts: Integers
    versions: Integers
    times_ms: Integers
    producers: list[str | None] | None
    epochs: Integers | None
    seqs: Integers | None
    joined: bytes
    batches: list[tuple[bytes | None, bytes]] | None
    names: dict[int, Named]
    skip: int
    take: int

    def payloads(self) -> Iterator[Sequence[bytes]]:
        """The messages of each row; a marker has one, which is empty."""
        if self.batches is None:
            at = 0
            for size in self.sizes:
                yield (self.joined[at : at + size],)
                at += size
            return
        for lengths, data in self.batches:
            yield [data] if lengths is None else split(lengths, data)


class LogChunk(NamedTuple):
    """Part of the log: `rows` (None: none were selected) and where to go on.

    `pruned` is the newest position in the range whose row is gone, for a reader who goes on anyway.
    A reader that goes downwards goes on with `next` as its `until`, and is done when that is not
    above `after`.
    """

    rows: LogRows | None
    after: int
    next: int
    until: int
    head: int
    pruned: int | None

    @property
    def at_head(self) -> bool:
        return self.next >= self.head


class Pruned(NamedTuple):
    """Rows of this selection are gone; the newest of them was at `last`."""

    last: int
    head: int


class BeyondHead(NamedTuple):
    """The reader is ahead of the log: its position is not from here, or from a lost past."""

    head: int


class PlanQuery(NamedTuple):
    """A range to weigh, bound and split; `at_ms` asks for the place of a time as well."""

    selection: Selection
    after: int
    until: int | None
    rows_max: int | None
    bytes_max: int | None
    parts: int
    at_ms: int | None
    principal: str = ""
    """The principal that asks, or its address without authorization: its share of the threads."""


class Plan(NamedTuple):
    """Where a bounded read ends and how it splits.

    `at` is the newest position older than the asked time: everything after it is at that time or
    later. `pruned` is the newest position whose row is gone, and `pruned_rows` how many there are.
    """

    end: End
    splits: list[Split]
    head: int
    pruned: int | None
    pruned_rows: int
    at: int | None


class LogStore(Protocol):
    """The global log."""

    async def head(self) -> int:
        """The newest committed position; -1 when there is none."""
        ...

    async def read(
        self, query: LogQuery, render: Callable[[LogRows], T]
    ) -> tuple[LogChunk, T | None] | Pruned | BeyondHead:
        """Part of the log, rendered where it was read, off the event loop.

        Ends early at the query's bounds, or when it has looked through enough positions without
        finding much; but `next` is always above `after` when there is anything to read up to.
        """
        ...

    async def plan(self, query: PlanQuery) -> Plan | BeyondHead:
        """Weigh a range, bound it, split it. Nothing of it can change later but by a purge."""
        ...


class ListedStream(NamedTuple):
    """A live stream in a list."""

    path: str
    id: int
    content_type: str
    tail: Offset
    first: Offset
    closed: bool
    created_ms: int
    updated_ms: int
    lifetime: Lifetime
    forked_from: str | None
    books_closed: bool


class ListedProducer(NamedTuple):
    """A producer in a list: where its newest batch went, unless that was truncated away."""

    stream: str
    id: str
    epoch: int
    seq: int
    offset: Offset | None
    updated_ms: int


class ListedKey(NamedTuple):
    """An idempotency key in a list; the stream is None for a key of a whole commit."""

    stream: str | None
    incarnation: int
    principal: str
    key: str
    offset: Offset
    position: int
    created_ms: int
    expires_ms: int | None


Listed = TypeVar("Listed", ListedStream, ListedProducer, ListedKey, Writer, PublishedBatch)


class Page(NamedTuple, Generic[Listed]):
    """Entries in the order of their keys, and the key to go on after; None at the end."""

    entries: list[Listed]
    next: tuple[str, ...] | None


class ListStore(Protocol):
    """Streams, producers, keys, writers and what they published, page by page.

    Pages are stable: what is there from before the first page until after the last is on exactly
    one of them.
    """

    async def usage(self) -> list[tuple[str, str, int]]:
        """What principals hold on disk: principal, resource, amount."""
        ...

    async def list_streams(
        self, glob: Glob | None, *, after: str, limit: int
    ) -> Page[ListedStream]:
        """Live streams in the order of their paths."""
        ...

    async def list_producers(
        self, stream: Glob | None, glob: Glob | None, *, after: tuple[str, str], limit: int
    ) -> Page[ListedProducer]:
        """Producers whose id matches `glob`, in the order of stream paths, then of their ids."""
        ...

    async def list_keys(
        self, *, owner: str | None, after: tuple[int, str, str], as_of_ms: int | None, limit: int
    ) -> Page[ListedKey]:
        """Idempotency keys in the order of incarnations, principals, keys; those of an owner, or
        all."""
        ...

    async def list_writers(
        self, glob: Glob | None, *, owner: str | None, after: str, limit: int
    ) -> Page[Writer]:
        """Writers whose name matches `glob`, by name; only those of `owner`, if one is given."""
        ...

    async def list_writer_history(
        self, name: str, *, before: int | None, limit: int
    ) -> Page[PublishedBatch]:
        """The batches of a writer before one of them, or all of them, the newest first."""
        ...
