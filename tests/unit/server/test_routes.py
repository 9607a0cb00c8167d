"""The table of routes: it finds what it lists, and the OpenAPI document lists the same."""

import json
import re
from importlib.resources import files
from unittest.mock import MagicMock

import pytest

from fencepost.http.messages import Request
from fencepost.server.routes import Handlers, Table, routes
from fencepost.server.settings import AuthSettings

ROWS = routes(Handlers(*(MagicMock() for _ in Handlers._fields)), AuthSettings())
DOCUMENT = json.loads(files("fencepost.server").joinpath("openapi.json").read_text())
SPLIT_IN_THE_DOCUMENT = {"/v1/staging/{part...}": "/v1/staging/{txn}/{part}"}


def found(path: bytes) -> tuple[str | None, tuple[bytes, ...]]:
    route, parts = Table(ROWS).find(Request("GET", path, b"", {}, b""))
    return (None if route is None else route.path), parts


def test_the_table_and_the_openapi_document_have_the_same_routes() -> None:
    documented = {
        (method.upper(), path)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method in ("get", "head", "post", "put", "delete")
    }
    listed = {
        (method, SPLIT_IN_THE_DOCUMENT.get(row.path) or re.sub(r"\.\.\.}", "}", row.path))
        for row in ROWS
        for method in row.handlers
    }

    # The document describes HEAD only where it differs from GET.
    assert {one for one in listed if one[0] != "HEAD"} <= documented
    assert documented <= listed


@pytest.mark.parametrize(
    ("path", "row", "parts"),
    [
        (b"/v1/stream/a/b", "/v1/stream/{path...}", (b"a/b",)),
        (b"/v1/stream/__ds", "/v1/stream/{path...}", (b"__ds",)),
        (b"/v1/stream/__ds/jwks.json", "/v1/stream/__ds/jwks.json", ()),
        (b"/v1/writers", "/v1/writers", ()),
        (b"/v1/writer-history/a/b", "/v1/writer-history/{name...}", (b"a/b",)),
        (b"/v1/writers/a/b", "/v1/writers/{name...}", (b"a/b",)),
        (
            b"/v1/stream/__ds/subscriptions/s%2F1",
            "/v1/stream/__ds/subscriptions/{id}",
            (b"s%2F1",),
        ),
        (
            b"/v1/stream/__ds/subscriptions/s/streams/a/b",
            "/v1/stream/__ds/subscriptions/{id}/streams/{path...}",
            (b"s", b"a/b"),
        ),
    ],
)
def test_a_path_leads_to_its_row_with_its_parts(
    path: bytes, row: str, parts: tuple[bytes, ...]
) -> None:
    assert found(path) == (row, parts)


@pytest.mark.parametrize(
    "path",
    [b"/", b"/v1", b"/v1/log/", b"/v1/stream/__ds/x", b"/v1/stream/__ds/subscriptions/s/x"],
)
def test_a_path_that_is_not_in_the_table_is_not_found(path: bytes) -> None:
    assert found(path) == (None, ())
