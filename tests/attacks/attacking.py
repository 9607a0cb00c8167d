"""What the attacks share: two principals on one server, many streams, and how long a victim waits.

Every attack stays on loopback, is bounded in time and in size, and is made by `mallory`, who may
read and write below `mallory/` only. What counts is what `ann` notices of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines import emptied, server_at
from tests.integration.auth_support import ALL, ROOT, principal, token
from tests.integration.raw import Connection
from tests.serving import ServerProcess

ANN = principal("ann", ("ann/**", ALL))
MALLORY = principal("mallory", ("mallory/**", ALL))
STREAMS_PER_COMMIT = 500


@contextmanager
def attacked(
    engine: str, folder: Path, *principals: dict[str, Any], **environment: str
) -> Iterator[ServerProcess]:
    """A server with principals, on an empty store of this engine."""
    named = {"FENCEPOST_PRINCIPALS": json.dumps([ROOT, ANN, MALLORY, *principals]), **environment}
    with emptied(engine, folder) as store, server_at(store, environment=named) as server:
        yield server


def bearer(name: str) -> str:
    """The header that makes a request this principal's."""
    return f"Authorization: Bearer {token(name)}"


def make_streams(port: int, name: str, paths: list[str]) -> None:
    """Make these streams, each with a message."""
    connection = Connection(port)
    for first in range(0, len(paths), STREAMS_PER_COMMIT):
        appends = [
            {"stream": path, "content_type": "application/json", "data": 1, "auto_create": True}
            for path in paths[first : first + STREAMS_PER_COMMIT]
        ]
        reply = connection.ask(
            "POST",
            "/v1/commit",
            bearer(name),
            "Content-Type: application/json",
            body=json.dumps({"appends": appends}).encode(),
        )
        assert reply.status in (200, 201), reply.body
    connection.close()


def seconds_each(ask: Callable[[], object], *, count: int) -> list[float]:
    """How long each of so many calls takes, the slowest last."""
    taken: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def p99(taken: list[float]) -> float:
    """The time that 99 of 100 calls stay under."""
    return taken[int(len(taken) * 0.99)]
