"""WebSockets of an ASGI host: its events become what a receiver sees of a WebSocket.

The host does the frames and the pings of the protocol. What the front end bounds is bounded here
too: the size of a message, the bytes that wait for a client which does not read, the time for a
close.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fencepost.http.messages import (
    Answer,
    App,
    Request,
    StreamingResponse,
    UpgradeResponse,
    all_headers,
)
from fencepost.http.settings import WebSocketSettings
from fencepost.http.upgrade import Upgrade
from fencepost.http.websocket import REASON_BYTES_MAX, Closed, Receiver

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PAUSE_BYTES = 256 * 1024
"""Bytes waiting for a client above which its receiver is asked to send nothing more."""


async def serve_websocket(
    app: App, request: Request, extensions: object, receive: Receive, send: Send
) -> None:
    """Carry one connection of the host from its handshake to its end."""
    if (await receive())["type"] != "websocket.connect":
        return
    request.upgrade = Upgrade(b"")  # the host answers the key
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def respond(answer: Answer) -> None:
        if not answered.done():
            answered.set_result(answer)

    work = app.handle(request, respond)
    try:
        answer = await answered
    except asyncio.CancelledError:
        if work is not None:
            work.cancel()
        raise
    if isinstance(answer, UpgradeResponse):
        await _Connection(answer.settings).carry(answer, receive, send)
    else:
        assert not isinstance(answer, StreamingResponse), "a WebSocket is refused at once"
        if not isinstance(extensions, dict) or "websocket.http.response" not in extensions:
            await send({"type": "websocket.close", "code": 1008})  # the host answers 403
            return
        headers = [(name.lower(), value) for name, value in all_headers(answer)]
        start = {"type": "websocket.http.response.start", "status": answer.status}
        await send({**start, "headers": headers})
        body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
        await send({"type": "websocket.http.response.body", "body": body})


class _Connection:
    """What a receiver holds in place of a `WebSocket`."""

    def __init__(self, settings: WebSocketSettings) -> None:
        self._settings = settings
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._close: tuple[int, str] | None = None
        self._written = asyncio.Event()
        """Set when there is something to send."""
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._gone = False
        self.writing_paused = False

    # For the receiver.

    @property
    def is_open(self) -> bool:
        return self._close is None and not self._gone

    def send(self, message: bytes) -> bool:
        if not self.is_open:
            return False
        self._outgoing.append(message)
        self._outgoing_bytes += len(message)
        self._written.set()
        if self._outgoing_bytes > self._settings.outgoing_bytes_max:
            self._gone = True
            return False
        self.writing_paused = self._outgoing_bytes > PAUSE_BYTES
        return True

    def close(self, code: int, reason: bytes = b"") -> None:
        if self._close is None:
            self._close = code, reason[:REASON_BYTES_MAX].decode(errors="ignore")
        self._unpaused.set()
        self._written.set()

    def pause(self) -> None:
        if self._close is None:
            self._unpaused.clear()

    def resume(self) -> None:
        self._unpaused.set()

    # For the host.

    async def carry(self, answer: UpgradeResponse, receive: Receive, send: Send) -> None:
        """Carry messages in both directions until one side has closed."""
        await send({"type": "websocket.accept"})
        receiver = answer.begin(self)
        reading = asyncio.ensure_future(self._read(receiver, receive))
        writing = asyncio.ensure_future(self._write(receiver, send))
        closed = Closed(1006, "")
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                closed = reading.result()
            else:
                # A client that takes nothing is cut off by the host; one that left is no error.
                with contextlib.suppress(TimeoutError, OSError):
                    writing.result()
        finally:
            self._gone = True
            receiver.closed(closed)
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read(self, receiver: Receiver, receive: Receive) -> Closed:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return Closed(message.get("code") or 1006, message.get("reason") or "")
            await self._unpaused.wait()
            text = message.get("text")
            if not self.is_open:
                continue
            if text is None:
                self.close(1003, b"messages are text")
            elif len(data := text.encode()) > self._settings.message_bytes_max:
                self.close(1009, b"message_bytes_max")
            else:
                receiver.received(data)

    async def _write(self, receiver: Receiver, send: Send) -> None:
        while True:
            await self._written.wait()
            self._written.clear()
            if self._gone:
                return  # it does not read: the host cuts the connection
            if self._close is not None:
                async with asyncio.timeout(self._settings.close_seconds):
                    await self._flush(receiver, send)
                    code, reason = self._close
                    await send({"type": "websocket.close", "code": code, "reason": reason})
                return
            await self._flush(receiver, send)

    async def _flush(self, receiver: Receiver, send: Send) -> None:
        while self._outgoing:
            message = self._outgoing.popleft()
            await send({"type": "websocket.send", "text": message.decode()})
            self._outgoing_bytes -= len(message)
            if self.writing_paused and self._outgoing_bytes <= PAUSE_BYTES // 4:
                self.writing_paused = False
                receiver.writable()
