"""Shared rows: `AsyncResources` over the rules of `fencepost.coordination.rules.resources`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

from fencepost.client.aio.connections import AsyncStop
from fencepost.client.aio.streams import AsyncStream
from fencepost.coordination.rules.checks import check_stream
from fencepost.coordination.rules.resources import RETRIES, OnConflict, Resourcing, Row

T = TypeVar("T")


class AsyncResources(Generic[T]):
    """Rows of one type that many actors update without losing an update.

    Args:
        stream: The JSON stream that all actors share.
        type: What the rows are called in their messages.
        kind: What values are: a msgspec Struct, a dataclass, or anything else that msgspec converts
            an object to. Without it they are dicts. Neither has a field `epoch`, `version` or
            `override`: `Row` has them.
    """

    @overload
    def __init__(self: AsyncResources[dict[str, Any]], stream: AsyncStream, type: str) -> None: ...

    @overload
    def __init__(self, stream: AsyncStream, type: str, kind: type[T]) -> None: ...

    def __init__(self, stream: AsyncStream, type: str, kind: type[T] | None = None) -> None:
        check_stream(stream, AsyncStream)
        self._driver = stream._driver
        self._core = Resourcing(stream._settings, stream.path, type, kind)
        self._following: WeakSet[AsyncStop] = WeakSet()
        self._turns: dict[str, asyncio.Lock] = {}

    async def get(self, key: str) -> Row[T] | None:
        """The row as it is now; None when there is none.

        Raises `RowUnreadableError` when what stands there is no message about the row.
        """
        await self._driver.run(self._core.refresh())
        return self._core.get(key)

    def known(self, key: str) -> Row[T] | None:
        """The row as it was when the stream was last read; asks nothing."""
        return self._core.get(key)

    async def rows(self) -> Iterator[Row[T]]:
        """Every row as it is now; those that cannot be read are left out."""
        await self._driver.run(self._core.refresh())
        return self._core.rows()

    async def refresh(self) -> None:
        """Read what others have written since the last time."""
        await self._driver.run(self._core.refresh())

    async def follow(self) -> AsyncIterator[Row[T | None]]:
        """Every change from here on, once the rows have it; the value of a deleted row is None.

        It ends when `close` of these rows or of the client is called, also from elsewhere.
        """
        changes, stop = self._core.changes(), self._driver.stop_of(None)
        self._following.add(stop)
        changes.stopped = stop.is_over
        while not stop.is_over():
            for row in await self._driver.run(self._core.next(changes), stop):
                yield row

    async def close(self) -> None:
        """End every `follow` of these rows, also one that waits elsewhere, at once."""
        for stop in list(self._following):
            stop.set()

    async def update(
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
        async with self._turn(key):
            return await self._driver.run(self._core.update(key, mutate, retries, on_conflict))

    async def delete(
        self, key: str, *, retries: int = RETRIES, on_conflict: OnConflict[T] | None = None
    ) -> None:
        """Remove a row, whatever its value; its versions go on if it comes back."""
        async with self._turn(key):
            await self._driver.run(self._core.delete(key, retries, on_conflict))

    async def settle(self, key: str) -> bool | None:
        """Whether an update that raised `OutcomeUnknownError` is stored; None: there was none."""
        async with self._turn(key):
            return await self._driver.run(self._core.settle(key))

    def _turn(self, key: str) -> asyncio.Lock:
        return self._turns.setdefault(key, asyncio.Lock())
