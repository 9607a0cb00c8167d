# Generated from src/fencepost/outbox/aio/daemons.py by `just twins`: change that file.
"""The daemon of this machine, as a program uses it: send, look, requeue, read the inbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fencepost.client.operations import query_of
from fencepost.client.reading import Pages
from fencepost.client.sync.closing import Closing
from fencepost.client.sync.connections import Driver
from fencepost.client.sync.readings import Listing
from fencepost.outbox import local
from fencepost.outbox.local import InboxMessage, RequeuedRow, RowDetails, RowInfo, Taken


class DaemonOutbox(Closing):
    """The outbox behind the socket of this machine. `Outbox.daemon_async()` makes it."""

    def __init__(
        self, socket: str | Path | None = None, *, mesh: str | None = None, timeout: float = 30.0
    ) -> None:
        """`socket`: else FENCEPOST_OUTBOX_SOCKET, else the user's own.

        `mesh`: else the only one that the daemon serves.
        """
        self._driver = Driver(local.settings_of(socket, timeout))
        self._mesh = mesh

    def send(
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
        return self._driver.run(local.send(settings, str(to), body, id, chosen, more))

    def rows(
        self, *, status: str | None = None, mesh: str | None = None, after: str | None = None
    ) -> Listing[RowInfo]:
        """The rows, oldest first: all, or those of a status, or those behind a row."""
        query = {"status": status, "mesh": mesh, "after": after}
        return self._pages("/v1/outbox", "rows", RowInfo, query)

    def inbox(self, *, mesh: str | None = None) -> Listing[InboxMessage]:
        """The messages that came in."""
        return self._pages("/v1/inbox", "messages", InboxMessage, {"mesh": mesh})

    def inspect(self, row: str) -> RowDetails:
        """One row by its own id, with its payload and its successors."""
        found = local.get(self._driver.settings, f"/v1/outbox/{row}", RowDetails)
        details: RowDetails = self._driver.run(found)
        return details

    def requeue(
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
        requeued: RequeuedRow = self._driver.run(change)
        return requeued

    def drop(self, row: str, *, by: str | None = None) -> RowInfo:
        """Give a row up; its id stays used."""
        change = local.change(self._driver.settings, row, "drop", {"by": by}, RowInfo)
        dropped: RowInfo = self._driver.run(change)
        return dropped

    def status(self) -> dict[str, Any]:
        """The daemon as it stands: rows by status, its meshes, its hooks."""
        found = local.get(self._driver.settings, "/v1/health", dict[str, Any])
        status: dict[str, Any] = self._driver.run(found)
        return status

    def _pages(self, path: str, field: str, kind: type[Any], query: dict[str, Any]) -> Listing[Any]:
        settings = self._driver.settings
        return Listing(self._driver, Pages(settings, path, field, kind, query_of(query)))

    def close(self) -> None:
        """Close the connections to the daemon."""
        self._driver.close()
