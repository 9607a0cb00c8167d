"""Requests of commits and staged parts over HTTP, for the tests of both."""

import itertools
import json
from collections.abc import Iterator
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
