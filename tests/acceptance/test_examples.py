"""The programs in examples/, run as their first lines say."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
START_SECONDS_MAX = 60


def test_streams_embedded_in_a_web_application_survive_its_restart(tmp_path: Path) -> None:
    url = "/fencepost/v1/stream/orders"
    json = {"content-type": "application/json"}

    with Uvicorn(tmp_path) as host:
        made = host.put(url, headers=json)
        host.post(url, headers=json, content=b'[{"order": 1}]')
        beside = host.get("/")
    with Uvicorn(tmp_path) as host:
        kept = host.get(url)

    assert made.status_code == 201
    assert made.headers["location"] == f"http://{made.request.url.netloc.decode()}{url}"
    assert beside.text.startswith("streams are below")
    assert kept.json() == [{"order": 1}]


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_an_open_live_reader_does_not_hold_up_the_end_of_its_host(
    tmp_path: Path, live: str
) -> None:
    """Events last a minute and long-polls half of one, unless the server ends them."""
    url = "/fencepost/v1/stream/orders"
    with Uvicorn(tmp_path) as host:
        host.put(url, headers={"content-type": "application/json"})
        reader = httpx.Client(base_url=host.base_url, timeout=START_SECONDS_MAX)
        threading.Thread(target=reader.get, args=(f"{url}?offset=-1&live={live}",)).start()
        while "fencepost_waiters 1.0" not in host.get("/fencepost/metrics").text:
            pass
        asked = time.monotonic()
    took = time.monotonic() - asked
    reader.close()

    assert took < 20


def test_every_example_is_tested() -> None:
    beside = Path(__file__).parents[1] / "pipeline" / "test_documentation.py"
    tested = Path(__file__).read_text() + beside.read_text()

    untested = [
        file.name for file in EXAMPLES.glob("*.py") if f"examples.{file.stem}:" not in tested
    ]

    assert untested == []


class Uvicorn:
    """`uvicorn examples.embedded:app`, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> httpx.Client:
        command = [sys.executable, "-m", "uvicorn", "--port", "0", "examples.embedded:app"]
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
        self._process = subprocess.Popen(
            command, cwd=self._folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"running on (http://\S+)", line)
            if found:
                self._client = httpx.Client(base_url=found[1], timeout=START_SECONDS_MAX)
                return self._client
        raise AssertionError("uvicorn did not start")

    def __exit__(self, *exc: object) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stderr is not None
        rest = self._process.stderr.read()
        self._process.stderr.close()
        # Uvicorn ends itself by the signal that it was sent, once it has shut down cleanly.
        assert self._process.wait(START_SECONDS_MAX) in (0, -signal.SIGTERM), rest
        assert "Application shutdown complete" in rest, rest
