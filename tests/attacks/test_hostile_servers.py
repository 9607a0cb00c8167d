"""What an outbox takes from a server that is none: answers without an end, in size or in time.

The way of a row to the server is the real one, and the server is a socket that says what it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import fencepost
from fencepost.client.settings import NO_RETRIES
from fencepost.outbox import delivery
from fencepost.outbox.delivery import attempt
from fencepost.outbox.states import Failed, Rejected, Stored
from fencepost.testing.clock import SimClock
from tests.unit.outbox.test_delivery import a_row

Hostile = Callable[[asyncio.StreamWriter], Awaitable[None]]
PIECE = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"


async def outcome(say: Hostile) -> Stored | Failed | Rejected:
    """What comes of an attempt at a server that answers a send by `say`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await say(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        asyncio.timeout(60),
        fencepost.connect_async(f"http://127.0.0.1:{port}", retries=NO_RETRIES) as client,
    ):
        return await attempt(client.mesh("shop"), a_row(), sender=None, clock=SimClock())


@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_an_endless_answer_is_refused_before_it_is_held(coding: str) -> None:
    said = 0

    async def say(writer: asyncio.StreamWriter) -> None:
        nonlocal said
        writer.write(
            b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\n"
            + (b"Content-Encoding: gzip\r\n" if coding == "gzip" else b"")
            + b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if coding == "gzip":
            import gzip

            small = gzip.compress(b" " * (32 << 20))
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(small), small))
            await writer.drain()
            return
        while True:
            writer.write(PIECE)
            await writer.drain()
            said += len(PIECE)

    found = await outcome(say)

    assert isinstance(found, Failed)
    assert "too large" in found.error
    assert said < 32 << 20


async def test_an_answer_that_trickles_ends_with_the_time_of_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "ATTEMPT_SECONDS", 0.5)

    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 100000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    found = await outcome(say)

    assert isinstance(found, Failed)
    assert "no whole answer" in found.error
