"""The inbox on this machine: messages of a member, each stored once, and where they come from.

A message is kept by its mesh, sender and id, so a delivery that is repeated adds nothing and runs
no hook a second time. A file that is damaged is moved aside: what it held is with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.errors import FencepostError, ResponseError
from fencepost.client.groups import Lease, LeaseAck
from fencepost.clock import Clock
from fencepost.outbox.daemon.database import (
    File,
    FileRefusedError,
    WriteFailedError,
    Writer,
    load_queries,
    open_file,
)
from fencepost.outbox.daemon.links import RefusedError
from fencepost.outbox.states import BACKOFF
from fencepost.protocol.meshes import inbox_path
from fencepost.protocol.sessions import OCCUPIED, REPLACED
from fencepost.protocol.timing import delay_ms

log = logging.getLogger(__name__)

FILE = "inbox.db"
EVENTS_MAX = 500
"""Messages that one claim asks for."""
LEASE_MS = 30_000
RENEW_SECONDS = 10.0
SWEPT_MAX = 500
_LINES = bytes.maketrans(b"\r\n", b"  ")


class Inbox:
    """inbox.db."""

    def __init__(self, writer: Writer, clock: Clock, arrived: Callable[[], None]) -> None:
        self._writer = writer
        self._clock = clock
        self._arrived = arrived
        self.stored = 0
        self.duplicates = 0

    @classmethod
    def open(
        cls, folder: Path, clock: Clock, *, vfs: str | None, arrived: Callable[[], None]
    ) -> Inbox:
        """Open the file, or begin a new one beside a damaged one."""
        path = folder / FILE
        queries = load_queries("inbox.sql")

        def first(file: File) -> None:
            # Numbers go on above those of a file that was moved aside.
            file.execute("start_at", clock.wall_ms() * 1000)

        try:
            file = open_file(path, queries, vfs=vfs, first=first)
        except FileRefusedError as error:
            if "newer fencepost" in str(error):
                raise
            aside = path.with_name(f"{FILE}.{clock.wall_ms()}")
            log.error("%s; it is moved to %s, and a new one begun", error, aside)
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(FILE + suffix).unlink(missing_ok=True)
            file = open_file(path, queries, vfs=vfs, first=first)
        return cls(Writer(file, path, vfs), clock, arrived)

    @property
    def failure(self) -> asyncio.Future[Exception]:
        return self._writer.failure

    async def add(self, mesh: str, entries: Iterable[Mapping[str, Any]]) -> int:
        """Store the entries that are new; how many. They are on disk when this returns."""
        now_ms = self._clock.now_ms()
        given = [
            (
                mesh,
                str(entry.get("sender", "")),
                str(entry.get("client_message_id") or entry.get("broker_message_id")),
                now_ms,
                msgspec.json.encode(entry).translate(_LINES),
            )
            for entry in entries
        ]

        def job(file: File) -> int:
            return sum(file.execute("add", *values) for values in given)

        new = await self._writer.write(job)
        self.stored += new
        self.duplicates += len(given) - new
        if new:
            self._arrived()
        return new

    async def listed(self, mesh: str | None, after: int, limit: int) -> list[dict[str, Any]]:
        """Messages in the order in which they came."""
        found = await self._writer.read(lambda file: file.fetch("list", after, mesh, limit))
        return [
            {"seq": seq, "mesh": name, "received_ms": at, "message": msgspec.Raw(entry)}
            for seq, name, at, entry in found
        ]

    async def last(self) -> int:
        """The number of the newest message."""
        found: int = await self._writer.read(lambda file: file.fetch("last")[0][0])
        return found

    async def count(self) -> int:
        found: int = await self._writer.read(lambda file: file.fetch("count")[0][0])
        return found

    async def sweep(self, before_ms: int) -> None:
        """Forget old messages."""
        while await self._writer.write(lambda file: file.execute("sweep", before_ms, SWEPT_MAX)):
            pass

    async def close(self) -> None:
        await self._writer.close()


class Puller:
    """Keeps the lease of an inbox, and stores what comes, over plain HTTP.

    The lease is held all the time, with work or without: that is what keeps a second daemon out.
    """

    def __init__(
        self,
        names: AsyncMesh,
        client_stream: Any,
        member: str,
        worker: str,
        clock: Clock,
        failpoint: Callable[[str], None],
    ) -> None:
        self._names = names
        self._failpoint = failpoint
        self._stream = client_stream(inbox_path(names.name, member))
        self._group = names.inbox(member)
        self._worker = worker
        self._clock = clock
        self._news = asyncio.Event()

    async def run(self, inbox: Inbox) -> None:
        """Pull until cancelled; raises `RefusedError` when another daemon has the inbox."""
        failures = 0
        while True:
            try:
                tail = (await self._stream.head()).next_offset
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(self._listen(tail))
                    try:
                        await self._hold(inbox)
                    finally:
                        _ = listening.cancel()
            except* RefusedError as refused:
                raise refused.exceptions[0] from None
            except* (FencepostError, WriteFailedError) as failed:
                failures += 1
                log.warning("the inbox of mesh %s waits: %s", self._names.name, failed.exceptions)
            await asyncio.sleep(delay_ms(BACKOFF, max(failures, 1), self._clock.random()) / 1000)

    async def _listen(self, tail: str) -> None:
        """Notice that something was appended; the stream is only a bell."""
        with contextlib.suppress(FencepostError):
            async for _entry in self._stream.follow(offset=tail):
                self._news.set()

    async def _hold(self, inbox: Inbox) -> None:
        while True:
            # Before the claim: what is appended after it rings again.
            self._news.clear()
            lease = await self._take()
            if lease.events:
                await inbox.add(self._names.name, (event.data for event in lease.events))
                self._failpoint("stored")
            else:
                await self._wait(lease)
            acked = await self._group.ack(LeaseAck(token=lease.token, at=lease.read_to))
            if acked.items[0].outcome == "lost" and not acked.uncertain:
                raise self._replaced()

    async def _take(self) -> Lease:
        try:
            found = await self._group.claim(
                self._worker, events_max=EVENTS_MAX, lease_ms=LEASE_MS, take=True
            )
        except ResponseError as error:
            if error.code == OCCUPIED.kind:
                name = self._names.name
                raise RefusedError(name, OCCUPIED.code, OCCUPIED.kind, OCCUPIED.detail) from None
            raise
        if not found.leases:
            raise self._replaced()
        return found.leases[0]

    async def _wait(self, lease: Lease) -> None:
        """Hold an empty lease until something comes, or for a while: a bell may fail to ring."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEW_SECONDS):
                await self._news.wait()
        [renewed] = await self._group.renew([lease.token], lease_ms=LEASE_MS)
        if renewed.outcome == "lost":
            raise self._replaced()

    def _replaced(self) -> RefusedError:
        return RefusedError(self._names.name, REPLACED.code, REPLACED.kind, REPLACED.detail)
