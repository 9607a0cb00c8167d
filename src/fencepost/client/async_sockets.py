"""Connections on asyncio: the same effects as `sockets.py`, awaited.

Cancellation passes through: a connection whose request was cancelled is closed, never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from typing import Any, TypeVar

from fencepost.client.effects import Call, Channel, Effect, Next, Open, Operation, Send, Shut, Sleep
from fencepost.client.errors import ClientClosedError, ConnectionFailedError, RequestTimeoutError
from fencepost.client.http import Address, Request, Response, ResponseParser, render_head
from fencepost.client.settings import ClientSettings, Timeouts
from fencepost.client.sockets import IDLE_MAX, READ_BYTES

T = TypeVar("T")


class AsyncConnection:
    """One connection to a server."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: Address,
        timeouts: Timeouts,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self._timeouts = timeouts
        self._parser = ResponseParser()
        self._seconds = timeouts.answer

    @classmethod
    async def dial(cls, address: Address, timeouts: Timeouts) -> AsyncConnection:
        """Connect, with TLS where the address has it."""
        try:
            async with asyncio.timeout(timeouts.connect):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=address.ssl, limit=4 * READ_BYTES
                )
        except OSError as error:  # TimeoutError is one of them
            raise ConnectionFailedError(
                f"cannot connect to {address.host}:{address.port}: {error}"
            ) from error
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return cls(reader, writer, address, timeouts)

    async def exchange(self, request: Request) -> Response:
        """The whole answer to a request."""
        await self._send(request)
        while not self._parser.done:
            await self._receive()
        return self._parser.done.pop()

    async def open(self, request: Request) -> Channel:
        """The head of an answer whose body follows; a refusal comes with its body."""
        await self._send(request)
        while self._parser.head is None and not self._parser.done:
            await self._receive()
        if self._parser.done:
            return Channel(self._parser.done[0], self)
        assert self._parser.head is not None
        head = self._parser.head
        while head.status != 200 and not self._parser.done:
            await self._receive()
        return Channel(head, self)

    async def next_piece(self) -> bytes | None:
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
            await self._receive()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent: all was read, and the server has not hung up."""
        return (
            self._parser.idle
            and not self._parser.closing
            and not self._reader.at_eof()
            and self._reader.exception() is None
            and not self._writer.is_closing()
        )

    def abort(self) -> None:
        """Hang up at once."""
        # The loop may be gone already, with the connection.
        with contextlib.suppress(RuntimeError):
            self._writer.close()

    async def close(self) -> None:
        """Hang up, and wait until it is done."""
        self.abort()
        with contextlib.suppress(OSError, RuntimeError):
            await self._writer.wait_closed()

    def __del__(self) -> None:
        # Whoever stops iterating over a follower and forgets it hangs up.
        if not self._writer.is_closing():
            self.abort()

    async def _send(self, request: Request) -> None:
        self._parser.without_body = request.method == "HEAD"
        self._seconds = self._timeouts.live if request.live else self._timeouts.answer
        head = render_head(self._address, request, len(request.body))
        self._writer.write(head)
        if request.body:
            self._writer.write(request.body)
        try:
            async with asyncio.timeout(self._seconds):
                await self._writer.drain()
        except TimeoutError as error:
            raise RequestTimeoutError("sending took too long", sent=True) from error
        except OSError as error:
            # A server that refuses a body early has answered before it hung up.
            with contextlib.suppress(ConnectionFailedError):
                while not self._parser.done:
                    await self._receive()
            if not self._parser.done:
                raise ConnectionFailedError(f"the connection broke: {error}", sent=True) from error

    async def _receive(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                data = await self._reader.read(READ_BYTES)
        except TimeoutError as error:
            raise RequestTimeoutError("the server did not answer in time", sent=True) from error
        except OSError as error:
            raise ConnectionFailedError(f"the connection broke: {error}", sent=True) from error
        if data:
            self._parser.feed(data)
        elif not self._parser.end():
            raise ConnectionFailedError("the server closed the connection", sent=True)


class AsyncDriver:
    """Runs operations; any number of tasks may call it at once."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._idle: deque[AsyncConnection] = deque()
        self._pid = os.getpid()
        self._closed = False

    async def run(self, operation: Operation[T]) -> T:
        """The result of an operation."""
        try:
            effect = next(operation)
            while True:
                try:
                    answer = await self._perform(effect)
                except ConnectionFailedError as failure:
                    effect = operation.throw(failure)
                else:
                    effect = operation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()

    async def close(self) -> None:
        """Hang up everywhere."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Send(request):
                return await self._send(request)
            case Open(request):
                return await self._open(request)
            case Next(channel):
                return await self._next(channel)
            case Shut(channel):
                await channel.connection.close()
                return None
            case Sleep(seconds):
                await asyncio.sleep(seconds)
                return None
            case Call(function):
                value = function()
                return await value if hasattr(value, "__await__") else value

    async def _send(self, request: Request) -> Response:
        connection = await self._take()
        try:
            response = await connection.exchange(request)
        except BaseException:
            connection.abort()
            raise
        if self._closed or len(self._idle) >= IDLE_MAX or not connection.reusable:
            await connection.close()
        else:
            self._idle.append(connection)
        return response

    async def _open(self, request: Request) -> Channel:
        connection = await self._take()
        try:
            return await connection.open(request)
        except BaseException:
            connection.abort()
            raise

    async def _next(self, channel: Channel) -> bytes | None:
        connection: AsyncConnection = channel.connection
        try:
            return await connection.next_piece()
        except BaseException:
            connection.abort()
            raise

    async def _take(self) -> AsyncConnection:
        if self._closed:
            raise ClientClosedError("the client was closed")
        if self._pid != os.getpid():
            # The sockets are shared with the parent: they are let go of, not closed politely.
            self._idle.clear()
            self._pid = os.getpid()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.abort()
        return await AsyncConnection.dial(self.settings.address, self.settings.timeouts)
