"""A TCP proxy that does to a connection what networks do: cut, delay, repeat, lose.

It stands between a client and a server and knows only where requests begin (so that it can repeat
one), not what they mean. What happens to each connection is drawn from a seed: after how many bytes
it is cut, in which direction, whether politely or by a reset, and what is held back on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """How bad the network is. Probabilities are per connection, bytes and seconds are bounds."""

    cut_requests: float = 0.0
    """Cut on the way to the server, somewhere in the first `within_bytes` bytes."""
    cut_answers: float = 0.0
    """Cut on the way back: requests arrive and their answers do not."""
    within_bytes: int = 200_000
    reset: float = 0.5
    """Of the cuts, how many are resets rather than ends."""
    refuse: float = 0.0
    """Accept, and hang up at once."""
    repeat: float = 0.0
    """After the connection ended, send all it carried to the server again, on another one."""
    delay_seconds: float = 0.0
    """Hold every piece back for up to so long, in both directions."""
    round_trip_seconds: float = 0.0
    """A fixed distance, half of it in each direction, without limiting the flow."""


CALM = Trouble()


class Proxy:
    """Listens on a port of its own and carries bytes to `host:port`, as `trouble` has it.

    With `ssl` it speaks TLS to its clients and ends it here.
    """

    def __init__(
        self,
        host: str,
        port: int,
        trouble: Trouble = CALM,
        *,
        seed: int = 0,
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        self._ssl = ssl
        self._host = host
        self._port = port
        self._dice = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.trouble = trouble
        self.connections = 0
        self.cuts = 0
        self.repeated = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, ssl=self._ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            await _finish(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        trouble, dice = self.trouble, self._dice
        if dice.random() < trouble.refuse:
            self._cut(writer)
            return
        try:
            upstream, downstream = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self._cut(writer)
            return
        there = back = None
        if dice.random() < trouble.cut_requests:
            there = dice.randrange(1, trouble.within_bytes)
        if dice.random() < trouble.cut_answers:
            # Answers are small beside what they answer.
            back = dice.randrange(1, max(2, trouble.within_bytes // 4))
        repeats = dice.random() < trouble.repeat
        carried = bytearray()
        try:
            async with asyncio.TaskGroup() as pipes:
                pipes.create_task(self._carry(reader, downstream, there, carried))
                pipes.create_task(self._carry(upstream, writer, back, None))
        except* (OSError, _CutError):
            pass
        finally:
            if dice.random() < trouble.reset:
                _reset(writer)
                _reset(downstream)
            await _finish(downstream)
        if repeats:
            await self._repeat(bytes(carried))

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cut_after: int | None,
        copy: bytearray | None,
    ) -> None:
        """Carry until the end, or until so many bytes have passed."""
        loop = asyncio.get_running_loop()
        trouble, half = self.trouble, self.trouble.round_trip_seconds / 2
        seen = 0
        later: list[asyncio.TimerHandle] = []
        while data := await reader.read(65536):
            if trouble.delay_seconds:
                await asyncio.sleep(self._dice.random() * trouble.delay_seconds)
            if cut_after is not None and seen + len(data) >= cut_after:
                data = data[: cut_after - seen]
            seen += len(data)
            if copy is not None:
                copy += data
            if half:
                later.append(loop.call_later(half, _write, writer, data))
            else:
                writer.write(data)
                await writer.drain()
            if cut_after is not None and seen >= cut_after:
                self.cuts += 1
                raise _CutError
        if half:
            await asyncio.sleep(half)
        # One side has ended: the other is told so, and both are over.
        raise _CutError

    async def _repeat(self, carried: bytes) -> None:
        """Send everything again on a connection of its own; the answers are not read."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return
        try:
            self.repeated += 1
            writer.write(carried)
            async with asyncio.timeout(2.0):
                await writer.drain()
                writer.write_eof()
                while await reader.read(65536):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            await _finish(writer)

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        self.cuts += 1
        _reset(writer)


class _CutError(Exception):
    """The connection is over."""


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


async def _finish(writer: asyncio.StreamWriter) -> None:
    """Close and see it closed, politely at first."""
    writer.close()
    try:
        async with asyncio.timeout(0.5):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a crash ends it: by a reset, losing what is on its way."""
    sock = None if writer.is_closing() else writer.get_extra_info("socket")
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
