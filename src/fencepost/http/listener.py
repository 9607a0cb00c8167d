"""The listening socket of the HTTP front end: opening it, sweeping its connections, draining it.

`serve` is the way in. The port is bound when it returns, so that port 0 can be asked what it became
and a second server on the same address fails here, before anything else has started.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from fencepost.clock import Clock, SystemClock
from fencepost.http.bodies import KnowsSender
from fencepost.http.connection import Connection
from fencepost.http.front import Front, HttpCounters, TakesWebSocket
from fencepost.http.messages import App
from fencepost.http.settings import HttpSettings


async def serve(
    app: App,
    settings: HttpSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Clock | None = None,
    shared: bool = False,
    takes_websocket: TakesWebSocket | None = None,
    knows_sender: KnowsSender | None = None,
) -> Listening:
    """Open the address and serve `app` on it until the returned `Listening` is drained.

    A `shared` port is one that other processes listen on too: the kernel deals connections out.
    `takes_websocket` says which paths may become WebSockets; without it none does. `knows_sender`
    says which principal sends a large body; without it all clients may.
    """
    settings = settings or HttpSettings()
    loop = asyncio.get_running_loop()
    front = Front(app, settings, clock or SystemClock(), loop, takes_websocket, knows_sender)
    listener = await _bind(loop, host, port, shared=shared)
    server = await loop.create_server(
        lambda: Connection(front), sock=listener, backlog=settings.backlog_connections
    )
    return Listening(front, server, listener.getsockname())


async def serve_socket(
    app: App, settings: HttpSettings, bound: socket.socket, *, clock: Clock
) -> Listening:
    """Serve `app` on a unix socket that is bound already."""
    loop = asyncio.get_running_loop()
    front = Front(app, settings, clock, loop)
    server = await loop.create_unix_server(
        lambda: Connection(front), sock=bound, backlog=settings.backlog_connections
    )
    return Listening(front, server, (bound.getsockname(), 0))


async def _bind(
    loop: asyncio.AbstractEventLoop, host: str, port: int, *, shared: bool
) -> socket.socket:
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return bind(found[0], shared=shared)


Address = tuple[Any, Any, int, str, Any]
"""One of the answers of getaddrinfo."""


def bind(found: Address, *, shared: bool) -> socket.socket:
    """A socket that has the address, and does not listen yet."""
    family, kind, protocol, _, address = found
    listener = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for the connections of the server before it to be forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setblocking(False)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


class Listening:
    """A front end that is up: where it listens, what it has counted, and how to end it."""

    def __init__(
        self, front: Front, server: asyncio.AbstractServer, address: tuple[str, int]
    ) -> None:
        self._front = front
        self._server = server
        self.host, self.port = address[:2]
        self._timer = front.loop.call_later(front.settings.sweep_seconds, self._sweep)

    @property
    def counters(self) -> HttpCounters:
        """What the front end has done since it started."""
        return self._front.counters

    def _sweep(self) -> None:
        self._timer = self._front.loop.call_later(self._front.settings.sweep_seconds, self._sweep)
        self._front.sweep()

    async def drain(self, timeout_seconds: float) -> bool:
        """Stop accepting, finish what is under way, and say whether all of it was finished.

        Idle connections are closed at once. Requests under way are answered with `Connection:
        close`. Event streams (SSE) are ended by cancelling their iterator, and their clients
        reconnect elsewhere; any other stream has an end of its own, which is waited for, because
        to cut it there would look complete to its reader. What is left after the time is aborted.
        An application that holds long-polls should answer them when it hears of the shutdown.
        """
        front = self._front
        front.draining = True
        self._server.close()
        for connection in list(front.connections):
            connection.begin_drain()
        finished = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await front.emptied()
        except TimeoutError:
            finished = False
            for connection in list(front.connections):
                connection.abort()
            await front.emptied()
        self._timer.cancel()
        await front.finished()
        await self._server.wait_closed()
        return finished
