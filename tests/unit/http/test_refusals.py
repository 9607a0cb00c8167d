"""Every request the front end refuses by itself: byte for byte what came, and what it is told.

After a refusal the connection is closed, because where the next request begins is then a matter of
opinion; that is why each case is followed by a request that must never be answered.
"""

from __future__ import annotations

import re

import msgspec
import pytest

from fencepost.http.connection import Connection
from fencepost.http.listener import Listening
from fencepost.http.messages import Response
from fencepost.http.settings import HttpSettings
from tests.unit.http.rawhttp import (
    QUICK,
    Client,
    Reply,
    ScriptedApp,
    connected,
    get,
    parse_head,
    post,
    serving,
    until,
)

SMALL = HttpSettings(
    sweep_seconds=0.01,
    target_bytes_max=100,
    header_bytes_max=200,
    header_count_max=5,
    body_bytes_max=1000,
)

LINE = b"POST /echo HTTP/1.1\r\n"
HOST = b"Host: test\r\n"
CHUNKED = LINE + HOST + b"Transfer-Encoding: chunked\r\n\r\n"

WHOLE_CHUNKED = CHUNKED + b"5\r\na\r\n b\r\n0\r\nT:  GET /b HTTP/1.1\r\n\r\n"

AMBIGUOUS_LENGTH = {
    "length then coding": LINE + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\n",
    "coding then length": LINE + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    b"0\r\n\r\n",
    "two lengths": LINE + HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "the same length twice": LINE + HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": LINE + HOST + b"Content-Length: 5, 5\r\n\r\nhello",
    "a signed length": LINE + HOST + b"Content-Length: +5\r\n\r\nhello",
    "a negative length": LINE + HOST + b"Content-Length: -5\r\n\r\nhello",
    "a hexadecimal length": LINE + HOST + b"Content-Length: 0x5\r\n\r\nhello",
    "an empty length": LINE + HOST + b"Content-Length:\r\n\r\nhello",
    "a length of two words": LINE + HOST + b"Content-Length: 5 5\r\n\r\nhello",
    "a length beyond 64 bits": LINE + HOST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a length with an underscore": LINE + HOST + b"Content-Length: 1_0\r\n\r\n0123456789",
    "a coding before chunked": LINE + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding after chunked": LINE + HOST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "another coding": LINE + HOST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "identity": LINE + HOST + b"Transfer-Encoding: identity\r\n\r\n",
    "almost chunked": LINE + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "quoted chunked": LINE + HOST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked twice": LINE + HOST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two codings": LINE
    + HOST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two codings, hidden": LINE
    + HOST
    + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an empty coding": LINE + HOST + b"Transfer-Encoding:\r\n\r\n",
    "a coding behind a control": LINE + HOST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a coding on HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}

MALFORMED_CHUNKS = {
    "bare LF after a size": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "bare LF after an extension": CHUNKED + b"3;a\nabc\r\n0\r\n\r\n",
    "bare LF after data": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "bare CR after a size": CHUNKED + b"3\rabc\r\n0\r\n\r\n",
    "no line end after data": CHUNKED + b"3\r\nabc0\r\n\r\n",
    "other bytes after data": CHUNKED + b"3\r\nabcXX0\r\n\r\n",
    "space after a size": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "space before a size": CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "a prefixed size": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "no size": CHUNKED + b"\r\n\r\n",
    "a size beyond 64 bits": CHUNKED + b"fffffffffffffffff\r\nabc",
    "a length in the trailers": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
}

MALFORMED_HEADS = {
    "a folded line": LINE + HOST + b"X: a\r\n b\r\n\r\n",
    "a line folded by a tab": LINE + HOST + b"X: a\r\n\tb\r\n\r\n",
    "a space before the first header": LINE + b" Host: test\r\n\r\n",
    "a space before the colon": LINE + HOST + b"Content-Length : 5\r\n\r\nhello",
    "a tab before the colon": LINE + HOST + b"Content-Length\t: 5\r\n\r\nhello",
    "no colon": LINE + HOST + b"Content-Length\r\n\r\n",
    "no name": LINE + HOST + b": value\r\n\r\n",
    "a name with a space": LINE + HOST + b"X Y: a\r\n\r\n",
    "a name with a bracket": LINE + HOST + b"X(: a\r\n\r\n",
    "a name with NUL": LINE + HOST + b"X\x00: a\r\n\r\n",
    "a name beyond ASCII": LINE + HOST + b"X\xe9: a\r\n\r\n",
    "a value with NUL": LINE + HOST + b"X: a\x00b\r\n\r\n",
    "a value with a control": LINE + HOST + b"X: a\x01b\r\n\r\n",
    "a value with DEL": LINE + HOST + b"X: a\x7fb\r\n\r\n",
    "a bare LF after a header": LINE + HOST + b"X: a\nY: b\r\n\r\n",
    "a bare CR after a header": LINE + HOST + b"X: a\rY: b\r\n\r\n",
    "two CR": LINE + HOST + b"X: a\r\r\n\r\n",
    "a bare LF at the end": LINE + HOST + b"\n",
    "a bare LF after the request line": b"GET /echo HTTP/1.1\n" + HOST + b"\r\n",
    "a bare CR after the request line": b"GET /echo HTTP/1.1\r" + HOST + b"\r\n",
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "the same host twice": b"GET /echo HTTP/1.1\r\nHost: test\r\nHost: test\r\n\r\n",
    "a host with a path": b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "a host with a user": b"GET /echo HTTP/1.1\r\nHost: u@a\r\n\r\n",
    "a host with a space": b"GET /echo HTTP/1.1\r\nHost: a b\r\n\r\n",
    "a list of hosts": b"GET /echo HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "a host beyond ASCII": b"GET /echo HTTP/1.1\r\nHost: \xe9\r\n\r\n",
    "two hosts on HTTP/1.0": b"GET /echo HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
}

MALFORMED_LINES = {
    "NUL in the target": b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a control in the target": b"GET /\x01 HTTP/1.1\r\n" + HOST + b"\r\n",
    "DEL in the target": b"GET /\x7f HTTP/1.1\r\n" + HOST + b"\r\n",
    "a byte beyond ASCII in the target": b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tab in the target": b"GET /\t HTTP/1.1\r\n" + HOST + b"\r\n",
    "a CR in the target": b"GET /\rX HTTP/1.1\r\n" + HOST + b"\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces before the target": b"GET  /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces behind the target": b"GET /a  HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces behind an empty line": b"\r\n\r\nGET  /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "many spaces": b"GET   /a    HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces and the good line in the body": b"POST  /a HTTP/1.1\r\n"
    + HOST
    + b"Content-Length: 19\r\n\r\nPOST /a HTTP/1.1\r\n\r",
    "a fragment": b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n",
    "a relative target": b"GET echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "an asterisk for GET": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "another scheme": b"GET ftp://a/b HTTP/1.1\r\n" + HOST + b"\r\n",
    "no host in the target": b"GET http:///b HTTP/1.1\r\n" + HOST + b"\r\n",
    "a user in the target": b"GET http://u@a/b HTTP/1.1\r\n" + HOST + b"\r\n",
    "a lower-case version": b"GET / http/1.1\r\n" + HOST + b"\r\n",
    "a version without a dot": b"GET / HTTP/11\r\n" + HOST + b"\r\n",
    "a version that never was": b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
    "a space after the version": b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n",
    "another protocol": b"GET / ICE/1.0\r\n\r\n",
    "the HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}

OTHERS = {
    "HTTP/0.9": (b"GET /\r\n\r\n", 505, "version_not_supported"),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505, "version_not_supported"),
    "an unknown method": (b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n", 400, "method_unknown"),
    "a lower-case method": (b"get / HTTP/1.1\r\n" + HOST + b"\r\n", 400, "method_unknown"),
    "TRACE": (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", 400, "method_unknown"),
    "CONNECT": (b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n", 400, "method_unknown"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, "method_unknown"),
    "NUL": (b"\x00", 400, "method_unknown"),
    "an upgrade": (
        get("/", "Connection: upgrade", "Upgrade: websocket"),
        400,
        "upgrade_refused",
    ),
    "an upgrade of HTTP itself": (
        get("/", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x"),
        400,
        "upgrade_refused",
    ),
    "another expectation": (post("/", b"x", "Expect: payment"), 417, "expectation_failed"),
}


def tables() -> list[object]:
    cases: list[object] = []
    for table in (AMBIGUOUS_LENGTH, MALFORMED_CHUNKS, MALFORMED_HEADS, MALFORMED_LINES):
        cases += [
            pytest.param(sent, 400, "bad_request", id=name.replace(" ", "-"))
            for name, sent in table.items()
        ]
    cases += [pytest.param(*case, id=name.replace(" ", "-")) for name, case in OTHERS.items()]
    return cases


def check_problem(reply: Reply, status: int, code: str) -> None:
    assert reply.status == status
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cross-origin-resource-policy"] == "cross-origin"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["connection"] == "close"
    problem = msgspec.json.decode(reply.body)
    assert problem["type"] == "about:blank"
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["title"]
    assert problem["detail"]


@pytest.mark.parametrize(("sent", "status", "code"), tables())
async def test_a_request_with_two_meanings_or_none_is_refused_and_the_connection_closed(
    sent: bytes, status: int, code: str
) -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(sent + get("/smuggled"))
        reply = await client.reply()

        check_problem(reply, status, code)
        assert await client.rest() == b""
    assert app.requests == []
    assert listening.counters.refusals == {code: 1}


@pytest.mark.parametrize(("sent", "status", "code"), tables())
async def test_it_is_refused_the_same_when_it_arrives_byte_by_byte(
    sent: bytes, status: int, code: str
) -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        connection = await _connection(listening)
        for at in range(len(sent)):
            connection.data_received(sent[at : at + 1])
        await client.send(get("/smuggled"))
        reply = await client.reply()

        check_problem(reply, status, code)
        assert await client.rest() == b""
    assert app.requests == []


@pytest.mark.parametrize("line", [b"GET  /b HTTP/1.1", b"GET /b  HTTP/1.1"])
@pytest.mark.parametrize("size", [1, 7, 30, 100, 1000])
@pytest.mark.parametrize("first", [post("/echo", b"a  b" * 40), get("/echo"), WHOLE_CHUNKED])
async def test_two_spaces_are_refused_behind_another_request_as_well(
    line: bytes, first: bytes, size: int
) -> None:
    app = ScriptedApp()
    sent = first + b"\r\n" + line + b"\r\nHost: a\r\nX: GET /b HTTP/1.1\r\n\r\n"
    async with serving(app) as listening, connected(listening) as client:
        connection = await _connection(listening)
        for at in range(0, len(sent), size):
            connection.data_received(sent[at : at + size])
        replies = [await client.reply(), await client.reply()]

    assert [reply.status for reply in replies] == [200, 400]
    assert [request.path for request in app.requests] == [b"/echo"]


@pytest.mark.parametrize("size", [1, 7, 30, 100, 1000])
@pytest.mark.parametrize("first", [post("/echo", b"a  b" * 40), get("/echo"), WHOLE_CHUNKED])
async def test_requests_behind_each_other_are_taken_however_they_are_cut(
    first: bytes, size: int
) -> None:
    app = ScriptedApp()
    sent = first + b"\r\n" + first + first
    async with serving(app) as listening, connected(listening) as client:
        connection = await _connection(listening)
        for at in range(0, len(sent), size):
            connection.data_received(sent[at : at + size])
        replies = [await client.reply() for _ in range(3)]

    assert [reply.status for reply in replies] == [200, 200, 200]


async def test_spaces_in_headers_and_bodies_are_not_those_of_the_line() -> None:
    app = ScriptedApp()
    body = b"POST  /echo HTTP/1.1\r\n\r\n"
    async with serving(app) as listening, connected(listening) as client:
        for _ in range(2):
            await client.send(post("/echo", body, "X: a  b"))
            assert (await client.reply()).status == 200
    assert [request.body for request in app.requests] == [body, body]


async def _connection(listening: Listening) -> Connection:
    # Segments cannot be forced onto a socket; the protocol object takes them directly.
    connections = listening._front.connections
    await until(lambda: connections)
    (connection,) = connections
    assert isinstance(connection, Connection)
    return connection


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        pytest.param(get("/" + "a" * 100), 414, "target_too_long", id="target"),
        pytest.param(b"GET /" + b"a" * 50_000, 414, "target_too_long", id="endless-target"),
        pytest.param(get("/", "X: " + "a" * 200), 431, "header_too_large", id="header"),
        pytest.param(
            get("/", "X: " + "a" * 100, "X: " + "b" * 100), 431, "header_too_large", id="repeated"
        ),
        pytest.param(get("/", *["X: a"] * 5), 431, "header_too_large", id="count"),
        pytest.param(
            get("/", *[f"X{n}: a" for n in range(5)]), 431, "header_too_large", id="names"
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, 431, "header_too_large", id="endless-header"
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\n" + b"a" * 100_000, 431, "header_too_large", id="endless-name"
        ),
        pytest.param(
            CHUNKED + b"1\r\na\r\n0\r\nX: " + b"a" * 100_000,
            431,
            "header_too_large",
            id="endless-trailer",
        ),
        pytest.param(
            CHUNKED + b"1;" + b"a" * 100_000, 431, "header_too_large", id="endless-extension"
        ),
        pytest.param(post("/", b"a" * 1001), 413, "body_too_large", id="body"),
        pytest.param(
            post("/", b"a" * 1001, "Expect: 100-continue")[:-1001],
            413,
            "body_too_large",
            id="announced-body",
        ),
        pytest.param(
            LINE + HOST + b"Content-Length: 9999999999999\r\n\r\n",
            413,
            "body_too_large",
            id="huge-length",
        ),
        pytest.param(
            CHUNKED + b"1f4\r\n" + b"a" * 500 + b"\r\n" + b"1f5\r\n" + b"a" * 501,
            413,
            "body_too_large",
            id="chunked-body",
        ),
    ],
)
async def test_a_request_beyond_a_limit_is_refused_before_it_is_read_whole(
    sent: bytes, status: int, code: str
) -> None:
    app = ScriptedApp()
    async with serving(app, SMALL) as listening, connected(listening) as client:
        await client.send(sent)
        reply = await client.reply()

        check_problem(reply, status, code)
        assert await client.rest() == b""
    assert app.requests == []


async def test_a_request_exactly_at_its_limits_is_taken() -> None:
    app = ScriptedApp()
    async with serving(app, SMALL) as listening, connected(listening) as client:
        line = "POST /" + "a" * 99 + " HTTP/1.1\r\n"
        headers = "Host: test\r\nContent-Length: 1000\r\n"
        filler = 200 - len(headers) - len("X: \r\n")
        head = f"{line}{headers}X: {'x' * filler}\r\n\r\n"
        await client.send(head.encode() + b"b" * 1000)

        assert (await client.reply()).status == 200
        await client.send(get("/", *[f"X{n}:" for n in range(4)]))
        assert (await client.reply()).status == 200


async def test_a_refused_sender_that_goes_on_sending_can_still_read_why() -> None:
    """Closing with unread bytes would reset the connection and take the answer with it."""
    async with serving(ScriptedApp(), SMALL) as listening, connected(listening) as client:
        await client.send(LINE + HOST + b"Content-Length: 3000000\r\n\r\n")
        for _ in range(30):
            await client.send(b"a" * 100_000)
        reply = await client.reply()

        check_problem(reply, 413, "body_too_large")
        assert await client.rest() == b""


async def test_a_refused_sender_that_never_stops_is_cut() -> None:
    settings = HttpSettings(sweep_seconds=0.01, body_bytes_max=10, linger_bytes_max=100_000)
    async with serving(ScriptedApp(), settings) as listening, connected(listening) as client:
        await client.send(post("/", b"a" * 11))

        with pytest.raises(ConnectionError):
            await _send_forever(client)


async def _send_forever(client: Client) -> None:
    while True:
        await client.send(b"a" * 100_000)


async def test_a_refused_sender_that_stays_is_closed_after_a_while() -> None:
    settings = HttpSettings(sweep_seconds=0.01, linger_seconds=0.05)
    async with serving(ScriptedApp(), settings) as listening, connected(listening) as client:
        await client.send(b"nonsense\r\n\r\n")
        await until(lambda: listening.counters.connections_open == 0)

        assert (await client.reply()).status == 400


async def test_a_refused_head_request_is_answered_without_a_body() -> None:
    async with serving(ScriptedApp(), SMALL) as listening, connected(listening) as client:
        await client.send(get("/", "Content-Length: 2000", method="HEAD"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")

    assert parse_head(head + b"\r\n\r\n").status == 413
    assert body == b""


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ("X-Request-Id: order-7/retry", "order-7/retry"),
        ("X-Request-Id: " + "a" * 129, None),
        ("X-Request-Id: two words", None),
        ("X-Other: 1", None),
    ],
)
async def test_a_refusal_names_its_request_as_the_client_did_or_by_a_name_of_its_own(
    sent: str, echoed: str | None
) -> None:
    refused = ScriptedApp(answer=Response(409, [(b"X-Own", b"1")], b"no"))
    async with serving(refused) as listening, connected(listening) as client:
        await client.send(get("/scripted", sent) * 2 + get("/echo", sent))
        first, second, taken = [await client.reply() for _ in range(3)]

    assert first.headers["x-own"] == "1"
    names = [first.headers["x-request-id"], second.headers["x-request-id"]]
    if echoed is None:
        assert len(set(names)) == 2
        assert all(re.fullmatch("[0-9a-f]{8}-[0-9]+", name) for name in names)
    else:
        assert names == [echoed, echoed]
    assert "x-request-id" not in taken.headers


async def test_the_log_names_the_request_on_which_the_server_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(get("/raise", "X-Request-Id: order-7"))
        reply = await client.reply()

    assert (reply.status, reply.headers["x-request-id"]) == (500, "order-7")
    assert "request order-7 was answered 500" in caplog.text


async def test_a_refusal_comes_after_the_answers_to_what_came_before() -> None:
    app = ScriptedApp()
    async with serving(app) as listening, connected(listening) as client:
        await client.send(post("/later") + get("/echo") + b"nonsense\r\n\r\n" + get("/smuggled"))
        pending = await app.pending.get()
        pending.answer(Response(201, []))

        assert (await client.reply()).status == 201
        assert (await client.reply()).body == b"GET /echo? "
        assert (await client.reply()).status == 400
        assert await client.rest() == b""
    assert [request.path for request in app.requests] == [b"/later", b"/echo"]


async def test_a_connection_too_many_is_told_so_and_the_others_are_served() -> None:
    settings = HttpSettings(sweep_seconds=0.01, connections_max=2, refusals_open_max=1)
    async with (
        serving(ScriptedApp(), settings) as listening,
        connected(listening) as first,
        connected(listening) as second,
    ):
        for client in (first, second):
            await client.send(get("/echo"))
            assert (await client.reply()).status == 200

        async with connected(listening) as third:
            check_problem(await third.reply(), 503, "too_many_connections")
            async with connected(listening) as fourth:
                assert await fourth.rest() == b""
            assert await third.rest() == b""

        await first.send(get("/echo"))
        assert (await first.reply()).status == 200
        await first.close()
        await until(lambda: listening.counters.connections_open == 1)
        async with connected(listening) as fifth:
            await fifth.send(get("/echo"))
            assert (await fifth.reply()).status == 200
    assert listening.counters.connections_refused == 2


async def test_a_header_that_mentions_an_upgrade_without_asking_for_one_is_let_through() -> None:
    async with serving(ScriptedApp(), QUICK) as listening, connected(listening) as client:
        await client.send(get("/echo", "Upgrade: h2c") * 2)

        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("begun", [b"GET ", b"GET", b"GET /echo ", b"GET /echo"])
async def test_two_spaces_in_a_line_that_came_in_pieces_behind_another_request_are_refused(
    begun: bytes,
) -> None:
    line = b"GET /echo  HTTP/1.1\r\n" if b"/" in begun else b"GET  /echo HTTP/1.1\r\n"
    async with serving(ScriptedApp()) as listening, connected(listening) as client:
        await client.send(get("/echo") + begun)
        assert (await client.reply()).status == 200

        await client.send(line.removeprefix(begun) + HOST + b"\r\n")

        assert (await client.reply()).status == 400
