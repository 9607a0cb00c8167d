"""A stream of State messages as rows in memory: the async class over `rows.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from fencepost.client.aio.connections import AsyncStop
from fencepost.client.aio.streams import AsyncStream
from fencepost.client.reading import Live
from fencepost.client.state.messages import Change, Control
from fencepost.client.state.rows import Materializing, View


class AsyncMaterialized(View):
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
        self._core = Materializing(stream._settings, stream.path, types, offset, strict=strict)
        self._stop: AsyncStop | None = None

    async def refresh(self) -> Self:
        """Take in everything that the stream holds now."""
        await self._driver.run(self._core.refresh())
        return self

    async def follow(
        self, *, live: Live = "auto", patience: float | None = None
    ) -> AsyncIterator[Change | Control]:
        """Every message from here on, once the rows have it, until the stream is closed.

        Messages that came together are all in the rows before the first of them is given out. It
        also ends when `close` of these rows or of the client is called, also from elsewhere.
        """
        stop = self._stop = self._driver.stop_of(None)
        core = self._core
        core.stopped = stop.is_over
        try:
            while (message := await self._driver.run(core.next(live, patience), stop)) is not None:
                yield message
        finally:
            await self._driver.run(core.shut())

    async def close(self) -> None:
        """End `follow`, also when it waits elsewhere, at once. The rows stay as they are."""
        if self._stop is not None:
            self._stop.set()
