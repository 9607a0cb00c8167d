"""Blocking connections: one request at a time, kept for the next one, safe across a fork.

There is no thread. A connection belongs to the process that opened it: after a fork the child drops
what it inherited without a word to the server, and opens its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Any, TypeVar

from fencepost.client.effects import Call, Channel, Effect, Next, Open, Operation, Send, Shut, Sleep
from fencepost.client.errors import (
    ClientClosedError,
    ConnectionFailedError,
    FencepostError,
    RequestTimeoutError,
)
from fencepost.client.http import Address, Request, Response, ResponseParser, render_head
from fencepost.client.settings import ClientSettings, Timeouts

T = TypeVar("T")

READ_BYTES = 256 * 1024
IDLE_MAX = 16
"""Connections kept for later."""


def dial(address: Address, timeouts: Timeouts) -> socket.socket:
    """A connected socket, with TLS where the address has it."""
    try:
        sock = socket.create_connection((address.host, address.port), timeouts.connect)
    except OSError as error:
        raise ConnectionFailedError(
            f"cannot connect to {address.host}:{address.port}: {error}"
        ) from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.ssl is not None:
            sock = address.ssl.wrap_socket(sock, server_hostname=address.host)
    except OSError as error:
        sock.close()
        raise ConnectionFailedError(f"TLS with {address.host} failed: {error}") from error
    return sock


def ready(sock: socket.socket, seconds: float | None, *, to_write: bool = False) -> bool:
    """Wait until a socket can be read, or also written; false when time is up."""
    poller = select.poll()  # unlike select(), it knows sockets above 1024
    poller.register(sock, select.POLLIN | (select.POLLOUT if to_write else 0))
    return bool(poller.poll(None if seconds is None else math.ceil(seconds * 1000)))


class Connection:
    """One connection to a server."""

    def __init__(self, address: Address, timeouts: Timeouts) -> None:
        self._address = address
        self._timeouts = timeouts
        self._parser = ResponseParser()
        self._sock = dial(address, timeouts)

    def exchange(self, request: Request) -> Response:
        """The whole answer to a request."""
        self._send(request)
        while not self._parser.done:
            self._receive()
        return self._parser.done.pop()

    def open(self, request: Request) -> Channel:
        """The head of an answer whose body follows; a refusal comes with its body."""
        self._send(request)
        while self._parser.head is None and not self._parser.done:
            self._receive()
        if self._parser.done:
            return Channel(self._parser.done[0], self)
        assert self._parser.head is not None
        head = self._parser.head
        while head.status != 200 and not self._parser.done:
            self._receive()
        return Channel(head, self)

    def next_piece(self) -> bytes | None:
        """More of the body, or None when it is complete."""
        parser = self._parser
        while True:
            if parser.head is None and not parser.done:
                return None
            body, _ = parser.take_body()
            if body:
                return body
            if parser.head is None:
                return None
            self._receive()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent: all was read, and the server has not hung up."""
        if self._parser.closing or not self._parser.idle or self._sock.fileno() < 0:
            return False
        return not ready(self._sock, 0.0)

    def close(self) -> None:
        """Hang up. In a forked child this leaves the parent's connection alone."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def __del__(self) -> None:
        # Whoever stops iterating over a follower and forgets it hangs up.
        if hasattr(self, "_sock"):
            self.close()

    def _send(self, request: Request) -> None:
        self._parser.without_body = request.method == "HEAD"
        body = request.body
        head = render_head(self._address, request, len(body))
        # A reader that waits for news may be silent for long; the kernel still notices a dead peer.
        self._sock.settimeout(self._timeouts.live if request.live else self._timeouts.answer)
        try:
            if len(body) <= READ_BYTES:
                self._sock.sendall(head + body)
            else:
                self._sock.sendall(head)
                self._sock.sendall(body)
        except TimeoutError as error:
            raise RequestTimeoutError("sending took too long", sent=True) from error
        except OSError as error:
            # A server that refuses a body early has answered before it hung up.
            with contextlib.suppress(ConnectionFailedError):
                while not self._parser.done:
                    self._receive()
            if not self._parser.done:
                raise ConnectionFailedError(f"the connection broke: {error}", sent=True) from error

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except TimeoutError as error:
            raise RequestTimeoutError("the server did not answer in time", sent=True) from error
        except OSError as error:
            raise ConnectionFailedError(f"the connection broke: {error}", sent=True) from error
        if data:
            self._parser.feed(data)
        elif not self._parser.end():
            raise ConnectionFailedError("the server closed the connection", sent=True)


class SyncDriver:
    """Runs operations, one at a time in each thread that calls it."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._idle: deque[Connection] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def run(self, operation: Operation[T]) -> T:
        """The result of an operation."""
        try:
            effect = next(operation)
            while True:
                try:
                    answer = self._perform(effect)
                except ConnectionFailedError as failure:
                    effect = operation.throw(failure)
                else:
                    effect = operation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()

    def close(self) -> None:
        """Hang up everywhere."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Send(request):
                return self._send(request)
            case Open(request):
                return self._open(request)
            case Next(channel):
                return self._next(channel)
            case Shut(channel):
                channel.connection.close()
                return None
            case Sleep(seconds):
                time.sleep(seconds)
                return None
            case Call(function):
                value = function()
                if hasattr(value, "__await__"):
                    raise FencepostError("a sync client cannot await: give it plain functions")
                return value

    def _send(self, request: Request) -> Response:
        connection = self._take()
        try:
            response = connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        self._put(connection)
        return response

    def _open(self, request: Request) -> Channel:
        connection = self._take()
        try:
            return connection.open(request)
        except BaseException:
            connection.close()
            raise

    def _next(self, channel: Channel) -> bytes | None:
        connection: Connection = channel.connection
        try:
            return connection.next_piece()
        except BaseException:
            connection.close()
            raise

    def _take(self) -> Connection:
        if self._closed:
            raise ClientClosedError("the client was closed")
        self._after_fork()
        while self._idle:
            with contextlib.suppress(IndexError):
                connection = self._idle.pop()
                if connection.reusable:
                    return connection
                connection.close()
        return Connection(self.settings.address, self.settings.timeouts)

    def _put(self, connection: Connection) -> None:
        if self._closed or len(self._idle) >= IDLE_MAX or not connection.reusable:
            connection.close()
        else:
            self._idle.append(connection)

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid != os.getpid():
                while self._idle:
                    self._idle.pop().close()
                self._pid = os.getpid()
