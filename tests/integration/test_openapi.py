"""The OpenAPI document is held to the server: what it says is there, and nothing else is.

Schemathesis makes requests from the document, good and bad ones, and compares every answer with it:
no 5xx, only statuses, content types, headers, bodies and error codes that are documented, and a 4xx
for whatever the document does not allow.
"""

import ast
import json
import re
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection

from tests.integration.openapi import DOCUMENT, HOME, SCHEMA, SERVER, Case, serving
from tests.serving import ServerProcess

ROOT = Path(__file__).parents[2]
METHODS = ("get", "head", "post", "put", "delete", "patch")
EXISTING = {"path": "objects", "txn": "load-7", "part": "p0", "id": "billing", "name": "sink"}
EXISTING |= {"group": "workers"}
EXISTING |= {"mesh": "shop", "member": "ann", "topic": "alerts", "queue": "jobs"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("openapi")) as process:
        yield process


@SCHEMA.parametrize()
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_are_as_documented(case: Case, server: ServerProcess) -> None:
    keep_webhooks_at_home(case)

    case.call_and_validate(base_url=server.url)


@SCHEMA.include(path_regex=r"\{").exclude(method="DELETE").parametrize()
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_about_what_exists_are_as_documented(case: Case, server: ServerProcess) -> None:
    keep_webhooks_at_home(case)
    leave_some_out(case)
    for name in case.path_parameters:
        case.path_parameters[name] = EXISTING[name]

    # With so much put right a bad request may have become a good one.
    case.call_and_validate(base_url=server.url, excluded_checks=[negative_data_rejection])


def leave_some_out(case: Case) -> None:
    """Of many headers at once the first bad one hides the others, so half of them go."""
    lot = zlib.crc32(repr((case.headers, case.query, case.body)).encode("utf-8", "replace"))
    for given in (case.headers, case.query):
        for name in list(given or ()):
            lot = zlib.crc32(name.encode("utf-8", "replace"), lot)
            if lot & 1:
                del given[name]


def keep_webhooks_at_home(case: Case) -> None:
    """A made-up webhook would be delivered to wherever its name leads."""
    body = case.body
    webhook = body.get("webhook") if isinstance(body, dict) else None
    if isinstance(webhook, dict) and isinstance(url := webhook.get("url"), str):
        webhook["url"] = HOME + url.removeprefix(HOME)


def test_the_document_is_openapi() -> None:
    SCHEMA.validate()


def test_a_broken_document_would_be_noticed() -> None:
    broken = json.loads(json.dumps(DOCUMENT))
    del broken["paths"]["/healthz"]["get"]["responses"]["200"]["description"]

    with pytest.raises(jsonschema_rs.ValidationError, match='"description" is a required'):
        schemathesis.openapi.from_dict(broken).validate()


def test_the_server_hands_out_the_document(server: ServerProcess) -> None:
    answer = httpx.get(f"{server.url}/v1/openapi.json")

    assert answer.json() == DOCUMENT
    assert DOCUMENT["info"]["version"] == version("fencepost")


def test_everything_that_is_described_is_used_and_everything_used_is_described() -> None:
    used = set(re.findall(r'"\$ref": "#/components/(\w+/[\w-]+)"', json.dumps(DOCUMENT)))
    described = {
        f"{kind}/{name}"
        for kind in ("parameters", "headers", "schemas", "responses")
        for name in DOCUMENT["components"][kind]
    }

    assert used == described


def test_a_method_is_in_the_document_exactly_when_the_server_takes_it(
    server: ServerProcess,
) -> None:
    with httpx.Client(base_url=server.url) as client:
        taken = {
            (path, method)
            for path in DOCUMENT["paths"]
            for method in METHODS
            if not is_unknown(client.request(method, concrete(path)))
        }

    assert taken == {
        (path, method)
        for path, item in DOCUMENT["paths"].items()
        for method in METHODS
        if method in item or (method == "head" and "get" in item)
    }


def is_unknown(answer: httpx.Response) -> bool:
    """Whether an answer says that there is no such route; HEAD has no body to tell by."""
    if answer.status_code == 405:
        return True
    if answer.status_code != 404 or answer.request.method == "HEAD":
        return False
    return bool(answer.json()["code"] == "not_found")


def concrete(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: EXISTING[found[1]], path)


def test_every_path_that_the_sources_name_is_in_the_document() -> None:
    """Routes are found by comparing paths, so each of them stands in the sources as a constant."""
    named = {
        value for value in constants() if re.fullmatch(r"/(v1/[\w./]+|[a-z]+z|metrics)", value)
    }

    assert named
    assert [
        value
        for value in sorted(named)
        if not any(path == value or path.startswith(value) for path in DOCUMENT["paths"])
    ] == []


def constants() -> Iterator[str]:
    for file in SERVER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
                yield node.value.decode("latin-1")


def test_the_document_has_exactly_the_codes_of_the_error_reference() -> None:
    """docs/reference/errors.md in turn is held to the sources, by tests/unit."""
    reference = (ROOT / "docs/reference/errors.md").read_text()
    schemas = DOCUMENT["components"]["schemas"]

    listed = set(re.findall(r"^\| `([a-z0-9_]+)` \| [0-9, ]+ \|", reference, re.MULTILINE))

    assert listed == {*schemas["Code"]["enum"], *schemas["SubscriptionCode"]["enum"]}
