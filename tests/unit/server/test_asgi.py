"""The ASGI adapter: what it makes of a scope, called directly and mounted in another server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from fencepost.http.messages import Response, StreamingResponse
from fencepost.http.settings import HttpSettings
from fencepost.server.asgi import ASGIApp, raw_path
from tests.unit.http.rawhttp import ScriptedApp

Message = MutableMapping[str, Any]


class Host:
    """An ASGI host made of two queues."""

    def __init__(self, *messages: Message) -> None:
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.arrived = asyncio.Event()
        self.taken = asyncio.Event()
        """Set when all that was there was taken, and more is waited for."""
        self.breaks_after: int | None = None
        for message in messages:
            self.incoming.put_nowait(message)

    async def receive(self) -> Message:
        if self.incoming.empty():
            self.taken.set()
        return await self.incoming.get()

    async def send(self, message: Message) -> None:
        if self.breaks_after is not None and len(self.sent) >= self.breaks_after:
            raise OSError("the client has left")
        self.sent.append(message)
        self.arrived.set()
        await asyncio.sleep(0)

    @property
    def status(self) -> int:
        assert self.sent[0]["type"] == "http.response.start"
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        assert self.sent[-1].get("more_body", False) is False
        return b"".join(message["body"] for message in self.sent[1:])


def http_scope(method: str = "GET", path: str = "/echo", **more: Any) -> Message:
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "https",
        "headers": [(b"host", b"test")],
        "client": ("192.0.2.1", 1234),
    }
    return scope | more


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


GONE: Message = {"type": "http.disconnect"}


async def test_a_request_reaches_the_application_as_it_does_behind_the_front_end() -> None:
    app = ScriptedApp()
    host = Host(body(b"hel", more=True), body(b"", more=True), body(b"lo"))
    headers = [(b"Host", b"test"), (b"x", b"1"), (b"X", b"2")]
    scope = http_scope("POST", "/a", raw_path=b"/a%2Fb", query_string=b"q=1", headers=headers)
    await ASGIApp(app)(scope, host.receive, host.send)

    (request,) = app.requests
    assert (request.method, request.path, request.query) == ("POST", b"/a%2Fb", b"q=1")
    assert request.headers == {b"host": b"test", b"x": b"1"}
    assert request.repeated == {b"x"}
    assert (request.body, request.scheme, request.peer) == (b"hello", "https", "192.0.2.1")
    assert (host.status, host.body) == (200, b"POST /a%2Fb?q=1 hello")
    assert host.headers[b"content-length"] == b"21"


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"path": "/a/b", "raw_path": b"/a%2Fb"}, b"/a%2Fb"),
        ({"path": "/a b/\u00e9"}, b"/a%20b/%C3%A9"),
        ({"path": "/a", "raw_path": None}, b"/a"),
        ({"path": "/a", "raw_path": b"/a?q=1"}, b"/a"),
        ({"path": "/m/a/b", "raw_path": b"/m/a%2Fb", "root_path": "/m"}, b"/a%2Fb"),
        ({"path": "/m/a", "raw_path": b"/m/a", "root_path": "/m/"}, b"/a"),
        ({"path": "/m", "raw_path": b"/m", "root_path": "/m"}, b"/"),
        ({"path": "/m/", "raw_path": b"/m/", "root_path": "/m"}, b"/"),
        ({"path": "/m m/n/a", "raw_path": b"/m%20m/n/%61", "root_path": "/m m/n"}, b"/%61"),
        ({"path": "/\u00e9/a", "root_path": "/\u00e9"}, b"/a"),
        ({"path": "/other", "raw_path": b"/other", "root_path": "/m"}, b"/other"),
        ({"path": "/mm/a", "raw_path": b"/mm/a", "root_path": "/m"}, b"/mm/a"),
    ],
)
def test_the_path_is_taken_raw_and_below_the_mount_point(scope: Message, expected: bytes) -> None:
    assert raw_path(scope) == expected


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ([(b"content-length", b"11")], []),
        ([], [body(b"x" * 6, more=True), body(b"x" * 5, more=True)]),
        ([(b"content-length", b"1")], [body(b"x" * 11)]),
    ],
)
async def test_a_body_too_large_is_refused_before_it_is_read_whole(
    headers: list[tuple[bytes, bytes]], messages: list[Message]
) -> None:
    app = ScriptedApp()
    host = Host(*messages)
    adapter = ASGIApp(app, HttpSettings(body_bytes_max=10))
    await adapter(http_scope("POST", headers=headers), host.receive, host.send)

    assert host.status == 413
    assert msgspec.json.decode(host.body)["code"] == "body_too_large"
    assert app.requests == []


def _knows(headers: dict[bytes, bytes], _repeated: frozenset[bytes]) -> str | None:
    name = headers.get(b"authorization")
    return None if name is None else name.decode()


LIMITED = HttpSettings(
    open_body_bytes_max=10,
    open_bodies_bytes_max=15,
    bodies_bytes_max=100,
    bodies_bytes_per_principal_max=60,
)
ANN = (b"authorization", b"ann")


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ([(b"content-length", b"11")], []),
        ([], [body(b"x" * 6, more=True), body(b"x" * 5, more=True)]),
    ],
)
async def test_a_large_body_without_a_token_is_refused_before_it_is_read_whole(
    headers: list[tuple[bytes, bytes]], messages: list[Message]
) -> None:
    app = ScriptedApp()
    host = Host(*messages)
    adapter = ASGIApp(app, LIMITED, knows_sender=_knows)
    await adapter(http_scope("POST", headers=headers), host.receive, host.send)

    assert host.status == 401
    assert app.requests == []


@pytest.mark.parametrize(
    ("headers", "size", "limit"),
    [([ANN], 40, "bodies_bytes_per_principal_max"), ([], 8, "open_bodies_bytes_max")],
)
async def test_bodies_that_are_read_share_a_room(
    headers: list[tuple[bytes, bytes]], size: int, limit: str
) -> None:
    app = ScriptedApp()
    adapter = ASGIApp(app, LIMITED, knows_sender=_knows)
    first, second, third = Host(body(b"x" * size, more=True)), Host(), Host()
    scope = http_scope("POST", headers=headers)
    reading = asyncio.ensure_future(adapter(scope, first.receive, first.send))
    async with asyncio.timeout(10):
        await first.taken.wait()
    second.incoming.put_nowait(body(b"x" * size, more=True))
    await adapter(scope, second.receive, second.send)
    first.incoming.put_nowait(body(b""))
    await reading
    del app.requests[:]
    for message in (body(b"x" * size, more=True), body(b"")):
        third.incoming.put_nowait(message)
    await adapter(scope, third.receive, third.send)

    refused = msgspec.json.decode(second.body)
    assert (second.status, refused["code"]) == (503, "too_many_bodies")
    assert limit in refused["detail"]
    assert second.headers[b"retry-after"] == b"1"
    assert first.status == third.status == 200


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        (HttpSettings(body_grace_seconds=0.05), "the body came too slowly"),
        (
            HttpSettings(body_grace_seconds=0.05, body_seconds_max=0.01),
            "the body took too long",
        ),
    ],
)
async def test_a_body_that_does_not_come_is_not_waited_for(
    settings: HttpSettings, detail: str
) -> None:
    host = Host(body(b"x", more=True))
    await ASGIApp(ScriptedApp(), settings)(http_scope("POST"), host.receive, host.send)

    assert host.status == 408
    assert msgspec.json.decode(host.body)["detail"] == detail


async def test_a_body_that_keeps_its_pace_may_take_several_graces() -> None:
    settings = HttpSettings(body_grace_seconds=0.02, body_bytes_per_second_min=1)
    host = Host()
    adapter = ASGIApp(ScriptedApp(), settings)
    reading = asyncio.ensure_future(adapter(http_scope("POST"), host.receive, host.send))
    loop = asyncio.get_running_loop()
    ends = loop.time() + 5 * settings.body_grace_seconds
    while loop.time() < ends:
        host.incoming.put_nowait(body(b"x", more=True))
        await asyncio.sleep(0.001)
    host.incoming.put_nowait(body(b""))
    await reading

    assert host.status == 200


async def test_a_client_that_leaves_while_it_sends_reaches_nobody() -> None:
    app = ScriptedApp()
    host = Host(body(b"x", more=True), GONE)
    await ASGIApp(app)(http_scope("POST"), host.receive, host.send)

    assert app.requests == []
    assert host.sent == []


async def test_an_unknown_method_is_refused() -> None:
    host = Host(body(b""))
    await ASGIApp(ScriptedApp())(http_scope("BREW"), host.receive, host.send)

    assert host.status == 400


@pytest.mark.parametrize(
    ("method", "answer", "length"),
    [
        ("HEAD", Response(200, [(b"Content-Length", b"77")], b"dropped"), b"77"),
        ("HEAD", Response(200, []), None),
        ("GET", Response(304, []), None),
        ("GET", Response(200, [], (b"ab", b"c")), b"3"),
    ],
)
async def test_an_answer_has_a_length_exactly_when_it_may_have_a_body(
    method: str, answer: Response, length: bytes | None
) -> None:
    host = Host(body(b""))
    adapter = ASGIApp(ScriptedApp(answer=answer))
    await adapter(http_scope(method, "/scripted"), host.receive, host.send)

    assert host.status == answer.status
    assert host.headers.get(b"content-length") == length
    assert host.body == (b"abc" if isinstance(answer.body, tuple) else b"")


async def test_a_refusal_names_its_request_behind_another_server_too() -> None:
    host = Host(body(b""))
    headers = [(b"host", b"test"), (b"x-request-id", b"order-7")]
    adapter = ASGIApp(ScriptedApp(answer=Response(409, [(b"X-Own", b"3")], b"no")))
    await adapter(http_scope(path="/scripted", headers=headers), host.receive, host.send)

    assert host.status == 409
    assert (host.headers[b"x-own"], host.headers[b"x-request-id"]) == (b"3", b"order-7")


async def test_header_lines_rendered_beforehand_are_passed_one_by_one() -> None:
    host = Host(body(b""))
    answer = Response(200, [(b"X-Own", b"3")], b"", b"X-Block: a: b\r\nX-More: 2\r\n")
    await ASGIApp(ScriptedApp(answer=answer))(http_scope(path="/scripted"), host.receive, host.send)

    assert host.headers == {
        b"x-own": b"3",
        b"x-block": b"a: b",
        b"x-more": b"2",
        b"content-length": b"0",
    }


async def test_an_answer_may_come_later() -> None:
    app = ScriptedApp()
    host = Host(body(b""))
    running = asyncio.ensure_future(ASGIApp(app)(http_scope(path="/poll"), host.receive, host.send))
    (await app.pending.get()).answer(Response(200, [], b"later"))
    await running

    assert host.body == b"later"


async def test_a_long_poll_is_cancelled_when_its_client_leaves() -> None:
    app = ScriptedApp()
    host = Host(body(b""))
    running = asyncio.ensure_future(ASGIApp(app)(http_scope(path="/poll"), host.receive, host.send))
    pending = await app.pending.get()
    host.incoming.put_nowait(GONE)
    await running

    assert pending.cancelled.is_set()
    assert host.sent == []
    late = Ticks()
    pending.answer(StreamingResponse(200, [], late))
    await asyncio.wait_for(late.closed.wait(), 10)


class Ticks:
    """A stream of a given length, or without end."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.closed = asyncio.Event()
        self.ticked = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self.ticked == self.count:
            raise StopAsyncIteration
        self.ticked += 1
        return b"" if self.ticked == 2 else b"tick %d\n" % self.ticked

    async def aclose(self) -> None:
        self.closed.set()


async def test_a_stream_is_sent_chunk_by_chunk_and_closed() -> None:
    ticks = Ticks(3)
    host = Host(body(b""))
    adapter = ASGIApp(ScriptedApp(chunks=lambda: ticks))
    await adapter(http_scope(path="/stream"), host.receive, host.send)

    assert [message["body"] for message in host.sent[1:]] == [b"tick 1\n", b"tick 3\n", b""]
    assert b"content-length" not in host.headers
    assert ticks.closed.is_set()


@pytest.mark.parametrize("how", ["disconnect", "send raises", "host cancels"])
async def test_a_stream_ends_with_its_client(how: str) -> None:
    ticks = Ticks()
    host = Host(body(b""))
    host.breaks_after = 5 if how == "send raises" else None
    adapter = ASGIApp(ScriptedApp(chunks=lambda: ticks))
    running = asyncio.ensure_future(adapter(http_scope(path="/stream"), host.receive, host.send))
    await host.arrived.wait()
    if how == "disconnect":
        host.incoming.put_nowait(GONE)
    if how == "host cancels":
        running.cancel()
    await asyncio.wait({running}, timeout=10)

    assert running.done()
    assert ticks.closed.is_set()


async def test_a_stream_that_fails_is_an_error_of_the_host() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"one"
        raise OSError("the disk is gone")

    host = Host(body(b""))
    adapter = ASGIApp(ScriptedApp(chunks=failing))

    with pytest.raises(OSError, match="the disk is gone"):
        await adapter(http_scope(path="/stream"), host.receive, host.send)


async def test_the_lifespan_runs_what_it_was_given() -> None:
    ran: list[str] = []

    async def note(what: str) -> None:
        ran.append(what)

    host = Host({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    adapter = ASGIApp(ScriptedApp(), startup=lambda: note("up"), shutdown=lambda: note("down"))
    await adapter({"type": "lifespan"}, host.receive, host.send)

    assert ran == ["up", "down"]
    assert [message["type"] for message in host.sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


async def test_a_start_that_fails_is_told_to_the_host() -> None:
    async def fail() -> None:
        raise RuntimeError("no disk")

    host = Host({"type": "lifespan.startup"})

    with pytest.raises(RuntimeError, match="no disk"):
        await ASGIApp(ScriptedApp(), startup=fail)({"type": "lifespan"}, host.receive, host.send)
    assert host.sent == [{"type": "lifespan.startup.failed", "message": "no disk"}]


async def test_a_websocket_that_is_refused_is_answered_as_the_host_can() -> None:
    scope = {"type": "websocket", "path": "/a", "raw_path": b"/a", "headers": [], "scheme": "ws"}
    plain, able = Host({"type": "websocket.connect"}), Host({"type": "websocket.connect"})

    await ASGIApp(ScriptedApp())(scope, plain.receive, plain.send)
    extended = {**scope, "extensions": {"websocket.http.response": {}}}
    await ASGIApp(ScriptedApp())(extended, able.receive, able.send)

    assert plain.sent == [{"type": "websocket.close", "code": 1008}]
    start, body = able.sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 200)
    assert body["body"].startswith(b"GET /a")


async def test_anything_else_is_an_error() -> None:
    host = Host()
    with pytest.raises(ValueError, match="carrier-pigeon"):
        await ASGIApp(ScriptedApp())({"type": "carrier-pigeon"}, host.receive, host.send)


@pytest.fixture
def mounted() -> Iterator[tuple[str, ScriptedApp]]:
    """The application below `/below` in Starlette on uvicorn, on a port of its own."""
    app = ScriptedApp(chunks=lambda: Ticks(3))
    adapter = ASGIApp(app, HttpSettings(body_bytes_max=1000))
    starlette = Starlette(routes=[Mount("/below", app=adapter)])
    config = uvicorn.Config(starlette, port=0, log_level="critical", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.005)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/below", app
    finally:
        server.should_exit = True
        thread.join(20)


def test_it_serves_below_a_mount_point_in_starlette_on_uvicorn(
    mounted: tuple[str, ScriptedApp],
) -> None:
    base, app = mounted
    with httpx.Client() as client:
        echoed = client.post(f"{base}/a%2Fb?q=1", content=b"hello")
        streamed = client.get(f"{base}/stream")
        head = client.head(f"{base}/echo")
        refused = client.post(f"{base}/echo", content=b"x" * 1001)

    assert echoed.content == b"POST /a%2Fb?q=1 hello"
    assert streamed.content == b"tick 1\ntick 3\n"
    assert (head.status_code, head.content) == (200, b"")
    assert refused.status_code == 413
    assert refused.headers["content-type"] == "application/problem+json"
    assert app.requests[0].peer == "127.0.0.1"
    assert len(app.requests) == 3
