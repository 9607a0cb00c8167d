"""A real `fencepost serve` process for tests to talk to, stop, kill and start again.

Nothing here knows the server's insides: it starts the program as a user does, reads the one line
that says where it listens, and sends signals. A restart keeps the data and the port, so that a
client which held the old address finds the new process there.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

READY_LINE = re.compile(r"listening on (https?://\S+?:(\d+))")

# Generous: the machine may be running the rest of the tests beside it.
START_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 30.0
OUTPUT_LINES_MAX = 400


class ServerProcess:
    """One server on a data folder, or on the database at the address `store`; a context manager
    that leaves no process behind.

    `arguments` follow `serve` on the command line, `environment` is added to ours.
    """

    ready_line = READY_LINE

    def __init__(
        self,
        data: Path = Path(),
        *,
        store: str = "",
        port: int = 0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.data = data
        self.store = store
        self.port = port
        self.arguments = tuple(arguments)
        self.environment = dict(environment or {})
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        self._output: _Output | None = None

    @property
    def pid(self) -> int:
        """The process that is running now."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and not ended by us since."""
        return self._process is not None

    @property
    def output(self) -> str:
        """What the newest process has printed so far, logs included, the last lines of it."""
        return self._output.text() if self._output else ""

    def start(self) -> Self:
        """Start, and return once the server says that it is ready."""
        assert self._process is None, "the server is running already"
        process = subprocess.Popen(
            self._command(),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        self._process = process
        self._output = _Output(process.stdout, self.ready_line)
        address = self._output.address(START_SECONDS_MAX)
        if address is None:
            self.kill()
            raise AssertionError(f"the server did not become ready; it said:\n{self.output}")
        self.url, self.port = address
        return self

    def stop(self) -> int:
        """Ask the server to finish (SIGTERM), and return its exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """End the server without a chance to finish anything (SIGKILL)."""
        return self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """Start again after `stop` or `kill`, on the same data and the same port."""
        return self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        code = self.stop()
        if error is None:
            assert code == 0, f"the server left with {code} after SIGTERM; it said:\n{self.output}"

    def _command(self) -> list[str]:
        where = ("--store", self.store) if self.store else ("--data", str(self.data))
        return [
            *(sys.executable, "-m", "fencepost", "serve"),
            *("--port", str(self.port), *where),
            *self.arguments,
        ]

    def wait(self) -> int:
        """Wait until the process has ended by itself, and return its exit code."""
        return self._end(None)

    def _end(self, how: signal.Signals | None) -> int:
        process, output = self._process, self._output
        assert process is not None, "the server is not running"
        assert output is not None
        if how is not None:
            process.send_signal(how)
        try:
            return process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(
                f"the server did not leave within {STOP_SECONDS_MAX} s of {how and how.name};"
                f" it said:\n{output.text()}"
            ) from None
        finally:
            output.close()
            self._process = None


class _Output:
    """Reads what a process prints, on a thread, so that a full pipe never blocks the process."""

    def __init__(self, pipe: IO[str], ready_line: re.Pattern[str]) -> None:
        self._pipe = pipe
        self._ready_line = ready_line
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self._address: tuple[str, int] | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True, name="server-output")
        self._thread.start()

    def address(self, seconds_max: float) -> tuple[str, int] | None:
        """Where the server listens, or None when it ended or stayed silent for too long."""
        self._known.wait(seconds_max)
        return self._address

    def text(self) -> str:
        return "".join(list(self._lines))

    def close(self) -> None:
        self._thread.join()
        self._pipe.close()

    def _read(self) -> None:
        for line in self._pipe:
            self._lines.append(line)
            if self._address is None and (found := self._ready_line.search(line)):
                self._address = found[1], int(found[2] or 0)
                self._known.set()
        self._known.set()
