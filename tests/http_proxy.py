"""An HTTP proxy for tests: it forwards absolute-form requests and makes tunnels for CONNECT.

Whatever host a request names, it goes to the one port that the proxy was made with, so that a test
may use names that no name server knows.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from types import TracebackType
from typing import Any, Self, cast


class HttpProxy:
    """A context manager; `asked` has the first lines that came, with their credentials."""

    def __init__(self, port: int, *, authorization: str | None = None) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self._port = port
        self._authorization = authorization
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), 10)

    def admits(self, first: str, given: str | None) -> bool:
        """Note a request; whether it shows the credentials that are asked for."""
        self.asked.append((first, given))
        return self._authorization in (None, given)

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
        self._server.drop_all()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    proxy: HttpProxy

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
        proxy = cast(_Server, self.server).proxy
        with contextlib.suppress(OSError), proxy.connect() as upstream:
            back = threading.Thread(target=_carry, args=(upstream, self.connection), daemon=True)
            while (head := self._head()) is not None:
                first, headers = head
                if not proxy.admits(first, headers.pop("proxy-authorization", None)):
                    self.wfile.write(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
                    return
                if not back.is_alive():
                    back.start()
                if first.startswith("CONNECT "):
                    self.wfile.write(b"HTTP/1.1 200 Connected\r\n\r\n")
                    _carry(self.connection, upstream)
                    return
                self._forward(first, headers, upstream)

    def _head(self) -> tuple[str, dict[str, str]] | None:
        first = self.rfile.readline().decode("latin-1").strip()
        headers: dict[str, str] = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return (first, headers) if first else None

    def _forward(self, first: str, headers: dict[str, str], upstream: socket.socket) -> None:
        method, target, version = first.split()
        assert target.startswith("http://"), target
        path = "/" + target.removeprefix("http://").partition("/")[2]
        headers["host"] = "127.0.0.1"  # the server on this machine answers to no other name
        lines = [f"{method} {path} {version}", *(f"{key}: {headers[key]}" for key in headers)]
        body = self.rfile.read(int(headers.get("content-length", 0)))
        upstream.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
