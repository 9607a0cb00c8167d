"""Deciding a create: what a PUT makes, a plain stream or a fork, or why it makes nothing.

A PUT is idempotent: the same configuration again is success, another one is a conflict. A fork is a
create with a source; finding the place named by an offset and a sub-offset needs a look at the
source's rows, so the store resolves it first and hands it in as `ForkPoint`.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.protocol.batches import Batch
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import KEEP_ALL, Retention
from fencepost.protocol.streams import Fork, Lifetime, Segment, Stream, media_type

DEFAULT_CONTENT_TYPE = "application/octet-stream"


class ForkFrom(NamedTuple):
    """The place to fork at, as asked: None for the source's tail at the time."""

    path: str
    offset: Offset | None = None
    sub_offset: int = 0

    @property
    def asked(self) -> str:
        """The question in one string, kept so that the same question again is recognised."""
        if self.offset is None:
            return ""
        return f"{self.offset}+{self.sub_offset}" if self.sub_offset else str(self.offset)


class Create(NamedTuple):
    """A request to make a stream, with its first messages if it has any."""

    path: str
    content_type: str | None = None
    lifetime: Lifetime = Lifetime()
    closed: bool = False
    batch: Batch | None = None
    fork_from: ForkFrom | None = None
    retention: Retention = KEEP_ALL
    owner: str = ""
    """The principal that asks for it; empty without authorization."""


class ForkPoint(NamedTuple):
    """A fork's source, and the place in it that the asked offset and sub-offset come to."""

    source: Stream
    at: Offset


class Created(NamedTuple):
    """A new stream. Its messages, if any, go from `start` to `tail`."""

    stream: Stream
    start: Offset
    tail: Offset
    closed: bool


class Exists(NamedTuple):
    """The stream is there already, as asked; `tail` is where it ended at that moment."""

    stream: Stream
    tail: Offset
    closed: bool


class ConfigConflict(NamedTuple):
    """The path is taken by a stream with another configuration; `detail` says what differs."""

    detail: str


class SourceTypeMismatch(NamedTuple):
    """A fork holds what its source holds, which is another content type than the one asked for."""

    expected: str


class PathBlocked(NamedTuple):
    """The path's stream was deleted, and is kept because forks still read from it."""


class SourceMissing(NamedTuple):
    """There is no stream to fork from at this path."""

    path: str


class SourceDeleted(NamedTuple):
    """The stream to fork from was deleted and lives on only in its forks."""

    path: str


class BadForkPoint(NamedTuple):
    """The source has no such place; `detail` says why."""

    detail: str


CreateOutcome = (
    Created
    | LimitExceeded
    | Exists
    | ConfigConflict
    | PathBlocked
    | SourceMissing
    | SourceDeleted
    | SourceTypeMismatch
    | BadForkPoint
)


def decide_create(
    existing: Stream | None,
    request: Create,
    *,
    stream_id: int,
    fork_point: ForkPoint | None,
    now_ms: int,
) -> CreateOutcome:
    """What `request` makes, given what is at its path; `stream_id` is the new incarnation's."""
    if existing is not None:
        return _compare(existing, request)
    if fork_point is not None:
        stream = _forked(request, fork_point, stream_id=stream_id, now_ms=now_ms)
        if isinstance(stream, SourceTypeMismatch):
            return stream
    else:
        stream = Stream(
            stream_id,
            request.path,
            request.content_type or DEFAULT_CONTENT_TYPE,
            created_ms=now_ms,
            lifetime=request.lifetime,
            retention=request.retention,
            owner=request.owner,
        )
    start = stream.tail
    if request.batch is not None:
        stream.tail = Offset(
            start.messages + request.batch.messages, start.bytes + request.batch.size
        )
    stream.closed = request.closed
    return Created(stream, start, stream.tail, stream.closed)


def _forked(
    request: Create, point: ForkPoint, *, stream_id: int, now_ms: int
) -> Stream | SourceTypeMismatch:
    source, at = point
    assert request.fork_from is not None
    content_type = request.content_type or source.content_type
    if media_type(content_type) != source.media_type:
        return SourceTypeMismatch(source.content_type)
    lifetime = source.lifetime if request.lifetime == Lifetime() else request.lifetime
    return Stream(
        stream_id,
        request.path,
        content_type,
        created_ms=now_ms,
        lifetime=lifetime,
        tail=at,
        first=source.first,
        fork=Fork(source.id, source.path, request.fork_from.asked, at),
        segments=inherited(source, at),
        # Not the source's: forking is how to keep what the source will drop.
        retention=request.retention,
        owner=request.owner,
    )


def inherited(source: Stream, end: Offset) -> tuple[Segment, ...]:
    """The rows that make up `source` below `end`: those it inherited, then its own."""
    segments = []
    start_bytes = 0
    for segment in (*source.segments, Segment(source.id, end)):
        stop = segment.end if segment.end.bytes < end.bytes else end
        if stop.bytes > start_bytes:
            segments.append(Segment(segment.stream_id, stop))
            start_bytes = stop.bytes
    return tuple(segments)


def _compare(existing: Stream, request: Create) -> CreateOutcome:
    if existing.soft_deleted:
        return PathBlocked()
    if existing.closed != request.closed:
        state = "closed" if existing.closed else "open"
        return ConfigConflict(f"the existing stream is {state}")
    asked, fork = request.fork_from, existing.fork
    if (asked is None) != (fork is None):
        return ConfigConflict(
            "the existing stream is " + ("not a fork" if fork is None else "a fork")
        )
    if asked is not None and fork is not None:
        same_place = asked.asked == fork.asked or (
            asked.sub_offset == 0 and asked.offset == fork.at
        )
        if asked.path != fork.source_path or not same_place:
            return ConfigConflict("the existing stream was forked from another place")
    # A fork that names neither inherits both, so leaving them out cannot contradict anything.
    if request.content_type is not None or fork is None:
        wanted = media_type(request.content_type or DEFAULT_CONTENT_TYPE)
        if wanted != existing.media_type:
            return ConfigConflict(f"the existing stream holds {existing.content_type}")
    if existing.lifetime != request.lifetime and (fork is None or request.lifetime != Lifetime()):
        return ConfigConflict("the existing stream has another lifetime")
    if existing.retention != request.retention:
        return ConfigConflict("the existing stream has another retention")
    return Exists(existing, existing.tail, existing.closed)
