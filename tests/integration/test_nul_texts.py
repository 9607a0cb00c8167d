"""No text that is kept holds a NUL: PostgreSQL could not keep it, and no key sorts behind it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.log_support import Client
from tests.serving import ServerProcess

NUL = "a\0b"
JSON = "application/json"


@pytest.fixture(scope="module", params=["embedded", "postgres"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    if request.param == "embedded":
        server = ServerProcess(tmp_path_factory.mktemp("data"))
    else:
        postgres = request.getfixturevalue("postgres_server")
        server = ServerProcess(store=postgres.new_database())
    with server:
        client = Client(server.port)
        client.create("s", JSON)
        yield client
        client.close()


@pytest.mark.parametrize(
    "item",
    [
        {"data": 1, "producer": {"id": NUL, "epoch": 0, "seq": 0}},
        {"data": 1, "stream_seq": NUL},
        {"data": 1, "key": NUL},
        {"parts": [{"txn": NUL, "part": "p", "chunks": 1}]},
        {"parts": [{"txn": "t", "part": NUL, "chunks": 1}]},
    ],
)
def test_an_append_of_a_commit_with_a_nul_in_a_name_is_refused(
    client: Client, item: dict[str, Any]
) -> None:
    append = {"stream": "s", "content_type": JSON, **item}

    reply = client.ask("POST", "/v1/commit", json.dumps({"appends": [append]}))

    assert reply.status == 400
    assert reply.json()["code"] in ("commit_invalid", "idempotency_key_invalid")


@pytest.mark.parametrize(("name", "key"), [("producers", ["s", NUL]), ("keys", ["1", "", NUL])])
def test_a_page_after_a_key_with_a_nul_is_refused(
    client: Client, name: str, key: list[str]
) -> None:
    token = base64.urlsafe_b64encode(json.dumps(key).encode()).rstrip(b"=").decode()

    reply = client.ask("GET", f"/v1/{name}?after={token}")

    assert (reply.status, reply.json()["code"]) == (400, "after_invalid")


@pytest.mark.parametrize("name", ["streams", "writers"])
def test_a_page_after_a_name_with_a_nul_is_refused(client: Client, name: str) -> None:
    reply = client.ask("GET", f"/v1/{name}?after=a%00b")

    assert (reply.status, reply.json()["code"]) == (400, "after_invalid")
