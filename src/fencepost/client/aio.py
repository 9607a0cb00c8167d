"""The async client: thin classes over the operations of the core.

Every method builds an operation and runs it. Its twin in `sync.py` has the same names and
signatures; a test compares them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, overload

from fencepost.client import operations, writers
from fencepost.client.arrow_log import ArrowPage, arrow_page
from fencepost.client.async_producer import AsyncIdempotentProducer
from fencepost.client.async_sockets import AsyncDriver
from fencepost.client.operations import (
    CommitAppend,
    Condition,
    Creation,
    Producing,
    WriterBatch,
    query_of,
)
from fencepost.client.producing import ProducerSettings
from fencepost.client.reading import Follower, Live, LogReader, Pages, Reader
from fencepost.client.results import (
    Appended,
    Batch,
    Committed,
    Head,
    KeyInfo,
    LogEntry,
    LogPage,
    Plan,
    ProducerInfo,
    Staged,
    StreamInfo,
    WriterInfo,
)
from fencepost.client.session import OnAck, OnError
from fencepost.client.settings import JSON, ClientSettings

T = TypeVar("T")


class AsyncClient:
    """A server, and the way to its streams. Make it with `fencepost.connect_async`."""

    def __init__(self, settings: ClientSettings) -> None:
        self._driver = AsyncDriver(settings)

    def stream(self, path: str, *, content_type: str = JSON) -> AsyncStream:
        """A stream by its path, without asking the server; JSON unless told otherwise."""
        return AsyncStream(self._driver, path, content_type)

    async def create(
        self,
        path: str,
        *,
        content_type: str = JSON,
        messages: Iterable[Any] = (),
        ttl_seconds: int | None = None,
        expires_at: datetime | str | None = None,
        closed: bool = False,
    ) -> AsyncStream:
        """Make a stream, perhaps with messages in it; fine if it exists as it would be made."""
        creation = Creation(
            content_type=content_type,
            ttl_seconds=ttl_seconds,
            expires_at=expires_at,
            closed=closed,
        )
        given = list(messages)
        body = operations.encode_messages(given, content_type) if given else b""
        await self._driver.run(operations.create(self._driver.settings, path, creation, body))
        return AsyncStream(self._driver, path, content_type)

    def streams(
        self, *, match: str | None = None, after: str | None = None
    ) -> AsyncListing[StreamInfo]:
        """The streams whose paths match a pattern (`orders/*`, `**`), in the order of paths."""
        return self._pages("streams", StreamInfo, {"match": match, "after": after})

    def producers(
        self, *, stream: str | None = None, match: str | None = None
    ) -> AsyncListing[ProducerInfo]:
        """The producers of streams that match `stream`, whose ids match `match`."""
        return self._pages("producers", ProducerInfo, {"stream": stream, "match": match})

    def keys(self, *, as_of: datetime | str | None = None) -> AsyncListing[KeyInfo]:
        """The idempotency keys the server remembers, for audits."""
        return self._pages("keys", KeyInfo, {"as_of": as_of})

    def writers(self, *, match: str | None = None) -> AsyncListing[WriterInfo]:
        """The writers whose names match a pattern, in the order of names."""
        return self._pages("writers", WriterInfo, {"match": match})

    async def open_writer(self, name: str, query: str, *, allow_new: bool = False) -> WriterInfo:
        """Begin a run of a writer, which ends every run before it, and learn how far it came.

        A name is bound to one query; with `allow_new` another one may take it over.
        """
        return await self._driver.run(
            writers.open_writer(self._driver.settings, name, query, allow_new=allow_new)
        )

    async def writer(self, name: str) -> WriterInfo:
        """A writer as it stands, without beginning a run."""
        return await self._driver.run(writers.find_writer(self._driver.settings, name))

    async def forget_writer(self, name: str) -> None:
        """Remove a writer: what it published stays, and the same batches may come again."""
        await self._driver.run(writers.forget_writer(self._driver.settings, name))

    async def commit(
        self,
        appends: Iterable[CommitAppend],
        *,
        key: str | None = None,
        writer: WriterBatch | None = None,
    ) -> Committed:
        """Several appends to several streams, all of them or none; as a writer's batch, once."""
        return await self._driver.run(
            operations.commit(self._driver.settings, appends, key, writer=writer)
        )

    async def stage(
        self,
        txn: str,
        part: str,
        messages: Iterable[Any],
        *,
        chunk: int = 0,
        content_type: str = JSON,
    ) -> Staged:
        """Upload a chunk of a part that a later commit makes visible; the same again is fine."""
        body = operations.encode_messages(messages, content_type)
        return await self._driver.run(
            operations.stage(self._driver.settings, txn, part, chunk, body, content_type)
        )

    async def unstage(self, txn: str, part: str) -> None:
        """Drop a part that no commit used; one that a commit used is refused."""
        await self._driver.run(writers.unstage(self._driver.settings, txn, part))

    def log(
        self,
        *,
        after: int | Literal["now"] = -1,
        until: int | None = None,
        streams: list[str] | None = None,
        match: str | list[str] | None = None,
        part: str | None = None,
        page_rows: int | None = None,
        follow: bool = False,
        skip_pruned: bool = False,
    ) -> AsyncLogReading:
        """Every message of every selected stream in one order; with `follow` it waits for more."""
        query = query_of(
            {
                "stream": streams,
                "match": match,
                "part": part,
                "limit": page_rows,
                "pruned": "skip" if skip_pruned else None,
            }
        )
        reader = LogReader(self._driver.settings, query, after=after, until=until, live=follow)
        return AsyncLogReading(self._driver, reader)

    async def log_arrow(
        self,
        *,
        after: int | Literal["now"] = -1,
        until: int | None = None,
        streams: list[str] | None = None,
        match: str | list[str] | None = None,
        part: str | None = None,
        page_rows: int | None = None,
        wait: bool = False,
        skip_pruned: bool = False,
    ) -> ArrowPage:
        """One page of the log as an Arrow IPC stream; with `wait`, as soon as there is news."""
        query = query_of(
            {
                "until": until,
                "stream": streams,
                "match": match,
                "part": part,
                "limit": page_rows,
                "pruned": "skip" if skip_pruned else None,
            }
        )
        return await self._driver.run(
            arrow_page(self._driver.settings, query, after=after, wait=wait)
        )

    async def log_head(self) -> int:
        """The newest position of the log; -1 when nothing was ever stored."""
        return await self._driver.run(operations.log_head(self._driver.settings))

    async def plan(
        self,
        *,
        after: int = -1,
        until: int | None = None,
        rows_max: int | None = None,
        bytes_max: int | None = None,
        parts: int | None = None,
        streams: list[str] | None = None,
        match: str | list[str] | None = None,
        part: str | None = None,
        at: datetime | str | int | None = None,
    ) -> Plan:
        """Where a read of the log bounded in rows or bytes ends, and how to split it evenly."""
        query = query_of(
            {
                "after": after,
                "until": until,
                "rows_max": rows_max,
                "bytes_max": bytes_max,
                "parts": parts,
                "stream": streams,
                "match": match,
                "part": part,
                "at": at,
            }
        )
        return await self._driver.run(operations.plan(self._driver.settings, query))

    async def close(self) -> None:
        """Hang up. Streams and readings of this client end with it."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _pages(self, name: str, kind: type[T], query: dict[str, Any]) -> AsyncListing[T]:
        settings = self._driver.settings
        pages = Pages(settings, f"/v1/{name}", name, kind, query_of(query))
        return AsyncListing(self._driver, pages)


class AsyncStream:
    """One stream of a server."""

    def __init__(self, driver: AsyncDriver, path: str, content_type: str) -> None:
        self._driver = driver
        self.path = path
        self.content_type = content_type

    def __repr__(self) -> str:
        return f"<AsyncStream {self.path!r} of {self.content_type}>"

    async def append(
        self,
        data: Any,
        *,
        close: bool = False,
        if_match: str | None = None,
        if_none_match: Literal["*"] | None = None,
        auto_create: bool = False,
        stream_seq: str | None = None,
        key: str | None = None,
        producer: Producing | None = None,
        producer_if: tuple[int, int] | None = None,
        strict: bool = False,
        retry: bool = True,
    ) -> Appended:
        """Store one message: any JSON value, or bytes or text where the stream is not JSON.

        It carries an Idempotency-Key of its own, so that a retry after a lost answer stores
        nothing twice. `retry=False` sends none: a lost answer is then `OutcomeUnknownError`.

        Args:
            close: Close the stream with this message, in one step.
            if_match: The offset where the stream must end, or `*`: it must exist.
            if_none_match: `*`: the stream must be empty or not exist; then it is made.
            auto_create: Make the stream if it does not exist.
            stream_seq: A text that must be greater than that of the append before.
            key: An Idempotency-Key of your own: the same key again gives the first answer again.
            producer: A producer's id, epoch and sequence number instead of a key.
            producer_if: The epoch and seq where the producer must be.
            strict: Refuse a duplicate of the producer that has other bytes.
        """
        body = operations.encode_message(data, self.content_type)
        condition = Condition(
            close=close,
            if_match=if_match,
            if_none_match=if_none_match,
            auto_create=auto_create,
            stream_seq=stream_seq,
            key=key,
            producer=producer,
            producer_if=producer_if,
            strict=strict,
        )
        return await self._append(body, condition, retry=retry)

    async def append_many(
        self,
        messages: Iterable[Any],
        *,
        close: bool = False,
        if_match: str | None = None,
        if_none_match: Literal["*"] | None = None,
        auto_create: bool = False,
        stream_seq: str | None = None,
        key: str | None = None,
        producer: Producing | None = None,
        producer_if: tuple[int, int] | None = None,
        strict: bool = False,
        retry: bool = True,
    ) -> Appended:
        """Store several messages in one step, all or none; the options are those of `append`."""
        body = operations.encode_messages(messages, self.content_type)
        condition = Condition(
            close=close,
            if_match=if_match,
            if_none_match=if_none_match,
            auto_create=auto_create,
            stream_seq=stream_seq,
            key=key,
            producer=producer,
            producer_if=producer_if,
            strict=strict,
        )
        return await self._append(body, condition, retry=retry)

    def producer(
        self,
        producer_id: str,
        *,
        epoch: int | None = None,
        seq: int | None = None,
        batch_bytes_max: int = 1 << 20,
        linger: float = 0.0,
        max_in_flight: int = 5,
        pending_bytes_max: int = 16 << 20,
        delivery_seconds_max: float = 120.0,
        on_ack: OnAck | None = None,
        on_error: OnError | None = None,
    ) -> AsyncIdempotentProducer:
        """A producer that stores every message exactly once, in order, through any failure.

        By default it opens the next epoch of `producer_id`: a predecessor is fenced, and its
        numbers cannot swallow a message of this one.

        Args:
            epoch: Open this epoch instead of finding the next one.
            seq: With `epoch`: go on behind this number, the last one that was acknowledged.
            batch_bytes_max: Size at which a batch is full.
            linger: Seconds that a batch may wait for more messages.
            max_in_flight: Batches that may be on their way at once.
            pending_bytes_max: Unacknowledged bytes at which `append` waits.
            delivery_seconds_max: How long nothing may be acknowledged before it gives up.
            on_ack: Called with the receipt of every stored batch.
            on_error: Called with the error and the batch, data included, that was not stored.
        """
        settings = self._driver.settings
        tuning = ProducerSettings(
            batch_bytes_max=batch_bytes_max,
            linger=linger,
            max_in_flight=max_in_flight,
            pending_bytes_max=pending_bytes_max,
            delivery_seconds_max=delivery_seconds_max,
            answer_seconds_max=settings.timeouts.answer,
            retries=settings.retries,
            renewable=settings.changes,
        )
        return AsyncIdempotentProducer(
            self._driver,
            self.path,
            self.content_type,
            producer_id,
            tuning,
            epoch=epoch,
            seq=seq,
            on_ack=on_ack,
            on_error=on_error,
        )

    @overload
    def read(self, *, offset: str | None = None) -> AsyncReading[Any]: ...

    @overload
    def read(self, *, offset: str | None = None, type: type[T]) -> AsyncReading[T]: ...

    def read(self, *, offset: str | None = None, type: Any = None) -> AsyncReading[Any]:
        """What the stream holds now, from `offset` (the beginning) to its tail.

        Iterating gives messages: JSON values (of `type`, if given), texts, or bytes in pieces.
        """
        reader: Reader[Any] = Reader(self._driver.settings, self.path, offset, type)
        return AsyncReading(self._driver, reader)

    @overload
    def follow(
        self,
        *,
        offset: str | None = None,
        live: Live = "auto",
        patience: float | None = None,
    ) -> AsyncReading[Any]: ...

    @overload
    def follow(
        self,
        *,
        offset: str | None = None,
        live: Live = "auto",
        patience: float | None = None,
        type: type[T],
    ) -> AsyncReading[T]: ...

    def follow(
        self,
        *,
        offset: str | None = None,
        live: Live = "auto",
        patience: float | None = None,
        type: Any = None,
    ) -> AsyncReading[Any]:
        """What the stream holds and what comes, until it is closed; `offset="now"` skips the past.

        It goes on by itself from where it was, through lost connections and restarts, for as long
        as it takes, or until the server was away for `patience` seconds.
        """
        follower: Follower[Any] = Follower(
            self._driver.settings, self.path, offset, type, live=live, patience=patience
        )
        return AsyncReading(self._driver, follower)

    async def head(self) -> Head:
        """What there is to know without reading: type, tail, closed, lifetime."""
        return await self._driver.run(operations.head(self._driver.settings, self.path))

    async def close(self) -> Appended:
        """Close the stream: readers see its end, writers are refused. Closing again is fine."""
        return await self._append(b"", Condition(close=True), retry=False)

    async def delete(self) -> None:
        """Remove the stream and its messages."""
        await self._driver.run(operations.delete(self._driver.settings, self.path))

    async def truncate(self, *, before: str) -> Head:
        """Drop what lies before an offset (`now`: all); offsets and versions go on."""
        return await self._driver.run(operations.truncate(self._driver.settings, self.path, before))

    async def fork(
        self,
        path: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        ttl_seconds: int | None = None,
        expires_at: datetime | str | None = None,
    ) -> AsyncStream:
        """A new stream at `path` that shares this one's past up to `offset` (the tail)."""
        creation = Creation(
            fork_of=self.path,
            fork_offset=offset,
            fork_sub_offset=sub_offset,
            ttl_seconds=ttl_seconds,
            expires_at=expires_at,
        )
        made = await self._driver.run(operations.create(self._driver.settings, path, creation))
        return AsyncStream(self._driver, path, made.content_type)

    async def _append(self, body: bytes, condition: Condition, *, retry: bool) -> Appended:
        return await self._driver.run(
            operations.append(
                self._driver.settings,
                self.path,
                body,
                self.content_type,
                condition,
                retry=retry,
            )
        )


class AsyncReading(Generic[T]):
    """A read under way: iterate over it for messages, or its `batches()`.

    `offset` is where to go on so that nothing is missed: behind the last batch whose messages were
    all taken.
    """

    def __init__(self, driver: AsyncDriver, cursor: Reader[T] | Follower[T]) -> None:
        self._driver = driver
        self._cursor = cursor
        self._messages: Iterator[T] = iter(())
        self._after = cursor.offset
        self.offset = cursor.offset

    @property
    def content_type(self) -> str | None:
        """The stream's type, once something was read."""
        return self._cursor.content_type

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            for message in self._messages:
                return message
            self.offset = self._after
            batch = await self._next()
            if batch is None:
                raise StopAsyncIteration
            self._messages = iter(batch.messages)
            self._after = batch.next_offset

    async def batches(self) -> AsyncIterator[Batch[T]]:
        """Messages as they came together, each batch with the offset behind it."""
        while (batch := await self._next()) is not None:
            yield batch
            self.offset = batch.next_offset

    async def bytes(self) -> bytes:
        """Everything as it came, in one piece; of a JSON stream, an array."""
        self._cursor.leave_undecoded()
        pieces = [batch async for batch in self.batches()]
        if operations.is_json(self.content_type or ""):
            inner = (piece.data.strip()[1:-1].strip() for piece in pieces)
            return b"[%b]" % b",".join(filter(None, inner))
        return b"".join(piece.data for piece in pieces)

    async def text(self) -> str:
        """Everything in one text."""
        return (await self.bytes()).decode()

    async def messages(self) -> list[T]:
        """Every message in one list."""
        return [message async for message in self]

    async def close(self) -> None:
        """Stop reading, and give the connection up."""
        if isinstance(self._cursor, Follower):
            await self._driver.run(self._cursor.shut())
        self._cursor.ended = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _next(self) -> Batch[T] | None:
        return await self._driver.run(self._cursor.next())


class AsyncListing(Generic[T]):
    """A list of the server that is fetched page by page while it is iterated."""

    def __init__(self, driver: AsyncDriver, pages: Pages[T]) -> None:
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


class AsyncLogReading:
    """The log under way: iterate over it for entries, or its `pages()`.

    `after` is where to go on: the last position of the last page whose entries were all taken.
    """

    def __init__(self, driver: AsyncDriver, reader: LogReader) -> None:
        self._driver = driver
        self._reader = reader
        self._entries: Iterator[LogEntry] = iter(())
        self._next = reader.after
        self.after = reader.after

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LogEntry:
        while True:
            for entry in self._entries:
                return entry
            self.after = self._next
            page = await self._driver.run(self._reader.next())
            if page is None:
                raise StopAsyncIteration
            self._entries = iter(page.entries)
            self._next = page.next

    async def pages(self) -> AsyncIterator[LogPage]:
        """Entries as they came together, with where to go on and where the log ends."""
        while (page := await self._driver.run(self._reader.next())) is not None:
            yield page
            self.after = page.next
