"""Bundles: one upload with chunks of many parts, taken apart by the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import fencepost
from fencepost.client.operations import BUNDLE, BundledChunk, CommitAppend, stage_bundle
from tests.engines import emptied, server_at
from tests.engines import engine as engine
from tests.integration.log_support import Client
from tests.serving import ServerProcess

STREAMS = 40


@pytest.fixture(scope="module")
def bundle_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with emptied(engine, tmp_path_factory.mktemp("bundles")) as store, server_at(store) as server:
        yield server


@pytest.fixture
def asking(bundle_server: ServerProcess) -> Iterator[Client]:
    with closing(Client(bundle_server.port)) as client:
        yield client


def _bundle(index: list[dict[str, Any]], *chunks: bytes) -> bytes:
    return json.dumps(index).encode() + b"\n" + b"".join(chunks)


def _piece(**fields: Any) -> dict[str, Any]:
    line = {"piece": 0, "stream": "s", "content_type": "application/json", "bytes": 1}
    return line | fields


def test_a_commit_uses_the_pieces_of_a_bundle_as_parts(
    bundle_server: ServerProcess,
) -> None:
    name = "wide"
    chunks = [
        BundledChunk(piece, number, f"{name}/{piece}", "application/json", body)
        for piece in range(STREAMS)
        for number, body in enumerate((b"[%d,1]" % piece, b"2"))
    ]
    with fencepost.connect(bundle_server.url) as client:
        driver = client._driver
        first = driver.run(stage_bundle(driver.settings, name, "p", chunks))
        again = driver.run(stage_bundle(driver.settings, name, "p", chunks))
        client.commit(
            [
                CommitAppend(
                    stream=f"{name}/{piece}", parts=[(name, f"p.{piece}", 2)], auto_create=True
                )
                for piece in range(STREAMS)
            ]
        )

        assert (first.messages, first.duplicate) == (3 * STREAMS, False)
        assert (again.messages, again.duplicate) == (3 * STREAMS, True)
        for piece in range(STREAMS):
            assert list(client.stream(f"{name}/{piece}").read()) == [piece, 1, 2]


def test_pieces_are_dropped_together_but_not_what_a_commit_used(asking: Client) -> None:
    for piece in (0, 1, 3):
        body = _bundle([_piece(piece=piece)], b"1")
        assert asking.ask("POST", "/v1/staging/drop/p", body, Content_Type=BUNDLE).status == 201
    commit = {
        "appends": [
            {
                "stream": "dropping",
                "content_type": "application/json",
                "auto_create": True,
                "parts": [{"txn": "drop", "part": "p.3"}],
            }
        ]
    }
    done = asking.ask("POST", "/v1/commit", json.dumps(commit), Content_Type="application/json")
    assert done.status == 200, done

    assert asking.ask("DELETE", "/v1/staging/drop/p?pieces=3").status == 204
    assert asking.ask("DELETE", "/v1/staging/drop/p?pieces=3").status == 204
    used = asking.ask("DELETE", "/v1/staging/drop/p?first=2&pieces=2")
    assert (used.status, used.json()["code"]) == (409, "part_committed")
    assert asking.ask("DELETE", "/v1/staging/drop/p.0").status == 404


@pytest.mark.parametrize(
    ("index", "chunks", "status", "code"),
    [
        ([], b"", 400, "bundle_invalid"),
        ([_piece()], b"", 400, "bundle_invalid"),
        ([_piece()], b"12", 400, "bundle_invalid"),
        ([_piece(), _piece()], b"12", 400, "bundle_invalid"),
        ([_piece(bytes=0)], b"", 400, "bundle_invalid"),
        ([_piece(piece=-1)], b"1", 400, "bundle_invalid"),
        ([_piece(other=1)], b"1", 400, "bundle_invalid"),
        ([_piece(stream="")], b"1", 400, "path_invalid"),
        ([_piece(content_type="x")], b"1", 400, "content_type_invalid"),
        ([_piece()], b"{", 400, "json_invalid"),
        ([_piece(bytes=2)], b"[]", 400, "body_empty"),
        ([_piece(chunk=16_384)], b"1", 413, "commit_too_large"),
        ([_piece(piece=number) for number in range(513)], b"1" * 513, 413, "commit_too_large"),
    ],
)
def test_a_bad_bundle_is_refused_as_a_whole(
    asking: Client, index: list[dict[str, Any]], chunks: bytes, status: int, code: str
) -> None:
    good = _piece(piece=900)
    body = _bundle([good, *index], b"1", chunks) if index else _bundle([], chunks)

    reply = asking.ask("POST", "/v1/staging/bad/p", body, Content_Type=BUNDLE)

    assert (reply.status, reply.json()["code"]) == (status, code), reply
    assert asking.ask("DELETE", "/v1/staging/bad/p.900").status == 404


def test_what_is_no_bundle_is_said(asking: Client) -> None:
    for body in (b"1", b"{}\n1", b"[1]\n"):
        reply = asking.ask("POST", "/v1/staging/bad/p", body, Content_Type=BUNDLE)
        assert (reply.status, reply.json()["code"]) == (400, "bundle_invalid"), reply
    for query in ("pieces=0", "pieces=513", "pieces=x", "pieces=1&first=-1", "first=x"):
        reply = asking.ask("DELETE", f"/v1/staging/bad/p?{query}")
        assert (reply.status, reply.json()["code"]) == (400, "pieces_invalid"), reply
