"""The inbox on this machine: messages of a member, each stored once.

A message is kept by its mesh, sender and id, so a delivery that is repeated adds nothing and runs
no hook a second time. A file that is damaged is moved aside: what it held is with the server.
`pulling` is where messages come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fencepost.clock import Clock
from fencepost.outbox.daemon.database import (
    File,
    FileRefusedError,
    Writer,
    load_queries,
    open_file,
)

log = logging.getLogger(__name__)

FILE = "inbox.db"
SWEPT_MAX = 500
PAGE_BYTES_MAX = 4 << 20
"""Bytes of the messages that are read at once for those who follow events."""
_LINES = bytes.maketrans(b"\r\n", b"  ")


class Messages(NamedTuple):
    """A page of messages; `more`: there are some behind them."""

    messages: list[dict[str, Any]]
    more: bool


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

    async def listed(
        self, mesh: str | None, after: int, limit: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> Messages:
        """Messages in the order in which they came: so many, of so many bytes, one at least."""

        def query(file: File) -> Messages:
            found: list[dict[str, Any]] = []
            room = bytes_max
            for seq, name, at, entry in file.each("list", after, mesh, limit + 1):
                room -= len(entry)
                if len(found) == limit or (found and room < 0):
                    return Messages(found, more=True)
                message = msgspec.Raw(entry)
                found.append({"seq": seq, "mesh": name, "received_ms": at, "message": message})
            return Messages(found, more=False)

        return await self._writer.read(query)

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
