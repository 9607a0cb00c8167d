"""Commits over HTTP: all or nothing, said precisely, refused by name when malformed."""

import base64
import json
from typing import Any

import pytest

from tests.engines import engine as engine
from tests.integration.commit_support import (
    JSON,
    ROOT,
    START,
    TEXT,
    commit,
    content,
    data,
    fresh,
    make,
    messages,
    refusal,
    stage,
)
from tests.integration.commit_support import wire as wire
from tests.integration.raw import Connection, code_of
from tests.serving import ServerProcess

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
