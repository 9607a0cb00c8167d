"""A connection on which requests or answers get lost when a test says so."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

from tests.serving import ServerProcess


class Cutting:
    """Carries requests to a server; while `answers_lost`, an answer is dropped with its connection.

    The request has arrived then and was answered: what is lost is only that the client knows. While
    `requests_lost`, a request is dropped with its connection before it arrives.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept)
        self.answers_lost = 0
        self.requests_lost = 0
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
        """Both ways, as bytes come; a request begins with the first ones after an answer."""
        with connection, socket.create_connection(("127.0.0.1", self._server.port)) as upstream:
            asked = False
            while True:
                for ready in select.select([connection, upstream], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    if ready is connection:
                        if self.requests_lost and not asked:
                            self.requests_lost -= 1
                            return
                        self.requests += not asked
                        asked = True
                        upstream.sendall(data)
                        continue
                    asked = False
                    if self.answers_lost:
                        self.answers_lost -= 1
                        return
                    connection.sendall(data)
