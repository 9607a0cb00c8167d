"""Committing events and querying them, as operations without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple

from fencepost.client import operations
from fencepost.client.effects import Operation
from fencepost.client.errors import StreamNotFoundError, TailMovedError, require
from fencepost.client.operations import Condition, query_of
from fencepost.client.reading import LogReader
from fencepost.client.results import Appended
from fencepost.client.settings import JSON, ClientSettings
from fencepost.events.codec import CAUSATION, CORRELATION, TEXT_MAX, Codec, encoded
from fencepost.events.errors import ConcurrencyError
from fencepost.events.types import Event, Recorded

CORRELATION_BYTES = 16


class Expected(Enum):
    """Where a stream must stand for a commit, when it is no exact version."""

    ANY = "any"
    NO_STREAM = "no_stream"
    STREAM_EXISTS = "stream_exists"


ANY, NO_STREAM, STREAM_EXISTS = Expected.ANY, Expected.NO_STREAM, Expected.STREAM_EXISTS
"""Any; the stream must be empty or not exist; the stream must exist."""


def meta_of(
    settings: ClientSettings,
    correlation: str | None,
    causation: str | None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What goes with events: a correlation always, a causation if there is one."""
    for name, value in ((CORRELATION, correlation), (CAUSATION, causation)):
        require(
            value is None or 0 < len(value) <= TEXT_MAX, f"{name} has 1 to {TEXT_MAX} characters"
        )
    meta = dict(extra or {})
    meta[CORRELATION] = correlation or settings.clock.token(CORRELATION_BYTES).hex()
    if causation is not None:
        meta[CAUSATION] = causation
    return meta


def condition_of(expected: Expected | int) -> Condition:
    """The condition of an append for what is expected of its stream."""
    if expected is ANY:
        return Condition(auto_create=True)
    if expected is NO_STREAM or expected == -1:
        return Condition(if_none_match="*")
    if expected is STREAM_EXISTS:
        return Condition(if_match="*")
    require_version(expected)
    return Condition(if_match=str(expected))


def require_version(expected: Any, modes: str = "ANY, NO_STREAM, STREAM_EXISTS or ") -> None:
    """Raise `InvalidArgumentError` for what is no version of a stream."""
    is_version = isinstance(expected, int) and not isinstance(expected, bool) and expected >= -1
    require(is_version, f"expected is {modes}a version from -1 on, not {expected!r}")


def require_events(events: Sequence[Event]) -> None:
    """Raise `InvalidArgumentError` for what is no list of events."""
    require(not isinstance(events, Event), "commit takes a list of events: [event]")
    for event in events:
        require(isinstance(event, Event), f"{event!r} is no event: commit takes a list of events")


class Stored(NamedTuple):
    """Events where they lie now, and where their stream goes on."""

    events: list[Recorded[Any]]
    offset: str


def commit(
    settings: ClientSettings,
    stream: str,
    events: Sequence[Event],
    expected: Expected | int,
    meta: Mapping[str, Any],
) -> Operation[Stored]:
    """Store events in one step, if the stream stands where it is expected.

    Give it at least one event.
    """
    messages = [encoded(event, meta, stream) for event in events]
    body = operations.encode_messages(messages, JSON)
    shown = expected.value if isinstance(expected, Expected) else expected
    try:
        done = yield from operations.append(settings, stream, body, JSON, condition_of(expected))
    except TailMovedError as error:
        raise ConcurrencyError(stream, shown, error.version, events) from error
    except StreamNotFoundError as error:
        raise ConcurrencyError(stream, shown, -1, events) from error
    return Stored(recorded_of(stream, events, messages, done), done.next_offset)


def recorded_of(
    stream: str, events: Sequence[Event], messages: Sequence[dict[str, Any]], done: Appended
) -> list[Recorded[Any]]:
    """Events with the places that they got: the messages of one append follow one another."""
    version, position = done.version, done.position
    assert version is not None, "the answer to an append names the version"
    assert position is not None, "the answer to an append names the position"
    last = len(events) - 1
    return [
        Recorded(
            data=event,
            name=message["name"],
            stream=stream,
            version=version - last + index,
            position=position - last + index,
            correlation=message["meta"].get(CORRELATION),
            causation=message["meta"].get(CAUSATION),
            meta=message["meta"],
            schema=message["schema"],
        )
        for index, (event, message) in enumerate(zip(events, messages, strict=True))
    ]


class Query:
    """Events of the log that fit a selection, page by page."""

    def __init__(
        self,
        settings: ClientSettings,
        codec: Codec,
        *,
        after: int = -1,
        before: int | None = None,
        stream: str | None = None,
        names: Sequence[str | type[Event]] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        correlation: str | None = None,
        limit: int | None = None,
        backward: bool = False,
    ) -> None:
        for time in (created_after, created_before):
            if time is not None:
                require_time(time)
        require(_is_position(after) or after == -1, "after is a position, or -1")
        require(before is None or _is_position(before), "before is a position")
        require(stream is None or isinstance(stream, str), "stream is a path or a glob")
        require(not isinstance(names, str | type), "names is a list of names or classes of events")
        require(limit is None or limit >= 0, "limit is not negative")
        self._settings = settings
        self._codec = codec
        self._after = after
        self._until = None if before is None else before - 1
        self._created = (created_after, created_before)
        self._left = limit
        self._backward = backward
        pattern = stream is not None and "*" in stream
        self._query: dict[str, Any] = {
            "stream": None if pattern else stream,
            "match": stream if pattern else None,
            "name": [name if isinstance(name, str) else name.__event__.name for name in names],
            "correlation": correlation,
            "order": "desc" if backward else None,
            "pruned": "skip",
        }
        self._reader: LogReader | None = None
        self._named = bool(names) or correlation is not None

    def next(self) -> Operation[list[Recorded[Any]] | None]:
        """The next page that has events; None at the end."""
        if self._reader is None:
            yield from self._begin()
        assert self._reader is not None
        while self._left is None or self._left > 0:
            page = yield from self._reader.next()
            if page is None:
                return None
            found = [
                self._codec.recorded(entry)
                for entry in page.entries
                if entry.marker is None and is_event(entry.data)
            ]
            if self._left is not None:
                found = found[: self._left]
                self._left -= len(found)
            if found:
                return found
        return None

    def _begin(self) -> Operation[None]:
        after, until = self._after, self._until
        created_after, created_before = self._created
        if created_after is not None:
            first = yield from self._position_at(created_after)
            after = max(after, first)
        if created_before is not None:
            last = yield from self._position_at(created_before)
            until = last if until is None else min(until, last)
        if until is not None and until <= after:
            self._left = 0
            until = after
        if self._left is not None:
            self._query["limit"] = max(1, min(self._left, 1_000))
        self._reader = LogReader(
            self._settings,
            query_of(self._query),
            after=after,
            until=until,
            live=False,
            descending=self._backward,
        )

    def _position_at(self, time: datetime) -> Operation[int]:
        """Everything behind this position is of this time or later, and nothing before it."""
        plan = yield from operations.plan(self._settings, query_of({"at": time}))
        after = None if plan.at is None else plan.at.after
        return plan.head if after is None else after


def _is_position(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def require_time(time: Any) -> None:
    """Raise `InvalidArgumentError` for what does not name one moment everywhere."""
    require(isinstance(time, datetime), f"a time is a datetime, not {time!r}")
    require(time.tzinfo is not None, "a time needs its zone: datetime.now(UTC), not datetime.now()")


def is_event(data: Any) -> bool:
    """Whether a message of the log is an event: an object with a name."""
    return isinstance(data, dict) and isinstance(data.get("name"), str)
