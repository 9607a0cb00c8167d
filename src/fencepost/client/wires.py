"""The I/O of both clients: a connected socket that sends and receives bytes, blocking or awaited.

This is the one module of the client where sync and async are written side by side by hand, because
sockets and asyncio share nothing. `aio/connections.py` speaks HTTP over an `AsyncWire`, and its
generated twin over a `Wire`; both turn every failure of the network into `ConnectionFailedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fencepost.client.errors import ConnectionFailedError, FencepostError, RequestTimeoutError
from fencepost.client.http import Address
from fencepost.client.proxies import Proxy, tunnel_made, tunnel_request
from fencepost.client.settings import Timeouts

READ_BYTES = 256 * 1024


class AsyncWire:
    """A connection to a server on asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def dial(cls, address: Address, timeouts: Timeouts) -> AsyncWire:
        """Connect, with TLS where the address has it."""
        try:
            async with asyncio.timeout(timeouts.connect):
                if address.socket:
                    reader, writer = await asyncio.open_unix_connection(
                        address.socket, limit=4 * READ_BYTES
                    )
                    return cls(reader, writer)
                target = await async_target(address)
                reader, writer = await asyncio.open_connection(
                    **target, ssl=address.ssl, limit=4 * READ_BYTES
                )
        except (OSError, UnicodeError) as error:  # a name that DNS cannot hold is a UnicodeError
            raise unreachable(address, error) from error
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return cls(reader, writer)

    async def send(self, head: bytes, body: bytes | bytearray, seconds: float) -> None:
        """Send a request, within `seconds`."""
        if self._writer.is_closing():
            # Another task has noticed that the connection is gone; uvloop would not say it so.
            raise ConnectionFailedError("the connection is closed", sent=True)
        self._writer.write(head)
        if body:
            self._writer.write(body)
        try:
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError as error:
            raise RequestTimeoutError("sending took too long", sent=True) from error
        except OSError as error:
            raise _broken(error) from error

    async def receive(self, seconds: float) -> bytes:
        """What arrives next, within `seconds`; empty once the server has closed the connection."""
        try:
            async with asyncio.timeout(seconds):
                return await self._reader.read(READ_BYTES)
        except TimeoutError as error:
            raise RequestTimeoutError("the server did not answer in time", sent=True) from error
        except OSError as error:
            raise _broken(error) from error

    @property
    def usable(self) -> bool:
        """Whether both sides still hold the connection open and nothing unread has arrived.

        A connection belongs to its event loop: a client that is used in another one connects anew.
        """
        return (
            self._loop is asyncio.get_running_loop()
            and not self._reader.at_eof()
            and self._reader.exception() is None
            and not self._writer.is_closing()
        )

    def interrupt(self) -> None:
        """End a wait of another task for this connection."""
        self._writer.transport.abort()

    def abort(self) -> None:
        """Close the connection without waiting for it."""
        # The event loop may have been closed before, and its connections with it.
        with contextlib.suppress(RuntimeError):
            self._writer.close()

    async def close(self) -> None:
        """Close the connection, and wait until it is closed."""
        self.abort()
        with contextlib.suppress(OSError, RuntimeError):
            await self._writer.wait_closed()

    def __del__(self) -> None:
        # A program that stops iterating over a follower and drops it also drops its connection.
        if not self._writer.is_closing():
            self.abort()


class Wire:
    """A connection to a server on a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def dial(cls, address: Address, timeouts: Timeouts) -> Wire:
        """Connect, with TLS where the address has it."""
        return cls(dial(address, timeouts))

    def send(self, head: bytes, body: bytes | bytearray, seconds: float) -> None:
        """Send a request, within `seconds`."""
        try:
            self._sock.settimeout(seconds)
            if len(body) <= READ_BYTES:
                self._sock.sendall(head + body)
            else:
                self._sock.sendall(head)
                self._sock.sendall(body)
        except TimeoutError as error:
            raise RequestTimeoutError("sending took too long", sent=True) from error
        except OSError as error:
            raise _broken(error) from error

    def receive(self, seconds: float) -> bytes:
        """What arrives next, within `seconds`; empty once the server has closed the connection."""
        try:
            self._sock.settimeout(seconds)
            return self._sock.recv(READ_BYTES)
        except TimeoutError as error:
            raise RequestTimeoutError("the server did not answer in time", sent=True) from error
        except OSError as error:
            raise _broken(error) from error

    @property
    def usable(self) -> bool:
        """Whether both sides still hold the connection open and nothing unread has arrived."""
        return self._sock.fileno() >= 0 and not ready(self._sock, 0.0)

    def interrupt(self) -> None:
        """End a wait of another thread for this connection, which that thread then closes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Close the connection. In a forked child this leaves the parent's connection alone."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def close(self) -> None:
        """Close the connection."""
        self.abort()

    def __del__(self) -> None:
        # A program that stops iterating over a follower and drops it also drops its connection.
        self.abort()


def dial(address: Address, timeouts: Timeouts) -> socket.socket:
    """A connected socket, with TLS where the address has it."""
    if address.socket:
        return _dial_unix(address, timeouts)
    try:
        sock = socket.create_connection(address.reached_at, timeouts.connect)
    except (OSError, UnicodeError) as error:  # a name that DNS cannot hold is a UnicodeError
        raise unreachable(address, error) from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.ssl is not None:
            if address.proxy is not None:
                _tunnel(sock, address, address.proxy)
            sock = address.ssl.wrap_socket(sock, server_hostname=address.host)
    except ConnectionFailedError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConnectionFailedError(f"TLS with {address.host} failed: {error}") from error
    return sock


def _dial_unix(address: Address, timeouts: Timeouts) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeouts.connect)
        sock.connect(address.socket)
    except OSError as error:
        sock.close()
        raise unreachable(address, error) from error
    return sock


def _tunnel(sock: socket.socket, address: Address, proxy: Proxy) -> None:
    """Have the proxy at the other end of a socket connect to the server."""
    received = b""
    try:
        sock.sendall(tunnel_request(proxy, address.host, address.port))
        while not tunnel_made(proxy, received):
            data = sock.recv(READ_BYTES)
            if not data:
                raise _hung_up(proxy)
            received += data
    except OSError as error:
        raise unreachable(address, error) from error


async def async_target(address: Address) -> dict[str, Any]:
    """What asyncio is to connect to: a host and a port, or a socket whose tunnel is made."""
    proxy = address.proxy
    if address.ssl is None or proxy is None:
        host, port = address.reached_at
        return {"host": host, "port": port}
    loop = asyncio.get_running_loop()
    sock = await _async_socket(loop, proxy)
    received = b""
    try:
        await loop.sock_sendall(sock, tunnel_request(proxy, address.host, address.port))
        while not tunnel_made(proxy, received):
            data = await loop.sock_recv(sock, READ_BYTES)
            if not data:
                raise _hung_up(proxy)
            received += data
    except BaseException:
        sock.close()
        raise
    return {"sock": sock, "server_hostname": address.host}


async def _async_socket(loop: asyncio.AbstractEventLoop, proxy: Proxy) -> socket.socket:
    found = await loop.getaddrinfo(proxy.host, proxy.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{proxy.host} has no address")
    for family, kind, protocol, _name, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def ready(sock: socket.socket, seconds: float | None, *, to_write: bool = False) -> bool:
    """Wait until a socket can be read, or also written; false when time is up."""
    poller = select.poll()  # unlike select(), it takes sockets with numbers above 1024
    poller.register(sock, select.POLLIN | (select.POLLOUT if to_write else 0))
    return bool(poller.poll(None if seconds is None else math.ceil(seconds * 1000)))


def unreachable(address: Address, error: Exception) -> ConnectionFailedError:
    """The failure to connect, with where to."""
    where = address.socket or f"{address.host}:{address.port}"
    if address.proxy is not None:
        where += f" through the proxy {address.proxy.host}:{address.proxy.port}"
    return ConnectionFailedError(f"cannot connect to {where}: {error}")


def _hung_up(proxy: Proxy) -> ConnectionFailedError:
    return ConnectionFailedError(f"the proxy {proxy.host}:{proxy.port} closed the connection")


def _broken(error: OSError) -> ConnectionFailedError:
    return ConnectionFailedError(f"the connection broke: {error}", sent=True)


async def async_call(function: Callable[[], Any]) -> Any:
    """What a function of the user returns, awaited if it is awaitable."""
    value = function()
    if isinstance(value, Awaitable):
        return await value
    return value


def call(function: Callable[[], Any]) -> Any:
    """What a function of the user returns; an awaitable is an error."""
    value = function()
    if isinstance(value, Awaitable):
        if isinstance(value, Coroutine):
            value.close()  # else Python warns that it was never awaited
        raise FencepostError("a sync client cannot await: give it plain functions")
    return value


async def async_sleep(seconds: float) -> None:
    """Wait so many seconds."""
    await asyncio.sleep(seconds)


def sleep(seconds: float) -> None:
    """Wait so many seconds."""
    time.sleep(seconds)


async def async_wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or for so many seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def wait(event: threading.Event, seconds: float) -> None:
    """Wait until an event is set, or for so many seconds."""
    event.wait(seconds)
