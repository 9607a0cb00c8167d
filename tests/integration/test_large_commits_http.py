"""Large commits over HTTP: read bit by bit, answered as any other, whole to readers."""

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import engine as engine
from tests.integration.raw import Connection, code_of, request
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

JSON = "application/json"
COUNT = 1500

_names = itertools.count()


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


def fresh() -> str:
    """A folder that no other test uses."""
    return f"large-{next(_names)}"


def appends(folder: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "stream": f"{folder}/{number:05}",
            "content_type": JSON,
            "data": {"n": number},
            "auto_create": True,
            **more,
        }
        for number in range(COUNT)
    ]


def commit(wire: Connection, items: list[dict[str, Any]], *headers: str) -> Reply:
    return wire.ask("POST", "/v1/commit", *headers, body=json.dumps({"appends": items}).encode())


def test_a_large_commit_is_answered_as_any_other(wire: Connection) -> None:
    folder = fresh()
    items = appends(folder)

    first = commit(wire, items, "Idempotency-Key: " + folder)
    again = commit(wire, items, "Idempotency-Key: " + folder)
    other = commit(wire, items[:-1], "Idempotency-Key: " + folder)

    answer, repeated = json.loads(first.body), json.loads(again.body)
    assert (answer["duplicate"], repeated["duplicate"]) == (False, True)
    assert answer["appends"] == repeated["appends"]
    assert [one["stream"] for one in answer["appends"]] == [item["stream"] for item in items]
    positions = [one["position"] for one in answer["appends"]]
    assert positions == list(range(positions[0], positions[0] + COUNT))
    assert (other.status, code_of(other)) == (409, "idempotency_key_reused")
    last = wire.ask("GET", f"/v1/stream/{items[-1]['stream']}?offset=-1")
    assert json.loads(last.body) == [{"n": COUNT - 1}]


BROKEN: list[tuple[dict[str, Any], int, str]] = [
    ({"stream": ""}, 400, "path_invalid"),
    ({"surprise": 1}, 400, "commit_invalid"),
    ({"data": 1, "data_base64": "MQ=="}, 400, "commit_invalid"),
    ({"auto_create": False}, 404, "stream_not_found"),
    ({"if_match": "0000000000000007_0000000000000007"}, 412, "tail_moved"),
]


@pytest.mark.parametrize(
    ("fields", "status", "expected"), BROKEN, ids=lambda value: str(value)[:40]
)
def test_a_refused_large_commit_names_its_append(
    wire: Connection, fields: dict[str, Any], status: int, expected: str
) -> None:
    folder = fresh()
    items = appends(folder)
    items[1234].update(fields)

    reply = commit(wire, items)

    assert (reply.status, code_of(reply)) == (status, expected)
    assert json.loads(reply.body)["item"] == 1234
    for item in (items[0], items[-1]):
        assert wire.ask("HEAD", f"/v1/stream/{item['stream']}").status == 404


def test_a_large_body_that_is_no_commit_is_refused(wire: Connection) -> None:
    for body in (b'{"appends": [' + b" " * 100_000, b'{"appends": ["' + b"\xff" * 100_000 + b'"]}'):
        reply = wire.ask("POST", "/v1/commit", body=body)

        assert (reply.status, code_of(reply)) == (400, "commit_invalid")


def test_others_write_and_read_while_a_large_commit_is_under_way(
    server_process: ServerProcess, wire: Connection
) -> None:
    """The last stream is made by the last slice: whoever sees one of the two sees the other."""
    folder = fresh()
    done = threading.Event()
    seen: list[tuple[int, int]] = []
    answered = 0

    def read() -> None:
        with Connection(server_process.port) as connection:
            while not done.is_set():
                last = connection.ask("HEAD", f"/v1/stream/{folder}/{COUNT - 1:05}").status
                first = connection.ask("HEAD", f"/v1/stream/{folder}/00000").status
                seen.append((last, first))

    reader = threading.Thread(target=read)
    reader.start()
    with Connection(server_process.port) as large:
        body = json.dumps({"appends": appends(folder)}).encode()
        large.send(request("POST", "/v1/commit", body=body))
        replies: list[Reply] = []
        committer = threading.Thread(target=lambda: replies.append(large.reply("POST")))
        committer.start()
        while committer.is_alive():
            outcome = wire.ask(
                "POST",
                f"/v1/stream/{folder}-other",
                f"Content-Type: {JSON}",
                "Stream-Auto-Create: true",
                body=b"1",
            )
            assert outcome.status == 204
            answered += 1
        committer.join()
    done.set()
    reader.join()

    assert replies[0].status == 200
    assert answered > COUNT // 128, "somebody else was answered between any two slices"
    assert (200, 404) not in seen
    assert len(json.loads(wire.ask("GET", f"/v1/stream/{folder}-other?offset=-1").body)) == answered
