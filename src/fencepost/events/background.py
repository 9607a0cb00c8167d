"""Work beside the caller's: snapshots that are written while nothing waits for them.

Async and sync are written side by side by hand, because tasks and threads share nothing. What is
given while too much waits already is dropped: a snapshot is only ever a shortcut.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor

WAITING_MAX = 64


class AsyncBackground:
    """Runs functions in tasks of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Begin; whether there was room."""
        if len(self._tasks) >= WAITING_MAX:
            return False

        async def run() -> None:
            await work()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Wait for what has begun."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))


class Background:
    """Runs functions in a thread of its own, one after the other."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: set[Future[None]] = set()
        self._lock = threading.Lock()

    def start(self, work: Callable[[], None]) -> bool:
        """Begin; whether there was room."""
        with self._lock:
            if len(self._waiting) >= WAITING_MAX:
                return False
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="fencepost-events")
            future = self._pool.submit(work)
            self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return True

    def close(self) -> None:
        """Wait for what has begun."""
        if self._pool is not None:
            self._pool.shutdown()
