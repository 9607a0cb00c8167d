"""Events as messages and back: checked when they are written, upcast and checked when read.

A message is `{"name", "data", "meta": {"correlation", "causation", ...}, "schema"}`. Where the
event lies (stream, version, position, time) is never inside it. Names that begin with `$` are the
server's: `$opened` carries the state that a stream begins with after its books were closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from fencepost.client.operations import ENCODING_FAILURES
from fencepost.client.results import LogEntry
from fencepost.events.errors import (
    DefinitionError,
    EventInvalidError,
    EventTooNewError,
    UnknownEventError,
)
from fencepost.events.types import Entity, Event, Recorded

T = TypeVar("T")

OPENED, CLOSED = "$opened", "$closed"
CORRELATION, CAUSATION = "correlation", "causation"
TEXT_MAX = 256
"""Characters of a correlation or a causation."""


class Place(NamedTuple):
    """Where a message lies, for errors."""

    stream: str
    version: int | None
    position: int | None = None


class Envelope(msgspec.Struct):
    """A message that is an event, its data not yet looked into."""

    name: str
    data: Any = None
    meta: dict[str, Any] = {}
    schema: int = 1


def encoded(event: Event, meta: Mapping[str, Any], stream: str) -> dict[str, Any]:
    """An event as a message; raises `EventInvalidError` for values that its class does not take."""
    kind = event.__event__
    try:
        data = as_data(event)
    except ENCODING_FAILURES as error:
        raise EventInvalidError(f"{kind.name}: {error}", stream, version=None) from None
    return {"name": kind.name, "data": data, "meta": dict(meta), "schema": kind.schema}


def as_data(value: Event | Entity) -> Any:
    """An event or a state as JSON takes it; raises one of `ENCODING_FAILURES` for what it cannot.

    What is stored is all that is left of it. So it is read again here, as any reader will.
    """
    data = msgspec.to_builtins(value, str_keys=True)
    text = msgspec.json.encode(data)
    if b"null" in text and not _is_finite(data):
        raise ValueError("JSON has no NaN and no infinity")
    msgspec.json.decode(text, type=type(value))
    return data


def from_data(data: Any, kind: type[T]) -> T:
    """What `as_data` made data of; raises `msgspec.ValidationError` if it does not fit."""
    return msgspec.convert(data, kind, str_keys=True)


def _is_finite(data: Any) -> bool:
    """Whether no number in it is a NaN or an infinity, which would be stored as null."""
    if isinstance(data, dict):
        return all(map(_is_finite, data.values()))
    if isinstance(data, list | tuple):
        return all(map(_is_finite, data))
    return not isinstance(data, float) or math.isfinite(data)


def envelope(message: Any, place: Place) -> Envelope:
    """A message as an event, its data as it is."""
    try:
        return msgspec.convert(message, Envelope)
    except msgspec.ValidationError as error:
        raise invalid(f"the message is no event: {error}", place) from None


class Codec:
    """The events that an app knows, by name."""

    def __init__(self, kinds: Iterable[type[Event]]) -> None:
        self._kinds: dict[str, type[Event]] = {}
        for kind in kinds:
            self.add(kind)

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def add(self, kind: type[Event]) -> None:
        """Know one more; two classes of one name are an error."""
        name = kind.__event__.name
        if self._kinds.setdefault(name, kind) is not kind:
            raise DefinitionError(
                f"two classes of events are named {name!r}: give one another name"
            )

    def require_known(self, events: Iterable[Event], what: str) -> None:
        """Raise `DefinitionError` for an event that no load of its entity could read."""
        for event in events:
            if type(event) is not self._kinds.get(event.__event__.name):
                raise DefinitionError(
                    f"{what} stores {type(event).__name__}, which the app does not know: "
                    "annotate what its action returns, and give its entity to the app"
                )

    def decode(self, found: Envelope, place: Place) -> Event:
        """The event that an envelope holds, in the form of today."""
        kind = self._kinds.get(found.name)
        if kind is None:
            stream, version, position = place
            raise UnknownEventError(found.name, stream, version=version, position=position)
        newest = kind.__event__.schema
        if found.schema > newest:
            reason = f"{found.name}: its schema is {found.schema}, and we know up to {newest}"
            stream, version, position = place
            raise EventTooNewError(reason, stream, version=version, position=position)
        try:
            return from_data(_upcast(kind, found), kind)
        except Exception as error:  # an upcaster may raise anything
            reason = f"{found.name}: {type(error).__name__}: {error}"
            steps = range(max(found.schema, 1), newest)
            missing = [schema for schema in steps if schema not in kind.__event__.upcasters]
            if missing:
                reason += f"; no function @upcasts({kind.__name__}, {missing[0]})"
            raise invalid(reason, place) from error

    def recorded(self, entry: LogEntry) -> Recorded[Any]:
        """An entry of the log as an event; one of an unknown name keeps its data as it is."""
        place = Place(entry.stream, entry.version, entry.position)
        found = envelope(entry.data, place)
        known = found.name in self._kinds
        return Recorded(
            data=self.decode(found, place) if known else found.data,
            name=found.name,
            stream=entry.stream,
            version=-1 if entry.version is None else entry.version,
            position=entry.position,
            timestamp_ms=entry.timestamp_ms,
            correlation=_text(found.meta.get(CORRELATION)),
            causation=_text(found.meta.get(CAUSATION)),
            meta=found.meta,
            schema=found.schema,
        )


def _upcast(kind: type[Event], found: Envelope) -> Any:
    data, newest = found.data, kind.__event__.schema
    if found.schema < 1:
        raise ValueError(f"its schema is {found.schema}, and schemas count from 1")
    for schema in range(found.schema, newest):
        upcaster = kind.__event__.upcasters.get(schema)
        if upcaster is not None:
            data = upcaster(dict(data))
            if not isinstance(data, dict):
                raise TypeError(f"its upcaster of schema {schema} returned {type(data).__name__}")
    return data


def invalid(reason: str, place: Place) -> EventInvalidError:
    """The error about a message at a place."""
    return EventInvalidError(reason, place.stream, version=place.version, position=place.position)


def _text(value: Any) -> str | None:
    """A correlation or causation, if it is one that a commit would take: others are left alone."""
    return value if isinstance(value, str) and 0 < len(value) <= TEXT_MAX else None
