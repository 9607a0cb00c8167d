"""A shell for tests of the command line: it runs commands as processes against one server."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

import fencepost
from tests.serving import ServerProcess

WAIT_SECONDS = 30.0
COMMAND = [sys.executable, "-m", "fencepost"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration folder without a file in it: the user's own must not matter."""
    return tmp_path_factory.mktemp("home")


class Shell:
    """Runs commands against one server."""

    def __init__(self, url: str, home: Path) -> None:
        self.environment = {
            **os.environ,
            "FENCEPOST_URL": url,
            "XDG_CONFIG_HOME": str(home),
            "HOME": str(home),
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "",
        }
        self.environment.pop("FENCEPOST_TOKEN", None)
        self.client = fencepost.connect(url)

    def run(
        self, *arguments: str, given: str = "", code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=given,
            capture_output=True,
            env={**self.environment, **environment},
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        return done

    def lines(self, *arguments: str, **more: Any) -> list[Any]:
        """What a command prints as JSON lines."""
        return [json.loads(line) for line in self.run(*arguments, **more).stdout.splitlines()]

    def refusal(self, *arguments: str, **more: Any) -> str:
        """The one sentence of a command that fails, which has nothing else to say."""
        done = self.run(*arguments, **{"code": 1, **more})
        assert done.stdout == ""
        said = done.stderr.splitlines()
        assert len(said) == 1, done.stderr
        assert said[0].startswith("fencepost: ")
        return said[0]

    @contextlib.contextmanager
    def started(self, *arguments: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A command that runs beside the test; what it has not finished is killed."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=self.environment,
            # In the background of a shell Ctrl-C is ignored, and commands would inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            **{**pipes, **more},
        )
        # A command that never says what the test waits for must not hang it.
        guard = threading.Timer(WAIT_SECONDS, process.kill)
        guard.start()
        try:
            yield process
        finally:
            guard.cancel()
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def shell(server_process: ServerProcess, home: Path) -> Iterator[Shell]:
    made = Shell(server_process.url, home)
    yield made
    made.client.close()


def reader_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout
