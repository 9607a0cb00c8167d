"""A standalone Spark cluster from the wheel, and drivers on it: processes that can be killed.

A master and two workers, as `spark-class` starts them on any machine. The workers go by two names
of the same host, because Spark runs a speculative copy of a task only on another host.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import pyspark

from fencepost.pipeline.java import find_java

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
START_SECONDS_MAX = 90.0
END_SECONDS_MAX = 30.0
OUTPUT_LINES_MAX = 300
WORKER_HOSTS = ("127.0.0.1", "localhost")


class Process:
    """A process in a group of its own, and what it prints."""

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, pattern: str, seconds_max: float = START_SECONDS_MAX) -> re.Match[str]:
        """The first match in what the process prints."""
        with self._news:
            self._news.wait_for(
                lambda: self._ended or re.search(pattern, self.output), timeout=seconds_max
            )
        found = re.search(pattern, self.output)
        assert found, f"no {pattern!r} within {seconds_max} s; it said:\n{self.output}"
        return found

    def wait(self) -> int:
        """The exit code of a process that ends by itself."""
        code = self._process.wait(START_SECONDS_MAX)
        self._reader.join(END_SECONDS_MAX)
        return code

    def signal(self, how: signal.Signals) -> None:
        """Send a signal to the process and all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, how)

    def kill(self) -> None:
        """End it and its group without a chance to finish anything."""
        self.signal(signal.SIGKILL)
        self._process.wait(END_SECONDS_MAX)
        self._reader.join(END_SECONDS_MAX)

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


class Cluster:
    """A master and two workers; a context manager that leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._master: Process | None = None
        self._workers: list[Process] = []
        self.url = ""

    def __enter__(self) -> Self:
        master = self._start("master.Master", "--host", "127.0.0.1", "--port", "0")
        self._master = master
        self.url = master.wait_for(r"spark://127\.0\.0\.1:\d+")[0]
        for index in range(len(WORKER_HOSTS)):
            self._workers.append(self._worker(index))
        for worker in self._workers:
            worker.wait_for("Successfully registered with master")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (*self._workers, self._master):
            if process is not None:
                process.kill()

    def kill_worker(self, index: int) -> None:
        """End a worker, which takes its executors along, and start it again."""
        self._workers[index].kill()
        self._workers[index] = self._worker(index)

    def kill_executor(self, index: int) -> bool:
        """End an executor of a worker; false when there was none."""
        for pid in children_of(self._workers[index].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _worker(self, index: int) -> Process:
        return self._start(
            "worker.Worker",
            *("--host", WORKER_HOSTS[index], "--cores", "1", "--memory", "1g"),
            *("--work-dir", str(self._folder / f"worker-{index}"), self.url),
        )

    def _start(self, name: str, *arguments: str) -> Process:
        command = [
            str(SPARK_HOME / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{name}",
            *("--webui-port", "0", *arguments),
        ]
        environment = {
            **find_java().environment(),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            # Executors are killed all the time here: that is no reason to give the query up.
            "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
        }
        return Process(command, environment, self._folder)


def children_of(parent: int) -> list[int]:
    """The processes that a process has started."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in listing.stdout.splitlines()]
    return [int(pid) for pid, ppid in pairs if int(ppid) == parent]


PATHS = os.pathsep.join((str(ROOT), str(ROOT / "src")))
"""Where drivers and executors import the modules of the tests from."""


def start_driver(
    job: msgspec.Struct,
    folder: Path,
    module: str = "tests.faults.pipeline_query",
    environment: Mapping[str, str] | None = None,
) -> Process:
    """A driver that runs what the module says until it is killed or fails."""
    command = [sys.executable, "-m", module, msgspec.json.encode(job).decode()]
    given = {
        "PYTHONPATH": PATHS,
        "PYTHONUNBUFFERED": "1",
        "PYSPARK_PYTHON": sys.executable,
        **(environment or {}),
    }
    return Process(command, given, folder)


@contextlib.contextmanager
def killed_at_the_end(start: Callable[[], Process]) -> Iterator[Process]:
    """A process for as long as the `with` lasts."""
    process = start()
    try:
        yield process
    finally:
        process.kill()
