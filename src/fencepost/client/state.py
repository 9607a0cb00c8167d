"""State over a stream: messages that say what changed, and the rows that come of them.

The format is the public State Protocol: a change names a type and a key and what became of them, a
control message says something about the stream itself. `insert`, `update`, `upsert`, `delete` and
the three controls build messages that are valid; `parse` checks one that came from elsewhere.
`Materialized` and `AsyncMaterialized` keep the rows in memory; both run the same `Rows` and
`Materializing`, which do no I/O.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar, overload

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fencepost.client.aio import AsyncStream
from fencepost.client.effects import Operation
from fencepost.client.errors import FencepostError
from fencepost.client.reading import START, Follower, Live, Reader
from fencepost.client.results import Batch
from fencepost.client.settings import ClientSettings
from fencepost.client.sync import Stream

T = TypeVar("T")
log = logging.getLogger(__name__)

Name = Annotated[str, Meta(min_length=1)]
Instant = Annotated[datetime, Meta(tz=True)]


class StateMessageError(FencepostError):
    """This is no message of the State Protocol. Build messages with the functions of this module.

    Raised while following only if `strict`; otherwise such a message is counted and passed over.
    """


class ChangeHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, in which transaction, and when, if the writer says so."""

    operation: Literal["insert", "update", "upsert", "delete"]
    txid: Name | UnsetType = UNSET
    timestamp: Instant | UnsetType = UNSET


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the entity `key` of `type`. Append it to a JSON stream as it is."""

    type: Name
    key: Name
    value: Any = UNSET
    old_value: Any = UNSET
    headers: ChangeHeaders

    @property
    def operation(self) -> str:
        return self.headers.operation


class ControlHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """Which signal, and the offset that it is about."""

    control: Literal["snapshot-start", "snapshot-end", "reset"]
    offset: Name | UnsetType = UNSET


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A signal about the stream rather than about an entity."""

    headers: ControlHeaders

    @property
    def control(self) -> str:
        return self.headers.control


def insert(
    type: str,
    key: str,
    value: Any,
    *,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity begins with this value."""
    return _change("insert", type, key, value, None, txid, timestamp)


def update(
    type: str,
    key: str,
    value: Any,
    *,
    old_value: Any = None,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity has this value now; `old_value` is for readers that want to compare."""
    return _change("update", type, key, value, old_value, txid, timestamp)


def upsert(
    type: str,
    key: str,
    value: Any,
    *,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity has this value now, whether or not it was there before.

    The npm package understands it; the written protocol knows insert, update and delete only.
    """
    return _change("upsert", type, key, value, None, txid, timestamp)


def delete(
    type: str,
    key: str,
    *,
    old_value: Any = None,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity is gone."""
    return _change("delete", type, key, UNSET, old_value, txid, timestamp)


def snapshot_start(*, offset: str | None = None) -> Control:
    """What follows, up to `snapshot_end`, is everything there is."""
    return _control("snapshot-start", offset)


def snapshot_end(*, offset: str | None = None) -> Control:
    """The snapshot is complete: what did not come in it is gone."""
    return _control("snapshot-end", offset)


def reset(*, offset: str | None = None) -> Control:
    """Forget everything, and begin again at `offset` (here)."""
    return _control("reset", offset)


def parse(message: Any) -> Change | Control:
    """The message that a JSON value stands for; raises `StateMessageError` if it is none."""
    headers = message.get("headers") if isinstance(message, dict) else None
    controls = isinstance(headers, dict) and "control" in headers
    parsed: Change | Control
    try:
        parsed = msgspec.convert(message, Control) if controls else msgspec.convert(message, Change)
    except msgspec.ValidationError as error:
        raise StateMessageError(f"no message of the State Protocol: {error}") from None
    if isinstance(parsed, Change) and parsed.value is UNSET and parsed.operation != "delete":
        raise StateMessageError(f"an {parsed.operation} of {parsed.type}/{parsed.key} has no value")
    return parsed


def _change(
    operation: str,
    type: str,
    key: str,
    value: Any,
    old_value: Any,
    txid: str | None,
    timestamp: datetime | None,
) -> Change:
    headers = {"operation": operation, "txid": txid, "timestamp": timestamp}
    given = {name: one for name, one in headers.items() if one is not None}
    message: dict[str, Any] = {"type": type, "key": key, "headers": given}
    if value is not UNSET:
        message["value"] = value
    if old_value is not None:
        message["old_value"] = old_value
    parsed = parse(message)
    assert isinstance(parsed, Change)
    return parsed


def _control(control: str, offset: str | None) -> Control:
    headers = {"control": control} if offset is None else {"control": control, "offset": offset}
    parsed = parse({"headers": headers})
    assert isinstance(parsed, Control)
    return parsed


class Rows:
    """The rows that messages leave behind, by type and key; no I/O.

    During a snapshot changes show at once, and at its end every row that did not come in it goes:
    a snapshot whose writer died half way hides nothing.
    """

    def __init__(self, types: Mapping[str, Any] | None = None) -> None:
        self._types = dict(types or {})
        self._rows: dict[str, dict[str, Any]] = {}
        self._seen: set[tuple[str, str]] | None = None

    def apply(self, message: Change | Control) -> None:
        """Take one message in; raises `StateMessageError` when its value is not of its type."""
        if isinstance(message, Control):
            self._signal(message.control)
            return
        if message.operation == "delete":
            self._rows.get(message.type, {}).pop(message.key, None)
        else:
            value = self._typed(message)
            self._rows.setdefault(message.type, {})[message.key] = value
            if self._seen is not None:
                self._seen.add((message.type, message.key))

    def of(self, type: str) -> Mapping[str, Any]:
        """The rows of a type as they are now, read-only; they change with what comes."""
        return MappingProxyType(self._rows.setdefault(type, {}))

    @property
    def types(self) -> list[str]:
        """The types that have rows."""
        return [name for name, rows in self._rows.items() if rows]

    def _typed(self, message: Change) -> Any:
        kind = self._types.get(message.type)
        if kind is None:
            return message.value
        try:
            return msgspec.convert(message.value, kind)
        except msgspec.ValidationError as error:
            raise StateMessageError(
                f"the value of {message.type}/{message.key} is no {kind.__name__}: {error}"
            ) from None

    def _signal(self, control: str) -> None:
        if control == "snapshot-end" and self._seen is not None:
            for type, rows in self._rows.items():
                for key in [key for key in rows if (type, key) not in self._seen]:
                    del rows[key]
        if control == "reset":
            for rows in self._rows.values():
                rows.clear()
        self._seen = set() if control == "snapshot-start" else None


class Materializing:
    """Rows, and how far in the stream they are: what sync and async share."""

    def __init__(
        self,
        settings: ClientSettings,
        path: str,
        types: Mapping[str, Any] | None,
        offset: str | None,
        *,
        strict: bool,
    ) -> None:
        self._settings = settings
        self._path = path
        self._strict = strict
        self._follower: Follower[Any] | None = None
        self._taken: deque[Change | Control] = deque()
        self._replay_until = ""
        self.rows = Rows(types)
        self.offset = self._began = offset or START
        self.invalid = 0

    def refresh(self) -> Operation[None]:
        """Take in everything up to the tail."""
        yield from self.shut()
        reader: Reader[Any] = Reader(self._settings, self._path, self.offset, None)
        while (batch := (yield from reader.next())) is not None:
            for _message in self._take(batch):
                pass
            if self.offset != reader.offset:
                reader = Reader(self._settings, self._path, self.offset, None)
        self.offset = reader.offset

    def next(self, live: Live, patience: float | None) -> Operation[Change | Control | None]:
        """The next message, which the rows have in them; None once the stream is closed."""
        while not self._taken:
            if self._follower is None:
                self._follower = Follower(
                    self._settings, self._path, self.offset, None, live=live, patience=patience
                )
            batch = yield from self._follower.next()
            if batch is None:
                return None
            self._taken.extend(self._take(batch))
            if self.offset != batch.next_offset:
                yield from self.shut()  # a reset sent us elsewhere
        return self._taken.popleft()

    def shut(self) -> Operation[None]:
        """Give up the connection that `next` has open."""
        follower, self._follower = self._follower, None
        if follower is not None:
            yield from follower.shut()

    def _take(self, batch: Batch[Any]) -> list[Change | Control]:
        """Apply a batch and move behind it, or to where a reset in it says to begin again."""
        taken: list[Change | Control] = []
        again: str | None = None
        for raw in batch.messages:
            try:
                message = parse(raw)
                restart = _restart(message)
                if restart is not None and self._is_done(restart, batch):
                    continue
                self.rows.apply(message)
            except StateMessageError as error:
                if self._strict:
                    raise
                self.invalid += 1
                log.warning("a message of %s is passed over: %s", self._path, error)
                continue
            taken.append(message)
            again = restart or again
        self.offset = batch.next_offset
        if again is not None:
            self.rows.apply(reset())
            self.offset = self._began = again
            self._replay_until = batch.next_offset
        return taken

    def _is_done(self, restart: str, batch: Batch[Any]) -> bool:
        """Whether a reset was obeyed already: it is met again on the way from where it sent us."""
        return restart == self._began or batch.next_offset <= self._replay_until


def _restart(message: Change | Control) -> str | None:
    """Where a reset says to begin again."""
    if isinstance(message, Change) or message.control != "reset":
        return None
    return None if message.headers.offset is UNSET else message.headers.offset


class _View:
    """What a materialization shows, without I/O."""

    _core: Materializing

    @property
    def offset(self) -> str:
        """Up to where the rows are; give it to `follow` of a stream to see what comes after."""
        return self._core.offset

    @property
    def invalid(self) -> int:
        """Messages that were passed over because they are none."""
        return self._core.invalid

    @property
    def types(self) -> list[str]:
        """The types that have rows."""
        return self._core.rows.types

    @overload
    def rows(self, type: str) -> Mapping[str, Any]: ...

    @overload
    def rows(self, type: str, kind: type[T]) -> Mapping[str, T]: ...

    def rows(self, type: str, kind: Any = None) -> Mapping[str, Any]:
        """The rows of a type by key; `kind` only tells a type checker what they are."""
        del kind
        return self._core.rows.of(type)

    @overload
    def get(self, type: str, key: str) -> Any: ...

    @overload
    def get(self, type: str, key: str, kind: type[T]) -> T | None: ...

    def get(self, type: str, key: str, kind: Any = None) -> Any:
        """The value of a row; None when there is none."""
        del kind
        return self._core.rows.of(type).get(key)


class Materialized(_View):
    """The rows of a stream in memory. `refresh` catches up; `follow` goes on as changes come.

    Args:
        stream: A JSON stream of State messages.
        types: What values are, by the type of their messages: msgspec Structs, dataclasses or
            anything else that msgspec can convert to. Other types stay plain JSON values.
        offset: Where to begin, when not at the beginning.
        strict: Raise `StateMessageError` for what is no message instead of passing it over.
    """

    def __init__(
        self,
        stream: Stream,
        types: Mapping[str, Any] | None = None,
        *,
        offset: str | None = None,
        strict: bool = False,
    ) -> None:
        self._driver = stream._driver
        self._core = Materializing(
            stream._driver.settings, stream.path, types, offset, strict=strict
        )

    def refresh(self) -> Self:
        """Take in everything that the stream holds now."""
        self._driver.run(self._core.refresh())
        return self

    def follow(
        self, *, live: Live = "auto", patience: float | None = None
    ) -> Iterator[Change | Control]:
        """Every message from here on, once the rows have it, until the stream is closed.

        Messages that came together are all in the rows before the first of them is given out.
        """
        try:
            while (message := self._driver.run(self._core.next(live, patience))) is not None:
                yield message
        finally:
            self._driver.run(self._core.shut())


class AsyncMaterialized(_View):
    """The rows of a stream in memory. `refresh` catches up; `follow` goes on as changes come.

    Args:
        stream: A JSON stream of State messages.
        types: What values are, by the type of their messages: msgspec Structs, dataclasses or
            anything else that msgspec can convert to. Other types stay plain JSON values.
        offset: Where to begin, when not at the beginning.
        strict: Raise `StateMessageError` for what is no message instead of passing it over.
    """

    def __init__(
        self,
        stream: AsyncStream,
        types: Mapping[str, Any] | None = None,
        *,
        offset: str | None = None,
        strict: bool = False,
    ) -> None:
        self._driver = stream._driver
        self._core = Materializing(
            stream._driver.settings, stream.path, types, offset, strict=strict
        )

    async def refresh(self) -> Self:
        """Take in everything that the stream holds now."""
        await self._driver.run(self._core.refresh())
        return self

    async def follow(
        self, *, live: Live = "auto", patience: float | None = None
    ) -> AsyncIterator[Change | Control]:
        """Every message from here on, once the rows have it, until the stream is closed.

        Messages that came together are all in the rows before the first of them is given out.
        """
        try:
            while (message := await self._driver.run(self._core.next(live, patience))) is not None:
                yield message
        finally:
            await self._driver.run(self._core.shut())
