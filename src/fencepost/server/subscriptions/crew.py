"""A bounded crew for outgoing work: so many jobs at once, others wait, and all have a parent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Job = Callable[[], Coroutine[Any, Any, None]]


class Crew:
    """Runs jobs, at most `size` at a time, inside the task group of `run`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: deque[Job] = deque()
        self._working: set[asyncio.Task[None]] = set()
        self._parent: asyncio.TaskGroup | None = None
        self._stopping = False

    @property
    def working_count(self) -> int:
        return len(self._working)

    def add(self, job: Job) -> None:
        """Do `job` when it is its turn. It must not raise."""
        self._waiting.append(job)
        self._start()

    def forget(self) -> None:
        """Drop the jobs that have not begun."""
        self._waiting.clear()

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Work until `meanwhile` ends or is cancelled; jobs under way are then cancelled too."""
        async with asyncio.TaskGroup() as parent:
            self._parent = parent
            self._start()
            try:
                await meanwhile()
            finally:
                self._parent = None

    async def drain(self, seconds_max: float) -> None:
        """Begin no more jobs, and wait for those under way."""
        self._stopping = True
        if self._working:
            await asyncio.wait(self._working, timeout=seconds_max)

    def _start(self) -> None:
        while (
            self._waiting
            and self._parent is not None
            and not self._stopping
            and len(self._working) < self._size
        ):
            task = self._parent.create_task(self._waiting.popleft()())
            self._working.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        self._start()
