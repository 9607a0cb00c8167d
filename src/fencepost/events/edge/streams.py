"""Records on a Fencepost server: one JSON stream per key, whose last message is the record.

A claim creates the stream with its first message; every further change is an append with If-Match
at the tail that was read. So the server decides between two requests, and an owner that slept
through its lease finds another tail. The stream has a TTL: the server removes it when the key was
not used for that long.

How long a claim has not been renewed is measured by who looks at it, from its own first look on:
no clock of another machine is involved. A process that meets a claim for the first time therefore
waits one lease before it takes the claim over, even if the owner crashed long ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from fencepost.client.aio import AsyncClient
from fencepost.client.errors import (
    FencepostError,
    ForbiddenError,
    PreconditionFailedError,
    StreamExistsError,
    StreamNotFoundError,
)
from fencepost.clock import Clock, SystemClock
from fencepost.events.edge.backends import BackendUnavailableError
from fencepost.events.edge.rules import Claimed, Record, Seen

LOOKS_MAX = 10_000
FIRST_VERSION = "0"
"""If-Match takes an offset or a version: this is the version of a stream with one message."""


class _Message(msgspec.Struct, frozen=True):
    record: Record
    stamp: str


class StreamBackend:
    """Records in streams of a Fencepost server, under `prefix`.

    The client's principal needs `create`, `append` and `read` on `PREFIX/**`, and `delete` to drop
    the earlier records of a key that is used again after its time.
    """

    def __init__(
        self, client: AsyncClient, *, prefix: str = "idempotency", clock: Clock | None = None
    ) -> None:
        self._client = client
        self._prefix = prefix.strip("/")
        self._clock = clock or SystemClock()
        self._looks: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def load(self, record_id: str) -> Seen | None:
        found = await self._read(record_id)
        if found is None:
            return None
        message, tail = found
        idle_ms = 0
        if isinstance(message.record, Claimed):
            idle_ms = self._clock.monotonic_ms() - self._first_look_ms(record_id, tail)
        return Seen(message.record, tail, idle_ms)

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        message = _Message(record, stamp)
        async with _reaching():
            if version is None:
                return await self._create(record_id, message, ttl_ms)
            return await self._append(record_id, version, message)

    async def _create(self, record_id: str, message: _Message, ttl_ms: int) -> str | None:
        try:
            made = await self._client.create(
                self._path(record_id), messages=[message], ttl_seconds=-(-ttl_ms // 1000)
            )
        except StreamExistsError:
            pass
        else:
            if made.is_new:
                return FIRST_VERSION
        # The stream was there, or an attempt of ours whose answer was lost made it.
        return await self._version_of(record_id, message)

    async def _append(self, record_id: str, version: str, message: _Message) -> str | None:
        stream = self._client.stream(self._path(record_id))
        try:
            appended = await stream.append(message, if_match=version, key=message.stamp)
        except (PreconditionFailedError, StreamNotFoundError):
            return None
        if appended.duplicate:
            # An earlier attempt stored it; another request may have changed the record since.
            return await self._version_of(record_id, message)
        if isinstance(message.record, Claimed):
            await self._drop_before(record_id, version)
        return appended.next_offset

    async def _version_of(self, record_id: str, message: _Message) -> str | None:
        """The version that `message` is, if it is the current one."""
        found = await self._read(record_id)
        return found[1] if found is not None and found[0].stamp == message.stamp else None

    async def _drop_before(self, record_id: str, version: str) -> None:
        """Drop the records before a new claim: a key that is used every day must not grow."""
        try:
            await self._client.stream(self._path(record_id)).truncate(before=version)
        except (ForbiddenError, StreamNotFoundError):
            return  # the claim itself is stored

    async def _read(self, record_id: str) -> tuple[_Message, str] | None:
        async with _reaching():
            reading = self._client.stream(self._path(record_id)).read(type=_Message)
            last: _Message | None = None
            try:
                async for message in reading:
                    last = message
            except StreamNotFoundError:
                return None
            if last is None or reading.offset is None:
                return None
            return last, reading.offset

    def _first_look_ms(self, record_id: str, tail: str) -> int:
        """When this process first saw the claim at this tail."""
        now_ms = self._clock.monotonic_ms()
        first_ms = self._looks.setdefault((record_id, tail), now_ms)
        self._looks.move_to_end((record_id, tail))
        if len(self._looks) > LOOKS_MAX:
            self._looks.popitem(last=False)
        return first_ms

    def _path(self, record_id: str) -> str:
        return f"{self._prefix}/{record_id}"


@asynccontextmanager
async def _reaching() -> AsyncIterator[None]:
    try:
        yield
    except FencepostError as error:
        raise BackendUnavailableError(f"the Fencepost server: {error}") from error
