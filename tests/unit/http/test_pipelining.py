"""Requests sent ahead of their answers: the order of answers, whose turn it is, and the bounds."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
import uvloop
from hypothesis import given, settings

from fencepost.http.connection import Connection
from fencepost.http.messages import Response
from fencepost.http.parser import RequestReader
from fencepost.http.settings import HttpSettings
from tests.unit.http.rawhttp import (
    QUICK,
    ScriptedApp,
    connected,
    get,
    parse_head,
    post,
    serving,
    until,
)


def ok(body: bytes) -> Response:
    return Response(200, [], body)


async def test_posts_are_handed_over_at_once_and_answered_in_order() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(b"".join(post("/later", b"%d" % number) for number in range(4)))
        pending = [await app.pending.get() for _ in range(4)]
        assert [one.request.body for one in pending] == [b"0", b"1", b"2", b"3"]
        for one in (pending[2], pending[1], pending[3], pending[0]):
            one.answer(ok(one.request.body))

        assert [(await client.reply()).body for _ in range(4)] == [b"0", b"1", b"2", b"3"]


async def test_a_read_waits_for_the_writes_before_it_and_later_writes_wait_for_the_read() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later", b"1") + get("/poll") + post("/later", b"2") + get("/echo"))
        write = await app.pending.get()
        assert len(app.requests) == 1

        write.answer(ok(b"written"))
        read = await app.pending.get()
        assert read.request.path == b"/poll"
        assert len(app.requests) == 2

        read.answer(ok(b"read"))
        last = await app.pending.get()
        assert last.request.body == b"2"
        assert len(app.requests) == 3
        last.answer(ok(b"written again"))

        bodies = [(await client.reply()).body for _ in range(4)]
    assert bodies == [b"written", b"read", b"written again", b"GET /echo? "]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_any_method_but_post_has_its_turn_alone(method: str) -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/later", method=method) * 2)
        first = await app.pending.get()
        assert app.pending.empty()
        first.answer(ok(b"1"))
        (await app.pending.get()).answer(ok(b"2"))

        assert [(await client.reply()).body for _ in range(2)] == [b"1", b"2"]


@pytest.mark.parametrize("cut", [7, 150, 4_000, 16_384, 40_000])
async def test_heads_repeat_wherever_a_long_pipeline_is_cut(cut: int) -> None:
    app = ScriptedApp()
    count = 1_000
    asked = b"".join(post("/echo", b"%d" % number * 9) for number in range(count))
    async with serving(app) as listening, connected(listening) as client:
        for warm_up in range(3):
            await client.send(post("/echo", b"%d" % warm_up))
            await client.reply()
        for at in range(0, len(asked), cut):
            await client.send(asked[at : at + cut])

        answered = [(await client.reply()).body for _ in range(count)]

    assert answered == [b"POST /echo? " + b"%d" % number * 9 for number in range(count)]
    if cut >= 4_000:
        # One request of a slice is cut, and goes through the parser.
        assert listening.counters.heads_repeated > count * 0.8


async def test_large_bodies_that_come_whole_repeat_the_head() -> None:
    large = b"x" * 60_000
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        for number in range(20):
            await client.send(post("/echo", large + b"%d" % number))
            assert (await client.reply()).body == b"POST /echo? " + large + b"%d" % number

    # Some come in two pieces, and go through the parser.
    assert listening.counters.heads_repeated > 0


async def test_empty_lines_in_a_body_in_chunks_do_not_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces: list[int] = []
    feed = RequestReader.feed

    def fed(reader: RequestReader, data: bytes | memoryview) -> None:
        pieces.append(len(data))
        feed(reader, data)

    monkeypatch.setattr(RequestReader, "feed", fed)
    body = b"\r\n" * 30_000
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert (await client.reply()).body == b"POST /echo? " + body

    assert len(pieces) < 100


async def test_a_long_pipeline_is_answered_without_deep_recursion() -> None:
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        count = 5000
        sending = asyncio.ensure_future(client.send(get("/echo") * count))
        for _ in range(count):
            assert (await client.reply()).status == 200
        await sending


async def test_no_more_than_the_depth_is_queued_and_the_rest_is_not_read() -> None:
    depth = 4
    app = ScriptedApp()
    limits = HttpSettings(sweep_seconds=0.01, pipeline_depth_max=depth)
    body = b"x" * 10_000  # above the slice the reader parses at once, so the bound is exact
    async with serving(app, limits) as listening, connected(listening) as client:
        count = 600
        sending = asyncio.ensure_future(client.send(post("/later", body) * count))
        await until(lambda: len(app.requests) >= depth)
        received = -1
        while received != listening.counters.bytes_in:
            received = listening.counters.bytes_in
            await asyncio.wait({sending}, timeout=0.05)
        assert not sending.done()
        assert len(app.requests) <= depth + 2
        assert received < 1_000_000

        for _ in range(count):
            (await app.pending.get()).answer(ok(b""))
        for _ in range(count):
            assert (await client.reply()).status == 200
        await sending


async def test_a_segment_full_of_tiny_requests_is_not_queued_whole() -> None:
    app = ScriptedApp()
    limits = HttpSettings(sweep_seconds=0.01, pipeline_depth_max=2)
    async with serving(app, limits) as listening, connected(listening):
        connections = listening._front.connections
        await until(lambda: connections)
        (connection,) = connections
        assert isinstance(connection, Connection)
        connection.data_received(get("/poll") * 5000)

        assert len(connection._turns) < 700
        assert len(app.requests) == 1


async def test_a_segment_full_of_requests_that_repeat_their_head_is_not_queued_whole() -> None:
    app = ScriptedApp()
    limits = HttpSettings(sweep_seconds=0.01, pipeline_depth_max=2)
    async with serving(app, limits) as listening, connected(listening) as client:
        for _ in range(4):
            await client.send(post("/echo", b"s"))
            await client.reply()
        (connection,) = listening._front.connections
        assert isinstance(connection, Connection)
        small, large = post("/later", b"s"), post("/later", b"x" * 40_000)
        connection.data_received(small * 2_000 + large * 4)

        assert listening.counters.heads_repeated > 100
        assert len(connection._turns) <= 2 + 20_000 // len(small)

        for _ in range(2_004):
            (await app.pending.get()).answer(ok(b""))
            assert (await client.reply()).status == 200


async def test_bodies_that_wait_are_bounded_in_bytes() -> None:
    app = ScriptedApp()
    limits = HttpSettings(sweep_seconds=0.01, pipeline_bytes_max=100_000)
    async with serving(app, limits) as listening, connected(listening) as client:
        count = 40
        sending = asyncio.ensure_future(client.send(post("/later", b"x" * 90_000) * count))
        for _ in range(count):
            pending = await app.pending.get()
            assert app.pending.qsize() <= 1
            pending.answer(ok(b""))
            assert (await client.reply()).status == 200
        await sending


async def test_a_long_poll_is_cancelled_when_its_client_leaves() -> None:
    app = ScriptedApp()
    async with serving(app) as listening:
        async with connected(listening) as client:
            await client.send(get("/poll"))
            pending = await app.pending.get()
        async with asyncio.timeout(10):
            await pending.cancelled.wait()

        pending.answer(ok(b"nobody reads this"))


async def test_a_client_that_only_stops_sending_counts_as_gone_for_a_long_poll() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/poll"))
        pending = await app.pending.get()
        client.writer.write_eof()

        assert await client.rest() == b""
        assert pending.cancelled.is_set()


async def test_a_client_that_only_stops_sending_still_hears_about_its_appends() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later", b"1") + get("/echo") + post("/later", b"2") + b"POST /x")
        client.writer.write_eof()
        first = await app.pending.get()
        (connection,) = listening._front.connections
        assert isinstance(connection, Connection)
        await until(lambda: connection._eof)
        first.answer(ok(b"one"))
        (await app.pending.get()).answer(ok(b"two"))
        replies = [await client.reply() for _ in range(3)]

        assert [reply.body for reply in replies] == [b"one", b"GET /echo? ", b"two"]
        assert [reply.headers.get("connection") for reply in replies] == [None, None, "close"]
        assert await client.rest() == b""


PIPELINE = [
    post("/a?1", b"hello"),
    get("/b", "X-Header: value"),
    get("/c", "Transfer-Encoding: chunked", method="POST")
    + b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nT: t\r\n\r\n",
    post("/d", b"x" * 40),
    get("/e", method="HEAD"),
    b"\r\n" + get("/f", "Connection: close"),
]


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, sum(map(len, PIPELINE))), max_size=30))
def test_how_the_bytes_are_cut_into_segments_changes_no_answer(cuts: list[int]) -> None:
    """Property: the answers depend on the bytes sent, never on where a segment ended."""

    async def answers(cuts: list[int]) -> bytes:
        app = ScriptedApp()
        sent = b"".join(PIPELINE)
        async with serving(app, QUICK) as listening, connected(listening) as client:
            connections = listening._front.connections
            await until(lambda: connections)
            (connection,) = connections
            assert isinstance(connection, Connection)
            for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                connection.data_received(sent[start:end])
            received = await client.rest()
        return b"\r\n".join(
            line for line in received.split(b"\r\n") if not line.startswith(b"Date: ")
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        received = runner.run(answers(sorted(cuts)))

    assert received == EXPECTED


def _expected() -> bytes:
    echoes = [
        (b"/a", b"POST /a?1 hello"),
        (b"/b", b"GET /b? "),
        (b"/c", b"POST /c? hello world"),
        (b"/d", b"POST /d? " + b"x" * 40),
        (b"/e", None),
        (b"/f", b"GET /f? "),
    ]
    answers = []
    for path, body in echoes:
        head = b"HTTP/1.1 200 OK\r\nX-Path: " + path + b"\r\n"
        head += b"Connection: close\r\n" if path == b"/f" else b""
        head += b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        assert parse_head(head + b"\r\n").status == 200
        answers.append(head + b"\r\n" + (body or b""))
    return b"".join(answers)


EXPECTED = _expected()
