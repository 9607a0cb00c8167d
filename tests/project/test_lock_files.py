"""The lock files pin everything by hash, and name no host: they work behind any mirror."""

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = (
    "requirements.lock",
    "requirements-postgres.lock",
    "requirements-demo.lock",
    "requirements-dev.lock",
)
"""Each holds what the one before it holds, and more."""
PINNED = re.compile(r"^(?P<package>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>\S+)", re.MULTILINE)


@pytest.mark.parametrize(
    "lock",
    [
        *LOCKS,
        "tests/package-lock.json",
    ],
)
def test_a_lock_file_names_no_host(lock: str) -> None:
    naming = [line for line in (ROOT / lock).read_text().splitlines() if "://" in line]

    assert naming == []


@pytest.mark.parametrize("lock", LOCKS)
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
    pins = [
        {found["package"]: found["version"] for found in PINNED.finditer((ROOT / lock).read_text())}
        for lock in LOCKS
    ]

    for less, more in itertools.pairwise(pins):
        assert less.items() <= more.items()


@pytest.mark.parametrize(
    ("arguments", "environment", "needed"),
    [
        (["demo"], {}, "demo"),
        (["pipeline", "table"], {}, "demo"),
        (["serve"], {}, "run"),
        (["append", "notes", "see postgresql://db"], {}, "run"),
        (["serve", "--store", "postgresql://db/fencepost"], {}, "postgres"),
        (["serve", "--store=postgres://db/fencepost"], {}, "postgres"),
        (["migrate", "--dry-run"], {"FENCEPOST_STORE_URL": "postgresql://db/fp"}, "postgres"),
        (["serve", "--config", "with.toml"], {}, "postgres"),
        (["serve", "--config=with.toml"], {}, "postgres"),
        (["serve", "--config", "without.toml"], {}, "run"),
        (["serve", "--config", "absent.toml"], {}, "run"),
    ],
)
def test_run_makes_the_environment_that_its_arguments_need(
    arguments: list[str], environment: dict[str, str], needed: str, tmp_path: Path
) -> None:
    (tmp_path / "with.toml").write_text('[store]\nurl = "postgresql://db/fencepost"\n')
    (tmp_path / "without.toml").write_text("# url = postgresql://db/fencepost\n[store]\n")
    script = f'set -eu; . "{ROOT}/.ci/environment.sh"; environment_needed "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "run", *arguments],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == needed
