"""A stream and a producer as the rules see them: plain records, owned and changed by one store.

The store that holds a record is the only one to change it, and it does so with the outcome of a
rule in hand. Nothing here knows where the record came from.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import msgspec

from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import KEEP_ALL, Retention

RECENT_BATCHES = 16
"""How many of a producer's last batches are remembered in full, beside seq 0 of its epoch."""

JSON = "application/json"


class Segment(NamedTuple):
    """Part of a fork that lies in another stream: its rows up to, not including, `end`.

    An end inside a byte append counts the cut message as whole: for the fork it is.
    """

    stream_id: int
    end: Offset


class Lifetime(NamedTuple):
    """How long a stream lives: a sliding window, a fixed end, or (both None) for ever."""

    ttl_s: int | None = None
    expires_at_ms: int | None = None

    def deadline_ms(self, touched_ms: int) -> int | None:
        """When the stream ends if no request touches it after `touched_ms`."""
        if self.ttl_s is not None:
            return touched_ms + self.ttl_s * 1000
        return self.expires_at_ms

    def stored_deadline_ms(self, touched_ms: int) -> int | None:
        """The deadline to write down: later than the true one by some slack.

        A read slides the window, and a write to disk for every read would be absurd. What is stored
        is a promise not to expire before; it is written again only when it no longer holds.
        """
        if self.ttl_s is not None:
            slack_ms = min(self.ttl_s * 125, 60_000)
            return touched_ms + self.ttl_s * 1000 + slack_ms
        return self.expires_at_ms


FOREVER = Lifetime()


class Fork(NamedTuple):
    """Where a fork came from: its source's incarnation, the asked place, and the resolved one."""

    source_id: int
    source_path: str
    asked: str
    at: Offset


class Remembered(NamedTuple):
    """What is kept of an accepted batch: where it went and what it said."""

    offset: Offset
    digest: bytes


_REMEMBERED = struct.Struct("<QQ16s")
PACKED_BYTES = _REMEMBERED.size
"""Length of a packed batch."""


def pack(offset: Offset, digest: bytes) -> bytes:
    """A batch to remember, as a producer keeps it."""
    return _REMEMBERED.pack(offset[0], offset[1], digest)


def _unpack(packed: bytes, at: int) -> Remembered:
    messages, size, digest = _REMEMBERED.unpack_from(packed, at)
    return Remembered(Offset(messages, size), digest)


UNCLAIMED, CLAIMED, RELEASED, COMPLETED = range(4)
"""Whether a producer id is a claim, and how it stands; see `protocol.claims`."""


class Producer(msgspec.Struct, frozen=True, gc=False):
    """A producer on one stream: its epoch, its last sequence number, and its recent batches.

    `first` and `recent` hold packed `Remembered` records, because there may be a producer for every
    task ever claimed, and a tuple of objects for each would be most of the server's memory.
    """

    id: str
    epoch: int
    seq: int
    first: bytes  # seq 0 of this epoch, never forgotten: a claim must outlive its heartbeats
    recent: bytes  # the newest is last, and belongs to `seq`
    position: int  # of the newest batch, in the order of all batches of all streams
    updated_ms: int
    principal: str = ""  # the principal that opened the epoch; empty without authorization
    claim: int = UNCLAIMED

    def remembered(self, seq: int) -> Remembered | None:
        """The batch accepted as `seq` of this epoch, or None when it is too long ago."""
        if seq == 0:
            return _unpack(self.first, 0)
        at = len(self.recent) - (self.seq - seq + 1) * _REMEMBERED.size
        return _unpack(self.recent, at) if 0 <= at < len(self.recent) else None

    def next(self, seq: int, batch: bytes, *, position: int, now_ms: int) -> Producer:
        """This producer after one more (packed) batch of the same epoch."""
        recent = self.recent[-(RECENT_BATCHES - 1) * _REMEMBERED.size :] + batch
        return Producer(
            self.id,
            self.epoch,
            seq,
            self.first,
            recent,
            position,
            now_ms,
            self.principal,
            self.claim,
        )

    def continues(self, before: Producer) -> bool:
        """Whether it is `before` after more batches of its epoch, and nothing else."""
        return (
            self.epoch == before.epoch
            and self.claim == before.claim
            and self.principal == before.principal
            and self.first is before.first
        )

    @staticmethod
    def opening(
        producer_id: str, epoch: int, batch: bytes, *, position: int, now_ms: int
    ) -> Producer:
        """A producer whose epoch begins with a (packed) batch."""
        return Producer(producer_id, epoch, 0, batch, batch, position, now_ms)


class Stream:
    """A stream's state after every decision made so far, committed or still on its way to disk."""

    __slots__ = (
        "books_closed_at",
        "closed",
        "closed_by",
        "content_type",
        "created_ms",
        "first",
        "fork",
        "forks_count",
        "id",
        "lifetime",
        "media_type",
        "owner",
        "path",
        "retention",
        "segments",
        "seq",
        "soft_deleted",
        "tail",
        "touched_ms",
    )

    def __init__(
        self,
        stream_id: int,
        path: str,
        content_type: str,
        *,
        created_ms: int,
        lifetime: Lifetime = FOREVER,
        tail: Offset = START,
        first: Offset = START,
        fork: Fork | None = None,
        segments: tuple[Segment, ...] = (),
        retention: Retention = KEEP_ALL,
        owner: str = "",
    ) -> None:
        self.id = stream_id
        self.owner = owner  # the principal that makes it; not known of one that is loaded
        self.path = path
        self.content_type = content_type
        self.media_type = media_type(content_type)
        self.created_ms = created_ms
        self.touched_ms = created_ms
        self.lifetime = FOREVER if lifetime == FOREVER else lifetime
        self.tail = tail
        self.first = first  # the first offset still kept; later ones were truncated away
        self.fork = fork
        self.segments = segments
        self.retention = retention
        self.forks_count = 0
        self.closed = False
        self.closed_by: tuple[str, int, int] | None = None
        self.seq: str | None = None
        self.soft_deleted = False
        self.books_closed_at: int | None = None  # no message of it has this position or a later one

    def __copy__(self) -> Stream:
        """Field by field: the general way takes ten times as long, and a commit copies many."""
        other = Stream.__new__(Stream)
        other.id = self.id
        other.owner = self.owner
        other.path = self.path
        other.content_type = self.content_type
        other.media_type = self.media_type
        other.created_ms = self.created_ms
        other.touched_ms = self.touched_ms
        other.lifetime = self.lifetime
        other.tail = self.tail
        other.first = self.first
        other.fork = self.fork
        other.segments = self.segments
        other.retention = self.retention
        other.forks_count = self.forks_count
        other.closed = self.closed
        other.closed_by = self.closed_by
        other.seq = self.seq
        other.soft_deleted = self.soft_deleted
        other.books_closed_at = self.books_closed_at
        return other

    @property
    def is_json(self) -> bool:
        return self.media_type == JSON

    @property
    def books_closed(self) -> bool:
        """Whether the stream takes no messages until its books are opened again."""
        return self.books_closed_at is not None

    def expired(self, now_ms: int) -> bool:
        """Whether the stream's time is over."""
        if self.lifetime is FOREVER:
            return False
        deadline_ms = self.lifetime.deadline_ms(self.touched_ms)
        return deadline_ms is not None and deadline_ms <= now_ms


# Remembered, because every stream in memory holds one and there are only a few.
@lru_cache(maxsize=1024)
def media_type(content_type: str) -> str:
    """The part of a content type that counts for comparisons: no parameters, lower case."""
    return content_type.partition(";")[0].strip().lower()
