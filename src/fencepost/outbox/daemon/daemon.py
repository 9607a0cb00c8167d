"""The outbox daemon as one object: its files, links to meshes, deliveries, inbox and hooks.

Opening it puts back what was in flight; no server needs to be there. `running` puts the endpoints
before it, and starts and stops both.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from fencepost.client.aio.client import AsyncClient
from fencepost.clock import Clock
from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.database import (
    File,
    Lock,
    WriteFailedError,
    Writer,
    load_queries,
    make_folder,
    open_file,
)
from fencepost.outbox.daemon.delivering import Deliveries, Failpoint, Road, no_failpoint
from fencepost.outbox.daemon.feed import Feed
from fencepost.outbox.daemon.hooks import Hook
from fencepost.outbox.daemon.inbox import Inbox
from fencepost.outbox.daemon.links import Link, MeshNote
from fencepost.outbox.daemon.links import RefusedError as LinkRefusedError
from fencepost.outbox.daemon.pulling import Puller
from fencepost.outbox.daemon.rows import Change
from fencepost.outbox.daemon.settings import DAY_MS, OutboxSettings
from fencepost.outbox.delivery import RowIds, read_send, row_of, ulid
from fencepost.outbox.states import RETRY_AFTER_MS_MAX, Queued, Row, Status
from fencepost.protocol.fingerprints import Unsendable

log = logging.getLogger(__name__)

FILE = "outbox.db"
DISK_LOOK_MS = 1_000
SWEEP_SECONDS = 3_600.0


class DiskFailedError(Exception):
    """The disk failed while the daemon ran. Everything that was answered is stored."""


class Daemon:
    """Everything that one process holds. Make it with `open`, on the loop that it will run on."""

    def __init__(
        self,
        settings: OutboxSettings,
        clock: Clock,
        lock: Lock,
        writer: Writer,
        known: Mapping[str, Any],
        failpoint: Failpoint,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.writer = writer
        self.failpoint = failpoint
        self.version = version("fencepost")
        self.started_ms = clock.wall_ms()
        self.counts: Counter[str] = known["counts"]
        self.accepted = 0
        self.row_id = RowIds(clock, known["newest"])
        self.worker: str = known["worker"]
        self.links: list[Link] = []
        self.inbox: Inbox
        self.feed: Feed
        self.deliveries: Deliveries
        self.hooks: list[Hook] = []
        self._lock = lock
        self._disk_looked_ms = 0
        self._disk_is_full = False
        self._events: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        settings: OutboxSettings,
        client: AsyncClient,
        clock: Clock,
        *,
        sender: str | None,
        failpoint: Failpoint = no_failpoint,
    ) -> Daemon:
        """Open the files; `sender` is for servers without principals."""
        make_folder(settings.folder)
        lock = Lock(settings.folder)
        try:
            path = settings.folder / FILE
            queries = load_queries("outbox.sql")
            file = open_file(
                path, queries, vfs=settings.vfs, first=lambda made: _begin(made, clock)
            )
            known = _restart(file, path, clock)
            writer = Writer(file, path, settings.vfs)
            daemon = cls(settings, clock, lock, writer, known, failpoint)
            daemon.inbox = Inbox.open(
                settings.folder, clock, vfs=settings.vfs, arrived=lambda: daemon.feed.wake()
            )
            daemon.feed = Feed(writer, daemon.inbox, settings.event_streams_max)
            for mesh in settings.meshes:
                note = known["meshes"].get(mesh)
                found = None if note is None else msgspec.convert(note, MeshNote)
                link = Link(mesh, client, settings, clock, sender=sender, known=found)
                if settings.member:
                    link.puller = Puller(
                        *(link.names, client, settings.member, daemon.worker),
                        *(daemon.inbox, writer, clock, failpoint),
                    )
                daemon.links.append(link)
            roads: dict[str, Road] = {link.mesh: link for link in daemon.links}
            daemon.deliveries = Deliveries(
                *(writer, roads, settings, clock, daemon._changed, daemon._swept, failpoint)
            )
            for lane, due_ms in known["lanes"].items():
                daemon.deliveries.wakes(lane, due_ms)
            for hook in settings.hooks:
                daemon.hooks.append(Hook(hook, daemon.feed, writer, clock, daemon._reply))
        except BaseException:
            lock.release()
            raise
        return daemon

    async def run(self) -> None:
        """Work until cancelled; raises when a mesh will not do, or the disk fails."""
        try:
            async with asyncio.TaskGroup() as group:
                for link in self.links:
                    _ = group.create_task(
                        link.run(self._happened, self.deliveries.look, partial(self._save, link))
                    )
                _ = group.create_task(self.deliveries.run())
                for hook in self.hooks:
                    _ = group.create_task(hook.run())
                _ = group.create_task(self._sweep_inbox())
                _ = group.create_task(self._watch(self.writer.failure))
                _ = group.create_task(self._watch(self.inbox.failure))
        except* (LinkRefusedError, DiskFailedError) as failed:
            raise failed.exceptions[0] from None

    async def close(self) -> None:
        """Finish what is being written, and let go of the files."""
        for task in list(self._events):
            _ = task.cancel()
        await asyncio.gather(*self._events, return_exceptions=True)
        await self.inbox.close()
        await self.writer.close()
        self._lock.release()

    # For the endpoints

    def new_id(self) -> str:
        """An id for a message that comes without one."""
        return ulid(self.clock)

    def disk_is_full(self) -> bool:
        """Whether no send is taken for want of room: what is accepted must also be settled."""
        now_ms = self.clock.monotonic_ms()
        if not self._disk_looked_ms or now_ms - self._disk_looked_ms >= DISK_LOOK_MS:
            self._disk_looked_ms = now_ms
            self._disk_is_full = disk_percent(self.settings.folder) > self.settings.disk_percent_max
        return self._disk_is_full

    def queued(self, row: Row) -> None:
        """A row was accepted, and is on disk."""
        self.accepted += 1
        self.counts["pending"] += 1
        self.deliveries.wakes(row.lane)

    def requeued(self, before: Status, old: Row, new: Row) -> None:
        """A row was replaced by another."""
        self._changed([Change(before, old)])
        self.counts["pending"] += 1
        self.deliveries.wakes(new.lane)
        self.feed.wake()

    def dropped(self, before: Status, row: Row) -> None:
        """A row was given up; those behind it may go on."""
        self._changed([Change(before, row)])
        self.deliveries.wakes(row.lane)
        self.feed.wake()

    def shown(self) -> dict[str, object]:
        """The daemon as `status` shows it."""
        return {
            "status": "ok" if all(link.state == "connected" for link in self.links) else "waiting",
            "version": self.version,
            "pid": os.getpid(),
            "folder": str(self.settings.folder),
            "member": self.settings.member,
            "started_ms": self.started_ms,
            "rows": {status: count for status, count in sorted(self.counts.items()) if count},
            "deliveries_under_way": self.deliveries.under_way,
            "inbox_stored": self.inbox.stored,
            "meshes": [link.shown() for link in self.links],
            "hooks": [
                {"hook": hook.settings.name, "runs": hook.runs, "failures": hook.failures}
                for hook in self.hooks
            ],
        }

    # What happens inside

    def _changed(self, changes: Iterable[Change]) -> None:
        for before, row in changes:
            if before == row.status:
                continue
            if before is not None:
                self.counts[before] -= 1
            self.counts[row.status] += 1
            if row.status == "dead":
                log.error(
                    "%r to %s in mesh %s is dead: %s (fencepost outbox inspect %s)",
                    row.client_message_id,
                    row.destination,
                    row.mesh,
                    row.last_error,
                    row.id,
                )
                self.feed.wake()

    def _swept(self, rows_count: int) -> None:
        self.counts["done"] -= rows_count

    def _happened(self, kind: str, mesh: str, data: Mapping[str, object]) -> None:
        now_ms = self.clock.now_ms()

        async def add() -> None:
            with contextlib.suppress(WriteFailedError):
                await self.writer.write(lambda file: rows.add_event(file, kind, mesh, now_ms, data))
                self.feed.wake()

        task = asyncio.get_running_loop().create_task(add())
        self._events.add(task)
        task.add_done_callback(self._events.discard)

    async def _save(self, link: Link, note: MeshNote) -> None:
        with contextlib.suppress(WriteFailedError):
            await self.writer.write(lambda file: rows.note(file, f"mesh:{link.mesh}", note))

    async def _reply(self, mesh: str, message_id: str, fields: Mapping[str, Any]) -> None:
        """Queue the answer of a hook, as a send like any other."""
        data = msgspec.json.encode(fields)
        send = read_send(data, header_id=message_id, minted_id=message_id)
        assert not isinstance(send, Unsendable), send
        offered = row_of(send, mesh=mesh, row_id=self.row_id(), now_ms=self.clock.now_ms())
        outcome = await self.writer.write(lambda file: rows.do_accept(file, offered))
        if isinstance(outcome, Queued):
            self.queued(outcome.row)

    async def _sweep_inbox(self) -> None:
        while True:
            before_ms = self.clock.now_ms() - self.settings.inbox_days * DAY_MS
            with contextlib.suppress(WriteFailedError):
                await self.inbox.sweep(before_ms)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _watch(self, failure: asyncio.Future[Exception]) -> None:
        raise DiskFailedError(f"the disk failed: {await failure}")


def _begin(file: File, clock: Clock) -> None:
    rows.note(file, "daemon", clock.token(8).hex())


def _restart(file: File, path: Path, clock: Clock) -> dict[str, Any]:
    """Put back what was in flight, and read what the daemon keeps in memory."""
    now_ms = clock.now_ms()
    with file.raw:
        restarted = rows.do_restart(file, now_ms=now_ms, latest_ms=now_ms + RETRY_AFTER_MS_MAX)
    if restarted:
        log.info("%d sends were in flight and are sent again", restarted)
    meshes = {
        name.removeprefix("mesh:"): msgspec.json.decode(value)
        for name, value in file.fetch("all_notes")
        if name.startswith("mesh:")
    }
    # A copy of the folder is another worker, so that the lease of the inbox refuses one of the two.
    place = f"{socket.gethostname()} {path.resolve()} {path.stat().st_ino}"
    worker = f"outbox-{rows.noted(file, 'daemon')}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    return {
        "meshes": meshes,
        "lanes": rows.lanes(file),
        "counts": rows.counts(file),
        "newest": rows.newest(file),
        "worker": worker,
    }


def disk_percent(folder: Path) -> float:
    """How full the disk is, as `df` counts it."""
    found = os.statvfs(folder)
    used = found.f_blocks - found.f_bfree
    return 100.0 * used / max(1, used + found.f_bavail)
