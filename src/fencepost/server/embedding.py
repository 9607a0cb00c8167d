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

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

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
) -> AsyncIterator[ASGIApp]:
    """An application to mount, as long as the context is open: on a folder, or on another store.

    Every request may do everything, unless `settings.auth` has principals.
    """
    settings = settings or ServerSettings()
    if store_settings is None:
        if folder is None:
            raise ValueError("name a data folder, or give store_settings")
        store_settings = SqliteSettings(folder=folder)
    assembly = await Assembly.open(settings, store_settings, on_loopback=False)
    try:
        async with _reached(assembly):
            yield ASGIApp(assembly.app, settings.http)
            await assembly.drain()
    finally:
        await assembly.close()


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
    listening = await serve(assembly.app, settings.http, host=host, clock=assembly.clock)
    try:
        await assembly.reached_at(url_of(host, listening.port))
        yield
    finally:
        await listening.drain(settings.drain_ms / 1000)
