"""What the numbers were measured on: cores, versions, the file system and the raw disk.

A rate of durable appends means little without the rate at which this disk can sync, so that
line stands beside the results of every run.
"""

import os
import platform
import sqlite3
import subprocess
import time
from importlib import metadata
from pathlib import Path

SYNC_BYTES = 4096


def facts(folder: Path) -> dict[str, str | int | float]:
    """The machine and the versions that took part, with the file system `folder` is on."""
    return {
        "cores": os.cpu_count() or 0,
        "cpu": _cpu_model(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        # Other work on the machine makes every number worse: this tells whether there was some.
        "load_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": _sqlite_version(),
        "node": _output("node", "--version"),
        "compiler": _output("cc", "--version"),
        "filesystem": _output("stat", "-f", "-c", "%T", str(folder)),
    }


def syncs_per_second(folder: Path, *, seconds: float) -> float:
    """How often a second this disk makes 4 KiB at the end of a growing file durable."""
    path = folder / "sync-probe"
    block = b"\0" * SYNC_BYTES
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        started = time.perf_counter()
        count = 0
        while (elapsed := time.perf_counter() - started) < seconds:
            os.write(descriptor, block)
            os.fsync(descriptor)
            count += 1
        return count / elapsed
    finally:
        os.close(descriptor)
        path.unlink()


def resident_mb(pid: int) -> float:
    """Memory of the process that is in RAM now, in MB."""
    return _status_kib(pid, "VmRSS") * 1024 / 1e6


def peak_resident_mb(pid: int) -> float:
    """The most memory that the process ever had in RAM, in MB."""
    return _status_kib(pid, "VmHWM") * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    """Processor time of the process and all its threads since it started."""
    # The command name may hold spaces, so fields are counted after its closing bracket.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def folder_mb(folder: Path) -> float:
    """What the files below `folder` occupy on disk, in MB."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file()) / 1e6


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _sqlite_version() -> str:
    # The server writes through apsw, which carries an SQLite of its own.
    try:
        return metadata.version("apsw") + " (apsw)"
    except metadata.PackageNotFoundError:
        return sqlite3.sqlite_version


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return "missing"
    return done.stdout.partition("\n")[0].strip()


def processor_s(pids: list[int]) -> dict[int, float]:
    """Processor seconds of processes and all their threads, to the nanosecond."""
    return {
        pid: sum(
            int((task / "schedstat").read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
        for pid in pids
    }
