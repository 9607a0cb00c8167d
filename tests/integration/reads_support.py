"""What tests of reading share: streams of their own, and sockets to read them with."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.engines import engine as engine
from tests.integration.raw import ask
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Client, Reply

ROOT = "/v1/stream/"
MIB = 1 << 20
WAIT_SECONDS = 30.0
TEXT = "Content-Type: text/plain"
BYTES = "Content-Type: application/octet-stream"
JSON = "Content-Type: application/json"

_numbers = itertools.count()


@pytest.fixture
def port(server_process: ServerProcess) -> int:
    return server_process.port


def new_path() -> str:
    """Where no stream is yet."""
    return f"{ROOT}reads/{next(_numbers)}"


@pytest.fixture
def path() -> str:
    """A stream of the test's own."""
    return new_path()


def make(port: int, path: str, *headers: str, body: bytes = b"") -> Reply:
    reply = ask(port, "PUT", path, *headers, body=body)
    assert reply.status == 201, reply
    return reply


def add(port: int, path: str, kind: str, body: bytes, *headers: str) -> Reply:
    reply = ask(port, "POST", path, kind, *headers, body=body)
    assert reply.status in (200, 204), reply
    return reply


def tail_of(reply: Reply) -> str:
    return reply.headers["stream-next-offset"]


def flags(reply: Reply) -> tuple[bool, bool]:
    """Whether an answer says that this was all, and that it was the end."""
    return "stream-up-to-date" in reply.headers, "stream-closed" in reply.headers


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    client = Client(reader, writer)
    try:
        yield client
    finally:
        await client.close()
