"""Readers of the log and claims of groups that wait with many patterns do not slow down writers."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

from tests.attacks.attacking import attacked, bearer, make_streams
from tests.engines import engine as engine
from tests.integration.auth_support import ALL, principal
from tests.integration.raw import Connection, request

WAITERS = 100
PATTERNS = 180
LANES = 500
JSON = "Content-Type: application/json"
APPENDS = 40
SECONDS_MAX = 4.0
"""At 5 appends a second, which this attack left before, they take 8."""


def test_waiting_readers_do_not_slow_down_appends(engine: str, tmp_path: Path) -> None:
    with attacked(engine, tmp_path) as server, ExitStack() as stack:
        make_streams(server.port, "ann", ["ann/a"])
        for waiter in range(WAITERS):
            query = "&".join(f"match=**/*x{waiter}-{n}*y" for n in range(PATTERNS))
            mallory = stack.enter_context(Connection(server.port))
            target = f"/v1/log?after=now&live=long-poll&{query}"
            mallory.send(request("GET", target, bearer("mallory")))
        ann = stack.enter_context(Connection(server.port))
        while _waiting(ann, "fencepost_log_waiters") < WAITERS:
            pass

        taken = _seconds_for_appends(ann)

    assert taken < SECONDS_MAX, f"{APPENDS / taken:.0f} appends a second"


def test_waiting_claims_of_groups_do_not_slow_down_appends(engine: str, tmp_path: Path) -> None:
    """A fifth of a second for each append, with 64 sources in each of 300 groups, and with a
    thousand lanes of a group 25 ms: both together are asked for here."""
    worker = principal("worker", ("worker/**", ALL), ("__groups/**", ALL))
    with attacked(engine, tmp_path, worker) as server, ExitStack() as stack:
        make_streams(server.port, "ann", ["ann/a"])

        def claim(group: str, **more: object) -> None:
            body = json.dumps({"worker": "w", "wait_ms": 30_000, **more}).encode()
            lane = stack.enter_context(Connection(server.port))
            lane.send(
                request("POST", f"/v1/groups/{group}/claim", bearer("worker"), JSON, body=body)
            )

        asking = stack.enter_context(Connection(server.port))
        for group in ("all", *(f"g{n}" for n in range(WAITERS))):
            sources = [f"**/*x{group}-{n}*y" for n in range(63)]
            made = asking.ask(
                "PUT",
                f"/v1/groups/{group}",
                bearer("worker"),
                JSON,
                body=json.dumps({"sources": [*sources, "**"], "start": "now"}).encode(),
            )
            assert made.status == 201
            claim(group)
        for lane in range(LANES):
            claim("all", lane=f"lane-{lane}")
        ann = stack.enter_context(Connection(server.port))
        while _waiting(ann, "fencepost_group_claims_waiting") <= WAITERS + LANES:
            pass

        taken = _seconds_for_appends(ann)

    assert taken < SECONDS_MAX, f"{APPENDS / taken:.0f} appends a second"


def _seconds_for_appends(ann: Connection) -> float:
    began = time.perf_counter()
    for _ in range(APPENDS):
        reply = ann.ask("POST", "/v1/stream/ann/a", bearer("ann"), JSON, body=b"1")
        assert reply.status in (200, 204)
    return time.perf_counter() - began


def _waiting(connection: Connection, gauge: str) -> int:
    metrics = connection.ask("GET", "/metrics", bearer("root")).body.decode()
    [line] = [line for line in metrics.splitlines() if line.startswith(f"{gauge} ")]
    return int(float(line.split()[1]))
