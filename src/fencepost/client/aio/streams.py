"""One stream of the async client: appending, producing, reading, following."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar, overload

from fencepost.client import operations
from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.readings import AsyncReading
from fencepost.client.errors import (
    BooksClosedError,
    ConflictError,
    FencepostError,
    ForbiddenError,
    SequenceGapError,
    StreamClosedError,
    StreamNotFoundError,
    StreamSeqError,
)
from fencepost.client.operations import Condition, Creation, Producing
from fencepost.client.producer.aio import AsyncIdempotentProducer
from fencepost.client.producer.session import OnAck, OnError
from fencepost.client.reading import Follower, Live, Reader
from fencepost.client.results import Appended, Head
from fencepost.client.settings import JSON, ClientSettings, ProducerSettings, Value

T = TypeVar("T")


class AsyncStream:
    """One stream of a server."""

    def __init__(
        self,
        driver: AsyncDriver,
        path: str,
        content_type: str | None = None,
        is_new: bool | None = None,
        *,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> None:
        self._driver = driver
        self._settings = driver.settings.carrying(headers, params)
        self._is_typed = content_type is not None
        self.path = operations.check_origin(driver.settings, path)
        self.content_type = content_type or JSON
        self.is_new = is_new
        """After `create`: whether it made the stream; None when that is not known."""

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
        lease: str | None = None,
        retry: bool = True,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> Appended:
        """Store one message: any JSON value, or bytes or text where the stream is not JSON.

        It carries an Idempotency-Key of its own, so that a retry after a lost answer stores
        nothing twice. `retry=False` sends none: a lost answer is then `OutcomeUnknownError`.

        Args:
            close: Close the stream with this message, in one step.
            if_match: The offset where the stream must end, or the version of its last message, or
                `*`: it must exist.
            if_none_match: `*`: the stream must be empty or not exist; then it is made.
            auto_create: Make the stream if it does not exist.
            stream_seq: A text that must be greater than that of the append before.
            key: An Idempotency-Key of your own: the same key again gives the first answer again.
            producer: A producer's id, epoch and sequence number instead of a key.
            producer_if: The epoch and seq where the producer must be.
            strict: Refuse a duplicate of the producer that has other bytes.
            lease: The token of a group's lease: store it only while that is current.
            headers: Sent with this request too; values may be functions. The same for `params`, in
                every method that takes them.
        """
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
            lease=lease,
        )
        return await self._store([data], condition, headers, params, retry=retry)

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
        lease: str | None = None,
        retry: bool = True,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> Appended:
        """Store several messages in one step, all or none; the options are those of `append`."""
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
            lease=lease,
        )
        several = operations.listed(messages)
        return await self._store(several, condition, headers, params, retry=retry)

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
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
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
        # A producer has a connection of its own, so it would not notice by itself.
        self._driver.require_open()
        settings = self._settings.carrying(headers, params)
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
            self.content_type if self._is_typed else None,
            producer_id,
            tuning,
            epoch=epoch,
            seq=seq,
            on_ack=on_ack,
            on_error=on_error,
            settings=settings,
        )

    @overload
    def read(
        self,
        *,
        offset: str | None = None,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncReading[Any]: ...

    @overload
    def read(
        self,
        *,
        offset: str | None = None,
        type: type[T],
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncReading[T]: ...

    def read(
        self,
        *,
        offset: str | None = None,
        type: Any = None,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncReading[Any]:
        """What the stream holds now, from `offset` (the beginning) to its tail.

        Iterating gives messages: JSON values (of `type`, if given), texts, or bytes in pieces.
        """
        reader: Reader[Any] = Reader(
            self._settings.carrying(headers, params), self.path, offset, type
        )
        return AsyncReading(self._driver, reader)

    @overload
    def follow(
        self,
        *,
        offset: str | None = None,
        live: Live = "auto",
        patience: float | None = None,
        timeout: float | None = None,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncReading[Any]: ...

    @overload
    def follow(
        self,
        *,
        offset: str | None = None,
        live: Live = "auto",
        patience: float | None = None,
        timeout: float | None = None,
        type: type[T],
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncReading[T]: ...

    def follow(
        self,
        *,
        offset: str | None = None,
        live: Live = "auto",
        patience: float | None = None,
        timeout: float | None = None,
        type: Any = None,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncReading[Any]:
        """What the stream holds and what comes, until it is closed; `offset="now"` skips the past.

        It goes on by itself from where it was, through lost connections and restarts, for as long
        as it takes, or until the server was away for `patience` seconds. After `timeout` seconds
        it ends as it does at the end of a closed stream; `closed` of the reading tells which it
        was. `close()` of the reading or of the client ends it from elsewhere, at once.
        """
        follower: Follower[Any] = Follower(
            self._settings.carrying(headers, params),
            self.path,
            offset,
            type,
            live=live,
            patience=patience,
        )
        return AsyncReading(self._driver, follower, timeout)

    async def head(
        self,
        *,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> Head:
        """What there is to know without reading: type, tail, closed, lifetime."""
        settings = self._settings.carrying(headers, params)
        return await self._driver.run(operations.head(settings, self.path))

    async def close(
        self,
        *,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> Appended:
        """Close the stream: readers see its end, writers are refused. Closing again is fine."""
        settings = self._settings.carrying(headers, params)
        return await self._append(settings, b"", Condition(close=True), retry=False)

    async def _store(
        self,
        messages: list[Any],
        condition: Condition,
        headers: Mapping[str, Value] | None,
        params: Mapping[str, Value] | None,
        *,
        retry: bool,
    ) -> Appended:
        """Append messages as what the stream holds, which is asked for if it is not JSON."""
        settings = self._settings.carrying(headers, params)
        if not self._is_typed and operations.holds_bytes(messages):
            # A stream of JSON must not get them, so it is asked for its type before.
            try:
                await self._learn_type(settings, None)
            except StreamNotFoundError:
                if not condition.makes:
                    raise
            except ForbiddenError:
                pass  # the caller may append and not ask
        body = operations.encode_messages(messages, self.content_type)
        try:
            return await self._append(settings, body, condition, retry=retry)
        except ConflictError as error:
            known = isinstance(
                error, StreamSeqError | StreamClosedError | SequenceGapError | BooksClosedError
            )
            if self._is_typed or known:
                raise
            await self._learn_type(settings, error)
        body = operations.encode_messages(messages, self.content_type)
        return await self._append(settings, body, condition, retry=retry)

    async def _learn_type(self, settings: ClientSettings, error: FencepostError | None) -> None:
        """Ask for the type of a stream that was opened without one; raise if it is JSON indeed."""
        found = await self._driver.run(operations.head(settings, self.path))
        self._is_typed = True
        if operations.is_json(found.content_type) and error is not None:
            raise error
        self.content_type = found.content_type

    async def delete(
        self,
        *,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> None:
        """Remove the stream and its messages."""
        settings = self._settings.carrying(headers, params)
        await self._driver.run(operations.delete(settings, self.path))

    async def truncate(
        self,
        *,
        before: str,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> Head:
        """Drop what lies before an offset (`now`: all); offsets and versions go on."""
        settings = self._settings.carrying(headers, params)
        return await self._driver.run(operations.truncate(settings, self.path, before))

    async def fork(
        self,
        path: str,
        *,
        offset: str | None = None,
        sub_offset: int | None = None,
        ttl_seconds: int | None = None,
        expires_at: datetime | str | None = None,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncStream:
        """A new stream at `path` that shares this one's past up to `offset` (the tail)."""
        creation = Creation(
            fork_of=self.path,
            fork_offset=offset,
            fork_sub_offset=sub_offset,
            ttl_seconds=ttl_seconds,
            expires_at=expires_at,
        )
        settings = self._settings.carrying(headers, params)
        made = await self._driver.run(operations.create(settings, path, creation))
        fork = AsyncStream(self._driver, path, made.content_type, made.is_new)
        fork._settings = self._settings
        return fork

    async def _append(
        self, settings: ClientSettings, body: bytes, condition: Condition, *, retry: bool
    ) -> Appended:
        return await self._driver.run(
            operations.append(
                settings,
                self.path,
                body,
                self.content_type,
                condition,
                retry=retry,
            )
        )
