"""A connection on which answers get lost when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from tests.serving import ServerProcess


class Cutting:
    """Carries requests to a server; while `answers_lost`, an answer is dropped with its connection.

    The request has arrived then and was answered: what is lost is only that the client knows.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept)
        self.answers_lost = 0
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        carriers = []
        with contextlib.suppress(OSError):
            while True:
                connection, _address = self._listener.accept()
                carrier = threading.Thread(target=self._carry, args=(connection,))
                carrier.start()
                carriers.append(carrier)
        for carrier in carriers:
            carrier.join()

    def _carry(self, connection: socket.socket) -> None:
        """One request at a time, as the sync client sends them."""
        with connection, socket.create_connection(("127.0.0.1", self._server.port)) as upstream:
            while request := connection.recv(1 << 20):
                self.requests += 1
                upstream.sendall(request)
                answer = upstream.recv(1 << 20)
                if self.answers_lost:
                    self.answers_lost -= 1
                    return
                connection.sendall(answer)
