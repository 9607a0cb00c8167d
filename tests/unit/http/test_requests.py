"""What arrives at the application for each shape of request, and how its answers are written."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from fencepost.clock import SystemClock
from fencepost.http.connection import Connection
from fencepost.http.listener import serve
from fencepost.http.messages import Response
from fencepost.http.settings import HttpSettings
from tests.unit.http.rawhttp import QUICK, ScriptedApp, connected, get, post, serving, until


async def test_the_tests_of_the_front_end_run_on_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_a_post_reaches_the_application_whole() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/a%2Fb?x=1&y", b"hello", "X-One:  1 \t", "x-one: 2"))
        reply = await client.reply()

    (request,) = app.requests
    assert (request.method, request.path, request.query) == ("POST", b"/a%2Fb", b"x=1&y")
    assert request.body == b"hello"
    assert request.headers == {b"host": b"test", b"content-length": b"5", b"x-one": b"1"}
    assert request.repeated == {b"x-one"}
    assert (request.scheme, request.peer) == ("http", "127.0.0.1")
    assert reply.status == 200
    assert reply.body == b"POST /a%2Fb?x=1&y hello"
    assert reply.headers["content-length"] == str(len(reply.body))
    assert reply.headers["date"].endswith(" GMT")
    assert "connection" not in reply.headers


async def test_a_chunked_body_is_joined_and_its_extensions_and_trailers_are_dropped() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        head = get("/echo", "Transfer-Encoding: chunked", method="POST")
        await client.send(head + b"3;name=value\r\nabc\r\n2\r\nde\r\n0\r\nHost: evil\r\n\r\n")
        await client.reply()
        await client.send(get("/next"))
        await client.reply()

    first, second = app.requests
    assert first.body == b"abcde"
    assert first.headers[b"host"] == b"test"
    assert first.repeated == second.repeated == frozenset()
    assert second.headers == {b"host": b"test"}


@pytest.mark.parametrize("parts", [1, 2, 16, 17, 18, 19, 40])
async def test_a_body_is_whole_in_however_many_parts_it_comes(parts: int) -> None:
    app = ScriptedApp()
    sent = [b"%02d" % number for number in range(parts)]
    async with serving(app) as listening, connected(listening) as client:
        head = get("/echo", "Transfer-Encoding: chunked", method="POST")
        for _ in range(2):
            await client.send(
                head + b"".join(b"2\r\n%b\r\n" % part for part in sent) + b"0\r\n\r\n"
            )
            await client.reply()

    assert [request.body for request in app.requests] == [b"".join(sent)] * 2


@pytest.mark.parametrize(
    ("target", "host", "path", "query"),
    [
        ("http://other:81/a?b", "other:81", b"/a", b"b"),
        ("HTTP://other", "other", b"/", b""),
        ("http://other?q", "other", b"/", b"q"),
        ("https://[::1]:8/x", "[::1]:8", b"/x", b""),
        ("//double/slash", "test", b"//double/slash", b""),
        ("/?", "test", b"/", b""),
    ],
)
async def test_a_target_is_split_and_an_absolute_one_names_the_host(
    target: str, host: str, path: bytes, query: bytes
) -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get(target))
        await client.reply()

    (request,) = app.requests
    assert (request.path, request.query) == (path, query)
    assert request.headers[b"host"] == host.encode()


async def test_options_may_ask_about_the_whole_server() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("*", method="OPTIONS"))
        await client.reply()

    assert app.requests[0].path == b"*"


@pytest.mark.parametrize(
    ("request_bytes", "connection"),
    [
        (b"GET /echo HTTP/1.0\r\n\r\n", "close"),
        (b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive"),
        (get("/echo", "Connection: close"), "close"),
        (get("/echo", "Connection: Close"), "close"),
        (get("/echo", "Connection: keep-alive"), None),
    ],
)
async def test_a_connection_is_kept_or_closed_as_the_client_asks(
    request_bytes: bytes, connection: str | None
) -> None:
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(request_bytes)
        reply = await client.reply()

        assert reply.headers.get("connection") == connection
        if connection == "close":
            assert await client.rest() == b""
        else:
            await client.send(get("/echo"))
            assert (await client.reply()).status == 200


async def test_bytes_after_the_last_request_are_dropped_and_its_answer_still_arrives() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/echo", "Connection: close") + get("/smuggled") * 100)
        reply = await client.reply()

        assert reply.status == 200
        assert await client.rest() == b""
    assert [request.path for request in app.requests] == [b"/echo"]


async def test_an_expected_body_is_asked_for() -> None:
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(post("/echo", b"12345", "Expect: 100-Continue")[:-5])
        interim = await client.reply()
        await client.send(b"12345")
        reply = await client.reply()

    assert interim.status == 100
    assert interim.headers == {}
    assert reply.body == b"POST /echo? 12345"


async def test_an_expected_body_that_came_along_is_not_asked_for() -> None:
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(post("/echo", b"12345", "Expect: 100-continue"))

        assert (await client.reply()).status == 200


async def test_the_asking_waits_for_the_answers_before_it() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later") + post("/echo", b"12345", "Expect: 100-continue")[:-5])
        (await app.pending.get()).answer(Response(204, []))

        assert (await client.reply()).status == 204
        assert (await client.reply()).status == 100
        await client.send(b"12345")
        assert (await client.reply()).body == b"POST /echo? 12345"


@pytest.mark.parametrize(
    ("method", "answer", "length"),
    [
        ("HEAD", Response(200, []), None),
        ("HEAD", Response(200, [(b"Content-Length", b"77")]), "77"),
        ("HEAD", Response(404, [], b"dropped"), None),
        ("GET", Response(304, [(b"ETag", b'"x"')]), None),
        ("POST", Response(204, []), None),
        ("GET", Response(200, [], b""), "0"),
        ("GET", Response(200, [], (b"ab", b"", b"cde")), "5"),
        ("GET", Response(599, [], b"x"), "1"),
    ],
)
async def test_an_answer_has_a_length_exactly_when_it_may_have_a_body(
    method: str, answer: Response, length: str | None
) -> None:
    app = ScriptedApp(answer=answer)
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/scripted", method=method) + get("/echo"))
        reply = await client.reply(to=method)
        after = await client.reply()

    assert reply.status == answer.status
    assert reply.headers.get("content-length") == length
    assert after.body == b"GET /echo? "


async def test_a_large_answer_in_parts_arrives_whole() -> None:
    parts = tuple(bytes([number]) * 300_000 for number in range(10))
    app = ScriptedApp(answer=Response(200, [], parts))
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/scripted"))

        assert (await client.reply()).body == b"".join(parts)


@pytest.mark.parametrize("value", [b"a\r\nSet-Cookie: b", b"a\nb", b"a\rb"])
async def test_an_answer_whose_header_would_break_its_line_is_replaced(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    app = ScriptedApp(answer=Response(200, [(b"X-Echo", value)], b"body"))
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/scripted"))
        reply = await client.reply()

        assert reply.status == 500
        assert b"internal_error" in reply.body
        assert "set-cookie" not in reply.headers
        assert await client.rest() == b""
    assert "an answer was dropped" in caplog.text


async def test_header_lines_rendered_beforehand_stand_beside_the_others() -> None:
    block = b"X-Block: 1\r\nX-More: 2\r\n"
    app = ScriptedApp(answer=Response(200, [(b"X-Own", b"3")], b"body", block))
    async with serving(app) as listening, connected(listening) as client:
        await client.send(get("/scripted"))
        reply = await client.reply()

    assert [reply.headers[name] for name in ("x-block", "x-more", "x-own")] == ["1", "2", "3"]
    assert reply.body == b"body"


async def test_small_answers_are_not_held_back_by_the_kernel() -> None:
    async with serving(ScriptedApp()) as listening, connected(listening):
        connections = listening._front.connections
        await until(lambda: connections)
        (connection,) = connections
        assert isinstance(connection, Connection)
        accepted = connection._transport.get_extra_info("socket")

        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_an_application_that_raises_is_answered_for_and_the_connection_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(post("/raise") + get("/echo"))

        assert (await client.reply()).status == 500
        assert (await client.reply()).status == 200
    assert "as the test asked" in caplog.text


async def test_a_second_answer_to_the_same_request_is_dropped() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later"))
        pending = await app.pending.get()
        pending.answer(Response(200, [], b"first"))
        pending.answer(Response(200, [], b"second"))
        await client.send(get("/echo"))

        assert (await client.reply()).body == b"first"
        assert (await client.reply()).body == b"GET /echo? "


async def test_what_happened_is_counted() -> None:
    async with serving(ScriptedApp()) as listening:
        async with connected(listening) as client:
            sent = get("/echo") + post("/raise") + b"nonsense\r\n\r\n"
            await client.send(sent)
            received = await client.rest()
        counters = listening.counters
        await until(lambda: counters.connections_open == 0)

    assert counters.requests["GET"] == [0, 0, 1, 0, 0, 0]
    assert counters.requests["POST"] == [0, 0, 0, 0, 0, 1]
    assert counters.refusals == {"method_unknown": 1}
    assert counters.connections_total == 1
    assert counters.bytes_in == len(sent)
    assert counters.bytes_out == len(received)


async def test_the_date_follows_the_clock_it_was_given() -> None:
    class Stopped(SystemClock):
        def wall_ms(self) -> int:
            return 784_111_777_000

    listening = await serve(ScriptedApp(), QUICK, clock=Stopped())
    async with connected(listening) as client:
        await client.send(get("/echo"))
        reply = await client.reply()
    await listening.drain(1)

    assert reply.headers["date"] == "Sun, 06 Nov 1994 08:49:37 GMT"


async def test_an_address_in_use_is_an_error_before_anything_is_served() -> None:
    async with serving(ScriptedApp()) as listening:
        with pytest.raises(OSError, match="in use"):
            await serve(ScriptedApp(), port=listening.port)


@pytest.mark.parametrize("name", ["body_bytes_max", "idle_timeout_seconds"])
def test_a_limit_of_zero_is_no_setting(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        HttpSettings(**{name: 0})


def test_the_write_marks_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="write_buffer_bytes_low"):
        HttpSettings(write_buffer_bytes_low=2, write_buffer_bytes_high=1)
