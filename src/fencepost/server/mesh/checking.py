"""The orphan check of a server: every mesh, once a night, and a page of it when one is asked for.

Of several servers the one that leads checks. What a check finds is logged, counted and left alone:
`fencepost messages rebuild` writes missing rows, after an operator has looked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fencepost.clock import Clock
from fencepost.protocol.meshes import Mesh
from fencepost.server.mesh.sending import Sending
from fencepost.store.contract import StoreAwayError
from fencepost.store.mesh_contract import MeshReads

log = logging.getLogger(__name__)

INTERVAL_S = 86_400.0
PAGE_ROWS = 1_000
FINDINGS_LOGGED_MAX = 10
"""Findings of one mesh that are logged one by one."""


class OrphanChecks:
    """Checks every mesh of a store."""

    def __init__(
        self, reads: MeshReads, clock: Clock, sending: Sending, *, leads: Callable[[], bool]
    ) -> None:
        self._reads = reads
        self._clock = clock
        self._sending = sending
        self._leads = leads

    async def run(self) -> None:
        """Check once a night until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not self._leads():
                continue
            try:
                await self.check_all()
            except StoreAwayError as error:
                log.warning("the orphan check waits for the store: %s", error)
            except Exception:
                log.exception("the orphan check failed and will be tried again")

    async def check_all(self) -> int:
        """Check every mesh; how many orphans there are."""
        found, after = 0, ""
        while page := await self._reads.meshes(after, PAGE_ROWS):
            for mesh in page:
                found += await self.check(mesh)
            after = page[-1].name
        return found

    async def check(self, mesh: Mesh) -> int:
        """Check a mesh from one end to the other; how many orphans it has."""
        found = 0
        after: str | None = ""
        while after is not None:
            page = await self._reads.check(mesh, after, PAGE_ROWS, self._clock.now_ms())
            assert page is not None, "the place comes from the page before"
            for finding in page.findings[: max(0, FINDINGS_LOGGED_MAX - found)]:
                log.warning("mesh %s: %s: %s", mesh.name, finding.code, finding.detail)
            found += len(page.findings)
            after = page.next
        self.note(mesh.name, found)
        return found

    def note(self, mesh: str, found: int) -> None:
        """A check of a mesh has come to its end."""
        self._sending.orphan_checks += 1
        self._sending.count_of(mesh).orphans = found
