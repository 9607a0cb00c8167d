"""The public npm client (`@durable-streams/client`) against a real server.

client.mjs does what a user of that client would write, and prints what it saw.
"""

import json
import os
import subprocess
from typing import Any

import pytest

from tests import npm
from tests.serving import ServerProcess

pytestmark = pytest.mark.timeout(npm.INSTALL_SECONDS_MAX + 120)


def run_client(server: ServerProcess, *scenario: str) -> Any:
    """What the client saw in one scenario of client.mjs."""
    outcome = subprocess.run(
        [npm.node(), "interop/client.mjs", *scenario],
        cwd=npm.FOLDER,
        env={**os.environ, "FENCEPOST_BASE_URL": server.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def test_it_creates_appends_reads_and_closes_a_stream(server_process: ServerProcess) -> None:
    saw = run_client(server_process, "writing")

    assert saw == {
        "items": [{"event": "click"}, {"event": "scroll"}, {"event": "leave"}],
        "refused": {"status": 409, "streamClosed": "true"},
        "headSaysClosed": True,
        "offsetsAgree": True,
    }


@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_it_reads_live_until_the_stream_is_closed(server_process: ServerProcess, live: str) -> None:
    saw = run_client(server_process, "live", live)

    assert saw == {"items": [{"number": number} for number in range(4)], "streamClosed": True}


def test_its_pipelined_producer_writes_everything_once_and_in_order(
    server_process: ServerProcess,
) -> None:
    saw = run_client(server_process, "producing")

    assert saw == {"items": list(range(200)), "errors": []}
