"""Sessions of a principal that misbehaves: others do not notice, and the server stays small."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

import fencepost
from tests.integration.auth_support import ROOT, Place, place, principal, token
from tests.integration.mesh_support import Shop
from tests.outboxing import until

GRANTS = (
    ("__mesh/shop", ["read"]),
    ("__mesh/shop/**", ["read", "append"]),
    ("__groups/*", ["claim"]),
)
SETTINGS = {
    "FENCEPOST_SESSIONS_SESSIONS_PER_PRINCIPAL_MAX": "20",
    "FENCEPOST_HTTP_WRITE_STALL_SECONDS": "2",
}
GROWTH_BYTES_MAX = 150 << 20
SENDS = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    both = (principal("ann", *GRANTS), principal("eve", *GRANTS))
    with place(tmp_path_factory.mktemp("attacks"), ROOT, *both, environment=SETTINGS) as found:
        Shop(found("root").client, "shop")
        yield found


def resident_bytes(server: Place) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


@contextlib.contextmanager
def raw(server: Place, member: str | None = None) -> Iterator[socket.socket]:
    """A session of eve's, by hand, behind its welcome; nothing more is read of it."""
    with socket.create_connection(("127.0.0.1", server.process.port), 30) as sock:
        sock.sendall(
            b"GET /v1/mesh/shop/session HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Authorization: Bearer %b\r\n\r\n" % token("eve").encode()
        )
        hello = {} if member is None else {"member": member}
        sock.sendall(text({"hello": hello}))
        received = b""
        while b"welcome" not in received:
            data = sock.recv(1 << 16)
            assert data, received
            received += data
        yield sock


def text(frame: object) -> bytes:
    return Frame(Opcode.TEXT, json.dumps(frame).encode()).serialize(mask=True)


def pour(sock: socket.socket, data: bytes, bytes_max: int) -> int:
    """Send as long as the server takes it, up to a bound; how much it took."""
    sock.settimeout(0.5)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < bytes_max:
            sent += sock.send(data)
    return sent


def has_let_go(server: Place) -> bool:
    """Whether no session is open.

    The client would not notice: the end comes behind what it does not read.
    """
    return "fencepost_sessions_open 0.0" in server("root").client.get("/metrics").text


async def others_go_on(server: Place, name: str) -> None:
    """Ann sends in a session and over HTTP, and gets what was sent to her."""
    async with fencepost.connect_async(server.process.url, token=token("ann")) as client:
        mesh = client.mesh("shop")
        async with mesh.session("ann") as session:
            sends = [await session.send("dm:ann", "x", id=f"{name}-{n}") for n in range(SENDS)]
            assert [(await pending.outcome()).status for pending in sends] == [201] * SENDS
            assert not (await mesh.send("dm:ann", "x", id=f"{name}-http")).duplicate
            wanted = {*(f"{name}-{n}" for n in range(SENDS)), f"{name}-http"}
            came: set[str] = set()
            async for delivery in session:
                came.update(entry.data["client_message_id"] for entry in delivery.entries)
                assert await delivery.ack()
                if came >= wanted:
                    break


async def test_many_sessions_of_one_principal_are_refused_to_it_alone(server: Place) -> None:
    url = server.process.url.replace("http", "ws") + "/v1/mesh/shop/session"
    eve = {"Authorization": f"Bearer {token('eve')}"}
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(url, additional_headers=eve))
        with pytest.raises(InvalidStatus) as refused:
            stack.enter_context(connect(url, additional_headers=eve))
        await others_go_on(server, "many")

    assert refused.value.response.status_code == 429


async def test_a_flood_of_frames_that_reads_no_answer_is_not_read_either(server: Place) -> None:
    before = resident_bytes(server)
    ping = text({"ping": "x" * 100}) * 500
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(raw(server)) for _ in range(5)]
        pouring = [asyncio.to_thread(pour, sock, ping, 64 << 20) for sock in flooders]
        taken, _ = await asyncio.gather(asyncio.gather(*pouring), others_go_on(server, "flood"))
        grown = resident_bytes(server) - before

    assert all(size < 64 << 20 for size in taken), "the server stops reading"
    assert grown < GROWTH_BYTES_MAX


async def test_a_flood_of_sends_waits_its_turn(server: Place) -> None:
    before = resident_bytes(server)
    numbers = itertools.count()
    sends = b"".join(
        text({"id": n, "send": {"kind": "queue", "ref": "jobs", "body": "x" * 1_000}})
        for n in itertools.islice(numbers, 2_000)
    )
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(raw(server)) for _ in range(3)]
        pouring = [asyncio.to_thread(pour, sock, sends, 16 << 20) for sock in flooders]
        await asyncio.gather(*pouring, others_go_on(server, "sends"))
        grown = resident_bytes(server) - before

    assert grown < GROWTH_BYTES_MAX


async def test_a_reader_that_does_not_read_its_inbox_is_cut_off(server: Place) -> None:
    with fencepost.connect(server.process.url, token=token("ann")) as client:
        for _ in range(40):
            client.mesh("shop").send("dm:bea", "x" * 1_000_000)
    before = resident_bytes(server)
    with raw(server, "bea"):
        await others_go_on(server, "slow")
        grown = resident_bytes(server) - before
        await asyncio.to_thread(until, lambda: has_let_go(server))

    assert grown < GROWTH_BYTES_MAX
