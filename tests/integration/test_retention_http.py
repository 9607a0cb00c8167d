"""Truncation and retention over HTTP, and servers that are killed while they drop rows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.server.settings import AuthSettings, ServerSettings
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.testing import TestServer
from tests.engines import engine as engine
from tests.integration.raw import Connection, ask, code_of
from tests.integration.retention_support import JSON
from tests.integration.retention_support import kept as kept
from tests.serving import ServerProcess


def test_truncation_over_http(server_process: ServerProcess) -> None:
    port = server_process.port
    with Connection(port) as client:
        client.ask("PUT", "/v1/stream/t", f"Content-Type: {JSON}", body=b"[0,1,2,3]")
        middle = "0000000000000002_0000000000000002"

        done = client.ask("POST", f"/v1/stream/t?truncate&before={middle}")

        assert done.status == 204
        assert done.headers["stream-first-offset"] == middle
        assert done.headers["stream-next-offset"] == "0000000000000004_0000000000000004"
        head = client.ask("HEAD", "/v1/stream/t")
        assert head.headers["stream-first-offset"] == middle
        for question in ("", "?offset=-1", f"?offset={middle}"):
            assert client.ask("GET", f"/v1/stream/t{question}").body == b"[2,3]"
        gone = client.ask("GET", "/v1/stream/t?offset=0000000000000001_0000000000000001")
        assert gone.status == 410
        assert code_of(gone) == "offset_truncated"
        assert gone.headers["stream-first-offset"] == middle
        zero = client.ask("GET", "/v1/stream/t?offset=0000000000000000_0000000000000000")
        assert zero.status == 410
        polled = client.ask("GET", "/v1/stream/t?offset=-1&live=long-poll")
        assert polled.body == b"[2,3]"
        assert client.ask("POST", "/v1/stream/t?truncate&before=now").status == 204
        assert client.ask("GET", "/v1/stream/t?offset=-1").body == b"[]"


@pytest.mark.parametrize(
    ("query", "body", "status", "code"),
    [
        ("truncate", b"", 400, "before_missing"),
        ("truncate&before=", b"", 400, "offset_invalid"),
        ("truncate&before=7", b"", 400, "offset_invalid"),
        ("truncate&before=0000000000000009_0000000000000009", b"", 400, "offset_invalid"),
        ("truncate&before=0000000000000001_0000000000000002", b"", 400, "offset_invalid"),
        ("truncate&before=now&before=-1", b"", 400, "query_repeated"),
        ("truncate=perhaps&before=now", b"", 400, "truncate_invalid"),
        ("truncate&before=now", b"[1]", 400, "body_unexpected"),
    ],
)
def test_a_truncation_that_is_not_understood_is_refused(
    server_process: ServerProcess, query: str, body: bytes, status: int, code: str
) -> None:
    port = server_process.port
    ask(port, "PUT", "/v1/stream/refusals", f"Content-Type: {JSON}", body=b'["a","b"]')

    reply = ask(port, "POST", f"/v1/stream/refusals?{query}", f"Content-Type: {JSON}", body=body)

    assert (reply.status, code_of(reply)) == (status, code)
    assert ask(port, "GET", "/v1/stream/refusals?offset=-1").body == b'["a","b"]'


def test_a_truncation_of_no_stream_is_a_404(server_process: ServerProcess) -> None:
    reply = ask(server_process.port, "POST", "/v1/stream/nowhere?truncate&before=now")

    assert (reply.status, code_of(reply)) == (404, "stream_not_found")


def test_another_query_on_an_append_means_nothing(server_process: ServerProcess) -> None:
    port = server_process.port
    ask(port, "PUT", "/v1/stream/q", "Content-Type: text/plain")

    assert (
        ask(port, "POST", "/v1/stream/q?a=b", "Content-Type: text/plain", body=b"x").status == 204
    )


def test_retention_is_part_of_a_streams_configuration(server_process: ServerProcess) -> None:
    port = server_process.port
    bounds = [
        "Stream-Retention-Age: 60",
        "Stream-Retention-Bytes: 1000",
        "Stream-Retention-Messages: 10",
    ]
    kind = "Content-Type: text/plain"

    assert ask(port, "PUT", "/v1/stream/r", kind, *bounds).status == 201
    assert ask(port, "PUT", "/v1/stream/r", kind, *bounds).status == 200
    assert ask(port, "PUT", "/v1/stream/r", kind, *bounds[:2]).status == 409
    assert ask(port, "PUT", "/v1/stream/r", kind).status == 409
    head = ask(port, "HEAD", "/v1/stream/r")
    assert head.headers["stream-retention-age"] == "60"
    assert head.headers["stream-retention-bytes"] == "1000"
    assert head.headers["stream-retention-messages"] == "10"


def test_a_retention_that_there_is_not_is_refused(server_process: ServerProcess) -> None:
    header = "Stream-Retention-Days: 7"

    reply = ask(server_process.port, "PUT", "/v1/stream/misspelt", header)

    assert (reply.status, code_of(reply)) == (400, "retention_invalid")


@pytest.mark.parametrize("name", ["Age", "Bytes", "Messages"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "", "99999999999999999999"])
def test_a_retention_that_is_not_a_number_is_refused(
    server_process: ServerProcess, name: str, value: str
) -> None:
    reply = ask(server_process.port, "PUT", "/v1/stream/bad", f"Stream-Retention-{name}: {value}")

    assert (reply.status, code_of(reply)) == (400, "retention_invalid")


def test_policies_of_the_config_file_are_applied(tmp_path: Path) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(
        "[store]\nsweep_interval_ms = 10\nretention_interval_ms = 10\n"
        '[[retention]]\nmatch = "logs/**"\nmax_messages = 2\n'
    )
    with ServerProcess(tmp_path / "data", arguments=["--config", str(config)]) as server:
        ask(server.port, "PUT", "/v1/stream/logs/a", f"Content-Type: {JSON}")
        for number in range(5):
            body = b"[%d]" % number
            ask(server.port, "POST", "/v1/stream/logs/a", f"Content-Type: {JSON}", body=body)
        with Connection(server.port) as client:
            while client.ask("GET", "/v1/stream/logs/a").body != b"[3,4]":
                pass
    assert check(tmp_path / "data").findings == []


async def test_what_is_a_claim_by_the_settings_of_auth_is_never_forgotten(tmp_path: Path) -> None:
    store = SqliteSettings(
        folder=tmp_path / "data",
        sweep_interval_ms=10,
        retention_interval_ms=10,
        producer_retention_s=1,
        kept_producer_globs=("row:*",),
    )
    settings = ServerSettings(auth=AuthSettings(claim_globs=("job:*",)))
    async with TestServer(store, settings=settings) as server:
        known = await asyncio.to_thread(_kept_of_three, server.port)
    assert known == {"job:1", "row:1"}


def _kept_of_three(port: int) -> set[str]:
    """The producers that are left when one of three was forgotten."""
    known = {"job:1", "row:1", "task:1"}
    with Connection(port) as client:
        client.ask("PUT", "/v1/stream/s", f"Content-Type: {JSON}")
        for name in known:
            producer = (f"Producer-Id: {name}", "Producer-Epoch: 0", "Producer-Seq: 0")
            kind = f"Content-Type: {JSON}"
            reply = client.ask("POST", "/v1/stream/s", kind, *producer, body=b"1")
            assert reply.status in (200, 204)
        while len(known) == 3:
            found = json.loads(client.ask("GET", "/v1/producers").body)
            known = {producer["id"] for producer in found["producers"]}
    return known


# Faults


def test_the_upkeep_of_a_stopped_piece_is_all_or_nothing(tmp_path: Path) -> None:
    """A process killed between the pieces of a purge goes on with it after a restart."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from fencepost.store.maintain import purge as purges, retention as keeping\n"
        "from tests.integration.retention_support import Kept, numbers, JSON, Offset\n"
        "keeping.ROWS_PER_STEP_MAX = 3\n"
        "left = int(sys.argv[2])\n"
        "drop = purges.drop\n"
        "def dying(*arguments):\n"
        "    global left\n"
        "    drop(*arguments)\n"
        "    left -= 1\n"
        "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "purges.drop = dying\n"
        "async def main():\n"
        "    kept = Kept(Path(sys.argv[1]))\n"
        "    await kept.made('s', JSON)\n"
        "    await numbers(kept, 's', 20)\n"
        "    await kept.truncate('s', Offset(11, 12))\n"
        "    await kept.purge_all()\n"
        "asyncio.run(main())\n"
    )
    for pieces in (1, 2, 3, 4):
        folder = tmp_path / f"data-{pieces}"

        ended = subprocess.run(
            [sys.executable, "-c", script, str(folder), str(pieces)],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            timeout=60,
        )

        assert ended.returncode == -signal.SIGKILL
        report = check(folder)
        assert report.findings == []
        # The piece under way when it was killed is still there as a whole.
        assert report.counts["messages"] == 20 - 3 * (pieces - 1)
