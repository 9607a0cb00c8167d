"""One request that must be refused, with what it must be answered with, and how to write one."""

from typing import NamedTuple

from tests.integration.raw import request

ROOT = "/v1/stream/"
TEXT = "Content-Type: text/plain"
JSON = "Content-Type: application/json"
WITNESS = ROOT + "witness"
NEW = ROOT + "new"
PRODUCER = ("Producer-Id: p", "Producer-Epoch: 5", "Producer-Seq: 1")
MAX = 2**53 - 1


class Row(NamedTuple):
    """A request and what it must be answered with."""

    name: str
    raw: bytes
    status: int
    code: str


def put(name: str, code: str, *headers: str | bytes, body: bytes = b"", status: int = 400) -> Row:
    return Row(f"PUT {name}", request("PUT", NEW, *headers, body=body), status, code)


def post(
    name: str,
    code: str,
    *headers: str | bytes,
    body: bytes = b"x",
    status: int = 400,
    to: str = "witness",
) -> Row:
    return Row(f"POST {name}", request("POST", ROOT + to, *headers, body=body), status, code)


def get(name: str, code: str, query: str | bytes, *, status: int = 400) -> Row:
    query = query.encode() if isinstance(query, str) else query
    return Row(f"GET {name}", request("GET", WITNESS.encode() + b"?" + query), status, code)


def path(name: str, target: str | bytes, code: str, status: int = 400) -> list[Row]:
    """The same bad path with every method."""
    rows = []
    for method in ("PUT", "POST", "GET", "DELETE"):
        headers = (TEXT,) if method in ("PUT", "POST") else ()
        body = b"x" if method in ("PUT", "POST") else b""
        raw = request(method, target, *headers, body=body)
        rows.append(Row(f"{method} path {name}", raw, status, code))
    return rows
