"""A small HTTP/1.1 client that pipelines, for tests that care when an answer leaves."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import quote


class Reply(NamedTuple):
    """An answer: status, headers with lower-case names, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The stable code of a problem; empty when it is none, or has no body (HEAD)."""
        if not self.body or "problem+json" not in self.headers.get("content-type", ""):
            return ""
        problem: dict[str, Any] = json.loads(self.body)
        return str(problem["code"])


class HttpRequest(NamedTuple):
    """A request that can be sent again, byte for byte."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: bytes = b""
    query: str = ""
    root: str = "/v1/stream/"

    def encode(self) -> bytes:
        target = self.root + quote(self.path) + (f"?{self.query}" if self.query else "")
        lines = [f"{self.method} {target} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


class Wire:
    """One connection. `send` as often as you like; `receive` gives the answers in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        return cls(reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()

    def send(self, request: HttpRequest) -> None:
        self._writer.write(request.encode())

    async def drain(self) -> None:
        """Wait until the kernel has what was sent."""
        await self._writer.drain()

    async def receive(self) -> Reply:
        """The next answer, whole; raises when the connection ends first."""
        reply = await self._head()
        length = int(reply.headers.get("content-length", "0"))
        if reply.status in (204, 304) or not length:
            return reply
        return reply._replace(body=await self._reader.readexactly(length))

    async def ask(self, request: HttpRequest) -> Reply:
        self.send(request)
        return await self.receive()

    async def receive_head(self) -> Reply:
        """The head of an answer without an end; its chunks come by `receive_chunk`."""
        return await self._head()

    async def receive_chunk(self) -> bytes:
        """The next chunk of a chunked body."""
        size = int((await self._reader.readline()).split(b";")[0], 16)
        data = await self._reader.readexactly(size + 2)
        return data[:-2]

    async def _head(self) -> Reply:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return Reply(int(lines[0].split()[1]), headers, b"")


async def asked(port: int, request: HttpRequest) -> Reply:
    """The answer to one request on a connection of its own."""
    async with await Wire.connect(port) as wire:
        return await wire.ask(request)


def put(path: str, content_type: str = "application/octet-stream", **headers: str) -> HttpRequest:
    """A create; keyword `stream_ttl` becomes the header Stream-TTL."""
    return HttpRequest("PUT", path, {"Content-Type": content_type, **_named(headers)})


def post(
    path: str,
    body: bytes,
    *,
    producer: str | None = None,
    epoch: int = 0,
    seq: int = 0,
    content_type: str = "application/octet-stream",
    closes: bool = False,
) -> HttpRequest:
    """An append, by a producer if one is named."""
    headers = {"Content-Type": content_type}
    if producer is not None:
        headers["Producer-Id"] = producer
        headers["Producer-Epoch"] = str(epoch)
        headers["Producer-Seq"] = str(seq)
    if closes:
        headers["Stream-Closed"] = "true"
    return HttpRequest("POST", path, headers, body)


def get(path: str, query: str = "offset=-1") -> HttpRequest:
    """A read."""
    return HttpRequest("GET", path, query=query)


def head(path: str) -> HttpRequest:
    """A look."""
    return HttpRequest("HEAD", path)


def remove(path: str) -> HttpRequest:
    """A delete."""
    return HttpRequest("DELETE", path)


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-").title(): value for name, value in headers.items()}
