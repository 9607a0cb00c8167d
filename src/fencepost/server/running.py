"""A server from start to stop: the store, the handlers, the front end and the upkeep, in that
order.

Stopping goes the other way round: no new connections, those who wait are told to come back,
requests in flight are finished, then the store commits and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from fencepost.clock import Clock, SystemClock
from fencepost.server.handlers.openapi import OpenApi
from fencepost.server.handlers.operations import Operations
from fencepost.server.listening import serve
from fencepost.server.metrics import Metrics
from fencepost.server.routes import Application
from fencepost.server.settings import ServerSettings
from fencepost.server.subscriptions.guard import is_loopback
from fencepost.server.subscriptions.opening import open_subscriptions
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.subscriptions import SqliteSubscriptions
from fencepost.store.sqlite.upkeep import Upkeep

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
    clock = clock or SystemClock()
    store = SqliteStore(store_settings, clock)
    metrics = Metrics(store)
    engine, reserved, webhooks = await open_subscriptions(
        SqliteSubscriptions(store),
        clock,
        settings.subscriptions,
        settings.limits,
        on_loopback=is_loopback(host),
    )
    app = Application(
        store,
        clock,
        settings,
        extras=(Operations(store, metrics).handle, OpenApi().handle, reserved.handle),
    )
    metrics.watch(app.tails)
    metrics.watch_subscriptions(engine)
    upkeep = Upkeep(store, clock)
    background = [asyncio.create_task(work) for work in (upkeep.run(), upkeep.fold(), engine.run())]
    try:
        listening = await serve(app, settings.http, host=host, port=port, clock=clock)
        metrics.count(listening.counters)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.port}")
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, store.failure), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        log.info("stopping")
        app.stop_waiting()
        drain_s = settings.drain_ms / 1000
        await asyncio.gather(listening.drain(drain_s), engine.drain(drain_s))
    finally:
        for task in background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await webhooks.close()
        await app.close()
        failure = store.failure
        await store.close()
        if failure.done() and not failure.cancelled():
            failure.result()
