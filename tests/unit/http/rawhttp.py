"""What the tests of the HTTP front end share: a scripted application and a client made of bytes.

The client sends exactly the bytes it is given, over a real socket, because what these tests are
about is what other clients would never send.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from fencepost.http.listener import Listening, serve
from fencepost.http.messages import Answer, Request, Response, StreamingResponse
from fencepost.http.settings import HttpSettings

WAIT_SECONDS = 20.0
"""How long a test waits for something that should happen at once."""

QUICK = HttpSettings(sweep_seconds=0.01)


class Pending:
    """A request that the test answers by hand, and that notices being cancelled."""

    def __init__(self, request: Request, answer: Callable[[Answer], None]) -> None:
        self.request = request
        self.answer = answer
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class ScriptedApp:
    """Answers by path: `/echo` at once, `/later` and `/poll` by hand, `/stream` with chunks.

    `/later` cannot be cancelled, as an append cannot; `/poll` can, as a long-poll.
    """

    requests: list[Request] = field(default_factory=list)
    pending: asyncio.Queue[Pending] = field(default_factory=asyncio.Queue)
    chunks: Callable[[], AsyncIterator[bytes]] | None = None
    stream_type: bytes = b"text/event-stream"
    answer: Response | None = None

    def handle(self, request: Request, answer: Callable[[Answer], None]) -> Pending | None:
        self.requests.append(request)
        match request.path:
            case b"/later" | b"/poll":
                pending = Pending(request, answer)
                self.pending.put_nowait(pending)
                return pending if request.path == b"/poll" else None
            case b"/stream":
                assert self.chunks is not None
                headers = [(b"Content-Type", self.stream_type)]
                answer(StreamingResponse(200, headers, self.chunks()))
            case b"/raise":
                raise RuntimeError("as the test asked")
            case b"/scripted":
                assert self.answer is not None
                answer(self.answer)
            case _:
                answer(Response(200, [(b"X-Path", request.path)], echo(request)))
        return None


def echo(request: Request) -> bytes:
    return b"%s %s?%s %s" % (request.method.encode(), request.path, request.query, request.body)


@dataclass
class Reply:
    """An answer as it came over the wire; repeated headers are joined by a comma."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection that says what it is told to say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, *, to: str = "GET") -> Reply:
        """The next answer, which must be well formed."""
        async with asyncio.timeout(WAIT_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            reply = parse_head(head)
            if to == "HEAD" or reply.status in (204, 304) or reply.status < 200:
                return reply
            if reply.headers.get("transfer-encoding") == "chunked":
                reply.body = b"".join([chunk async for chunk in self._chunks()])
            elif "content-length" in reply.headers:
                reply.body = await self.reader.readexactly(int(reply.headers["content-length"]))
            else:
                reply.body = await self.reader.read()
            return reply

    async def _chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.chunk():
            yield chunk

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end."""
        async with asyncio.timeout(WAIT_SECONDS):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            assert data[-2:] == b"\r\n"
            return data[:-2]

    async def rest(self) -> bytes:
        """Everything up to the close; a reset counts as one."""
        data = b""
        async with asyncio.timeout(WAIT_SECONDS):
            try:
                while part := await self.reader.read(65536):
                    data += part
            except ConnectionError:
                pass
        return data

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):  # a server that cuts the connection is what some tests want
            await self.writer.wait_closed()


def parse_head(head: bytes) -> Reply:
    """A strict reading of an answer's head: a malformed one fails the test."""
    lines = head.decode("latin-1").split("\r\n")
    version, status, _ = lines[0].split(" ", 2)
    assert version == "HTTP/1.1", head
    assert lines[-2:] == ["", ""], head
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, separator, value = line.partition(": ")
        assert separator, head
        assert name, head
        name = name.lower()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Reply(int(status), headers, b"")


@asynccontextmanager
async def serving(app: ScriptedApp, settings: HttpSettings = QUICK) -> AsyncIterator[Listening]:
    """The front end on a port of its own, drained when the block ends."""
    listening = await serve(app, settings)
    try:
        yield listening
    finally:
        await listening.drain(timeout_seconds=0.05)
        assert listening.counters.connections_open == 0
        assert listening.counters.streams_open == 0


@asynccontextmanager
async def connected(listening: Listening, *, buffer_bytes: int = 2**20) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port, limit=buffer_bytes)
    client = Client(reader, writer)
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    """A well-formed POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    """A well-formed request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()
