"""Apps on real servers for tests of both clients: the sync one looks like the async one.

A test asks for `opening` and is written with `await`. It runs on the async client, and on the sync
one whose calls run in threads. With `begin`, apps see the events of their test alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

import fencepost
from fencepost.events import App, AppSettings, Breadcrumb
from fencepost.events.correlating import Correlating, make_group
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


_numbers = itertools.count()


def fresh(word: str) -> str:
    """A name that no other test of this server has."""
    return f"{word}{next(_numbers)}"


begins = [-1]


@pytest.fixture(autouse=True)
def begin(server_process: ServerProcess) -> None:
    """Apps of a test begin behind what tests before it have stored."""
    with fencepost.connect(server_process.url) as client:
        begins.append(client.log_head())


def here() -> AppSettings:
    """The settings of an app that sees the events of this test alone."""
    return AppSettings(start=begins[-1])


def watching(app: App) -> list[Breadcrumb]:
    """Everything that the app reports from now on."""
    seen: list[Breadcrumb] = []
    for kind in ("committed", "claimed", "acked", "failed", "blocked", "parked", "lost", "settled"):
        app.hook(kind)(seen.append)
    return seen


def kinds(seen: list[Breadcrumb], *wanted: str) -> list[str]:
    return [crumb.kind for crumb in seen if crumb.kind in wanted]


def is_async_app(opened: Any) -> bool:
    return type(opened).__name__ == "AsyncOpenApp"


async def parked_events(shop: Any) -> list[Any]:
    """What is set aside, from either client."""
    found = shop.group.parked()
    return await listed(found) if is_async_app(shop) else list(found)


async def correlate_all(shop: Any) -> None:
    """Correlate as a worker does, and handle nothing."""
    app = shop.app
    with fencepost.connect(str(url_of(shop))) as client:
        driver = client._driver
        await asyncio.to_thread(driver.run, make_group(driver.settings, app.name, begins[-1]))
        correlating = Correlating(driver.settings, app.name, app.registry)
        await asyncio.to_thread(driver.run, correlating.to_head())


def url_of(shop: Any) -> str:
    address = shop.deciding.settings.address
    return f"http://{address.host}:{address.port}"
