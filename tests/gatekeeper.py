"""A proxy for tests that lets plain HTTP pass, and does to WebSockets what it is told to."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from types import TracebackType
from typing import Any, Literal, Self

Treatment = Literal["pass", "refuse", "cut"]
_REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Gatekeeper:
    """A context manager. `treatment` of WebSockets may be changed at any time; `cut` ends all."""

    def __init__(self, port: int, treatment: Treatment = "pass") -> None:
        self.treatment = treatment
        self.upgrades = 0
        self._port = port
        self._open: set[socket.socket] = set()
        keeper = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    keeper._handle(self.request)

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def cut(self) -> int:
        """End every connection that is open now; how many there were."""
        found = list(self._open)
        for one in found:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return len(found)

    def _handle(self, client: socket.socket) -> None:
        self._open.add(client)
        try:
            first = client.recv(65536)
            if b"upgrade: websocket" in first.lower():
                self.upgrades += 1
                if self.treatment == "refuse":
                    client.sendall(_REFUSAL)
                if self.treatment != "pass":
                    return
            with socket.create_connection(("127.0.0.1", self._port), 10) as server:
                server.settimeout(None)
                server.sendall(first)
                back = threading.Thread(target=_carry, args=(server, client), daemon=True)
                back.start()
                _carry(client, server)
                back.join()
        finally:
            self._open.discard(client)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self.cut()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is what this proxy is for."""


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
