"""Pull the messages of a member into the inbox on this machine: store them, then acknowledge.

They come through the session of the mesh, and where sessions do not pass over plain HTTP: there the
lease of the inbox is held all the time, with work or without, because that is what keeps a second
daemon out. In a mesh with `allow_concurrent` there is no lease; the inbox is read from a place that
this daemon keeps by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.aio.sessions import AsyncMeshSession
from fencepost.client.errors import FencepostError, ResponseError
from fencepost.client.groups import Lease, LeaseAck
from fencepost.clock import Clock
from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.database import WriteFailedError, Writer
from fencepost.outbox.daemon.inbox import Inbox
from fencepost.outbox.states import BACKOFF
from fencepost.protocol.meshes import inbox_path
from fencepost.protocol.sessions import OCCUPIED, REPLACED, Close
from fencepost.protocol.timing import delay_ms

log = logging.getLogger(__name__)

EVENTS_MAX = 500
"""Messages that one claim asks for."""
LEASE_MS = 30_000
RENEW_SECONDS = 10.0
RETRY_WRITE_SECONDS = 1.0
SHARED = "allow_concurrent"


class InboxLostError(Exception):
    """Another daemon has the inbox: `close` says how it came to that."""

    def __init__(self, close: Close) -> None:
        super().__init__(close.detail)
        self.close = close


class InboxBlockedError(Exception):
    """The group of the inbox is blocked: nothing is handed out until a person unblocks it."""


class InboxPlace(msgspec.Struct, frozen=True):
    """How far an inbox without a lease was read: for sessions, and for reads of its stream."""

    position: int | None = None
    offset: str = "-1"


class Puller:
    """Stores what comes to the inbox of one mesh."""

    def __init__(
        self,
        names: AsyncMesh,
        client: AsyncClient,
        member: str,
        worker: str,
        inbox: Inbox,
        writer: Writer,
        clock: Clock,
        failpoint: Callable[[str], None],
    ) -> None:
        self.member = member
        self.worker = worker
        self._mesh = names.name
        self._failpoint = failpoint
        self._stream = client.stream(inbox_path(names.name, member))
        self._group = names.inbox(member)
        self._inbox = inbox
        self._writer = writer
        self._clock = clock
        self._news = asyncio.Event()

    async def place(self) -> InboxPlace:
        """How far this daemon has read an inbox that has no lease."""
        found = await self._writer.read(lambda file: rows.noted(file, self._note))
        return InboxPlace() if found is None else msgspec.convert(found, InboxPlace)

    @property
    def _note(self) -> str:
        return f"inbox:{self._mesh}:{self.member}"

    async def _reached(self, place: InboxPlace) -> None:
        await self._writer.write(lambda file: rows.note(file, self._note, place))

    async def _add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Store entries, however long there is no room for them."""
        given = list(entries)
        while True:
            try:
                await self._inbox.add(self._mesh, given)
            except WriteFailedError as error:
                log.error("the inbox of mesh %s cannot be written: %s", self._mesh, error)
                await asyncio.sleep(RETRY_WRITE_SECONDS)
            else:
                self._failpoint("stored")
                return

    async def from_session(self, session: AsyncMeshSession, policy: str) -> None:
        """Store what a session delivers; raises what ends the session."""
        async for delivery in session:
            await self._add(entry.data for entry in delivery.entries)
            if policy == SHARED:
                last = delivery.entries[-1]
                await self._reached(InboxPlace(last.position, last.offset))
            await delivery.ack()

    async def over_http(self, policy: str) -> None:
        """Pull until cancelled; raises `InboxLostError` when another daemon has the inbox."""
        failures = 0
        while True:
            try:
                if policy == SHARED:
                    await self._read()
                else:
                    await self._claim()
            except (FencepostError, WriteFailedError, InboxBlockedError) as error:
                failures += 1
                log.warning("the inbox of mesh %s waits: %s", self._mesh, error)
            await asyncio.sleep(delay_ms(BACKOFF, max(failures, 1), self._clock.random()) / 1000)

    # Without a lease

    async def _read(self) -> None:
        place = await self.place()
        async with self._stream.follow(offset=place.offset) as reading:
            async for batch in reading.batches():
                if batch.messages:
                    await self._add(batch.messages)
                    await self._reached(InboxPlace(place.position, batch.next_offset))

    # With the lease of the inbox's group

    async def _claim(self) -> None:
        tail = (await self._stream.head()).next_offset
        listening = asyncio.create_task(self._listen(tail))
        try:
            await self._hold()
        finally:
            _ = listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, tail: str) -> None:
        """Notice that something was appended; the stream is only a bell."""
        with contextlib.suppress(FencepostError):
            async for _entry in self._stream.follow(offset=tail):
                self._news.set()

    async def _hold(self) -> None:
        while True:
            # Before the claim: what is appended after it rings again.
            self._news.clear()
            lease = await self._take()
            if lease.events:
                await self._add(event.data for event in lease.events)
            else:
                await self._wait(lease)
            acked = await self._group.ack(LeaseAck(token=lease.token, at=lease.read_to))
            if acked.items[0].outcome == "lost" and not acked.uncertain:
                raise InboxLostError(REPLACED)

    async def _take(self) -> Lease:
        try:
            found = await self._group.claim(
                self.worker, events_max=EVENTS_MAX, lease_ms=LEASE_MS, take=True
            )
        except ResponseError as error:
            if error.code == OCCUPIED.kind:
                raise InboxLostError(OCCUPIED) from None
            raise
        if not found.leases:
            raise InboxBlockedError("an operator has to unblock the group of the inbox")
        return found.leases[0]

    async def _wait(self, lease: Lease) -> None:
        """Hold an empty lease until something comes, or for a while: a bell may fail to ring."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEW_SECONDS):
                await self._news.wait()
        [renewed] = await self._group.renew([lease.token], lease_ms=LEASE_MS)
        if renewed.outcome == "lost":
            raise InboxLostError(REPLACED)
