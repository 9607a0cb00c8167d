"""Apps on real servers for tests of both clients: the sync one looks like the async one.

A test asks for `opening` and is written with `await`. It runs on the async client, and on the sync
one whose calls run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

import fencepost
from fencepost.events import App
from tests.serving import ServerProcess
from tests.twins import Threaded

AT_ONCE = frozenset(("using", "query"))
"""Methods of an open app that give something without asking the server."""

Opening = Callable[[App], AbstractAsyncContextManager[Any]]


class ThreadedApp(Threaded):
    """A sync app whose methods are awaited."""

    def __getattr__(self, name: str) -> Any:
        if name in AT_ONCE:
            found = getattr(self._wrapped, name)
            return lambda *arguments, **named: ThreadedApp(found(*arguments, **named))
        if name in ("group", "books"):
            return ThreadedApp(getattr(self._wrapped, name))
        if name in ("streams", "parked", "workers") or name == "client":
            return getattr(self._wrapped, name)
        return super().__getattr__(name)


@pytest.fixture(params=["async", "sync"])
def opening(request: pytest.FixtureRequest, server_process: ServerProcess) -> Opening:
    """`async with opening(app) as opened` for either client."""
    if request.param == "async":

        @asynccontextmanager
        async def open_async(app: App) -> Any:
            url = server_process.url
            async with fencepost.connect_async(url) as client, app.open(client) as opened:
                yield opened

        return open_async

    @asynccontextmanager
    async def open_sync(app: App) -> Any:
        with fencepost.connect(server_process.url) as client:
            opened = app.open(client)
            try:
                yield ThreadedApp(opened)
            finally:
                await asyncio.to_thread(opened.close)

    return open_sync


async def listed(found: Any) -> list[Any]:
    """Everything of a listing."""
    return [item async for item in found]
