"""A server from start to stop: what is behind the front end, then the front end itself.

Stopping goes the other way round: no new connections, those who wait are told to come back,
requests in flight are finished, then the store commits and closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.server.assembly import Assembly
from fencepost.server.listening import serve
from fencepost.server.settings import ServerSettings
from fencepost.server.stores import AnyStoreSettings
from fencepost.server.subscriptions.guard import is_loopback

log = logging.getLogger(__name__)


class Worker(NamedTuple):
    """One of several processes on one port: its number, and the port that it has to itself."""

    number: int
    port: int | None


async def run(
    settings: ServerSettings,
    store_settings: AnyStoreSettings,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    clock: Clock | None = None,
    migrate: bool = True,
    worker: Worker | None = None,
) -> None:
    """Serve until `stop` is set, then drain. Raises when the store fails for good."""
    assembly = await Assembly.open(
        settings, store_settings, on_loopback=is_loopback(host), clock=clock, migrate=migrate
    )
    app, http, clock = assembly.app, settings.http, assembly.clock
    try:
        shared = worker is not None
        listening = [await serve(app, http, host=host, port=port, clock=clock, shared=shared)]
        assembly.metrics.count(listening[0].counters)
        if worker is not None:
            assembly.metrics.worker = worker.number
            if worker.port is not None:
                listening.append(await serve(app, http, host=host, port=worker.port, clock=clock))
        ready(url_of(host, listening[0].port))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, assembly.store.failure), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        log.info("stopping")
        drain_s = settings.drain_ms / 1000
        await asyncio.gather(assembly.drain(), *(one.drain(drain_s) for one in listening))
    finally:
        await assembly.close()


def url_of(host: str, port: int) -> str:
    """Where a server on this address is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
