"""A Fencepost server inside another program: an ASGI application over a data folder.

    @asynccontextmanager
    async def lifespan(app):
        async with embedded(Path("data")) as streams:
            app.mount("/fencepost", streams)
            yield

One process may open a folder at a time, so the host runs with one worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fencepost.server.asgi import ASGIApp
from fencepost.server.assembly import Assembly
from fencepost.server.settings import ServerSettings
from fencepost.store.sqlite.settings import SqliteSettings


@contextlib.asynccontextmanager
async def embedded(
    folder: Path,
    settings: ServerSettings | None = None,
    store_settings: SqliteSettings | None = None,
) -> AsyncIterator[ASGIApp]:
    """An application to mount, as long as the context is open.

    Everybody may do everything, unless `settings.auth` has principals.
    """
    settings = settings or ServerSettings()
    assembly = await Assembly.open(
        settings, store_settings or SqliteSettings(folder=folder), on_loopback=False
    )
    try:
        yield ASGIApp(assembly.app, settings.http)
        await assembly.drain()
    finally:
        await assembly.close()
