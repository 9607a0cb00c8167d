"""A user's example type-checks in strict mode, and runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.serving import ServerProcess

EXAMPLE = Path(__file__).with_name("example_client.py")
SOURCES = Path(__file__).parents[2] / "src"


def test_mypy_in_strict_mode_accepts_a_users_example(tmp_path: Path) -> None:
    # Without our own configuration, as a user would call it.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-incremental"),
            *("--follow-imports=silent", str(EXAMPLE)),
        ],
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(SOURCES), "PATH": ""},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_users_example_runs(server_process: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), server_process.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
