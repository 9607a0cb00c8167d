"""A server for tests that answers as it is told, also what no good server would answer.

It speaks just enough HTTP/1.1 to read requests. A test gives it a function from a request to the
bytes of the answer, and looks at the requests that came.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def live(self) -> str | None:
        return parse_qs(self.target.partition("?")[2]).get("live", [None])[0]


Answer = Callable[[Asked], bytes | Iterator[bytes] | None]
"""The bytes of an answer; None: say nothing and leave the connection open until the end.

What an iterator gives is sent piece by piece until the client hangs up; then the connection ends.
"""


def response(
    status: int = 200,
    body: bytes = b"",
    *,
    content_type: str | None = "application/json",
    headers: Mapping[str, str] | None = None,
    **named: str,
) -> bytes:
    """The bytes of an answer; `stream_next_offset="1"` is a header."""
    lines = [f"HTTP/1.1 {status} Whatever"]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    lines += [
        f"{name.replace('_', '-')}: {value}" for name, value in {**(headers or {}), **named}.items()
    ]
    if status not in (204, 304):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def tail(body: bytes = b"[]", offset: str = "1", **headers: str) -> bytes:
    """A read that reached the tail."""
    at = {"Stream-Next-Offset": offset, "Stream-Up-To-Date": "true"}
    return response(200, body, headers=at | headers)


class OddServer:
    """Answers every request with what `answer` makes of it; a context manager."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.odd = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.ended = threading.Event()
        self.sent_bytes = 0
        """Of answers that are sent piece by piece: what the client and the kernel have taken."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def count(self, live: str) -> int:
        """How many requests asked for this kind of news."""
        return sum(1 for one in list(self.asked) if one.live == live)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.drop_all()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    odd: OddServer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        self._open.add(sock)
        return sock, address

    def drop_all(self) -> None:
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self._one():
                pass

    def _one(self) -> bool:
        odd = cast(_Server, self.server).odd
        first = self.rfile.readline().decode("latin-1").split()
        if len(first) != 3:
            return False
        headers: dict[str, str] = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = self.rfile.read(int(headers.get("content-length", 0)))
        asked = Asked(first[0], first[1], headers, body, time.monotonic())
        odd.asked.append(asked)
        answer = odd.answer(asked)
        if answer is None:
            odd.ended.wait(60)
            return False
        if not isinstance(answer, bytes):
            for piece in answer:
                if odd.ended.is_set():
                    break
                self.wfile.write(piece)
                odd.sent_bytes += len(piece)
            return False
        self.wfile.write(answer)
        return b"\r\nConnection: close" not in answer
