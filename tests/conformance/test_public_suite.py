"""The public black-box suite of the Durable Streams protocol, run against a real server on either
store.

The suite is an npm package; vitest runs it and writes JSON, which is read here so that each of its
tests that fails is named in our own report. How many tests ran is asserted as well: a suite that
finds none of its tests would otherwise pass.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import npm
from tests.engines import engine as engine
from tests.serving import ServerProcess

TESTS_IN_THE_SUITE = 338
SUITE_SECONDS_MAX = 300

# One test of the suite may have to wait for this machine, not only for the server.
ONE_TEST_MS_MAX = 20_000


@dataclass(frozen=True)
class Ran:
    """What one run of the suite came to."""

    passed: int
    failures: list[str]


@pytest.mark.timeout(SUITE_SECONDS_MAX + npm.INSTALL_SECONDS_MAX)
def test_every_test_of_the_public_suite_passes(
    server_process: ServerProcess, tmp_path: Path
) -> None:
    ran = run_suite(server_process.url, report=tmp_path / "report.json")

    assert not ran.failures, f"{len(ran.failures)} failed:\n" + "\n".join(ran.failures)
    assert ran.passed == TESTS_IN_THE_SUITE


def run_suite(url: str, *, report: Path) -> Ran:
    """Run the whole suite against `url`."""
    program = npm.node()
    outcome = subprocess.run(
        [
            *(program, "node_modules/vitest/vitest.mjs", "run", "conformance/suite.test.mjs"),
            *("--reporter=json", f"--outputFile={report}", f"--testTimeout={ONE_TEST_MS_MAX}"),
        ],
        cwd=npm.FOLDER,
        env={**os.environ, "FENCEPOST_BASE_URL": url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_SECONDS_MAX,
        check=False,
    )
    assert report.exists(), f"vitest wrote no report; it said:\n{outcome.stdout}"
    return read_report(json.loads(report.read_text()))


def read_report(report: dict[str, Any]) -> Ran:
    """Count what passed, and describe everything else, a skipped test included."""
    tests = [test for file in report["testResults"] for test in file["assertionResults"]]
    unfinished = [
        f"{file['name']}: {file['message']}" for file in report["testResults"] if file["message"]
    ]
    return Ran(
        passed=sum(test["status"] == "passed" for test in tests),
        failures=unfinished + [describe(test) for test in tests if test["status"] != "passed"],
    )


def describe(test: dict[str, Any]) -> str:
    """One line: how it ended, its name, and the first line of why."""
    why = next(iter(test.get("failureMessages") or []), "").splitlines()
    return f"- {test['status']}: {test['fullName']}" + (f": {why[0]}" if why else "")
