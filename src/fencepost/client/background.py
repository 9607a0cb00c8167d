"""Something that runs beside its owner until it ends by itself: a task, or a thread.

Async and sync are written side by side by hand, because tasks and threads share nothing. The owner
tells what runs to end, and then joins it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable


class AsyncBackground:
    """Runs `work` in a task of its own."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._work()

    async def join(self) -> None:
        """Return once it has ended."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(task)


class Background:
    """Runs `work` in a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._work, daemon=True, name="fencepost-session")
        self._thread.start()

    def join(self) -> None:
        """Return once it has ended."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
