"""An answer that is pulled chunk by chunk: the only part of the front end that runs as a task.

The next chunk is asked for when the one before it has left for the kernel, or nearly: as soon as
the connection's buffer is above its high mark, pulling stops until it is below the low one. A
reader that does not read therefore holds one buffer and one chunk, never the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from fencepost.http.front import Front
from fencepost.http.messages import StreamingResponse

log = logging.getLogger("fencepost.http")

JOIN_BYTES_MAX = 64 * 1024
"""Larger bodies are written beside their head, not joined to it: copying them costs more."""

_LAST_CHUNK = b"0\r\n\r\n"


class Sink(Protocol):
    """Where chunks go: the connection."""

    writing_paused: bool

    def write(self, data: bytes) -> None: ...
    def write_parts(self, parts: tuple[bytes, ...]) -> None: ...


class OutgoingStream:
    """One `StreamingResponse` on its way out; `ended` hears whether it was complete."""

    __slots__ = ("_answer", "_chunked", "_drained", "_ended", "_front", "_sink", "_task")

    def __init__(
        self,
        front: Front,
        sink: Sink,
        answer: StreamingResponse,
        *,
        chunked: bool,
        ended: Callable[[bool], None],
    ) -> None:
        self._front = front
        self._sink = sink
        self._answer = answer
        self._chunked = chunked
        self._ended = ended
        self._drained: asyncio.Future[None] | None = None
        front.counters.streams_open += 1
        self._task = front.spawn(self._pull())
        self._task.add_done_callback(self._finish)

    @property
    def is_live(self) -> bool:
        """Whether this is an event stream (SSE): it has no end, and its client reconnects."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self._answer.headers
        )

    def cancel(self) -> None:
        """End the stream between two chunks."""
        self._task.cancel()

    def go_on(self) -> None:
        """The buffer is below its low mark: pull again."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def _pull(self) -> None:
        sink = self._sink
        async for chunk in self._answer.chunks:
            if not chunk:
                continue  # an empty chunk would end the body
            if not self._chunked:
                sink.write(chunk)
            elif len(chunk) <= JOIN_BYTES_MAX:
                sink.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            else:
                sink.write_parts((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
            if sink.writing_paused:
                self._drained = self._front.loop.create_future()
                await self._drained

    def _finish(self, task: asyncio.Task[None]) -> None:
        # The iterator is closed from here and not inside the task, because a task that is cancelled
        # before its first step never runs its own `finally`.
        self._front.discard(self._answer)
        self._front.counters.streams_open -= 1
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a stream ended with an error", exc_info=error)
        self._ended(error is None)

    def end(self) -> None:
        """Write what tells the client that the body is complete."""
        if self._chunked:
            self._sink.write(_LAST_CHUNK)
