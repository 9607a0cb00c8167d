"""Commits and staging over HTTP: all or nothing, said precisely, refused by name when malformed."""

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine as engine
from tests.integration.raw import Connection, code_of
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

ROOT = "/v1/stream/"
TEXT = "text/plain"
JSON = "application/json"
START = "0000000000000000_0000000000000000"

_names = itertools.count()


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


def fresh() -> str:
    """A name that no other test uses."""
    return f"commits-{next(_names)}"


def make(wire: Connection, path: str, content_type: str = JSON) -> str:
    assert wire.ask("PUT", ROOT + path, f"Content-Type: {content_type}").status == 201
    return path


def commit(wire: Connection, *appends: dict[str, Any], key: str | None = None) -> Reply:
    headers = [] if key is None else [f"Idempotency-Key: {key}"]
    return wire.ask("POST", "/v1/commit", *headers, body=json.dumps({"appends": appends}).encode())


def stage(
    wire: Connection, name: str, body: bytes, chunk: int = 0, content_type: str = JSON
) -> Reply:
    target = f"/v1/staging/{name}?chunk={chunk}"
    return wire.ask("POST", target, f"Content-Type: {content_type}", body=body)


def data(path: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"stream": path, "content_type": JSON, "data": value, **more}


def content(wire: Connection, path: str) -> bytes:
    return wire.ask("GET", f"{ROOT}{path}?offset=-1").body


def messages(wire: Connection, path: str) -> list[Any]:
    found: list[Any] = json.loads(content(wire, path))
    return found


def refusal(reply: Reply) -> tuple[int, str, int | None]:
    """The status, the code, and the append that a refused commit names."""
    return reply.status, code_of(reply), json.loads(reply.body).get("item")


# Commits


def test_a_commit_says_where_each_append_went(wire: Connection) -> None:
    json_path, text_path, new = make(wire, fresh()), make(wire, fresh(), TEXT), fresh()

    reply = commit(
        wire,
        data(json_path, [1, 2]),
        {"stream": text_path, "content_type": TEXT, "data_base64": "aGVsbG8="},
        data(new, {"made": True}, auto_create=True, close=True),
    )

    assert reply.status == 200
    assert reply.headers["content-type"] == JSON
    answer = json.loads(reply.body)
    assert answer["duplicate"] is False
    first, second, third = answer["appends"]
    assert first["stream"] == json_path
    assert (first["offset"], first["version"]) == (START, 1)
    assert second["next_offset"] == "0000000000000001_0000000000000005"
    assert third["closed"] is True
    assert first["position"] < second["position"] < third["position"]
    assert messages(wire, json_path) == [1, 2]
    assert content(wire, text_path) == b"hello"
    head = wire.ask("HEAD", ROOT + new)
    assert (head.headers["stream-closed"], head.headers["content-type"]) == ("true", JSON)


def test_null_is_a_message_like_any_other(wire: Connection) -> None:
    path = make(wire, fresh())

    assert commit(wire, data(path, None), data(path, [[]])).status == 200
    assert messages(wire, path) == [None, []]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        ({"stream": "commits-none"}, (404, "stream_not_found", 1)),
        ({"if_match": "0000000000000009_0000000000000009"}, (412, "tail_moved", 1)),
        (
            {"producer": {"id": "p", "epoch": 0, "seq": 4}},
            (409, "producer_sequence_gap", 1),
        ),
        (
            {"producer": {"id": "p", "epoch": 1, "seq": 0}, "producer_if": "0.0"},
            (412, "producer_moved", 1),
        ),
        ({"content_type": TEXT, "data_base64": "eA=="}, (409, "content_type_mismatch", 1)),
    ],
    ids=["missing", "tail", "gap", "producer", "type"],
)
def test_a_refused_commit_says_which_append_and_why_and_does_nothing(
    wire: Connection, spoil: dict[str, Any], expected: tuple[int, str, int]
) -> None:
    path, other, new = make(wire, fresh()), make(wire, fresh()), fresh()
    bad = data(other, 1) | spoil
    if "data_base64" in bad:
        del bad["data"]

    reply = commit(wire, data(path, 1), bad, data(new, 1, auto_create=True), key=fresh())

    assert refusal(reply) == expected
    assert (messages(wire, path), messages(wire, other)) == ([], [])
    assert wire.ask("HEAD", ROOT + new).status == 404


def test_a_closed_stream_refuses_a_commit(wire: Connection) -> None:
    path, closed = make(wire, fresh()), make(wire, fresh())
    wire.ask("POST", ROOT + closed, "Stream-Closed: true")

    assert refusal(commit(wire, data(path, 1), data(closed, 1))) == (409, "stream_closed", 1)
    assert messages(wire, path) == []


def test_a_repeated_commit_is_a_duplicate_and_one_repeated_in_part_is_refused(
    wire: Connection,
) -> None:
    path = make(wire, fresh())
    third = data(path, 3, producer={"id": "p", "epoch": 0, "seq": 0})
    fourth = data(path, 4, producer={"id": "p", "epoch": 0, "seq": 1})
    fifth = data(path, 5, producer={"id": "p", "epoch": 0, "seq": 2})

    first = json.loads(commit(wire, third, fourth).body)
    again = json.loads(commit(wire, third, fourth).body)
    in_part = commit(wire, fourth, fifth)

    assert (first["duplicate"], again["duplicate"]) == (False, True)
    assert [one["offset"] for one in again["appends"]] == [
        one["offset"] for one in first["appends"]
    ]
    assert [one["matches"] for one in again["appends"]] == [True, True]
    assert refusal(in_part) == (409, "commit_partial", None)
    assert messages(wire, path) == [3, 4]
    assert commit(wire, fifth).status == 200


def test_a_key_replays_the_answer_of_the_commit_even_without_what_it_made(
    wire: Connection,
) -> None:
    path, gone, key = make(wire, fresh()), fresh(), fresh()
    appends = (data(path, [1, 2]), data(gone, 3, auto_create=True))
    first = commit(wire, *appends, key=key)
    wire.ask("DELETE", ROOT + gone)

    again = commit(wire, *appends, key=key)
    other = commit(wire, data(path, 9), key=key)

    assert again.status == 200
    assert again.body == first.body.replace(b'"duplicate":false', b'"duplicate":true')
    assert (other.status, code_of(other)) == (409, "idempotency_key_reused")
    assert messages(wire, path) == [1, 2]


def test_a_reader_at_the_tail_is_woken_by_a_commit_of_staged_data(
    server_process: ServerProcess, wire: Connection
) -> None:
    path, txn = make(wire, fresh()), fresh()
    for ordinal in range(2):
        stage(wire, f"{txn}/p", b"[%d,%d]" % (ordinal, ordinal), ordinal)
    with Connection(server_process.port) as reader:
        target = f"{ROOT}{path}?offset={START}&live=sse"
        reader.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target.encode())
        assert reader.head().status == 200
        chunks = reader.chunks()
        seen = next(chunks)  # the control event of the empty stream: the reader waits now
        assert b"data" in seen
        commit(wire, {"stream": path, "parts": [{"txn": txn, "part": "p"}]})
        while b"0,0,1,1" not in seen:
            seen += next(chunks)


def test_a_subscription_hears_of_streams_that_a_commit_makes(wire: Connection) -> None:
    name, glob = fresh(), fresh()
    wakes = make(wire, fresh())
    subscription = {"type": "pull-wake", "pattern": f"{glob}/*", "wake_stream": wakes}
    body = json.dumps(subscription).encode()
    target = f"{ROOT}__ds/subscriptions/{name}"
    made = wire.ask("PUT", target, "Content-Type: application/json", body=body)
    assert made.status == 201, made.body

    commit(wire, data(f"{glob}/a", 1, auto_create=True), data(f"{glob}/b", 2, auto_create=True))

    live = wire.ask("GET", f"{ROOT}{wakes}?offset=-1&live=long-poll")
    assert live.status == 200
    assert name.encode() in live.body


# What is malformed

GOOD = {"stream": "s", "content_type": JSON, "data": 1}
MALFORMED: dict[str, tuple[Any, str, int | None]] = {
    "nothing": (b"", "commit_invalid", None),
    "no JSON": (b"{", "commit_invalid", None),
    "an array": ([GOOD], "commit_invalid", None),
    "no appends": ({}, "commit_invalid", None),
    "another field": ({"appends": [GOOD], "more": 1}, "commit_invalid", None),
    "appends no list": ({"appends": GOOD}, "commit_invalid", None),
    "empty": ({"appends": []}, "commit_empty", None),
    "append no object": ({"appends": [1]}, "commit_invalid", None),
    "no stream": ({"appends": [{"data": 1}]}, "commit_invalid", None),
    "unknown field": ({"appends": [{**GOOD, "dta": 1}]}, "commit_invalid", None),
    "stream a number": ({"appends": [{**GOOD, "stream": 1}]}, "commit_invalid", None),
    "stream empty": ({"appends": [GOOD, {**GOOD, "stream": ""}]}, "path_invalid", 1),
    "stream with dots": ({"appends": [GOOD, {**GOOD, "stream": "a/../b"}]}, "path_invalid", 1),
    "stream with NUL": ({"appends": [{**GOOD, "stream": "a\0"}]}, "path_invalid", 0),
    "stream reserved": ({"appends": [{**GOOD, "stream": "__ds/x"}]}, "path_reserved", 0),
    "stream too long": ({"appends": [{**GOOD, "stream": "a" * 1025}]}, "path_too_long", 0),
    "type invalid": ({"appends": [{**GOOD, "content_type": "json"}]}, "content_type_invalid", 0),
    **{
        f"type with {name}": (
            {"appends": [{**GOOD, "auto_create": True, "content_type": kind}]},
            "content_type_invalid",
            0,
        )
        for name, kind in {
            "a line end": "application/json\r\n\r\n;x",
            "a return in its parameters": "application/json;a=\rb",
            "a NUL": "application/json;\0",
            "a control": "application/json;\x7f",
        }.items()
    },
    "type not JSON": ({"appends": [{**GOOD, "content_type": TEXT}]}, "content_type_invalid", 0),
    "no type": ({"appends": [{"stream": "s", "data": 1}]}, "content_type_invalid", 0),
    "no data": ({"appends": [{"stream": "s", "content_type": JSON}]}, "body_empty", 0),
    "empty array": ({"appends": [{**GOOD, "data": []}]}, "batch_empty", 0),
    "empty array that closes": (
        {"appends": [{**GOOD, "data": [], "close": True}]},
        "batch_empty",
        0,
    ),
    "data twice": ({"appends": [{**GOOD, "data_base64": "eA=="}]}, "commit_invalid", 0),
    "data and parts": (
        {"appends": [{**GOOD, "parts": [{"txn": "t", "part": "p"}]}]},
        "commit_invalid",
        0,
    ),
    "base64 wrong": (
        {"appends": [{"stream": "s", "content_type": TEXT, "data_base64": "e A"}]},
        "base64_invalid",
        0,
    ),
    "base64 not ASCII": (
        {"appends": [{"stream": "s", "content_type": TEXT, "data_base64": "\u00e9\u00e9"}]},
        "base64_invalid",
        0,
    ),
    "base64 empty": (
        {"appends": [{"stream": "s", "content_type": TEXT, "data_base64": ""}]},
        "body_empty",
        0,
    ),
    "base64 no JSON": (
        {"appends": [{"stream": "s", "content_type": JSON, "data_base64": "ew=="}]},
        "json_invalid",
        0,
    ),
    "base64 without type": (
        {"appends": [{"stream": "s", "data_base64": "eA=="}]},
        "content_type_missing",
        0,
    ),
    "producer in part": (
        {"appends": [{**GOOD, "producer": {"id": "p", "epoch": 0}}]},
        "commit_invalid",
        None,
    ),
    "producer epoch negative": (
        {"appends": [{**GOOD, "producer": {"id": "p", "epoch": -1, "seq": 0}}]},
        "header_invalid",
        0,
    ),
    "producer seq too large": (
        {"appends": [{**GOOD, "producer": {"id": "p", "epoch": 0, "seq": 2**53}}]},
        "header_invalid",
        0,
    ),
    "producer seq a float": (
        {"appends": [{**GOOD, "producer": {"id": "p", "epoch": 0, "seq": 1.5}}]},
        "commit_invalid",
        None,
    ),
    "producer id empty": (
        {"appends": [{**GOOD, "producer": {"id": " ", "epoch": 0, "seq": 0}}]},
        "producer_id_empty",
        0,
    ),
    "producer id too long": (
        {"appends": [{**GOOD, "producer": {"id": "p" * 257, "epoch": 0, "seq": 0}}]},
        "header_too_long",
        0,
    ),
    "producer_if alone": (
        {"appends": [{**GOOD, "producer_if": "0.0"}]},
        "producer_headers_incomplete",
        0,
    ),
    "producer_if wrong": (
        {"appends": [{**GOOD, "producer": {"id": "p", "epoch": 0, "seq": 0}, "producer_if": "00"}]},
        "producer_if_invalid",
        0,
    ),
    "stream_seq empty": ({"appends": [{**GOOD, "stream_seq": ""}]}, "header_invalid", 0),
    "stream_seq too long": ({"appends": [{**GOOD, "stream_seq": "s" * 257}]}, "header_too_long", 0),
    "if_match wrong": ({"appends": [{**GOOD, "if_match": "here"}]}, "if_match_invalid", 0),
    "if_none_match wrong": ({"appends": [{**GOOD, "if_none_match": "x"}]}, "commit_invalid", None),
    "both conditions": (
        {"appends": [{**GOOD, "if_match": "*", "if_none_match": "*"}]},
        "precondition_conflict",
        0,
    ),
    "made without a type": (
        {"appends": [{"stream": "s", "close": True, "auto_create": True}]},
        "content_type_missing",
        0,
    ),
    "key empty": ({"appends": [{**GOOD, "key": ""}]}, "idempotency_key_invalid", 0),
    "key with controls": ({"appends": [{**GOOD, "key": "a\n"}]}, "idempotency_key_invalid", 0),
    "key too long": ({"appends": [{**GOOD, "key": "k" * 257}]}, "header_too_long", 0),
    "part without a name": (
        {"appends": [{"stream": "s", "parts": [{"txn": "t"}]}]},
        "commit_invalid",
        None,
    ),
    "bytes that are no UTF-8 in a name": (
        b'{"appends":[{"stream":"\xff","content_type":"application/json","data":1}]}',
        "commit_invalid",
        None,
    ),
    "bytes that are no UTF-8 in data": (
        b'{"appends":[{"stream":"s","content_type":"application/json","data":"\xff"}]}',
        "json_invalid",
        0,
    ),
    "a lone surrogate": (
        b'{"appends":[{"stream":"\\ud800","content_type":"application/json","data":1}]}',
        "commit_invalid",
        None,
    ),
    "nested too deeply": (
        b'{"appends":[{"stream":"s","content_type":"application/json","data":%b1%b}]}'
        % (b"[" * 100_000, b"]" * 100_000),
        "commit_invalid",
        None,
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_commit_is_refused_by_name(wire: Connection, name: str) -> None:
    body, code, place = MALFORMED[name]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    reply = wire.ask("POST", "/v1/commit", body=raw)

    assert refusal(reply) == (400, code, place)


@pytest.mark.parametrize("value", ["", "k" * 257])
def test_a_malformed_key_of_a_commit_is_refused(wire: Connection, value: str) -> None:
    body = json.dumps({"appends": [GOOD]}).encode()

    reply = wire.ask("POST", "/v1/commit", f"Idempotency-Key: {value}", body=body)

    assert reply.status == 400
    assert code_of(reply) in ("idempotency_key_invalid", "header_too_long")


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("/v1/commit", "GET"),
        ("/v1/commit", "PUT"),
        ("/v1/commit", "DELETE"),
        ("/v1/staging/t/p", "GET"),
        ("/v1/staging/t/p", "PUT"),
    ],
)
def test_commits_and_parts_are_posted(wire: Connection, target: str, method: str) -> None:
    reply = wire.ask(method, target)

    assert (reply.status, code_of(reply)) == (405, "method_not_allowed")
    others = "DELETE, " if "staging" in target else ""
    assert reply.headers["allow"] == f"POST, {others}OPTIONS"


# Staging


def test_a_part_is_staged_chunk_by_chunk_and_committed_once(wire: Connection) -> None:
    path, txn = make(wire, fresh()), fresh()
    parts = {"stream": path, "parts": [{"txn": txn, "part": "b"}, {"txn": txn, "part": "a"}]}

    staged = [stage(wire, f"{txn}/{part}", b"[1,2]") for part in "ab"]
    again = stage(wire, f"{txn}/a", b"[1, 2]")
    other = stage(wire, f"{txn}/a", b"[1,3]")
    assert [reply.status for reply in staged] == [201, 201]
    assert json.loads(staged[0].body) == {
        "txn": txn,
        "part": "a",
        "chunk": 0,
        "messages": 2,
        "bytes": 2,
        "duplicate": False,
    }
    assert (again.status, json.loads(again.body)["duplicate"]) == (200, True)
    assert (other.status, code_of(other)) == (409, "chunk_conflict")
    assert messages(wire, path) == []

    done, twice = commit(wire, parts), commit(wire, parts)

    assert done.status == 200
    assert json.loads(done.body)["appends"][0]["version"] == 3
    assert refusal(twice) == (409, "part_committed", 0)
    late = stage(wire, f"{txn}/a", b"[9]", 1)
    assert (late.status, code_of(late)) == (409, "part_committed")
    assert messages(wire, path) == [1, 2, 1, 2]


def test_the_log_shows_a_part_when_it_is_committed_and_in_its_order(wire: Connection) -> None:
    path, txn = make(wire, fresh()), fresh()
    target = f"/v1/log?match={path}"
    for chunk in (1, 0):
        stage(wire, f"{txn}/p", b"[%d,%d]" % (chunk, chunk), chunk)
    assert wire.ask("GET", target).body == b""

    parts = [{"txn": txn, "part": "p"}]
    done = commit(wire, data(path, "first"), {"stream": path, "parts": parts, "close": True})

    rows = [json.loads(line) for line in wire.ask("GET", target).body.splitlines()]
    shown = [row for row in rows if row.get("data") is not None]
    assert [row["data"] for row in shown] == ["first", 0, 0, 1, 1]
    positions = [row["position"] for row in shown]
    assert positions == list(range(positions[0], positions[0] + 5))
    told = [append["position"] for append in json.loads(done.body)["appends"]]
    assert told == [positions[0], positions[-1]]


def test_parts_that_are_missing_incomplete_repeated_or_mixed_are_refused(wire: Connection) -> None:
    path, txn = make(wire, fresh()), fresh()
    stage(wire, f"{txn}/gap", b"1", 1)
    stage(wire, f"{txn}/text", b"1", 0, TEXT)
    stage(wire, f"{txn}/json", b"1")

    def of(*names: str, **more: Any) -> Reply:
        named = [{"txn": txn, "part": name} for name in names]
        return commit(wire, data(path, 0), {"stream": path, "parts": named, **more})

    assert refusal(of("none")) == (409, "part_missing", 1)
    assert refusal(of("gap")) == (409, "part_incomplete", 1)
    short = {"stream": path, "parts": [{"txn": txn, "part": "json", "chunks": 2}]}
    assert refusal(commit(wire, data(path, 0), short)) == (409, "part_incomplete", 1)
    assert refusal(of("json", "json")) == (400, "part_repeated", 1)
    assert refusal(of("text", "json")) == (409, "part_type_mismatch", 1)
    assert refusal(of("json", "text")) == (409, "part_type_mismatch", 1)
    assert refusal(of("json", content_type=TEXT)) == (409, "part_type_mismatch", 1)
    assert refusal(of("text")) == (409, "content_type_mismatch", 1)
    assert messages(wire, path) == []
    assert of("json").status == 200


@pytest.mark.parametrize(
    ("target", "headers", "body", "status", "code"),
    [
        ("/v1/staging/t", (TEXT,), b"x", 400, "staging_path_invalid"),
        ("/v1/staging/t/p/q", (TEXT,), b"x", 400, "staging_path_invalid"),
        ("/v1/staging//p", (TEXT,), b"x", 400, "path_invalid"),
        ("/v1/staging/../p", (TEXT,), b"x", 400, "path_invalid"),
        ("/v1/staging/t/p", (), b"x", 400, "content_type_missing"),
        ("/v1/staging/t/p", ("text",), b"x", 400, "content_type_invalid"),
        ("/v1/staging/t/p", (TEXT,), b"", 400, "body_empty"),
        ("/v1/staging/t/p", (JSON,), b"[]", 400, "body_empty"),
        ("/v1/staging/t/p", (JSON,), b"{", 400, "json_invalid"),
        ("/v1/staging/t/p?chunk=-1", (TEXT,), b"x", 400, "header_invalid"),
        ("/v1/staging/t/p?chunk=", (TEXT,), b"x", 400, "header_invalid"),
        ("/v1/staging/t/p?chunk=1e3", (TEXT,), b"x", 400, "header_invalid"),
        ("/v1/staging/t/p?chunk=\u0661", (TEXT,), b"x", 400, "bad_request"),
        ("/v1/staging/t/p?chunk=0&chunk=1", (TEXT,), b"x", 400, "query_repeated"),
        ("/v1/staging/t/p?chunck=1", (TEXT,), b"x", 400, "parameter_unknown"),
        ("/v1/staging/t/p?chunk=16384", (TEXT,), b"x", 413, "commit_too_large"),
    ],
)
def test_a_malformed_upload_is_refused_by_name(
    wire: Connection, target: str, headers: tuple[str, ...], body: bytes, status: int, code: str
) -> None:
    lines = [f"Content-Type: {kind}" for kind in headers]

    reply = wire.ask("POST", target, *lines, body=body)

    assert (reply.status, code_of(reply)) == (status, code)


def test_the_limits_of_commits_and_staging_are_settings(tmp_path: Path) -> None:
    limits = {
        "FENCEPOST_LIMITS_COMMIT_APPENDS_MAX": "3",
        "FENCEPOST_LIMITS_COMMIT_PARTS_MAX": "2",
        "FENCEPOST_LIMITS_PART_CHUNKS_MAX": "2",
        "FENCEPOST_STORE_STAGED_PARTS_MAX": "2",
    }
    with (
        ServerProcess(tmp_path / "data", environment=limits) as server,
        Connection(server.port) as wire,
    ):
        make(wire, "s")
        three = [data("s", number) for number in range(3)]
        assert commit(wire, *three).status == 200
        assert refusal(commit(wire, *three, three[0])) == (413, "commit_too_large", None)
        parts = [{"txn": "t", "part": name} for name in "abc"]
        assert refusal(commit(wire, {"stream": "s", "parts": parts}))[:2] == (
            413,
            "commit_too_large",
        )
        assert refusal(stage(wire, "t/a", b"1", 2))[:2] == (413, "commit_too_large")
        assert [stage(wire, f"t/{name}", b"1").status for name in "aab"] == [201, 200, 201]
        full = stage(wire, "t/c", b"1")
        assert (full.status, code_of(full)) == (429, "too_many_parts")
        assert full.headers["retry-after"]
        assert stage(wire, "t/a", b"1", 1).status == 201
        assert commit(wire, {"stream": "s", "parts": parts[:1]}).status == 200
        assert stage(wire, "t/c", b"1").status == 201


def test_a_part_of_64_mib_becomes_visible_at_once_and_reads_as_it_was_sent(
    wire: Connection,
) -> None:
    path, txn = make(wire, fresh(), TEXT), fresh()
    mebibyte = bytes(range(256)) * 4096
    for ordinal in range(64):
        body = b"%08d" % ordinal + mebibyte[8:]
        assert stage(wire, f"{txn}/large", body, ordinal, TEXT).status == 201
    assert content(wire, path) == b""

    done = commit(wire, {"stream": path, "parts": [{"txn": txn, "part": "large"}]})

    assert json.loads(done.body)["appends"][0]["next_offset"] == f"{64:016d}_{64 << 20:016d}"
    at, size = START, 0
    while True:
        reply = wire.ask("GET", f"{ROOT}{path}?offset={at}")
        ordinal, within = divmod(size, 1 << 20)
        if within == 0 and reply.body:
            assert reply.body[:8] == b"%08d" % ordinal
        size += len(reply.body)
        at = reply.headers["stream-next-offset"]
        if reply.headers.get("stream-up-to-date") == "true":
            break
    assert size == 64 << 20


def test_parts_and_keys_survive_a_kill(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        with Connection(server.port) as wire:
            make(wire, "s")
            stage(wire, "t/committed", b"1")
            stage(wire, "t/waiting", b"2")
            first = commit(
                wire, {"stream": "s", "parts": [{"txn": "t", "part": "committed"}]}, key="k"
            )
        server.kill()
        server.restart()
        with Connection(server.port) as wire:
            again = commit(
                wire, {"stream": "s", "parts": [{"txn": "t", "part": "committed"}]}, key="k"
            )
            assert json.loads(again.body)["appends"] == json.loads(first.body)["appends"]
            taken = commit(wire, {"stream": "s", "parts": [{"txn": "t", "part": "committed"}]})
            assert refusal(taken) == (409, "part_committed", 0)
            assert stage(wire, "t/waiting", b"2").status == 200
            rest = commit(wire, {"stream": "s", "parts": [{"txn": "t", "part": "waiting"}]})
            assert rest.status == 200
            assert messages(wire, "s") == [1, 2]


def test_base64_carries_any_bytes(wire: Connection) -> None:
    path = make(wire, fresh(), "application/octet-stream")
    body = bytes(range(256))

    reply = commit(
        wire,
        {
            "stream": path,
            "content_type": "application/octet-stream",
            "data_base64": base64.b64encode(body).decode(),
        },
    )

    assert reply.status == 200
    assert content(wire, path) == body
