"""The lock files pin everything by hash, and name no host: they work behind any mirror."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"^(?P<package>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>\S+)", re.MULTILINE)


@pytest.mark.parametrize(
    "lock",
    [
        "requirements.lock",
        "requirements-demo.lock",
        "requirements-dev.lock",
        "tests/package-lock.json",
    ],
)
def test_a_lock_file_names_no_host(lock: str) -> None:
    naming = [line for line in (ROOT / lock).read_text().splitlines() if "://" in line]

    assert naming == []


@pytest.mark.parametrize(
    "lock", ["requirements.lock", "requirements-demo.lock", "requirements-dev.lock"]
)
def test_every_pinned_python_package_has_a_hash(lock: str) -> None:
    lines = (ROOT / lock).read_text().splitlines()
    after_pins = {
        line: lines[number + 1] for number, line in enumerate(lines) if PINNED.match(line)
    }

    assert after_pins
    assert [pin for pin, after in after_pins.items() if "--hash=sha256:" not in after] == []


def test_every_locked_npm_package_has_a_hash() -> None:
    packages = json.loads((ROOT / "tests/package-lock.json").read_text())["packages"]

    assert [name for name, entry in packages.items() if name and "integrity" not in entry] == []


def test_what_runs_and_what_is_tested_are_the_same_versions() -> None:
    run, demo, test = (
        {found["package"]: found["version"] for found in PINNED.finditer((ROOT / lock).read_text())}
        for lock in ("requirements.lock", "requirements-demo.lock", "requirements-dev.lock")
    )

    assert run.items() <= demo.items()
    assert demo.items() <= test.items()
