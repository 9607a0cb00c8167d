"""Note the targets of events beside a worker, for as long as it runs.

Async and sync are written side by side by hand, because tasks and threads share nothing. A worker
that notes nothing has nothing to do, so whatever fails here is said in the log and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator

from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.group_worker import AWAY, Breaker
from fencepost.client.sync.connections import Driver
from fencepost.events.correlating import Correlating

log = logging.getLogger(__name__)


def _failed(breaker: Breaker, error: Exception) -> None:
    breaker.failed(error)
    if not isinstance(error, AWAY):
        text = "the targets of events cannot be noted, next attempt in %.1f s: %s"
        log.error(text, breaker.pause_s, error)


@contextlib.asynccontextmanager
async def correlating_in_task(driver: AsyncDriver, correlating: Correlating) -> AsyncIterator[None]:
    """Note targets in a task while the block runs."""
    task = asyncio.create_task(_async_correlate(driver, correlating))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _async_correlate(driver: AsyncDriver, correlating: Correlating) -> None:
    breaker = Breaker()
    while True:
        try:
            await driver.run(correlating.follow(lambda: False))
            breaker.succeeded()
        except Exception as error:
            _failed(breaker, error)
        await asyncio.sleep(breaker.pause_s)


@contextlib.contextmanager
def correlating_in_thread(driver: Driver, correlating: Correlating) -> Iterator[None]:
    """Note targets in a thread while the block runs."""
    stop = driver.stop_of(None)

    def correlate() -> None:
        breaker = Breaker()
        while not stop.is_over():
            try:
                driver.run(correlating.follow(stop.is_over), stop)
                breaker.succeeded()
            except Exception as error:
                if stop.is_over():
                    return
                _failed(breaker, error)
                stop.sleep(breaker.pause_s)

    thread = threading.Thread(target=correlate, name="fencepost-correlate", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
