"""Answers without an end: chunks, backpressure, and an iterator that is always closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from fencepost.http.connection import Connection
from fencepost.http.messages import Response, StreamingResponse
from fencepost.http.settings import HttpSettings
from tests.unit.http.rawhttp import ScriptedApp, connected, get, post, serving, until


class Source:
    """An iterator of chunks that the test feeds, and that knows what became of it."""

    def __init__(self, *chunks: bytes, ends: bool = False) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.started = False
        self.cancelled = False
        self.closed = asyncio.Event()
        for chunk in chunks:
            self.queue.put_nowait(chunk)
        if ends:
            self.queue.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.started = True
        try:
            item = await self.queue.get()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self.closed.set()


async def closed(source: Source) -> bool:
    async with asyncio.timeout(10):
        return await source.closed.wait()


async def test_chunks_leave_one_by_one_and_the_connection_goes_on() -> None:
    source = Source(b"one")
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(get("/stream") + get("/echo"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        assert b"Content-Length" not in head
        assert await client.chunk() == b"one"
        source.queue.put_nowait(b"")
        source.queue.put_nowait(b"two")
        assert await client.chunk() == b"two"
        assert listening.counters.streams_open == 1
        source.queue.put_nowait(None)
        assert await client.chunk() == b""

        assert (await client.reply()).body == b"GET /echo? "
        assert await closed(source)


async def test_a_large_chunk_arrives_whole() -> None:
    source = Source(b"a" * 3_000_000, b"b", ends=True)
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(get("/stream"))

        assert (await client.reply()).body == b"a" * 3_000_000 + b"b"


async def test_an_old_client_gets_the_stream_up_to_the_close() -> None:
    source = Source(b"one", b"two", ends=True)
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        reply = await client.reply()

    assert "transfer-encoding" not in reply.headers
    assert reply.headers["connection"] == "close"
    assert reply.body == b"onetwo"
    assert await closed(source)


async def test_a_head_request_for_a_stream_gets_its_head_and_closes_the_iterator() -> None:
    source = Source(b"one")
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(get("/stream", method="HEAD") + get("/echo"))
        reply = await client.reply(to="HEAD")

        assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
        assert (await client.reply()).status == 200
        assert await closed(source)
        assert not source.started


async def test_a_client_that_leaves_cancels_its_stream() -> None:
    source = Source(b"one")
    async with serving(ScriptedApp(chunks=lambda: source)) as listening:
        async with connected(listening) as client:
            await client.send(get("/stream"))
            await client.reader.readuntil(b"one\r\n")

        assert await closed(source)
        assert source.cancelled


async def test_a_client_that_only_stops_sending_cancels_its_stream() -> None:
    source = Source(b"one")
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(get("/stream"))
        await client.reader.readuntil(b"one\r\n")
        client.writer.write_eof()

        assert await closed(source)
        assert await client.rest() == b""


async def test_an_iterator_that_never_began_is_closed_too() -> None:
    """Answered behind another request, or after the client left, a stream still holds something."""
    source, late = Source(), Source()
    app = ScriptedApp()
    async with serving(app) as listening:
        async with connected(listening) as client:
            await client.send(post("/later") + post("/later"))
            first, second = await app.pending.get(), await app.pending.get()
            second.answer(StreamingResponse(200, [], source))
            (connection,) = listening._front.connections
        assert isinstance(connection, Connection)
        await until(lambda: connection._eof)
        first.answer(StreamingResponse(200, [], late))
        assert await closed(source)
        assert await closed(late)

    assert not source.started
    assert not late.started


async def test_a_stream_may_answer_a_post_in_its_turn() -> None:
    source = Source(b"x", ends=True)
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later", b"1") + post("/later", b"2") + post("/later", b"3"))
        pending = [await app.pending.get() for _ in range(3)]
        pending[2].answer(Response(200, [], b"last"))
        pending[1].answer(StreamingResponse(200, [], source))
        pending[0].answer(Response(200, [], b"first"))

        assert [(await client.reply()).body for _ in range(3)] == [b"first", b"x", b"last"]


async def test_a_stream_that_fails_is_cut_so_that_it_does_not_look_complete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Source(b"one")
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(get("/stream"))
        await client.reader.readuntil(b"one\r\n")
        source.queue.put_nowait(RuntimeError("the disk is gone"))

        assert await client.rest() == b""
        assert await closed(source)
    assert "the disk is gone" in caplog.text


class Endless:
    """A gibibyte in chunks of 64 KiB, counting how many were asked for."""

    def __init__(self) -> None:
        self.pulled = 0
        self.closed = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self.pulled == 16 * 1024:
            raise StopAsyncIteration
        self.pulled += 1
        return bytes(64 * 1024)

    async def aclose(self) -> None:
        self.closed.set()


def slow_reader(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


async def test_a_reader_that_does_not_read_holds_a_buffer_and_not_the_stream() -> None:
    """And when it never reads at all it is cut, and the iterator closed."""
    source = Endless()
    limits = HttpSettings(sweep_seconds=0.01, write_stall_seconds=0.3)
    async with serving(ScriptedApp(chunks=lambda: source), limits) as listening:
        client = slow_reader(listening.port)
        client.sendall(get("/stream"))
        most = 0

        def stalled() -> bool:
            nonlocal most
            for connection in listening._front.connections:
                most = max(most, connection._transport.get_write_buffer_size())  # type: ignore[attr-defined]
            return source.closed.is_set()

        await until(stalled)
        client.close()

    assert most <= limits.write_buffer_bytes_high + 2 * 64 * 1024
    # What the kernel took is all that was ever pulled beyond that buffer.
    assert source.pulled < 1024
    assert listening.counters.connections_aborted == 1


async def test_a_reader_that_reads_slowly_is_not_cut() -> None:
    source = Endless()
    limits = HttpSettings(sweep_seconds=0.01, write_stall_seconds=0.3)
    async with serving(ScriptedApp(chunks=lambda: source), limits) as listening:
        loop = asyncio.get_running_loop()
        client = slow_reader(listening.port)
        client.setblocking(False)
        await loop.sock_sendall(client, get("/stream"))
        ends = loop.time() + 1.0
        received = 0
        while loop.time() < ends:
            received += len(await loop.sock_recv(client, 65536))

        assert received > 0
        assert listening.counters.connections_aborted == 0
        client.close()
        await asyncio.wait_for(source.closed.wait(), 10)


async def test_answers_nobody_reads_stop_further_requests_from_being_started() -> None:
    app = ScriptedApp(answer=Response(200, [], bytes(1024 * 1024)))
    limits = HttpSettings(sweep_seconds=0.01, write_stall_seconds=0.3)
    async with serving(app, limits) as listening:
        client = slow_reader(listening.port)
        client.sendall(get("/scripted") * 60)
        await until(lambda: listening.counters.connections_aborted == 1)
        client.close()

    assert len(app.requests) < 20


async def test_answers_that_waited_for_a_slow_reader_all_arrive() -> None:
    app = ScriptedApp(answer=Response(200, [], b"x" * 1024 * 1024))
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/scripted") * 30)
        for _ in range(30):
            assert len((await client.reply()).body) == 1024 * 1024
