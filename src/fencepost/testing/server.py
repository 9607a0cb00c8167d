"""A whole server inside the test's own event loop, on a real port and a real store.

It is the server that `fencepost serve` runs, without the process around it: a test may hand it a
clock and a VFS, and see how it ended. To kill one, run a process.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from fencepost.clock import Clock
from fencepost.server.running import run
from fencepost.server.settings import ServerSettings
from fencepost.store.opener import AnyStoreSettings


class TestServer:
    """A server for as long as the `async with` lasts; `url` and `port` say where."""

    __test__ = False  # pytest takes the name for a test otherwise

    def __init__(
        self,
        store: AnyStoreSettings,
        *,
        settings: ServerSettings | None = None,
        clock: Clock | None = None,
        port: int = 0,
    ) -> None:
        self._store = store
        self._settings = settings or ServerSettings()
        self._clock = clock
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.host = "127.0.0.1"
        self.port = port
        self.url = ""

    async def start(self) -> Self:
        """Return once the server listens; raises what kept it from starting."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            run(
                self._settings,
                self._store,
                host=self.host,
                port=self.port,
                stop=self._stop,
                ready=ready.set_result,
                clock=self._clock,
            )
        )
        self._task = task
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            await task
        self.url = ready.result()
        self.port = int(self.url.rpartition(":")[2])
        return self

    async def stop(self) -> None:
        """Drain and close; raises what the server ended with, if it was not asked to."""
        self._stop.set()
        await self.ended()

    async def ended(self) -> None:
        """Wait until the server is gone by itself or because it was asked; raises why."""
        assert self._task is not None, "the server was not started"
        await asyncio.shield(self._task)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        if not self._task.done():
            await self.stop()
