"""What the tests need from npm, installed once into an ignored folder, exactly as locked.

A machine without node is told what to install: a suite that silently does not run proves nothing.
"""

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NODE_MAJOR_MIN = 20
INSTALL_SECONDS_MAX = 600


def node() -> str:
    """The path of a node program that is new enough; the packages beside it are installed."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.fail(
            f"This test needs node {NODE_MAJOR_MIN} or newer, with npm."
            " Install them (Debian: apt install nodejs npm; macOS: brew install node).",
            pytrace=False,
        )
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.strip().lstrip("v").split(".")[0]) < NODE_MAJOR_MIN:
        pytest.fail(
            f"This test needs node {NODE_MAJOR_MIN} or newer, and {program} is"
            f" {version.stdout.strip()}. Install a newer one (nodejs.org, or brew install node).",
            pytrace=False,
        )
    _install(npm)
    return program


def _install(npm: str) -> None:
    wanted = hashlib.sha256((FOLDER / "package-lock.json").read_bytes()).hexdigest()
    stamp = FOLDER / "node_modules" / ".installed-from"
    with (FOLDER / ".npm.lock").open("w") as mutex:
        # Two test runs at once must not install over each other; the second finds the work done.
        fcntl.flock(mutex, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        # No package of the lock needs its install scripts, so none gets to run one.
        outcome = subprocess.run(
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS_MAX,
            check=False,
        )
        if outcome.returncode != 0:
            pytest.fail(
                "npm could not install the packages of tests/package-lock.json:\n"
                f"{outcome.stdout}{outcome.stderr}",
                pytrace=False,
            )
        stamp.write_text(wanted)
