"""A Fencepost server inside another program: an ASGI application over a store.

    @asynccontextmanager
    async def lifespan(app):
        async with embedded(Path("data")) as streams:
            app.mount("/fencepost", streams)
            yield

One process may open a folder at a time, so the host runs with one worker. On PostgreSQL it may run
with any number, each with an application of its own:

    embedded(store_settings=PostgresSettings(url="postgresql://..."))
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from fencepost.http.listener import serve
from fencepost.server.asgi import ASGIApp
from fencepost.server.assembly import Assembly
from fencepost.server.running import url_of
from fencepost.server.settings import ServerSettings
from fencepost.store.opener import AnyStoreSettings
from fencepost.store.settings import SqliteSettings


@contextlib.asynccontextmanager
async def embedded(
    folder: Path | None = None,
    settings: ServerSettings | None = None,
    store_settings: AnyStoreSettings | None = None,
    *,
    watch_signals: bool = True,
) -> AsyncIterator[ASGIApp]:
    """An application to mount, as long as the context is open: on a folder, or on another store.

    Every request may do everything, unless `settings.auth` has principals. Hosts such as uvicorn
    wait for open requests before they end their lifespan, so SIGINT and SIGTERM end live readers
    as soon as they arrive, beside what the host does about them; `watch_signals=False` leaves that
    to the host, which calls `ASGIApp.stop_waiting` when it begins to stop.
    """
    settings = settings or ServerSettings()
    if store_settings is None:
        if folder is None:
            raise ValueError("name a data folder, or give store_settings")
        store_settings = SqliteSettings(folder=folder)
    assembly = await Assembly.open(settings, store_settings, on_loopback=False)
    try:
        async with _reached(assembly):
            mounted = ASGIApp(
                assembly.app,
                settings.http,
                knows_sender=assembly.knows_sender,
                stop_waiting=assembly.app.stop_waiting,
            )
            with _watched(mounted.stop_waiting) if watch_signals else contextlib.nullcontext():
                yield mounted
            await assembly.drain()
    finally:
        await assembly.close()


@contextlib.contextmanager
def _watched(stop_waiting: Callable[[], None]) -> Iterator[None]:
    """Call `stop_waiting` when this process is asked to end, beside the handlers of the host.

    The host has installed its handlers before it starts our lifespan. Python lets only the main
    thread handle signals: elsewhere the host has to say by itself that it stops.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop_waiting)
        host = before[signal.Signals(number)]
        if callable(host):
            host(number, frame)
        elif host == signal.SIG_DFL:
            signal.signal(number, host)
            signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, host in before.items():
            # A handler that was installed after ours stays.
            if signal.getsignal(number) is handle:
                signal.signal(number, host)


@contextlib.asynccontextmanager
async def _reached(assembly: Assembly) -> AsyncIterator[None]:
    """Let the other servers on the store reach this one, if there can be any.

    Where the host listens is not known here, and its workers may share a port. So there is a port
    of our own: on this machine only, unless `node_host` says under which name others find it.
    """
    if assembly.opened.leading is None:
        yield
        return
    settings = assembly.settings
    host = settings.node_host or "127.0.0.1"
    listening = await serve(
        assembly.app,
        settings.http,
        host=host,
        clock=assembly.clock,
        knows_sender=assembly.knows_sender,
    )
    try:
        await assembly.reached_at(url_of(host, listening.port))
        yield
    finally:
        await listening.drain(settings.drain_ms / 1000)
