"""The servers under test, each started as a real process and always stopped again.

A subject is a command that prints one line with its address when it is ready. Every
measurement gets a fresh process on a fresh folder, so that no line inherits the heap, the
page cache of a database or the background work of the line before.
"""

import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.errors import BenchmarkError
from benchmarks.generator import WORK, compile_generator

HERE = Path(__file__).parent
READY = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
INSTALL_SECONDS_MAX = 300
RUST_VERSION = "0.1.5"
RUST_ROOT = WORK / f"rust-{RUST_VERSION}"
RUST_PROGRAM = "durable-streams-server"
BUILD_SECONDS_MAX = 1_800


@dataclass(frozen=True)
class Subject:
    """A server that can be measured."""

    name: str
    title: str
    command: Callable[[Path], list[str]]
    durable: bool
    promise: str = ""
    """What an answer of it says, for those who compare."""


@dataclass
class Running:
    """A started server: where it listens, and how long it took to say so."""

    process: subprocess.Popen[str]
    port: int
    ready_seconds: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, how: signal.Signals = signal.SIGTERM) -> float:
        """Send `how` to the server and return the seconds until it was gone."""
        started = time.perf_counter()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        self.process.wait(STOP_SECONDS_MAX)
        return time.perf_counter() - started


@contextlib.contextmanager
def running(
    subject: Subject, data: Path, *, seconds_max: float = READY_SECONDS_MAX
) -> Iterator[Running]:
    """Start `subject` on the folder `data`; whatever happens, its process group ends."""
    data.mkdir(parents=True, exist_ok=True)
    log_path = data.with_name(data.name + ".log")
    started = time.perf_counter()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            subject.command(data),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            cwd=HERE,
        )
    try:
        port = _await_ready(process, seconds_max)
        yield Running(process, port, time.perf_counter() - started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_ready(process: subprocess.Popen[str], seconds_max: float) -> int:
    assert process.stdout is not None
    ports: queue.Queue[int | None] = queue.Queue()
    # The reader goes on after the ready line: a server that prints more must never find its
    # pipe full in the middle of a measurement.
    threading.Thread(target=_drain, args=(process.stdout, ports), daemon=True).start()
    try:
        port = ports.get(timeout=seconds_max)
    except queue.Empty:
        raise BenchmarkError(f"the server was not ready within {seconds_max:.0f} s") from None
    if port is None:
        raise BenchmarkError("the server ended before it was ready")
    return port


def _drain(stdout: IO[str], ports: "queue.Queue[int | None]") -> None:
    with stdout:
        for line in stdout:
            if found := READY.search(line):
                ports.put(int(found[1]))
    ports.put(None)


def last_words(log_path: Path) -> str:
    """The end of what a server wrote to its log, on one line."""
    if not log_path.exists():
        return "none"
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:])[-600:] or "none"


def _ours(data: Path) -> list[str]:
    program = Path(sys.executable).with_name("fencepost")
    if not program.exists():
        raise BenchmarkError("fencepost is not installed beside this Python: call ./test --help")
    return [str(program), "serve", "--port", "0", "--data", str(data)]


def _reference_memory(_data: Path) -> list[str]:
    return [install_reference(), str(HERE / "reference.mjs")]


def _reference_file(data: Path) -> list[str]:
    return [install_reference(), str(HERE / "reference.mjs"), str(data)]


def _rust(data: Path) -> list[str]:
    # It takes no free port by itself, and prints the one that it was told.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    at = ["--host", "127.0.0.1", "--port", str(port), "--data-dir", str(data)]
    return [str(install_rust()), *at, "--durability", "wal"]


def _responder(_data: Path) -> list[str]:
    return [str(compile_generator()), "respond", "--seconds", "600"]


def install_reference() -> str:
    """Install the pinned reference server if it is not there yet; returns the path of node."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise BenchmarkError("The reference server needs Node.js: apt-get install -y nodejs npm")
    installed = HERE / "node_modules" / ".package-lock.json"
    lock = HERE / "package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return node
    done = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"npm could not install the reference server:\n{done.stderr}")
    installed.touch()
    return node


def can_build_rust() -> bool:
    """Whether the Rust server is there, or cargo is, which builds it."""
    return (RUST_ROOT / "bin" / RUST_PROGRAM).exists() or shutil.which("cargo") is not None


def install_rust() -> Path:
    """Build the pinned Rust server if it is not there yet; returns its path."""
    program = RUST_ROOT / "bin" / RUST_PROGRAM
    if program.exists():
        return program
    cargo = shutil.which("cargo")
    if cargo is None:
        raise BenchmarkError("The Rust server needs cargo: apt-get install -y cargo")
    package = ["durable-streams", "--version", RUST_VERSION, "--locked", "--root", str(RUST_ROOT)]
    done = subprocess.run(
        [cargo, "install", *package],
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS_MAX,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"cargo could not build the Rust server:\n{done.stderr[-2000:]}")
    return program


OURS = Subject(
    "ours",
    "fencepost",
    _ours,
    durable=True,
    promise="message and producer state are synced together: a retry after a crash appends once",
)
REFERENCE = Subject(
    "reference",
    "reference, memory",
    _reference_memory,
    durable=False,
    promise="nothing outlives the process",
)
REFERENCE_FILE = Subject(
    "reference-file",
    "reference, files",
    _reference_file,
    durable=True,
    promise="the message is synced; producer state is written apart from it",
)
RUST = Subject(
    "rust",
    "Rust, wal",
    _rust,
    durable=True,
    promise="the message is synced; producer state is not: a retry after a crash can append twice",
)
CEILING = Subject("ceiling", "generator's ceiling", _responder, durable=False)
SUBJECTS = (OURS, REFERENCE, REFERENCE_FILE, RUST, CEILING)
