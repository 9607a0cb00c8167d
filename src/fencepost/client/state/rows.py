"""Rows made of State messages, and how far in their stream they are: no I/O."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

import msgspec
from msgspec import UNSET

from fencepost.client.effects import Operation
from fencepost.client.reading import START, Follower, Live, Reader
from fencepost.client.results import Batch
from fencepost.client.settings import ClientSettings
from fencepost.client.state.messages import Change, Control, StateMessageError, parse, reset

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        self.stopped: Callable[[], bool] = lambda: False
        """Asked before each request of `next`: whether the user wants no more of them."""

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
        """The next message, which the rows have; None once closed or stopped."""
        while not self._taken:
            if self._follower is None:
                self._follower = Follower(
                    self._settings, self._path, self.offset, None, live=live, patience=patience
                )
                self._follower.stopped = self.stopped
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


class View:
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
