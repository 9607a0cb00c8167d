"""The benchmark harness works: every measurement is made and every answer in it was right.

Run at its quick scale, as a person would run it. No speed is looked at: a slow machine fails
nothing here, a wrong answer under load does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import measurements
from benchmarks.scale import QUICK
from benchmarks.subjects import RUST

ROOT = Path(__file__).parents[2]
RUN_SECONDS_MAX = 240

# Half a minute on an idle machine, longer when the reference server is still to be installed. A
# soak: the harness promises nothing to users, and `just bench` fails by itself on a wrong answer.
pytestmark = [pytest.mark.timeout(RUN_SECONDS_MAX + 30), pytest.mark.soak]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "report.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=RUN_SECONDS_MAX)
        finally:
            # Not SIGKILL: the harness has servers to stop.
            process.terminate()
    assert process.returncode == 0, said
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_every_measurement_is_made_for_every_subject_it_names(report: dict[str, Any]) -> None:
    made = {(r["case"], r["label"], r["subject"]) for r in report["results"]}

    expected = {
        (m.case, m.label, s.name) for m in measurements(QUICK) for s in m.subjects if s is not RUST
    }
    assert made == expected


def test_no_server_gave_a_wrong_answer_under_load(report: dict[str, Any]) -> None:
    assert [(r["case"], r["label"], r["subject"]) for r in report["results"] if r["problems"]] == []


def test_the_report_compares_us_with_the_reference_of_the_same_run(report: dict[str, Any]) -> None:
    compared = {ratio["case"] for ratio in report["ratios"]}

    # Restarting has no counterpart in a server that keeps its streams in memory; conditions, large
    # commits, the log and lists have none in any.
    ours_alone = {"restart", "conditions", "commit-stalls", "log", "lists"}
    assert compared == {m.case for m in measurements(QUICK)} - ours_alone


def test_the_report_says_what_it_was_measured_on(report: dict[str, Any]) -> None:
    assert report["machine"]["cores"] > 0
    assert report["disk"]["syncs_of_4_kib_per_second"] > 0
