"""The daemon of this machine, as a program uses it: send, look, requeue, read the inbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fencepost.client.aio.closing import AsyncClosing
from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.readings import AsyncListing
from fencepost.client.operations import query_of
from fencepost.client.reading import Pages
from fencepost.outbox import local
from fencepost.outbox.local import InboxMessage, RequeuedRow, RowDetails, RowInfo, Taken


class AsyncDaemonOutbox(AsyncClosing):
    """The outbox behind the socket of this machine. `Outbox.daemon_async()` makes it."""

    def __init__(
        self, socket: str | Path | None = None, *, mesh: str | None = None, timeout: float = 30.0
    ) -> None:
        """`socket`: else FENCEPOST_OUTBOX_SOCKET, else the user's own.

        `mesh`: else the only one that the daemon serves.
        """
        self._driver = AsyncDriver(local.settings_of(socket, timeout))
        self._mesh = mesh

    async def send(
        self,
        to: object,
        body: Any,
        *,
        id: str | None = None,
        mesh: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Taken:
        """Have a message delivered: it is on this machine's disk when this returns.

        The same id again is the same send; with another message it raises `IdUsedError`.
        """
        more = {"priority": priority, "reply_to": reply_to, "meta": meta}
        settings = self._driver.settings
        chosen = mesh or self._mesh
        return await self._driver.run(local.send(settings, str(to), body, id, chosen, more))

    def rows(
        self, *, status: str | None = None, mesh: str | None = None, after: str | None = None
    ) -> AsyncListing[RowInfo]:
        """The rows, oldest first: all, or those of a status, or those behind a row."""
        query = {"status": status, "mesh": mesh, "after": after}
        return self._pages("/v1/outbox", "rows", RowInfo, query)

    def inbox(self, *, mesh: str | None = None) -> AsyncListing[InboxMessage]:
        """The messages that came in."""
        return self._pages("/v1/inbox", "messages", InboxMessage, {"mesh": mesh})

    async def inspect(self, row: str) -> RowDetails:
        """One row by its own id, with its payload and its successors."""
        found = local.get(self._driver.settings, f"/v1/outbox/{row}", RowDetails)
        details: RowDetails = await self._driver.run(found)
        return details

    async def requeue(
        self,
        row: str,
        *,
        new_id: str | None = None,
        payload: Mapping[str, Any] | None = None,
        by: str | None = None,
    ) -> RequeuedRow:
        """Send a row's message under another id, `new_id` or one that is made."""
        values = {"new_id": new_id, "auto": new_id is None, "payload": payload, "by": by}
        change = local.change(self._driver.settings, row, "requeue", values, RequeuedRow)
        requeued: RequeuedRow = await self._driver.run(change)
        return requeued

    async def drop(self, row: str, *, by: str | None = None) -> RowInfo:
        """Give a row up; its id stays used."""
        change = local.change(self._driver.settings, row, "drop", {"by": by}, RowInfo)
        dropped: RowInfo = await self._driver.run(change)
        return dropped

    async def status(self) -> dict[str, Any]:
        """The daemon as it stands: rows by status, its meshes, its hooks."""
        found = local.get(self._driver.settings, "/v1/health", dict[str, Any])
        status: dict[str, Any] = await self._driver.run(found)
        return status

    def _pages(
        self, path: str, field: str, kind: type[Any], query: dict[str, Any]
    ) -> AsyncListing[Any]:
        settings = self._driver.settings
        return AsyncListing(self._driver, Pages(settings, path, field, kind, query_of(query)))

    async def close(self) -> None:
        """Close the connections to the daemon."""
        await self._driver.close()
