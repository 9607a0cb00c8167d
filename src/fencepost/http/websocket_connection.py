"""A connection after it became a WebSocket: what takes the place of `Connection` behind a socket.

`connection.py` writes the 101, makes one of these the protocol of its transport, and is done. The
bytes of the WebSocket are counted as those of any answer, messages that wait as the bodies of
requests, and a client that stops reading is cut off as any other.
"""

from __future__ import annotations

import asyncio

from fencepost.http.front import Front, StallWatch
from fencepost.http.settings import WebSocketSettings
from fencepost.http.websocket import WebSocket

TRY_LATER = 1013
"""The code of a close when the bodies in flight take all that they may (RFC 6455, registry)."""


class WebSocketConnection(asyncio.Protocol):
    """Stands between a transport of asyncio and a `WebSocket`, and is the transport of the latter.

    The methods in the first part are for the event loop, those in the second for `Front`, those in
    the third for the `WebSocket`.
    """

    __slots__ = ("_front", "_sender", "_stall", "_transport", "_written_bytes", "websocket")

    def __init__(
        self,
        front: Front,
        transport: asyncio.Transport,
        settings: WebSocketSettings,
        sender: str | None,
    ) -> None:
        """`sender` is the principal whose request made this a WebSocket, if the server has any."""
        self._front = front
        self._sender = sender
        self._transport = transport
        self._written_bytes = transport.get_write_buffer_size()
        self._stall = StallWatch(front.now_seconds, front.settings.write_stall_seconds)
        self.websocket = WebSocket(self, front.loop.call_soon, settings)

    # For the event loop.

    def data_received(self, data: bytes) -> None:
        front = self._front
        front.counters.bytes_in += len(data)
        if front.counters.bytes_in >= front.count_at_bytes:
            front.count_bodies()
        self.websocket.data_received(data)

    def eof_received(self) -> bool:
        self.websocket.eof_received()
        return False

    def pause_writing(self) -> None:
        self.websocket.pause_writing()

    def resume_writing(self) -> None:
        self.websocket.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._front.left(self)
        self.websocket.connection_lost()

    # For the front end.

    def sweep(self, now_seconds: float) -> None:
        """Look at every timeout of this connection; called a few times a second."""
        unsent_bytes = self._transport.get_write_buffer_size()
        if self._stall.is_stalled(now_seconds, self._written_bytes, unsent_bytes):
            self.abort()
        else:
            self.websocket.sweep(now_seconds)

    def count_bodies(self) -> None:
        """Count the messages that wait here, and close where there is no room for them."""
        size = self.websocket.held_bytes
        refusal = self._front.bodies.refuse(self._sender, size) if size else None
        if refusal is not None:
            self.websocket.close(TRY_LATER, refusal.code.encode())

    def begin_drain(self) -> None:
        """Let the receiver finish what is under way and close."""
        self.websocket.begin_drain()

    def abort(self) -> None:
        """Cut the connection now, whatever is under way."""
        self._front.counters.connections_aborted += 1
        self._transport.abort()

    # For the WebSocket.

    def writelines(self, pieces: list[bytes], /) -> None:
        size = sum(map(len, pieces))
        self._written_bytes += size
        self._front.counters.bytes_out += size
        self._transport.writelines(pieces)

    def write_eof(self) -> None:
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
