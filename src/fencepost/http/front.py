"""What all connections of one HTTP front end share: settings, the application, time, and counts.

The time here is coarse on purpose. One sweep per server moves `now_seconds` and renews the Date
line, so that a request costs no clock reading and no timer of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from fencepost.clock import Clock
from fencepost.http.bodies import Bodies, KnowsSender
from fencepost.http.messages import Answer, App, StreamingResponse
from fencepost.http.request_ids import RequestIds
from fencepost.http.settings import HttpSettings
from fencepost.http.wire import METHODS, date_line

log = logging.getLogger("fencepost.http")


class HttpCounters:
    """What the front end has done since it started, as plain integers for the metrics."""

    __slots__ = (
        "bodies_bytes",
        "bytes_in",
        "bytes_out",
        "connections_aborted",
        "connections_open",
        "connections_refused",
        "connections_total",
        "heads_repeated",
        "refusals",
        "requests",
        "streams_open",
    )

    def __init__(self) -> None:
        self.connections_open = 0
        self.connections_total = 0
        self.connections_refused = 0
        self.connections_aborted = 0  # stalled readers, drains past their time
        self.streams_open = 0
        self.heads_repeated = 0
        """Requests that were read without the parser (`heads.py`)."""
        self.bodies_bytes = 0
        """Bytes of bodies whose requests have no answer yet, as of the last sweep."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.requests: dict[str, list[int]] = {name: [0] * 6 for name in METHODS.values()}
        """Answers of the application: by method, then by the first digit of the status."""
        self.refusals: dict[str, int] = {}
        """Answers of the front end itself, by `code`."""


COUNTS = 32
"""How often the bodies are counted, at least, while so many bytes come as may be in flight."""


class Sweepable(Protocol):
    """A connection, as the sweep and the drain see it."""

    def sweep(self, now_seconds: float) -> None: ...
    def count_bodies(self) -> None: ...
    def begin_drain(self) -> None: ...
    def abort(self) -> None: ...


class StallWatch:
    """Notices a client that takes no byte of what waits for it, for longer than it may."""

    __slots__ = ("_moved_seconds", "_sent_bytes", "_stall_seconds")

    def __init__(self, now_seconds: float, stall_seconds: float) -> None:
        self._sent_bytes = 0
        self._moved_seconds = now_seconds
        self._stall_seconds = stall_seconds

    def is_stalled(self, now_seconds: float, written_bytes: int, unsent_bytes: int) -> bool:
        """Whether the client has stood still for too long; asked a few times a second."""
        sent_bytes = written_bytes - unsent_bytes
        if unsent_bytes == 0 or sent_bytes != self._sent_bytes:
            self._sent_bytes = sent_bytes
            self._moved_seconds = now_seconds
            return False
        return now_seconds - self._moved_seconds > self._stall_seconds


TakesWebSocket = Callable[[bytes], bool]
"""Whether a request for this raw path may become a WebSocket."""


class Front:
    """The shared state of one listening front end; connections hold it, `Listening` drives it."""

    __slots__ = (
        "_clock",
        "_date_second",
        "_emptied",
        "_tasks",
        "app",
        "bodies",
        "connections",
        "count_at_bytes",
        "counters",
        "date_line",
        "draining",
        "loop",
        "now_seconds",
        "refusing",
        "request_ids",
        "settings",
        "takes_websocket",
    )

    def __init__(
        self,
        app: App,
        settings: HttpSettings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        takes_websocket: TakesWebSocket | None = None,
        knows_sender: KnowsSender | None = None,
    ) -> None:
        self.app = app
        self.settings = settings
        self.bodies = Bodies(settings, knows_sender)
        self.takes_websocket = takes_websocket
        self.loop = loop
        self.request_ids = RequestIds(clock)
        self.counters = HttpCounters()
        self.connections: set[Sweepable] = set()
        self.count_at_bytes = settings.bodies_bytes_max // COUNTS
        """Count the bodies when so many bytes have come, whatever the time."""
        self.refusing = 0
        self.draining = False
        self._clock = clock
        self._date_second = -1
        self._emptied: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.tick()

    def tick(self) -> None:
        """Move the coarse clock."""
        self.now_seconds = self.loop.time()
        now_ms = self._clock.wall_ms()
        if now_ms // 1000 != self._date_second:
            self._date_second = now_ms // 1000
            self.date_line = date_line(now_ms)

    def sweep(self) -> None:
        """Move the coarse clock and let every connection look at its own timeouts."""
        self.tick()
        now_seconds = self.now_seconds
        for connection in list(self.connections):
            connection.sweep(now_seconds)
        self.count_bodies()

    def count_bodies(self) -> None:
        """Count the small bodies of all connections."""
        bodies, counters = self.bodies, self.counters
        bodies.begin_count()
        for connection in list(self.connections):
            connection.count_bodies()
        bodies.end_count()
        counters.bodies_bytes = bodies.bytes + bodies.small_bytes
        self.count_at_bytes = counters.bytes_in + self.settings.bodies_bytes_max // COUNTS

    def joined(self, connection: Sweepable) -> None:
        self.connections.add(connection)
        self.counters.connections_open += 1
        self.counters.connections_total += 1

    def left(self, connection: Sweepable) -> None:
        self.connections.discard(connection)
        self.counters.connections_open -= 1
        if not self.connections and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def replaced(self, connection: Sweepable, successor: Sweepable) -> None:
        """A connection changed its protocol, and is swept and drained as another object now."""
        self.connections.remove(connection)
        self.connections.add(successor)

    async def emptied(self) -> None:
        """Return once no connection is left."""
        if self.connections:
            self._emptied = self.loop.create_future()
            await self._emptied

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that belongs to this front end: `finished` waits for it."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finished(self) -> None:
        """Return once every task spawned here has ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def discard(self, answer: Answer) -> None:
        """Drop an answer whose client has left; a stream's iterator is closed all the same."""
        if isinstance(answer, StreamingResponse):
            _ = self.spawn(close_chunks(answer.chunks))


async def close_chunks(chunks: AsyncIterator[bytes]) -> None:
    """Close an iterator, if it is of a kind that can be closed."""
    close = getattr(chunks, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception:
        log.exception("a stream failed while it was closed")
