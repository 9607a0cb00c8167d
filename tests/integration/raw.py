"""A blocking HTTP client made of bytes: it sends exactly what it is given and reads strictly.

For tests about what well-behaved clients never send, and for readers that must notice every byte.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.unit.http.rawhttp import Reply, parse_head

WAIT_SECONDS = 30.0
"""How long to wait for something that should happen at once."""


def request(
    method: str,
    target: str | bytes,
    *headers: str | bytes,
    body: bytes = b"",
    chunked: bool = False,
) -> bytes:
    """A request in bytes; Host and the body's framing are added, nothing is checked."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), _bytes(target)), b"Host: localhost"]
    lines += [_bytes(header) for header in headers]
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    elif body or method in ("POST", "PUT"):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", b""]) + body


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


class Connection:
    """One connection to a server on this machine."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb", buffering=1 << 16)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(
        self,
        method: str,
        target: str | bytes,
        *headers: str | bytes,
        body: bytes = b"",
    ) -> Reply:
        self.send(request(method, target, *headers, body=body))
        return self.reply(method)

    def head(self) -> Reply:
        """The head of the next answer."""
        lines = []
        while line := self._file.readline():
            lines.append(line)
            if line == b"\r\n":
                break
        assert lines, "the server closed the connection without an answer"
        return parse_head(b"".join(lines))

    def reply(self, method: str = "GET") -> Reply:
        """The next answer, whole."""
        reply = self.head()
        if method == "HEAD" or reply.status in (204, 304):
            return reply
        if reply.headers.get("transfer-encoding") == "chunked":
            reply.body = b"".join(self.chunks())
        else:
            reply.body = self._file.read(int(reply.headers["content-length"]))
        return reply

    def chunks(self) -> Iterator[bytes]:
        """The chunks of a chunked body; a body that is cut off fails the test."""
        while True:
            size = int(self._file.readline(), 16)
            data = self._file.read(size + 2)
            assert len(data) == size + 2, "the body was cut off"
            assert data[-2:] == b"\r\n"
            if size == 0:
                return
            yield data[:-2]

    def at_end(self) -> bool:
        """Whether the server has closed the connection."""
        return not self._file.read(1)

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ask(
    port: int, method: str, target: str | bytes, *headers: str | bytes, body: bytes = b""
) -> Reply:
    """One request on a connection of its own."""
    with Connection(port) as connection:
        return connection.ask(method, target, *headers, body=body)


def code_of(reply: Reply) -> str:
    """The stable code of a problem, after checking that it is one."""
    assert reply.headers["content-type"] == "application/problem+json", reply
    assert reply.headers["cache-control"] == "no-store"
    problem = json.loads(reply.body)
    assert set(problem) >= {"type", "title", "status", "code", "detail"}
    assert problem["status"] == reply.status
    assert problem["title"]
    assert problem["detail"]
    code: str = problem["code"]
    return code


@dataclass
class Event:
    """One server-sent event: for a control event `data` is parsed."""

    kind: str
    data: str

    @property
    def control(self) -> dict[str, Any]:
        assert self.kind == "control", self
        parsed: dict[str, Any] = json.loads(self.data)
        return parsed


def events(chunks: Iterator[bytes]) -> Iterator[Event]:
    """The events of an SSE body, by the rules of the WHATWG, as they arrive."""
    waiting = b""
    for chunk in chunks:
        waiting += chunk
        *whole, waiting = re.split(b"\n\n", waiting)
        for block in whole:
            yield _event(block.decode("utf-8", "replace"))
    assert waiting == b"", "the stream ended inside an event"


def _event(block: str) -> Event:
    kind, data = "message", []
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        if name == "event":
            kind = value.removeprefix(" ")
        elif name == "data":
            data.append(value.removeprefix(" "))
    return Event(kind, "\n".join(data))
