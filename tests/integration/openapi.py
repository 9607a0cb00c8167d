"""What the tests of the OpenAPI document share: the document as schemathesis sees it, a server to
hold it against, and a way to send deliberate requests that are compared with it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from schemathesis.config import SchemathesisConfig

import fencepost.server
from tests.serving import ServerProcess

Case = schemathesis.Case[Any]
SERVER = Path(fencepost.server.__file__).parent
DOCUMENT: dict[str, Any] = json.loads((SERVER / "openapi.json").read_text())
EXAMPLES_MAX = 15
"""For each operation and pass, beside the cases that the document's own bounds give rise to."""

HOME = "http://127.0.0.1:9/"

SCHEMA = schemathesis.openapi.from_dict(
    DOCUMENT,
    config=SchemathesisConfig.from_dict(
        {
            "seed": 4437,
            "generation": {
                "max-examples": EXAMPLES_MAX,
                "deterministic": True,
                # Unknown headers, parameters and cookies are passed over, as HTTP has it.
                "allow-extra-parameters": False,
            },
            # The front end answers an unknown method, such as TRACE, with 400.
            "phases": {"coverage": {"unexpected-methods": ["PATCH", "PUT", "DELETE", "POST"]}},
            "checks": {
                # Headers depend on each other in ways that a schema cannot say, so a request that
                # fits the document may still be a 400.
                "positive_data_acceptance": {"enabled": False},
                "negative_data_rejection": {
                    "expected-statuses": ["4XX"],
                },
                # A subscription is deleted and made again under the same few names.
                "use_after_free": {"enabled": False},
                "ensure_resource_availability": {"enabled": False},
            },
        }
    ),
)


@contextmanager
def serving(data: Path) -> Iterator[ServerProcess]:
    """A server whose live reads end soon, with two streams in it."""
    process = ServerProcess(
        data,
        arguments=("--long-poll-ms", "10"),
        environment={
            "FENCEPOST_SERVER_SSE_MS": "10",
            "FENCEPOST_SUBSCRIPTIONS_RESOLVE_TIMEOUT_MS": "50",
        },
    )
    with process:
        for path, kind in (("objects", "application/json"), ("bytes", "text/plain")):
            made = httpx.put(
                f"{process.url}/v1/stream/{path}", headers={"Content-Type": kind}, content=b"[1,2]"
            )
            assert made.status_code == 201
        group = httpx.put(f"{process.url}/v1/groups/workers", json={"sources": ["objects"]})
        assert group.status_code == 201
        for name in ("", "/members/ann", "/topics/alerts", "/queues/jobs"):
            assert httpx.put(f"{process.url}/v1/mesh/shop{name}").status_code == 201
        yield process


class Walk:
    """One deliberate request after another, each compared with the document as well."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url

    def __call__(
        self,
        expected: str,
        method: str,
        path: str,
        /,
        *,
        headers: dict[str, str] | None = None,
        body: Any = None,
        media_type: str | None = "application/json",
        **parameters: str,
    ) -> Any:
        """Send it; `expected` is the status, and the code if it is a refusal."""
        operation = SCHEMA[path][method]
        named = {name: parameters.pop(name) for name in list(parameters) if f"{{{name}}}" in path}
        given = {} if body is None else {"body": body, "media_type": media_type}
        case = operation.Case(
            path_parameters=named, query=parameters, headers=headers or {}, **given
        )
        answer = case.call_and_validate(base_url=self._url)
        code = answer.json()["code"] if answer.status_code >= 400 and method != "HEAD" else ""
        assert f"{answer.status_code} {code}".strip() == expected, answer.text
        return answer
