"""Clients without a token cannot make the server hold bodies, and one principal not all of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.attacks.attacking import attacked, bearer, make_streams
from tests.engines import engine as engine
from tests.integration.raw import Connection, code_of

BODY_BYTES = 16 << 20
ATTACKERS = 20
MEMORY_BYTES_MAX = 64 << 20
"""What the attackers may cost; they announce five times as much."""
TEXT = "Content-Type: text/plain"


def _begin(connection: Connection, *headers: str, chunked: bool = False) -> None:
    """Send the head of an append, and no body yet."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {BODY_BYTES}"
    lines = ["POST /v1/stream/ann/a HTTP/1.1", "Host: localhost", TEXT, length, *headers]
    connection.send("\r\n".join([*lines, "", ""]).encode())


def _memory_bytes(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def test_a_large_body_without_a_token_is_refused_before_it_is_read(
    engine: str, tmp_path: Path
) -> None:
    with attacked(engine, tmp_path) as server, ExitStack() as stack:
        make_streams(server.port, "ann", ["ann/a"])
        before = _memory_bytes(server.pid)
        lanes = [stack.enter_context(Connection(server.port)) for _ in range(ATTACKERS)]
        for number, lane in enumerate(lanes):
            wrong = [] if number % 2 else ["Authorization: Bearer fp_mallory_wrong"]
            _begin(lane, *wrong)
        replies = [lane.reply() for lane in lanes]
        after = _memory_bytes(server.pid)

    assert {(reply.status, code_of(reply)) for reply in replies} == {(401, "unauthorized")}
    assert after - before < MEMORY_BYTES_MAX


def test_a_large_body_in_chunks_without_a_token_ends_at_the_open_limit(
    engine: str, tmp_path: Path
) -> None:
    with attacked(engine, tmp_path) as server, Connection(server.port) as mallory:
        _begin(mallory, chunked=True)
        mallory.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n1\r\nx\r\n")
        reply = mallory.reply()

    assert (reply.status, code_of(reply)) == (401, "unauthorized")


def test_one_principal_leaves_room_for_the_bodies_of_others(engine: str, tmp_path: Path) -> None:
    environment = {
        "FENCEPOST_HTTP_BODIES_BYTES_MAX": str(8 * BODY_BYTES),
        "FENCEPOST_HTTP_BODIES_BYTES_PER_PRINCIPAL_MAX": str(4 * BODY_BYTES),
    }
    with attacked(engine, tmp_path, **environment) as server, ExitStack() as stack:
        make_streams(server.port, "ann", ["ann/a"])
        lanes = [stack.enter_context(Connection(server.port)) for _ in range(5)]
        for lane in lanes[:4]:
            # The server says this when it has counted the body.
            _begin(lane, bearer("mallory"), "Expect: 100-continue")
            assert lane.head().status == 100
        _begin(lanes[4], bearer("mallory"))
        refused = lanes[4].reply()
        ann = stack.enter_context(Connection(server.port))
        _begin(ann, bearer("ann"))
        ann.send(b"1" * BODY_BYTES)
        taken = ann.reply()
        for lane in lanes[:4]:
            lane.close()
        while _answer_to_another(server.port) != 100:
            pass  # the server has yet to notice that the clients left

    assert (refused.status, code_of(refused)) == (503, "too_many_bodies")
    assert refused.headers["retry-after"] == "1"
    assert taken.status == 409, "a text for a stream of JSON: it was read whole and looked at"


def _answer_to_another(port: int) -> int:
    with Connection(port) as mallory:
        _begin(mallory, bearer("mallory"), "Expect: 100-continue")
        return mallory.head().status
