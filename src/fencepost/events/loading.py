"""Loading entities: a snapshot or the cache, then the tail of the stream, folded.

A snapshot lies in a stream beside the entity's, `$snapshots/PATH`, which keeps one message. It can
be thrown away at any time: it says which version and offset it stands for, and what follows is read
from there. A snapshot of another class, of an older fold, or one that cannot be read is passed
over.

A base cannot be thrown away. It lies in `$books/PATH` and holds the state of events that a windowed
close has dropped, stored in the commit that dropped them. A stream that begins later, and not with
`$opened`, is folded from its base.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from fencepost.client import operations
from fencepost.client.decoding import json_messages
from fencepost.client.effects import Operation
from fencepost.client.errors import (
    BadRequestError,
    OffsetTruncatedError,
    ProtocolError,
    StreamDeletedError,
    StreamNotFoundError,
)
from fencepost.client.http import Request
from fencepost.client.operations import ENCODING_FAILURES, Condition, stream_target
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings
from fencepost.events.codec import (
    OPENED,
    Codec,
    Place,
    as_data,
    envelope,
    from_data,
    invalid,
)
from fencepost.events.commits import Query, require_time
from fencepost.events.types import Entity, EntityT, Event

EntityT_co = TypeVar("EntityT_co", bound=Entity, covariant=True)

START = "-1"
SNAPSHOTS, BASES = "$snapshots/", "$books/"
_MESSAGES = json_messages(Any)


class Loaded(msgspec.Struct, Generic[EntityT_co], frozen=True, kw_only=True):
    """An entity as it stands: its state, and the version that the state is of."""

    state: EntityT_co
    stream: str
    version: int = -1
    """Number of the last event; -1: none happened yet."""
    offset: str = START
    """Where the stream goes on."""
    snapshot: int = -1
    """The version of the newest snapshot that was read or asked for."""


class Cache:
    """The newest state of some entities, the least recently used dropped first.

    What it holds may be old. A commit at its version finds out, and an action that it refuses is
    decided again on the state of today.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: OrderedDict[tuple[type[Entity], str], Loaded[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, kind: type[EntityT], path: str) -> Loaded[EntityT] | None:
        """The state that was put last, if it is still here."""
        with self._lock:
            found = self._entries.get((kind, path))
            if found is not None:
                self._entries.move_to_end((kind, path))
            return found

    def put(self, loaded: Loaded[Any]) -> None:
        """Remember a state, unless a newer one is here."""
        key = (type(loaded.state), loaded.stream)
        with self._lock:
            current = self._entries.get(key)
            if current is not None and current.version > loaded.version:
                return
            self._entries[key] = loaded
            self._entries.move_to_end(key)
            while len(self._entries) > self._entries_max:
                self._entries.popitem(last=False)

    def drop(self, kind: type[Entity], path: str) -> None:
        """Forget a state: it was found to be old."""
        with self._lock:
            self._entries.pop((kind, path), None)


class Snapshot(msgspec.Struct, kw_only=True):
    """The data of a snapshot, or of a base: that also says where its last event lay in the log."""

    entity: str
    snapshot: int
    version: int
    offset: str
    state: Any
    position: int = -1
    timestamp_ms: int = 0


def load(
    settings: ClientSettings,
    codec: Codec,
    kind: type[EntityT],
    entity_id: str,
    known: Loaded[EntityT] | None,
    *,
    snapshots: bool,
) -> Operation[Loaded[EntityT]]:
    """An entity as it stands now; `known` is an older state of it to go on from."""
    path = kind.__entity__.path_of(entity_id)
    began = known
    if began is None:
        began = Loaded(state=kind(), stream=path)
        if snapshots:
            began = (yield from _from_snapshot(settings, kind, path)) or began
    try:
        return (yield from catch_up(settings, codec, began))
    except (OffsetTruncatedError, StreamNotFoundError, StreamDeletedError, BadRequestError):
        if began.offset == START:
            raise
    # The stream begins later now, or is another one of the same name: what was known is no use.
    return (yield from catch_up(settings, codec, Loaded(state=kind(), stream=path)))


def catch_up(
    settings: ClientSettings, codec: Codec, loaded: Loaded[EntityT]
) -> Operation[Loaded[EntityT]]:
    """The state after the events behind the ones that are in it."""
    while True:
        target = stream_target(loaded.stream, (("offset", loaded.offset),))
        try:
            answer = yield from exchange(settings, Request("GET", target), Kind.READ)
        except StreamNotFoundError:
            if loaded.offset != START:
                raise
            return loaded
        response = answer.response
        following = response.headers.get("stream-next-offset")
        last = response.integer("stream-version")
        if following is None or last is None:
            raise ProtocolError("the answer to a read has no Stream-Next-Offset or Stream-Version")
        messages = _MESSAGES(response.body) if response.body else []
        first = last - len(messages) + 1
        if loaded.offset == START and first > 0 and not _is_opening(messages):
            base = yield from read_base(settings, type(loaded.state), loaded.stream)
            if base is not None and base.version >= first:
                loaded = base  # events were dropped between the two reads
                continue
            loaded = base or loaded
        loaded = fold(codec, loaded, messages, last, following)
        if response.is_true("stream-up-to-date") or response.is_true("stream-closed"):
            return loaded
        if not messages:
            return loaded


def _is_opening(messages: list[Any]) -> bool:
    """Whether messages begin with the state that a new period was opened with."""
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("name") == OPENED


def fold(
    codec: Codec, loaded: Loaded[EntityT], messages: list[Any], last: int, offset: str
) -> Loaded[EntityT]:
    """The state after messages, of which the last one has the version `last`."""
    state = loaded.state
    for index, message in enumerate(messages):
        place = Place(loaded.stream, last - len(messages) + 1 + index)
        state = folded(codec, state, message, place)
    return msgspec.structs.replace(loaded, state=state, version=last, offset=offset)


def folded(codec: Codec, state: EntityT, message: Any, place: Place) -> EntityT:
    """The state after one message; the books of a stream may begin with a state."""
    found = envelope(message, place)
    if found.name == OPENED:
        try:
            opened: EntityT = from_data(found.data["state"], type(state))
        except (msgspec.ValidationError, LookupError, TypeError) as error:
            raise invalid(
                f"{OPENED} has no state of {type(state).__name__}: {error}", place
            ) from None
        return opened
    if found.name.startswith("$"):
        return state
    return state.__entity__.apply(state, codec.decode(found, place))


def load_as_of(
    settings: ClientSettings,
    codec: Codec,
    kind: type[EntityT],
    entity_id: str,
    as_of: datetime | int,
) -> Operation[Loaded[EntityT]]:
    """An entity as it stood at a time, or right after the event at a position of the log."""
    if not isinstance(as_of, int):
        require_time(as_of)
    path = kind.__entity__.path_of(entity_id)
    return (yield from past_of(settings, codec, kind, path, as_of)).loaded


class Past(NamedTuple):
    """An entity as it stood, and the last of its events then."""

    loaded: Loaded[Any]
    position: int
    timestamp_ms: int


def past_of(
    settings: ClientSettings,
    codec: Codec,
    kind: type[EntityT],
    path: str,
    as_of: datetime | int,
) -> Operation[Past]:
    """An entity as it stood; what its base stands for is known from the base's last event on."""
    past = Past(Loaded(state=kind(), stream=path), -1, 0)
    base = yield from _base_of(settings, path)
    if base is not None and _is_before(base, as_of):
        past = Past(_based(kind, path, base), base.position, base.timestamp_ms)
    at = past.position
    if isinstance(as_of, int):
        query = Query(settings, codec, stream=path, after=at, before=max(as_of, at) + 1)
    else:
        query = Query(settings, codec, stream=path, after=at, created_before=as_of)
    while (page := (yield from query.next())) is not None:
        for event in page:
            loaded = past.loaded
            place = Place(path, event.version, event.position)
            if isinstance(event.data, Event):
                state = kind.__entity__.apply(loaded.state, event.data)
            else:
                message = {"name": event.name, "data": event.data, "schema": event.schema}
                state = folded(codec, loaded.state, message, place)
            loaded = msgspec.structs.replace(loaded, state=state, version=event.version)
            past = Past(loaded, event.position, event.timestamp_ms or 0)
    return past


def _is_before(base: Snapshot, as_of: datetime | int) -> bool:
    if isinstance(as_of, int):
        return base.position <= as_of
    return base.timestamp_ms < as_of.timestamp() * 1000


# Snapshots


def snapshot_path(path: str) -> str:
    """The stream that holds the snapshot of a stream."""
    return SNAPSHOTS + path


def is_due(loaded: Loaded[Any], every: int | None) -> bool:
    """Whether so many events have happened since the last snapshot."""
    return every is not None and loaded.version - loaded.snapshot >= every


def write_snapshot(settings: ClientSettings, loaded: Loaded[Any]) -> Operation[None]:
    """Store the state beside its stream; an older snapshot is dropped by its retention."""
    kind = loaded.state.__entity__
    path = snapshot_path(loaded.stream)
    data = Snapshot(
        entity=kind.name,
        snapshot=kind.snapshot,
        version=loaded.version,
        offset=loaded.offset,
        state=state_data(loaded),
    )
    body = operations.encode_messages([{"name": "$snapshot", "data": data}], JSON)
    try:
        yield from operations.append(settings, path, body, JSON, Condition())
    except StreamNotFoundError:
        yield from make_beside(settings, path)
        yield from operations.append(settings, path, body, JSON, Condition())


def state_data(loaded: Loaded[Any]) -> Any:
    """The state as it is stored; raises `EventInvalidError` if it could not be read again."""
    try:
        return as_data(loaded.state)
    except ENCODING_FAILURES as error:
        name = loaded.state.__entity__.name
        reason = f"the state of {name} cannot be stored: {error}"
        raise invalid(reason, Place(loaded.stream, loaded.version)) from None


def make_beside(settings: ClientSettings, path: str) -> Operation[None]:
    """Make a stream that keeps one message."""
    headers = (("Content-Type", JSON), ("Stream-Retention-Messages", "1"))
    yield from exchange(settings, Request("PUT", stream_target(path), headers), Kind.WRITE)


def base_path(path: str) -> str:
    """The stream that holds what a stream began with, once a windowed close has cut it."""
    return BASES + path


def read_base(
    settings: ClientSettings, kind: type[EntityT], path: str
) -> Operation[Loaded[EntityT] | None]:
    """The state that a stream goes on from; None: its events are all there are."""
    base = yield from _base_of(settings, path)
    return None if base is None else _based(kind, path, base)


def _base_of(settings: ClientSettings, path: str) -> Operation[Snapshot | None]:
    target = stream_target(base_path(path), (("offset", START),))
    try:
        answer = yield from exchange(settings, Request("GET", target), Kind.READ)
    except (StreamNotFoundError, StreamDeletedError):
        return None
    messages = _MESSAGES(answer.response.body) if answer.response.body else []
    try:
        return msgspec.convert(messages[-1]["data"], Snapshot) if messages else None
    except (msgspec.ValidationError, LookupError, TypeError) as error:
        raise invalid(f"the base is none: {error}", Place(base_path(path), None)) from None


def _based(kind: type[EntityT], path: str, base: Snapshot) -> Loaded[EntityT]:
    """A base as a state. It is all that is left of its events, so it must fit the class."""
    try:
        state = from_data(base.state, kind)
    except msgspec.ValidationError as error:
        reason = f"the base has no state of {kind.__name__}: {error}"
        raise invalid(reason, Place(base_path(path), None)) from None
    return Loaded(state=state, stream=path, version=base.version, offset=base.offset)


def _from_snapshot(
    settings: ClientSettings, kind: type[EntityT], path: str
) -> Operation[Loaded[EntityT] | None]:
    target = stream_target(snapshot_path(path), (("offset", START),))
    try:
        answer = yield from exchange(settings, Request("GET", target), Kind.READ)
    except (StreamNotFoundError, StreamDeletedError):
        return None
    messages = _MESSAGES(answer.response.body) if answer.response.body else []
    for message in reversed(messages):
        found = _read_snapshot(kind, path, message)
        if found is not None:
            return found
    return None


def _read_snapshot(kind: type[EntityT], path: str, message: Any) -> Loaded[EntityT] | None:
    """A snapshot as a state; None for one of another class or fold, or that does not fit."""
    try:
        found = msgspec.convert(message["data"], Snapshot)
        if (found.entity, found.snapshot) != (kind.__entity__.name, kind.__entity__.snapshot):
            return None
        state = from_data(found.state, kind)
    except (msgspec.ValidationError, LookupError, TypeError):
        return None
    return Loaded(
        state=state,
        stream=path,
        version=found.version,
        offset=found.offset,
        snapshot=found.version,
    )
