"""A server from start to stop: what is behind the front end, then the front end itself.

Stopping goes the other way round: no new connections, those who wait are told to come back,
requests in flight are finished, then the store commits and closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fencepost.clock import Clock
from fencepost.server.assembly import Assembly
from fencepost.server.listening import serve
from fencepost.server.settings import ServerSettings
from fencepost.server.subscriptions.guard import is_loopback
from fencepost.store.sqlite.settings import SqliteSettings

log = logging.getLogger(__name__)


async def run(
    settings: ServerSettings,
    store_settings: SqliteSettings,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    clock: Clock | None = None,
) -> None:
    """Serve until `stop` is set, then drain. Raises when the disk fails."""
    assembly = await Assembly.open(
        settings, store_settings, on_loopback=is_loopback(host), clock=clock
    )
    try:
        listening = await serve(
            assembly.app, settings.http, host=host, port=port, clock=assembly.clock
        )
        assembly.metrics.count(listening.counters)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.port}")
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, assembly.store.failure), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        log.info("stopping")
        await asyncio.gather(listening.drain(settings.drain_ms / 1000), assembly.drain())
    finally:
        await assembly.close()
