"""Staging over HTTP: chunks that no reader sees until a commit names their part."""

import json
from pathlib import Path
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
from tests.unit.http.rawhttp import Reply


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
