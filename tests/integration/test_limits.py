"""Limits: each holds at the number it is set to, one more is refused by name, and both are tried.

The server runs with every limit set to something small in its config file, so that these tests also
show that the settings reach the place where they count.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.raw import Connection, ask, code_of, events, request
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

ROOT = "/v1/stream/"
TEXT = "Content-Type: text/plain"
JSON = "Content-Type: application/json"

CONFIG = """
[server]
long_poll_ms = 60000
[limits]
path_bytes_max = 20
content_type_bytes_max = 24
producer_id_bytes_max = 8
stream_seq_bytes_max = 8
key_bytes_max = 8
messages_per_append_max = 3
read_chunk_bytes_max = 100
ttl_s_max = 60
waiters_max = 2
commit_appends_max = 2
writer_text_max = 8
[store]
writers_max = 2
[http]
target_bytes_max = 200
header_bytes_max = 1000
header_count_max = 20
body_bytes_max = 500
connections_max = 6
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder: Path = tmp_path_factory.mktemp("limits")
    config = folder / "fencepost.toml"
    config.write_text(CONFIG)
    with ServerProcess(folder / "data", arguments=["--config", str(config)]) as server:
        assert ask(server.port, "PUT", ROOT + "text", TEXT).status == 201
        assert ask(server.port, "PUT", ROOT + "json", JSON).status == 201
        yield server.port


class Case(NamedTuple):
    """A limit, a request at it, one beyond it, and the refusal."""

    limit: str
    at: bytes
    beyond: bytes
    status: int
    code: str


def _producer(name: str, seq: int = 0) -> tuple[str, str, str]:
    return f"Producer-Id: {name}", "Producer-Epoch: 0", f"Producer-Seq: {seq}"


def _post(*headers: str, body: bytes = b"x", to: str = "text", kind: str = TEXT) -> bytes:
    return request("POST", ROOT + to, kind, *headers, body=body)


def _commit(count: int) -> bytes:
    item = b'{"stream":"json","content_type":"application/json","data":1}'
    return request("POST", "/v1/commit", JSON, body=b'{"appends":[%b]}' % b",".join([item] * count))


CASES = [
    Case(
        "path_bytes_max",
        request("PUT", ROOT + "p" * 20, TEXT),
        request("PUT", ROOT + "p" * 21, TEXT),
        414,
        "path_too_long",
    ),
    Case(
        "content_type_bytes_max",
        request("PUT", ROOT + "type", f"Content-Type: text/{'x' * 19}"),
        request("PUT", ROOT + "type", f"Content-Type: text/{'x' * 20}"),
        400,
        "header_too_long",
    ),
    Case(
        "producer_id_bytes_max",
        _post(*_producer("\u00e9" * 4)),
        _post(*_producer("\u00e9" * 4 + "x")),
        400,
        "header_too_long",
    ),
    Case(
        "stream_seq_bytes_max",
        _post("Stream-Seq: 12345678"),
        _post("Stream-Seq: 123456789"),
        400,
        "header_too_long",
    ),
    Case(
        "key_bytes_max",
        _post("Idempotency-Key: 12345678"),
        _post("Idempotency-Key: 123456789"),
        400,
        "header_too_long",
    ),
    Case(
        "messages_per_append_max",
        _post(body=b"[1,2,3]", to="json", kind=JSON),
        _post(body=b"[1,2,3,4]", to="json", kind=JSON),
        413,
        "batch_too_large",
    ),
    Case(
        "ttl_s_max",
        request("PUT", ROOT + "ttl", TEXT, "Stream-TTL: 60"),
        request("PUT", ROOT + "ttl", TEXT, "Stream-TTL: 61"),
        400,
        "ttl_invalid",
    ),
    Case(
        "writer_text_max",
        request("POST", "/v1/writers/w", body=b'{"query": "12345678"}'),
        request("POST", "/v1/writers/w", body=b'{"query": "123456789"}'),
        400,
        "writer_invalid",
    ),
    Case("commit_appends_max", _commit(2), _commit(3), 413, "commit_too_large"),
    Case("body_bytes_max", _post(body=b"x" * 500), _post(body=b"x" * 501), 413, "body_too_large"),
    Case(
        "target_bytes_max",
        request("GET", f"{ROOT}text?offset=-1&{'q' * (200 - 26)}"),
        request("GET", f"{ROOT}text?offset=-1&{'q' * (201 - 26)}"),
        414,
        "target_too_long",
    ),
    Case(
        "header_count_max",
        request("GET", ROOT + "text", *[f"A{number}: b" for number in range(19)]),
        request("GET", ROOT + "text", *[f"A{number}: b" for number in range(20)]),
        431,
        "header_too_large",
    ),
    Case(
        "header_bytes_max",
        request("GET", ROOT + "text", "A: " + "b" * (1000 - len("Host: localhost\r\nA: \r\n"))),
        request("GET", ROOT + "text", "A: " + "b" * (1001 - len("Host: localhost\r\nA: \r\n"))),
        431,
        "header_too_large",
    ),
]


def send(port: int, raw: bytes) -> Reply:
    with Connection(port) as connection:
        connection.send(raw)
        return connection.reply(raw.split(b" ", 1)[0].decode())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.limit)
def test_a_limit_holds_at_its_number_and_one_more_is_refused(port: int, case: Case) -> None:
    beyond = send(port, case.beyond)
    at = send(port, case.at)

    assert (beyond.status, code_of(beyond)) == (case.status, case.code)
    assert 200 <= at.status < 300, at


@pytest.mark.parametrize("pieces", [2, 7, 50])
def test_a_head_in_pieces_is_bounded_like_a_whole_one(port: int, pieces: int) -> None:
    """The limit counts what was sent, not how it arrived."""
    raw = request("GET", ROOT + "text", *[f"A{n}: {'b' * 100}" for n in range(15)])
    size = len(raw) // pieces + 1
    with Connection(port) as connection:
        for at in range(0, len(raw), size):
            connection.send(raw[at : at + size])
        reply = connection.reply()

    assert (reply.status, code_of(reply)) == (431, "header_too_large")


def test_one_writer_too_many_is_refused_until_another_is_forgotten(port: int) -> None:
    body = b'{"query": "12345678"}'
    for name in ("w", "w2"):
        assert ask(port, "POST", f"/v1/writers/{name}", body=body).status == 200

    refused = ask(port, "POST", "/v1/writers/w3", body=body)
    assert (refused.status, code_of(refused)) == (429, "too_many_writers")
    assert refused.headers["retry-after"].isdigit()

    assert ask(port, "DELETE", "/v1/writers/w2").status == 204
    assert ask(port, "POST", "/v1/writers/w3", body=body).status == 200


def test_a_read_is_bounded_in_bytes(port: int) -> None:
    ask(port, "PUT", ROOT + "long", TEXT, body=b"x" * 250)

    sizes, offset = [], "-1"
    for _ in range(3):
        reply = ask(port, "GET", f"{ROOT}long?offset={offset}")
        sizes.append(len(reply.body))
        offset = reply.headers["stream-next-offset"]

    assert sizes == [100, 100, 50]


def test_one_reader_too_many_is_refused_until_another_leaves(port: int) -> None:
    follow = request("GET", ROOT + "text?offset=now&live=sse")
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(Connection(port))
            connection.send(follow)
            connection.head()
            next(events(connection.chunks()))

        for live in ("sse", "long-poll"):
            refused = ask(port, "GET", f"{ROOT}text?offset=now&live={live}")
            assert (refused.status, code_of(refused)) == (503, "too_many_waiters")
            assert refused.headers["retry-after"].isdigit()
        assert ask(port, "GET", ROOT + "text?offset=-1").status == 200

    while True:  # until the server has noticed that the two have left
        with Connection(port) as connection:
            connection.send(follow)
            if connection.head().status == 200:
                break


def test_one_connection_too_many_is_refused_until_another_leaves(port: int) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(Connection(port)) for _ in range(6)]
        for connection in held:
            assert connection.ask("GET", "/healthz").status == 200

        refused = stack.enter_context(Connection(port)).reply()
        assert (refused.status, code_of(refused)) == (503, "too_many_connections")

        held[0].close()
        while True:
            with Connection(port) as connection:
                connection.send(request("GET", "/healthz"))
                if connection.reply().status == 200:
                    break
