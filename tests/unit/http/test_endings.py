"""How connections end: slow senders, idle clients, and the drain before a shutdown."""

from __future__ import annotations

import asyncio

import pytest

from fencepost.http.connection import Connection
from fencepost.http.listener import Listening
from fencepost.http.messages import Response
from fencepost.http.settings import HttpSettings
from tests.unit.http.rawhttp import QUICK, ScriptedApp, connected, get, post, serving, until
from tests.unit.http.test_refusals import check_problem
from tests.unit.http.test_streams import Source, closed

HASTY = HttpSettings(
    sweep_seconds=0.01,
    header_timeout_seconds=0.1,
    body_grace_seconds=0.1,
    body_bytes_per_second_min=1_000_000,
    idle_timeout_seconds=0.1,
)


@pytest.mark.parametrize(
    "sent",
    [
        b"G",
        b"GET /echo HTTP/1.1\r\nHost: te",
        post("/echo", b"12345")[:-1],
        get("/echo", "Transfer-Encoding: chunked", method="POST") + b"5\r\nhel",
        post("/echo", b"12345", "Expect: 100-continue")[:-5],
    ],
)
async def test_a_sender_that_stops_in_the_middle_is_told_that_it_took_too_long(sent: bytes) -> None:
    app = ScriptedApp()
    async with serving(app, HASTY) as listening, connected(listening) as client:
        await client.send(sent)
        reply = await client.reply()
        if reply.status == 100:
            reply = await client.reply()

        check_problem(reply, 408, "request_timeout")
        assert await client.rest() == b""
    assert app.requests == []


async def test_a_sender_that_trickles_is_told_so_too() -> None:
    async with serving(ScriptedApp(), HASTY) as listening, connected(listening) as client:
        await client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        reply = asyncio.ensure_future(client.reply())
        while not reply.done():
            await client.send(b"x")
            await asyncio.wait({reply}, timeout=0.01)

        check_problem(await reply, 408, "request_timeout")


PACED = HttpSettings(
    sweep_seconds=1000, body_grace_seconds=10, body_bytes_per_second_min=100, body_seconds_max=300
)
"""No sweep comes by itself: the test sweeps, at times that it chooses."""


async def test_a_sender_that_keeps_the_pace_is_waited_for_up_to_a_bound() -> None:
    async with serving(ScriptedApp(), PACED) as listening, connected(listening) as client:
        connection = await only_connection(listening)
        connection.data_received(LONG_POST)
        now_seconds = listening._front.now_seconds
        for _ in range(29):
            now_seconds += 10.1
            connection.data_received(b"x" * 1100)
            connection.sweep(now_seconds)
            assert not connection.closing
        connection.data_received(b"x" * 1100)
        connection.sweep(now_seconds + 10.1)

        check_problem(await client.reply(), 408, "request_timeout")


async def test_what_came_early_does_not_let_a_sender_rest_later() -> None:
    """A client that holds a body open must go on sending it."""
    async with serving(ScriptedApp(), PACED) as listening, connected(listening) as client:
        connection = await only_connection(listening)
        connection.data_received(LONG_POST + b"x" * 900_000)
        now_seconds = listening._front.now_seconds
        connection.sweep(now_seconds + 11)
        assert not connection.closing
        connection.sweep(now_seconds + 22)

        check_problem(await client.reply(), 408, "request_timeout")


LONG_POST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"


async def only_connection(listening: Listening) -> Connection:
    """The one connection of a front end, as the server sees it."""
    connections = listening._front.connections
    await until(lambda: connections)
    (connection,) = connections
    assert isinstance(connection, Connection)
    return connection


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", get("/echo")])
async def test_an_idle_connection_is_closed_without_a_word(sent: bytes) -> None:
    async with serving(ScriptedApp(), HASTY) as listening, connected(listening) as client:
        await client.send(sent)
        if b"GET" in sent:
            assert (await client.reply()).status == 200

        assert await client.rest() == b""


async def test_a_request_under_way_is_not_idle() -> None:
    app = ScriptedApp()
    async with serving(app, HASTY) as listening, connected(listening) as client:
        await client.send(get("/poll"))
        pending = await app.pending.get()
        waited = asyncio.ensure_future(pending.cancelled.wait())
        await asyncio.wait({waited}, timeout=0.3)
        assert not waited.done()
        pending.answer(Response(200, [], b"patience"))

        assert (await client.reply()).body == b"patience"
        waited.cancel()


async def test_time_the_server_did_not_read_is_not_held_against_the_sender() -> None:
    app = ScriptedApp()
    limits = HttpSettings(
        sweep_seconds=0.01,
        pipeline_depth_max=1,
        header_timeout_seconds=0.1,
        body_grace_seconds=0.1,
        body_bytes_per_second_min=1_000_000,
    )
    async with serving(app, limits) as listening, connected(listening) as client:
        await client.send(post("/later") + post("/echo", b"12345")[:-2])
        pending = await app.pending.get()
        never = asyncio.ensure_future(pending.cancelled.wait())
        await asyncio.wait({never}, timeout=0.3)
        never.cancel()
        pending.answer(Response(204, []))
        assert (await client.reply()).status == 204
        await client.send(b"45")

        assert (await client.reply()).status == 200


async def test_a_drain_closes_the_idle_and_answers_what_is_under_way() -> None:
    app = ScriptedApp()
    async with (
        serving(app) as listening,
        connected(listening) as idle,
        connected(listening) as busy,
        connected(listening) as sending,
    ):
        await busy.send(post("/later", b"1") + get("/echo"))
        await sending.send(post("/echo", b"12345")[:-1])
        pending = await app.pending.get()
        await until(lambda: listening.counters.connections_open == 3)
        sent_bytes = len(post("/later", b"1") + get("/echo") + post("/echo", b"12345")) - 1
        await until(lambda: listening.counters.bytes_in == sent_bytes)

        draining = asyncio.ensure_future(listening.drain(timeout_seconds=10))
        assert await idle.rest() == b""
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", listening.port)
        await sending.send(b"5")
        pending.answer(Response(200, [], b"done"))

        first, second, third = await busy.reply(), await busy.reply(), await sending.reply()
        assert await draining
    assert (first.body, first.headers.get("connection")) == (b"done", None)
    assert (second.body, second.headers["connection"]) == (b"GET /echo? ", "close")
    assert (third.body, third.headers["connection"]) == (b"POST /echo? 12345", "close")


async def test_a_request_that_begins_during_the_drain_is_not_taken() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later"))
        pending = await app.pending.get()
        draining = asyncio.ensure_future(listening.drain(timeout_seconds=10))
        await until(lambda: listening._front.draining)
        received = listening.counters.bytes_in
        await client.send(post("/echo"))
        await until(lambda: listening.counters.bytes_in > received)
        pending.answer(Response(204, []))

        assert (await client.reply()).headers["connection"] == "close"
        assert await client.rest() == b""
        await client.close()
        assert await draining
    assert len(app.requests) == 1


async def test_a_drain_ends_event_streams_cleanly() -> None:
    source = Source(b"data: 1\n\n")
    async with (
        serving(ScriptedApp(chunks=lambda: source)) as listening,
        connected(listening) as client,
    ):
        await client.send(get("/stream"))
        await client.reader.readuntil(b"\r\n\r\n")
        assert await client.chunk() == b"data: 1\n\n"

        assert await listening.drain(timeout_seconds=10)
        assert await client.rest() == b"0\r\n\r\n"
    assert source.cancelled
    assert await closed(source)


async def test_a_drain_lets_other_streams_come_to_their_end() -> None:
    source = Source(b"row")
    app = ScriptedApp(chunks=lambda: source, stream_type=b"application/x-ndjson")
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/stream"))
        await client.reader.readuntil(b"row\r\n")
        draining = asyncio.ensure_future(listening.drain(timeout_seconds=10))
        source.queue.put_nowait(b"last")
        source.queue.put_nowait(None)

        assert await client.rest() == b"4\r\nlast\r\n0\r\n\r\n"
        assert await draining


async def test_what_does_not_end_in_time_is_aborted() -> None:
    source = Source(b"row")
    app = ScriptedApp(chunks=lambda: source, stream_type=b"application/x-ndjson")
    async with (
        serving(app, QUICK) as listening,
        connected(listening) as streaming,
        connected(listening) as polling,
    ):
        await streaming.send(get("/stream"))
        await streaming.reader.readuntil(b"row\r\n")
        await polling.send(get("/poll"))
        pending = await app.pending.get()

        assert not await listening.drain(timeout_seconds=0.05)
        assert pending.cancelled.is_set()
        assert source.closed.is_set()
        assert await streaming.rest() == b""
        assert await polling.rest() == b""
