"""The result of a producer's `append`: the batch that the message is in, to wait for.

Messages that were appended together share one. It is settled once, with a `Receipt` or an error,
and keeps its data until then, so that what could not be stored can be put somewhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from fencepost.client.errors import RequestTimeoutError
from fencepost.client.producer.batches import PendingBatch
from fencepost.client.results import Receipt


class Delivery(PendingBatch):
    """A batch of a sync producer."""

    __slots__ = ("_drive",)

    def __init__(
        self,
        drive: Callable[[Callable[[], bool], float | None], bool],
        *,
        json: bool,
        now: float,
        known: bool,
    ) -> None:
        super().__init__(json=json, now=now, known=known)
        self._drive = drive

    def wait(self, timeout: float | None = None) -> Receipt:
        """The receipt, once the batch is on the server's disk; raises why it is not."""
        if not self.settled and not self._drive(lambda: self.settled, timeout):
            raise RequestTimeoutError("the batch is not acknowledged yet", sent=True)
        return self.result()


class AsyncDelivery(PendingBatch):
    """A batch of an async producer: await it."""

    __slots__ = ("_future",)

    def __init__(self, *, json: bool, now: float, known: bool) -> None:
        super().__init__(json=json, now=now, known=known)
        self._future: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, Receipt]:
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> Receipt:
        """The receipt, once the batch is on the server's disk; raises why it is not."""
        if not self.settled:
            if self._future is None:
                self._future = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    # One waiter that is cancelled must not cancel the others.
                    await asyncio.shield(self._future)
            except TimeoutError:
                raise RequestTimeoutError("the batch is not acknowledged yet", sent=True) from None
        return self.result()

    def wake(self) -> None:
        """Let those go on who wait."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
