"""What the async client iterates over: a stream's messages, a list's pages, the log's entries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Generic, Self, TypeVar

from fencepost.client import operations
from fencepost.client.aio.closing import AsyncClosing
from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.decoding import array_inside, text_of
from fencepost.client.errors import require
from fencepost.client.reading import Follower, LogReader, Paged, Reader
from fencepost.client.results import Batch, LogEntry, LogPage

T = TypeVar("T")


class AsyncReading(AsyncClosing, Generic[T]):
    """A read under way: iterate over it for messages, or its `batches()`."""

    def __init__(
        self,
        driver: AsyncDriver,
        cursor: Reader[T] | Follower[T],
        timeout: float | None = None,
    ) -> None:
        self._driver = driver
        self._cursor = cursor
        require(timeout is None or timeout >= 0, "timeout is not negative")
        self._stop = driver.stop_of(timeout)
        self._messages: Iterator[T] = iter(())
        self._batch: Batch[T] | None = None
        self._given = 0
        self._is_waiting = False
        cursor.stopped = self._stop.is_over

    @property
    def offset(self) -> str:
        """Where to go on so that nothing is missed: behind the last batch that was taken whole."""
        return self._cursor.place if self._batch is None else self._batch.offset

    @property
    def content_type(self) -> str | None:
        """The stream's type, once something was read."""
        return self._cursor.content_type

    @property
    def up_to_date(self) -> bool:
        """Whether everything that the stream was known to hold was given out."""
        return self._is_at_end and self._cursor.up_to_date

    @property
    def closed(self) -> bool:
        """Whether everything was given out and the stream is closed: nothing will follow."""
        return self._is_at_end and self._cursor.closed

    @property
    def _is_at_end(self) -> bool:
        taken = self._batch is None or self._given == len(self._batch.messages)
        return taken and self._cursor.place == self._cursor.offset

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            for message in self._messages:
                self._given += 1
                return message
            self._batch = None
            batch = await self._next()
            if batch is None:
                raise StopAsyncIteration
            self._messages = iter(batch.messages)

    async def batches(self) -> AsyncIterator[Batch[T]]:
        """Messages as they came together, each batch with the offset behind it."""
        while (batch := await self._next()) is not None:
            self._given = len(batch.messages)
            yield batch
            self._batch = None

    async def bytes(self) -> bytes:
        """Everything as it came, in one piece; of a JSON stream, an array."""
        self._cursor.leave_undecoded()
        pieces = [batch async for batch in self.batches()]
        if operations.is_json(self.content_type or ""):
            inner = (array_inside(piece.data) for piece in pieces)
            return b"[%b]" % b",".join(filter(None, inner))
        return b"".join(piece.data for piece in pieces)

    async def text(self) -> str:
        """Everything in one text."""
        data = await self.bytes()
        return text_of(data)

    async def messages(self) -> list[T]:
        """Every message in one list."""
        return [message async for message in self]

    async def close(self) -> None:
        """Stop reading. A caller that waits for the next message elsewhere gets the end at once."""
        self._stop.set()
        if not self._is_waiting:
            await self._shut()

    async def _next(self) -> Batch[T] | None:
        self._is_waiting = True
        try:
            batch = await self._driver.run(self._cursor.next(), self._stop)
        finally:
            self._is_waiting = False
        self._batch, self._given = batch, 0
        if batch is None:
            await self._shut()
        return batch

    async def _shut(self) -> None:
        if isinstance(self._cursor, Follower):
            await self._driver.run(self._cursor.shut())


class AsyncListing(Generic[T]):
    """A list of the server that is fetched page by page while it is iterated."""

    def __init__(self, driver: AsyncDriver, pages: Paged[T]) -> None:
        self._driver = driver
        self._pages = pages
        self._entries: Iterator[T] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            for entry in self._entries:
                return entry
            page = await self._driver.run(self._pages.next())
            if page is None:
                raise StopAsyncIteration
            self._entries = iter(page)


class AsyncLogReading(AsyncClosing):
    """The log under way: iterate over it for entries, or its `pages()`.

    `after` is where to go on: the last position of the last page whose entries were all taken. Of a
    reading with the newest first it is the `until` to go on with.
    """

    def __init__(self, driver: AsyncDriver, reader: LogReader) -> None:
        self._driver = driver
        self._reader = reader
        self._entries: Iterator[LogEntry] = iter(())
        self._next = reader.after
        self._stop = driver.stop_of(None)
        self.after = reader.after
        reader.stopped = self._stop.is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LogEntry:
        while True:
            for entry in self._entries:
                return entry
            self.after = self._next
            page = await self._driver.run(self._reader.next(), self._stop)
            if page is None:
                raise StopAsyncIteration
            self._entries = iter(page.entries)
            self._next = page.next

    async def pages(self) -> AsyncIterator[LogPage]:
        """Entries as they came together, with where to go on and where the log ends."""
        while (page := await self._driver.run(self._reader.next(), self._stop)) is not None:
            yield page
            self.after = page.next

    async def close(self) -> None:
        """Stop reading. A caller that waits for the next entry elsewhere gets the end at once."""
        self._stop.set()
