"""HTTP over one connection, and the driver that runs operations over a pool of connections.

A connection carries one request at a time and is kept for the next one. It belongs to the process
that opened it: after a fork the child drops what it inherited without a word to the server. A
request that is cancelled or fails closes its connection, which is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, ref

from fencepost.client.effects import Call, Channel, Effect, Next, Open, Operation, Send, Shut, Sleep
from fencepost.client.errors import (
    ClientClosedError,
    ConnectionFailedError,
    FencepostError,
    RequestTimeoutError,
    ResponseError,
)
from fencepost.client.http import (
    Request,
    Response,
    ResponseParser,
    path_of,
    render_head,
)
from fencepost.client.settings import ClientSettings
from fencepost.client.wires import AsyncWire, async_call, async_sleep, async_wait
from fencepost.clock import Clock

T = TypeVar("T")

IDLE_MAX = 16
"""How many connections without a request are kept open for the next one."""
SLOWEST_BYTES_PER_S = 1024
"""An answer that comes more slowly than this has its timeout, and no more time for what came."""


class Interruptible(Protocol):
    """Something whose wait can be ended by another caller."""

    def interrupt(self) -> None: ...


class AsyncStop:
    """Ends what a reading waits for: at a deadline, or when it is closed by another caller."""

    def __init__(self, clock: Clock, seconds: float | None = None) -> None:
        self._event = asyncio.Event()
        self._clock = clock
        self._ends_ms = None if seconds is None else clock.monotonic_ms() + seconds * 1000
        self._waited_for: ref[Interruptible] | None = None

    def waits_for(self, connection: Interruptible | None) -> None:
        """Remember the connection that is waited for now.

        Weakly: in a cycle of the two the collector could end the socket before its owner closes
        it, with a ResourceWarning in whatever code runs then.
        """
        self._waited_for = None if connection is None else ref(connection)

    def is_over(self) -> bool:
        """Whether the reading was closed or its time is up."""
        return self._event.is_set() or self.remaining() <= 0

    def remaining(self) -> float:
        """Seconds until the deadline; without end when there is none."""
        if self._ends_ms is None:
            return math.inf
        return (self._ends_ms - self._clock.monotonic_ms()) / 1000

    def set(self) -> None:
        """Stop now, also in the middle of a wait."""
        self._event.set()
        connection = None if self._waited_for is None else self._waited_for()
        if connection is not None:
            connection.interrupt()

    async def sleep(self, seconds: float) -> None:
        """Wait so many seconds, or until it is over."""
        await async_wait(self._event, max(0.0, min(seconds, self.remaining())))


class AsyncConnection:
    """One connection to a server."""

    def __init__(self, wire: AsyncWire, settings: ClientSettings) -> None:
        self._wire = wire
        self._address = settings.address
        self._timeouts = settings.timeouts
        self._clock = settings.clock
        self._parser = ResponseParser()
        self._seconds = settings.timeouts.answer
        self._ends_ms = math.inf
        self.stop: AsyncStop | None = None
        """What may end a wait for this connection early."""

    @classmethod
    async def dial(cls, settings: ClientSettings) -> AsyncConnection:
        """Connect, with TLS where the address has it."""
        return cls(await AsyncWire.dial(settings.address, settings.timeouts), settings)

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
            return Channel(request, self._parser.done[0], self)
        assert self._parser.head is not None
        head = self._parser.head
        while head.status != 200 and not self._parser.done:
            await self._receive()
        self._ends_ms = math.inf  # a body that brings news has no end
        return Channel(request, head, self)

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
        """Whether another request may be sent: all was read, and the server did not hang up."""
        return self._parser.idle and not self._parser.closing and self._wire.usable

    def interrupt(self) -> None:
        """End a wait of another caller for this connection."""
        self._wire.interrupt()

    def abort(self) -> None:
        """Close the connection without waiting for it."""
        self._wire.abort()

    async def close(self) -> None:
        """Close the connection, and wait until it is closed."""
        await self._wire.close()

    async def _send(self, request: Request) -> None:
        self._parser.without_body = request.method == "HEAD"
        self._parser.limit(request.answer_bytes_max)
        # A reader that waits for news may be silent for long; the kernel still notices a dead peer.
        self._seconds = self._timeouts.live if request.live else self._timeouts.answer
        self._ends_ms = self._clock.monotonic_ms() + self._seconds * 1000
        head = render_head(self._address, request, len(request.body))
        try:
            await self._wire.send(head, request.body, self._seconds)
        except RequestTimeoutError:
            raise
        except ConnectionFailedError as failure:
            # A server that refuses a body early has answered before it hung up.
            with contextlib.suppress(ConnectionFailedError):
                while not self._parser.done:
                    await self._receive()
            if not self._parser.done:
                raise failure from None

    async def _receive(self) -> None:
        left = (self._ends_ms - self._clock.monotonic_ms()) / 1000
        if left <= 0:
            raise RequestTimeoutError("the answer comes too slowly", sent=True)
        seconds = min(self._seconds, left)
        if self.stop is not None:
            # Noted before it is looked at: a stop that comes in between finds the connection.
            self.stop.waits_for(self)
            if self.stop.is_over():
                raise ConnectionFailedError("the reading was stopped", sent=True, final=True)
            seconds = min(seconds, self.stop.remaining())
        data = await self._wire.receive(seconds)
        if data:
            self._ends_ms += len(data) * 1000 / SLOWEST_BYTES_PER_S
            self._parser.feed(data)
        elif not self._parser.end():
            raise ConnectionFailedError("the server closed the connection", sent=True)


class AsyncDriver:
    """Runs operations; any number of callers may use it at once."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._idle: deque[AsyncConnection] = deque()
        self._pid = os.getpid()
        self._closed = False
        self._stops: WeakSet[AsyncStop] = WeakSet()

    def stop_of(self, seconds: float | None) -> AsyncStop:
        """What ends a reading: after so many seconds, or when this client is closed."""
        stop = AsyncStop(self.settings.clock, seconds)
        self._stops.add(stop)
        return stop

    async def run(self, operation: Operation[T], stop: AsyncStop | None = None) -> T:
        """The result of an operation; an error of this package names the request it is about."""
        asked: Request | None = None
        response: Response | None = None
        try:
            effect = next(operation)
            while True:
                if isinstance(effect, Send | Open):
                    asked, response = effect.request, None
                elif isinstance(effect, Next):
                    asked, response = effect.channel.request, effect.channel.response
                try:
                    answer = await self._perform(effect, stop)
                except ConnectionFailedError as failure:
                    effect = operation.throw(failure)
                else:
                    response = answer if isinstance(answer, Response) else response
                    effect = operation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except FencepostError as error:
            if asked is not None:
                self._locate(error, asked, response)
            raise
        finally:
            operation.close()

    def _locate(self, error: FencepostError, asked: Request, response: Response | None) -> None:
        path = path_of(self.settings.address, asked)
        if isinstance(error, ResponseError):
            error.locate(asked.method, path, error.status, error.headers)
        elif response is None:
            error.locate(asked.method, path, None, {})
        else:
            error.locate(asked.method, path, response.status, response.headers)

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        for stop in list(self._stops):
            stop.set()
        while (connection := self._pop()) is not None:
            await connection.close()

    async def _perform(self, effect: Effect, stop: AsyncStop | None) -> Any:
        match effect:
            case Send(request):
                return await self._send(request, stop)
            case Open(request):
                return await self._open(request, stop)
            case Next(channel):
                return await self._next(channel)
            case Shut(channel):
                await channel.connection.close()
                return None
            case Sleep(seconds):
                if stop is None:
                    await async_sleep(seconds)
                else:
                    await stop.sleep(seconds)
                return None
            case Call(function):
                return await async_call(function)

    async def _send(self, request: Request, stop: AsyncStop | None) -> Response:
        connection = await self._take(stop)
        try:
            response = await connection.exchange(request)
        except BaseException:
            connection.abort()
            raise
        finally:
            if stop is not None:
                connection.stop = None
                stop.waits_for(None)
        if self._closed or len(self._idle) >= IDLE_MAX or not connection.reusable:
            await connection.close()
        else:
            self._idle.append(connection)
        return response

    async def _open(self, request: Request, stop: AsyncStop | None) -> Channel:
        connection = await self._take(stop)
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

    async def _take(self, stop: AsyncStop | None) -> AsyncConnection:
        if stop is not None and stop.is_over():
            raise ConnectionFailedError("the reading was stopped", final=True)
        connection = await self._connected()
        connection.stop = stop
        return connection

    def require_open(self) -> None:
        """Raise `ClientClosedError` once the client was closed."""
        if self._closed:
            raise ClientClosedError("the client was closed")

    async def _connected(self) -> AsyncConnection:
        self.require_open()
        if self._pid != os.getpid():
            # The parent still uses the sockets of these connections, so the child only drops them.
            self._idle = deque()
            self._pid = os.getpid()
        while (connection := self._pop()) is not None:
            if connection.reusable:
                return connection
            connection.abort()
        return await AsyncConnection.dial(self.settings)

    def _pop(self) -> AsyncConnection | None:
        # Another thread of a sync client may take the last connection at the same time.
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None
