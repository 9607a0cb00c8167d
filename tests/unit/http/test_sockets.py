"""WebSockets on the front end, over real sockets: the library's client, and bytes by hand.

The application answers `/socket` with an upgrade to an echo, and `/closed` with a refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol

from fencepost.http.connection import Connection
from fencepost.http.listener import Listening, serve
from fencepost.http.messages import Answer, Request, Response, Socket, UpgradeResponse
from fencepost.http.settings import HttpSettings, WebSocketSettings
from fencepost.http.websocket import Closed
from tests.unit.http.rawhttp import QUICK, WAIT_SECONDS, Client, connected, get, until
from tests.unit.http.test_refusals import check_problem

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ASK = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    f"Sec-WebSocket-Key: {KEY}",
)
LIMITS = WebSocketSettings(message_bytes_max=1000, outgoing_bytes_max=1 << 20, close_seconds=0.05)


class Echo:
    """Sends every message back, and keeps account of what happens to it."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.messages: list[bytes] = []
        self.end: Closed | None = None
        self.writables = 0

    def received(self, message: bytes) -> None:
        self.messages.append(message)
        self.socket.send(message)

    def writable(self) -> None:
        self.writables += 1

    def draining(self) -> None:
        self.socket.close(1001, b"server_stopping")

    def closed(self, closed: Closed) -> None:
        self.end = closed


class EchoApp:
    """An application that upgrades, at once or when the test says so."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.echoes: list[Echo] = []
        self.later: list[Callable[[], None]] = []

    def begin(self, socket: Socket) -> Echo:
        self.echoes.append(Echo(socket))
        return self.echoes[-1]

    def handle(self, request: Request, answer: Callable[[Answer], None]) -> None:
        self.requests.append(request)
        upgrade = UpgradeResponse(self.begin, LIMITS)
        if request.path == b"/socket":
            answer(upgrade)
        elif request.path == b"/later":
            self.later.append(lambda: answer(upgrade))
        elif request.path == b"/slow":
            self.later.append(lambda: answer(Response(403, [], b"no")))
        else:
            answer(Response(403, [], b"no"))


@asynccontextmanager
async def echoing(
    app: EchoApp, settings: HttpSettings = QUICK, *, drain_seconds: float = 0.05
) -> AsyncIterator[Listening]:
    listening = await serve(app, settings, takes_websocket=lambda path: path != b"/echo")
    try:
        yield listening
    finally:
        await listening.drain(timeout_seconds=drain_seconds)
        assert listening.counters.connections_open == 0


def client_of(listening: Listening) -> connect:
    url = f"ws://127.0.0.1:{listening.port}/socket"
    return connect(url, compression=None, proxy=None, open_timeout=WAIT_SECONDS)


async def heard(client: ClientConnection) -> str | bytes:
    async with asyncio.timeout(WAIT_SECONDS):
        return await client.recv()


async def test_a_client_of_the_library_talks_to_the_front_end() -> None:
    app = EchoApp()
    async with echoing(app) as listening:
        async with client_of(listening) as client:
            await client.send("hello")
            assert await heard(client) == "hello"

            await client.send(["in ", "three ", "fragments"])
            assert await heard(client) == "in three fragments"

            async with asyncio.timeout(WAIT_SECONDS):
                await (await client.ping())
        await until(lambda: app.echoes[0].end)

    assert app.echoes[0].end == Closed(1000, "")
    assert listening.counters.requests["GET"][1] == 1


async def test_a_client_that_offers_compression_and_subprotocols_gets_neither() -> None:
    async with (
        echoing(EchoApp()) as listening,
        connect(
            f"ws://127.0.0.1:{listening.port}/socket",
            compression="deflate",
            subprotocols=[Subprotocol("chat")],
            proxy=None,
        ) as client,
    ):
        await client.send("x" * 500)

        assert await heard(client) == "x" * 500
        assert client.subprotocol is None
        assert client.protocol.extensions == []


@pytest.mark.parametrize("code", [4003, 4010])
async def test_the_code_and_the_reason_of_a_close_reach_the_client(code: int) -> None:
    app = EchoApp()
    async with echoing(app) as listening, client_of(listening) as client:
        await client.send("x")
        await heard(client)

        app.echoes[0].socket.close(code, b"feature_unavailable")

        with pytest.raises(ConnectionClosed) as closed:
            await heard(client)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (code, "feature_unavailable")


async def test_an_application_may_refuse_with_an_ordinary_answer() -> None:
    async with echoing(EchoApp()) as listening:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{listening.port}/closed", proxy=None):
                pass

    assert refused.value.response.status_code == 403
    assert refused.value.response.body == b"no"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/echo", ASK, 400),
        ("/socket", ("Upgrade: h2c", *ASK[1:]), 400),
        ("/socket", ASK[:3], 400),
        ("/socket", (*ASK[:2], "Sec-WebSocket-Version: 8", ASK[3]), 426),
        ("/socket", (*ASK, "Upgrade: websocket"), 400),
        ("/socket", (*ASK, "Content-Length: 5"), 400),
    ],
)
async def test_any_other_upgrade_is_refused(
    path: str, headers: tuple[str, ...], status: int
) -> None:
    app = EchoApp()
    async with echoing(app) as listening, connected(listening) as client:
        await client.send(get(path, *headers))

        reply = await client.reply()

        check_problem(reply, status, "upgrade_refused")
        assert reply.headers.get("sec-websocket-version") == ("13" if status == 426 else None)
        assert await client.rest() == b""
    assert app.requests == []


async def opened(client: Client, path: str = "/socket") -> None:
    """Upgrade a connection by hand."""
    await client.send(get(path, *ASK))
    reply = await client.reply()
    assert reply.status == 101
    assert reply.headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def text(data: bytes) -> bytes:
    return Frame(Opcode.TEXT, data).serialize(mask=True)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (Frame(Opcode.TEXT, b"x").serialize(mask=False), 1002),
        (text(b"\xff"), 1007),
        (text(b"x" * 1001), 1009),
        (Frame(Opcode.BINARY, b"x").serialize(mask=True), 1003),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n", 1002),
    ],
    ids=["unmasked", "not UTF-8", "too large", "binary", "HTTP"],
)
async def test_a_frame_that_breaks_the_rules_is_told_why_although_more_follows(
    sent: bytes, code: int
) -> None:
    app = EchoApp()
    async with echoing(app) as listening, connected(listening) as client:
        await opened(client)

        await client.send(sent + text(b"more" * 200) * 250)

        data = await client.rest()
        assert data[:1] == b"\x88"
        assert int.from_bytes(data[2:4], "big") == code
    assert app.echoes[0].end is not None


async def test_requests_before_it_are_answered_first_and_frames_behind_it_are_not_lost() -> None:
    app = EchoApp()
    async with echoing(app) as listening, connected(listening) as client:
        await client.send(get("/a") + get("/later", *ASK) + text(b"early"))
        assert (await client.reply()).status == 403
        await until(lambda: app.later)
        await client.send(text(b"also early"))

        app.later[0]()

        assert (await client.reply()).status == 101
        assert await client.reader.readexactly(2 + 5 + 2 + 10) == (
            b"\x81\x05early" + b"\x81\x0aalso early"
        )


async def test_a_socket_behind_a_full_pipeline_is_read_again() -> None:
    app = EchoApp()
    slow = get("/slow")
    requests = 16 * 1024 // len(slow) + 5  # more than are parsed at once
    limits = HttpSettings(sweep_seconds=0.01, pipeline_depth_max=1)
    async with echoing(app, limits) as listening, connected(listening) as client:
        connections = listening._front.connections
        await until(lambda: connections)
        (connection,) = connections
        assert isinstance(connection, Connection)
        connection.data_received(slow * requests + get("/socket", *ASK) + text(b"early"))

        for _ in range(requests):
            await until(lambda: app.later)
            app.later.pop(0)()
            assert (await client.reply()).status == 403

        assert (await client.reply()).status == 101
        await client.send(text(b"late"))
        assert await client.reader.readexactly(2 + 5 + 2 + 4) == b"\x81\x05early\x81\x04late"


async def test_a_client_that_sends_much_before_the_answer_is_cut_off() -> None:
    app = EchoApp()
    async with echoing(app) as listening, connected(listening) as client:
        await client.send(get("/later", *ASK))
        await until(lambda: app.later)

        await client.send(b"\0" * 70_000)

        assert await client.rest() == b""
        app.later[0]()
    assert app.echoes == []
    assert listening.counters.connections_aborted == 1


async def test_a_client_that_does_not_read_is_not_read_for_ever_and_then_cut_off() -> None:
    app = EchoApp()
    stalled = HttpSettings(
        sweep_seconds=0.01,
        write_stall_seconds=0.2,
        write_buffer_bytes_high=64 * 1024,
        write_buffer_bytes_low=16 * 1024,
    )
    frames = text(b"x" * 1000) * 100
    async with echoing(app, stalled) as listening, connected(listening, buffer_bytes=1024) as one:
        await opened(one)
        async with connected(listening) as other:
            while not app.echoes[0].end:
                one.writer.write(frames)
                try:
                    async with asyncio.timeout(0.05):
                        await one.writer.drain()
                except (TimeoutError, ConnectionError):
                    pass
                # The others are served all the while.
                await other.send(get("/a"))
                assert (await other.reply()).status == 403

    assert app.echoes[0].end == Closed(1006, "")
    assert listening.counters.connections_aborted == 1


async def test_a_close_that_the_client_does_not_answer_ends_all_the_same() -> None:
    app = EchoApp()
    async with echoing(app) as listening, connected(listening) as client:
        await opened(client)

        app.echoes[0].socket.close(1000)

        data = await client.rest()
        assert data[:1] == b"\x88"
    assert listening.counters.connections_aborted == 1


async def test_a_drain_tells_the_application_and_waits_for_the_close() -> None:
    app = EchoApp()
    async with echoing(app, drain_seconds=WAIT_SECONDS) as listening:
        client = await client_of(listening)
        drained = asyncio.ensure_future(listening.drain(timeout_seconds=WAIT_SECONDS))

        with pytest.raises(ConnectionClosed) as closed:
            await heard(client)

        assert await drained
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
    assert app.echoes[0].end == Closed(1001, "server_stopping")


async def test_a_client_that_leaves_without_a_word_is_noticed() -> None:
    app = EchoApp()
    async with echoing(app) as listening:
        async with connected(listening) as client:
            await opened(client)
        await until(lambda: app.echoes[0].end)

    assert app.echoes[0].end == Closed(1006, "")


async def test_an_upgrade_that_was_not_asked_for_is_a_defect_and_answered_500() -> None:
    app = EchoApp()
    async with echoing(app) as listening, connected(listening) as client:
        await client.send(get("/socket"))

        check_problem(await client.reply(), 500, "internal_error")
