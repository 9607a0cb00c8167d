"""`./run`, whole: it finds the environment that was made, and becomes the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import fencepost
from tests.serving import ServerProcess

ROOT = Path(__file__).parents[2]


def checkout(folder: Path) -> Path:
    """A checkout whose environment is made already: it is that of the tests."""
    for name in ("run", "pyproject.toml", "requirements-dev.lock"):
        shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "fencepost"):
        (programs / name).symlink_to(Path(sys.executable).parent / name)
    stamp = 'root=$1; . "$root/.ci/environment.sh"; environment_stamp requirements-dev.lock'
    made = subprocess.run(["sh", "-euc", stamp, "sh", folder], capture_output=True, check=True)
    (folder / ".venv/made-for-test").write_bytes(made.stdout)
    return folder


class RunServer(ServerProcess):
    """A server that `./run serve` starts."""

    script: Path

    def _command(self) -> list[str]:
        command = super()._command()
        return [str(self.script), *command[command.index("serve") :]]


def test_run_serves_what_a_client_then_uses(tmp_path: Path) -> None:
    server = RunServer(tmp_path / "data")
    server.script = checkout(tmp_path) / "run"
    with server, fencepost.connect(server.url) as client:
        client.create("orders", messages=[{"n": 1}])

        assert client.stream("orders").read().messages() == [{"n": 1}]


def test_run_hands_its_arguments_on(tmp_path: Path) -> None:
    script = checkout(tmp_path) / "run"

    shown = subprocess.run([script, "serve", "--help"], capture_output=True, text=True, timeout=60)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--port" in shown.stdout
