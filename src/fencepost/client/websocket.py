"""WebSockets as values, on the client's side: the request, its answer, frames to and from bytes.

No sockets here. The frames are those of `websockets`, as on the server (ADR 0021); it is loaded
with the first session.
"""

from __future__ import annotations

import base64
from hashlib import sha1

from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

from fencepost.client.errors import ConnectionFailedError, ProtocolError
from fencepost.client.http import HEAD_BYTES_MAX, Request, ResponseParser
from fencepost.client.http import Response as HttpResponse

MESSAGE_BYTES_MAX = 64 << 20
"""The largest message of a server; ours sends about 1 MiB at a time."""
_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, 1.3."""


def upgrade_request(target: str, key: str) -> Request:
    """The request that asks for a WebSocket."""
    headers = (
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", key),
    )
    return Request("GET", target, headers, live=True)


class Handshake:
    """Reads the answer to that request."""

    def __init__(self, key: str) -> None:
        self._accept = base64.b64encode(sha1(key.encode() + _SUFFIX).digest()).decode()
        self._head = b""
        self._refused = False
        self._parser = ResponseParser()

    def feed(self, data: bytes) -> bytes | HttpResponse | None:
        """What came behind the 101, or the answer that refuses; None as long as more is to come."""
        if not data:
            raise ConnectionFailedError("the server closed the connection", sent=True)
        if self._refused:
            return self._answer(data)
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            if len(head) > HEAD_BYTES_MAX:
                raise ProtocolError("the headers of the server's answer have no end")
            return None
        status, *lines = head.decode("latin-1").split("\r\n")
        if status.split(" ")[1:2] != ["101"]:
            self._refused = True
            return self._answer(self._head)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("sec-websocket-accept") != self._accept:
            raise ProtocolError("the server's answer is not that of a WebSocket")
        return rest

    def _answer(self, data: bytes) -> HttpResponse | None:
        self._parser.feed(data)
        return self._parser.done.pop() if self._parser.done else None


def text(message: bytes) -> bytes:
    """A message as the bytes that go out."""
    return Frame(Opcode.TEXT, message).serialize(mask=True)


class Incoming:
    """Puts messages together out of what arrives."""

    def __init__(self) -> None:
        self._protocol = Protocol(Side.CLIENT, state=State.OPEN, max_size=MESSAGE_BYTES_MAX)
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete now; empty `data`: the connection has ended."""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        messages: list[bytes] = []
        for event in self._protocol.events_received():
            if not isinstance(event, Frame) or event.opcode not in (Opcode.TEXT, Opcode.CONT):
                continue
            self._parts.append(bytes(event.data))
            if event.fin:
                messages.append(b"".join(self._parts))
                self._parts.clear()
        return messages

    def close(self) -> None:
        """Say that the client is done."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000, "")

    def outgoing(self) -> bytes:
        """What is to be sent beside messages: pongs and the answer to a close."""
        return b"".join(self._protocol.data_to_send())

    @property
    def closed(self) -> tuple[int, str] | None:
        """The code and the reason of the server's close; 1006: there was none; None: it is open."""
        if self._protocol.state is State.OPEN:
            return None
        received = self._protocol.close_rcvd
        return (1006, "") if received is None else (received.code, received.reason)
