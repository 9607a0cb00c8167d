"""A large nested body does not stop the server, and one that may not be stored is not parsed."""

from __future__ import annotations

from pathlib import Path

from tests.attacks.attacking import attacked, bearer, make_streams
from tests.engines import engine as engine
from tests.integration.auth_support import principal
from tests.integration.raw import Connection, code_of

READER = principal("reader", ("ann/**", ["read"]))
JSON = "Content-Type: application/json"
NESTED = b"[[" + b"1," * 2_000_000 + b"1]]"
DEEP = b"[" * 600 + b"1" + b"]" * 600


def test_a_large_body_is_refused_to_a_reader_before_it_is_parsed(
    engine: str, tmp_path: Path
) -> None:
    """It is not JSON, and the reader is not told so."""
    with attacked(engine, tmp_path, READER) as server, Connection(server.port) as reader:
        make_streams(server.port, "ann", ["ann/a"])
        body = NESTED + b"]"
        replies = [
            reader.ask(method, target, bearer("reader"), JSON, body=body)
            for method, target in (
                ("POST", "/v1/stream/ann/a"),
                ("PUT", "/v1/stream/ann/b"),
                ("POST", "/v1/commit"),
            )
        ]

    assert [(reply.status, code_of(reply)) for reply in replies] == [(403, "forbidden")] * 3


def test_bodies_are_stored_or_refused_by_the_depth_that_is_a_setting(
    engine: str, tmp_path: Path
) -> None:
    with attacked(engine, tmp_path) as server, Connection(server.port) as ann:
        make_streams(server.port, "ann", ["ann/a"])
        stored = ann.ask("POST", "/v1/stream/ann/a", bearer("ann"), JSON, body=NESTED)
        made = ann.ask("PUT", "/v1/stream/ann/b", bearer("ann"), JSON, body=NESTED)
        deep = ann.ask("POST", "/v1/stream/ann/a", bearer("ann"), JSON, body=DEEP)
        large = b"[" + DEEP + b"," + NESTED + b"]"
        both = ann.ask("POST", "/v1/stream/ann/a", bearer("ann"), JSON, body=large)

    assert (stored.status, made.status) == (204, 201)
    for reply in (deep, both):
        assert (reply.status, code_of(reply)) == (400, "json_invalid")
        assert b"json_depth_max" in reply.body


def test_what_follows_a_large_body_on_its_connection_comes_after_it(
    engine: str, tmp_path: Path
) -> None:
    """It is parsed beside the loop, and its producer's next append must not overtake it."""
    with attacked(engine, tmp_path) as server, Connection(server.port) as ann:
        make_streams(server.port, "ann", ["ann/a"])
        for seq, body in enumerate((NESTED, b"2", NESTED, b"4")):
            producer = ("Producer-Id: p", "Producer-Epoch: 0", f"Producer-Seq: {seq}")
            lines = ["POST /v1/stream/ann/a HTTP/1.1", "Host: localhost", JSON, bearer("ann")]
            lines += [*producer, f"Content-Length: {len(body)}", "", ""]
            ann.send("\r\n".join(lines).encode() + body)
        replies = [ann.reply() for _ in range(4)]

    assert [reply.status for reply in replies] == [200, 200, 200, 200]
