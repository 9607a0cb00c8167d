"""Many small bodies that wait take no more memory than a few large ones: they count as well."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from websockets.frames import Frame, Opcode

from tests.attacks.attacking import attacked, bearer, make_streams
from tests.attacks.test_bodies_before_tokens import _memory_bytes
from tests.engines import SQLITE
from tests.integration.auth_support import ALL, principal
from tests.integration.raw import WAIT_SECONDS, Connection, ask, code_of, request
from tests.serving import ServerProcess

MIB = 1 << 20
BODY = b'"' + b"x" * 60_000 + b'"'
CONNECTIONS = 60
PER_CONNECTION = 64
PER_PRINCIPAL_BYTES = 16 * MIB
OPEN_BYTES = 4 * MIB
MEMORY_BYTES_MAX = 120 * MIB
"""The attackers offer twice as much."""
NOTHING_TAKEN_S = 0.5
JSON = "Content-Type: application/json"
EVE = principal("eve", ("__mesh/**", ALL))
UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
LIMITS = {
    "FENCEPOST_HTTP_BODIES_BYTES_MAX": str(4 * PER_PRINCIPAL_BYTES),
    "FENCEPOST_HTTP_BODIES_BYTES_PER_PRINCIPAL_MAX": str(PER_PRINCIPAL_BYTES),
    "FENCEPOST_HTTP_OPEN_BODIES_BYTES_MAX": str(OPEN_BYTES),
    "FENCEPOST_HTTP_SWEEP_SECONDS": "0.05",
    # A connection that is not read is not seen to close before its feed ends.
    "FENCEPOST_SERVER_SSE_MS": "6000",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with attacked(SQLITE, tmp_path_factory.mktemp("small"), EVE, **LIMITS) as server:
        make_streams(server.port, "ann", ["ann/a"])
        make_streams(server.port, "mallory", ["mallory/a"])
        yield server


def append(name: str, *headers: str, body: bytes = BODY) -> bytes:
    return request("POST", f"/v1/stream/{name}/a", bearer(name), JSON, *headers, body=body)


def _part(*headers: str) -> bytes:
    """An append without its last byte."""
    length = f"Content-Length: {len(BODY)}"
    lines = ["POST /v1/stream/ann/a HTTP/1.1", "Host: localhost", JSON, length, *headers]
    return "\r\n".join([*lines, "", ""]).encode() + BODY[:-1]


def test_bodies_without_a_token_share_a_small_room(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(Connection(server.port)) for _ in range(2 * OPEN_BYTES >> 16)]
        for lane in lanes:
            lane.send(_part())
        reply = _answered(lanes)[0].reply()
        # More than fit into that room, so that it is their token that lets them in.
        anns = [stack.enter_context(Connection(server.port)) for _ in range(OPEN_BYTES >> 15)]
        for ann in anns:
            ann.send(_part(bearer("ann")))
        _until(lambda: _open_bodies(server) >= len(anns) * (len(BODY) - 1))
        for ann in anns:
            ann.send(BODY[-1:])
        taken = {ann.reply().status for ann in anns}

    assert (reply.status, code_of(reply)) == (503, "too_many_bodies")
    assert b"open_bodies_bytes_max" in reply.body
    assert int(reply.headers["retry-after"]) >= 1
    assert taken == {204}, "the token of a first request is looked at before it is refused"


def test_parts_of_bodies_end_at_the_share_of_their_principal(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        count = 2 * PER_PRINCIPAL_BYTES >> 16
        lanes = [stack.enter_context(Connection(server.port)) for _ in range(count)]
        for lane in lanes:
            # The first request says whose connection this is.
            assert lane.ask("HEAD", "/v1/stream/mallory/a", bearer("mallory")).status == 200
            lane.send(_part(bearer("mallory")))
        reply = _answered(lanes)[0].reply()
        ann = ask(server.port, "POST", "/v1/stream/ann/a", bearer("ann"), JSON, body=BODY)

    assert (reply.status, code_of(reply)) == (503, "too_many_bodies")
    assert b"bodies_bytes_per_principal_max" in reply.body
    assert ann.status == 204


def test_frames_that_are_not_whole_end_at_the_share_of_their_principal(
    server: ServerProcess,
) -> None:
    """A session that is too much is closed with 1013, behind which a client connects again."""
    assert ask(server.port, "PUT", "/v1/mesh/eve", bearer("eve")).status == 201
    part = Frame(Opcode.TEXT, b"x" * (2 * MIB)).serialize(mask=True)[: 2 * MIB]
    with contextlib.ExitStack() as stack:
        lanes = [
            stack.enter_context(Connection(server.port))
            for _ in range(2 * PER_PRINCIPAL_BYTES // len(part))
        ]
        for lane in lanes:
            lane.send(request("GET", "/v1/mesh/eve/session", bearer("eve"), *UPGRADE))
            assert lane.head().status == 101
            lane.send(part)
        closed = _answered(lanes)
        frame = closed[0].socket.recv(100)
        others = ask(server.port, "POST", "/v1/stream/ann/a", bearer("ann"), JSON, body=BODY)

    assert len(closed) < len(lanes)
    assert frame[:1] == b"\x88"
    assert frame[2:] == (1013).to_bytes(2, "big") + b"too_many_bodies"
    assert others.status == 204


def test_appends_behind_a_waiting_read_stop_being_read_at_the_share(server: ServerProcess) -> None:
    before = _memory_bytes(server.pid)
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(Connection(server.port)) for _ in range(CONNECTIONS)]
        for lane in lanes:
            lane.send(request("GET", "/v1/stream/mallory/a?offset=now&live=sse", bearer("mallory")))
            assert lane.head().status == 200
        _pour([lane.socket for lane in lanes], append("mallory"))
        held = 0.0
        while held != (now := _open_bodies(server)):
            held = now  # until no more is taken
        after = _memory_bytes(server.pid)
        ann = stack.enter_context(Connection(server.port))
        ann.send(append("ann") * 20)
        taken = [ann.reply().status for _ in range(20)]

    assert 0 < held < PER_PRINCIPAL_BYTES * 2
    assert after - before < MEMORY_BYTES_MAX
    assert taken == [204] * 20


def test_nothing_is_counted_when_everything_is_answered(server: ServerProcess) -> None:
    _until(lambda: not _open_bodies(server))


def _pour(sockets: list[socket.socket], data: bytes) -> None:
    """Send these bytes again and again on each socket, as long as the server takes any."""
    left = {sock: PER_CONNECTION * len(data) for sock in sockets}
    for sock in sockets:
        sock.setblocking(False)
    while left and (taking := select.select([], left, [], NOTHING_TAKEN_S)[1]):
        for sock in taking:
            left[sock] -= sock.send(data[-left[sock] % len(data) :])
            if not left[sock]:
                del left[sock]


def _answered(lanes: list[Connection]) -> list[Connection]:
    """Those on which the server has said something, when it has."""
    by_socket = {lane.socket: lane for lane in lanes}
    return [by_socket[found] for found in select.select(by_socket, [], [], WAIT_SECONDS)[0]]


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < ends


def _open_bodies(server: ServerProcess) -> float:
    shown = ask(server.port, "GET", "/metrics", bearer("root")).body.decode()
    [line] = [line for line in shown.splitlines() if line.startswith("fencepost_http_bodies_bytes")]
    return float(line.split()[-1])
