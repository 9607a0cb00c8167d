"""Heartbeats in the background of a block that works on a claimed task or a wake.

Async and sync are written side by side by hand, because tasks and threads share nothing. A beat
raises once the claim is lost. The async block is then cancelled, as by `asyncio.timeout`. Python
cannot cancel a thread: the sync block is told by `lost`, and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable


class AsyncHeartbeats:
    """Calls `beat` every so many seconds, in a task of its own, beside the task that starts it."""

    def __init__(self, beat: Callable[[], Awaitable[None]], every: float) -> None:
        self._beat = beat
        self._every = every
        self._working: asyncio.Task[object] | None = None
        self._beating: asyncio.Task[None] | None = None
        self.lost: Exception | None = None
        """The exception that a beat raised; no further beat is sent after it."""

    async def start(self) -> None:
        """Begin; the task that calls this is cancelled when a beat raises."""
        self._working = asyncio.current_task()
        self._beating = asyncio.create_task(self._run())

    async def stop(self) -> Exception | None:
        """Beat no more; what a beat raised, if one did."""
        beating, self._beating = self._beating, None
        if beating is None:
            return self.lost
        if self.lost is not None and self._working is not None:
            # The cancellation may have ended the block, or be about to arrive at the next await.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            self._working.uncancel()
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
        return self.lost

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await self._beat()
            except Exception as error:
                self.lost = error
                assert self._working is not None
                self._working.cancel()
                return


class Heartbeats:
    """Calls `beat` every so many seconds, in a thread of its own."""

    def __init__(self, beat: Callable[[], None], every: float) -> None:
        self._beat = beat
        self._every = every
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: Exception | None = None
        """The exception that a beat raised; no further beat is sent after it."""

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="fencepost-heartbeats")
        self._thread.start()

    def stop(self) -> Exception | None:
        """Beat no more; what a beat raised, if one did."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        return self.lost

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self._beat()
            except Exception as error:
                self.lost = error
                return
