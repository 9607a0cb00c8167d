"""The load generator seen from Python: compile load.c once, run it, return its JSON.

Each run is a process of its own with a deadline. While it works it says how far it is on
stderr, which feeds the progress bar of the long set-ups.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError

SOURCE = Path(__file__).parent / "load.c"
WORK = Path(__file__).parent / ".work"
COMPILE_SECONDS_MAX = 120

Progress = Callable[[int], None]


def compile_generator() -> Path:
    """The path of the compiled generator, compiled now if its source is newer."""
    binary = WORK / "load"
    if binary.exists() and binary.stat().st_mtime > SOURCE.stat().st_mtime:
        return binary
    compiler = shutil.which("cc")
    if compiler is None:
        raise BenchmarkError("The load generator needs a C compiler: apt-get install -y gcc")
    WORK.mkdir(exist_ok=True)
    fresh = binary.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(fresh), str(SOURCE)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"load.c did not compile (it needs Linux with epoll):\n{done.stderr}")
    fresh.rename(binary)
    return binary


def run(
    mode: str, *, seconds_max: float, progress: Progress | None = None, **options: object
) -> dict[str, Any]:
    """Run one mode of the generator to its end and return what it measured."""
    command = [str(compile_generator()), mode]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = threading.Timer(seconds_max, _kill_group, [process])
    deadline.start()
    said: list[str] = []
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            word, _, rest = line.partition(" ")
            if word != "progress":
                said.append(line.strip())
            elif progress is not None:
                progress(int(rest))
        # The report is one short line: it fits the pipe, so reading it last cannot block.
        report = process.stdout.read()
        code = process.wait()
    finally:
        deadline.cancel()
        _kill_group(process)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if code == -signal.SIGKILL:
        raise BenchmarkError(f"the generator was stopped after {seconds_max:.0f} s")
    if code:
        raise BenchmarkError("; ".join(said) or f"the generator ended with {code}")
    measured: dict[str, Any] = json.loads(report)
    return measured


def _kill_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
