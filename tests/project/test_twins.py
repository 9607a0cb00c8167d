"""The sync classes are what `just twins` makes of the async ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TWINS = ROOT / "tools" / "twins.py"


def test_every_generated_module_is_what_the_script_generates_now() -> None:
    checked = subprocess.run(
        [sys.executable, TWINS, "--check"], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stderr


def test_generated_modules_name_their_source_in_the_first_line() -> None:
    generated = [
        *ROOT.glob("src/fencepost/*/sync/*.py"),
        *ROOT.glob("src/fencepost/**/state/sync.py"),
    ]

    assert len(generated) >= 10
    for path in generated:
        first = path.read_text().partition("\n")[0]
        source = first.removeprefix("# Generated from ").partition(" by `just twins`")[0]
        assert (ROOT / source).is_file(), first
