# Generated from src/fencepost/coordination/aio/resources.py by `just twins`: change that file.
"""Shared rows: `Resources` over the rules of `fencepost.coordination.rules.resources`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

from fencepost.client.sync.connections import Stop
from fencepost.client.sync.streams import Stream
from fencepost.coordination.rules.checks import check_stream
from fencepost.coordination.rules.resources import RETRIES, OnConflict, Resourcing, Row

T = TypeVar("T")


class Resources(Generic[T]):
    """Rows of one type that many actors update without losing an update.

    Args:
        stream: The JSON stream that all actors share.
        type: What the rows are called in their messages.
        kind: What values are: a msgspec Struct, a dataclass, or anything else that msgspec converts
            an object to. Without it they are dicts. Neither has a field `epoch`, `version` or
            `override`: `Row` has them.
    """

    @overload
    def __init__(self: Resources[dict[str, Any]], stream: Stream, type: str) -> None: ...

    @overload
    def __init__(self, stream: Stream, type: str, kind: type[T]) -> None: ...

    def __init__(self, stream: Stream, type: str, kind: type[T] | None = None) -> None:
        check_stream(stream, Stream)
        self._driver = stream._driver
        self._core = Resourcing(stream._settings, stream.path, type, kind)
        self._following: WeakSet[Stop] = WeakSet()
        self._turns: dict[str, threading.Lock] = {}

    def get(self, key: str) -> Row[T] | None:
        """The row as it is now; None when there is none.

        Raises `RowUnreadableError` when what stands there is no message about the row.
        """
        self._driver.run(self._core.refresh())
        return self._core.get(key)

    def known(self, key: str) -> Row[T] | None:
        """The row as it was when the stream was last read; asks nothing."""
        return self._core.get(key)

    def rows(self) -> Iterator[Row[T]]:
        """Every row as it is now; those that cannot be read are left out."""
        self._driver.run(self._core.refresh())
        return self._core.rows()

    def refresh(self) -> None:
        """Read what others have written since the last time."""
        self._driver.run(self._core.refresh())

    def follow(self) -> Iterator[Row[T | None]]:
        """Every change from here on, once the rows have it; the value of a deleted row is None.

        It ends when `close` of these rows or of the client is called, also from elsewhere.
        """
        changes, stop = self._core.changes(), self._driver.stop_of(None)
        self._following.add(stop)
        changes.stopped = stop.is_over
        while not stop.is_over():
            yield from self._driver.run(self._core.next(changes), stop)

    def close(self) -> None:
        """End every `follow` of these rows, also one that waits elsewhere, at once."""
        for stop in list(self._following):
            stop.set()

    def update(
        self,
        key: str,
        mutate: Callable[[T | None], T],
        *,
        retries: int = RETRIES,
        on_conflict: OnConflict[T] | None = None,
    ) -> Row[T]:
        """Write what `mutate` makes of the value (None: there is no row); the row it became.

        When others were first it reads again and, unless `on_conflict` answers otherwise, calls
        `mutate` again, so `mutate` does nothing but compute. Without others it is one request.

        Updates of a row through one object wait for each other: only what others write is a
        conflict.

        Raises `UpdateContendedError` after `retries` repetitions and `UpdateAbortedError` when the
        handler says so; nothing was stored then.
        """
        with self._turn(key):
            return self._driver.run(self._core.update(key, mutate, retries, on_conflict))

    def delete(
        self, key: str, *, retries: int = RETRIES, on_conflict: OnConflict[T] | None = None
    ) -> None:
        """Remove a row, whatever its value; its versions go on if it comes back."""
        with self._turn(key):
            self._driver.run(self._core.delete(key, retries, on_conflict))

    def settle(self, key: str) -> bool | None:
        """Whether an update that raised `OutcomeUnknownError` is stored; None: there was none."""
        with self._turn(key):
            return self._driver.run(self._core.settle(key))

    def _turn(self, key: str) -> threading.Lock:
        return self._turns.setdefault(key, threading.Lock())
