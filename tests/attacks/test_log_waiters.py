"""Readers that wait on the log with many patterns do not slow down the writers."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from tests.attacks.attacking import attacked, bearer, make_streams
from tests.engines import engine as engine
from tests.integration.raw import Connection, request

WAITERS = 100
PATTERNS = 180
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
        while _waiting(ann) < WAITERS:
            pass

        began = time.perf_counter()
        for _ in range(APPENDS):
            reply = ann.ask(
                "POST",
                "/v1/stream/ann/a",
                bearer("ann"),
                "Content-Type: application/json",
                body=b"1",
            )
            assert reply.status in (200, 204)
        taken = time.perf_counter() - began

    assert taken < SECONDS_MAX, f"{APPENDS / taken:.0f} appends a second"


def _waiting(connection: Connection) -> int:
    metrics = connection.ask("GET", "/metrics", bearer("root")).body.decode()
    [line] = [line for line in metrics.splitlines() if line.startswith("fencepost_log_waiters ")]
    return int(float(line.split()[1]))
