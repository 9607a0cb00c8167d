"""`fencepost pipeline` as a user runs it: what is shown, what programs get, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

import fencepost
from fencepost.cli.pipeline import app
from fencepost.client import state
from fencepost.coordination import TaskClaims
from fencepost.pipeline import tables
from fencepost.pipeline.sweeps import now_ms
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOWHERE = "http://127.0.0.1:9"


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def _lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_an_audit_in_a_process_of_its_own_is_quiet_and_ends_with_0(server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        client.create("cli/sound", messages=[1, 2, 3])
    command = [sys.executable, "-m", "fencepost", "pipeline", "audit", "cli/sound"]

    done = subprocess.run(
        [*command, "--master", "local[2]"],
        env={**os.environ, "FENCEPOST_URL": server.url},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "clean" in done.stdout


@pytest.mark.usefixtures("spark")
def test_an_audit_that_finds_something_shows_it_draws_it_and_ends_with_1(
    server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("cli/doubled", messages=[{"of": {"id": n}} for n in (1, 2, 1)])
    plot, nowhere = tmp_path / "plot.png", tmp_path / "nowhere" / "plot.png"
    command = ("audit", "cli/doubled", "--once", "of.id", "--url", server.url, "--plot")

    result = _run(*command, plot)
    unplotted = _run(*command, nowhere)

    assert (unplotted.exit_code, unplotted.stdout) == (2, result.stdout)
    assert f"cannot be written to {nowhere}" in unplotted.stderr
    assert result.exit_code == 1
    assert "1 defects" in result.stdout
    assert "largest streams" in result.stdout
    assert "message_repeated" in result.stdout
    assert plot.stat().st_size > 1000


def test_an_audit_that_could_not_be_made_ends_with_2() -> None:
    result = _run("audit", "--url", NOWHERE, "--json")

    assert result.exit_code == 2
    assert "cannot reach the server" in json.loads(result.stdout)["error"]


def test_a_table_is_made_resumed_and_measured(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    users = [state.insert("user", f"u{n}", {"name": f"n{n}"}) for n in range(4)]
    with fencepost.connect(server.url) as client:
        client.create("cli/users", messages=users)
    options = ("--type", "user=name string", "--url", server.url, "--json")

    planned = _run("table", "cli/users", tmp_path / "t", *options, "--dry-run")
    made = _run("table", "cli/users", tmp_path / "t", *options)
    again = _run("table", "cli/users", tmp_path / "t", *options, "--vacuum")
    behind = _run("lag", tmp_path / "t", "--url", server.url)

    assert [one["messages"] for one in _lines(planned)] == [4]
    assert [one["messages"] for one in _lines(made)] == [4]
    assert [one.get("messages") for one in _lines(again)] == [0, None]
    assert sorted(row.name for row in tables.read(spark, tmp_path / "t", "user").collect()) == [
        *("n0", "n1", "n2", "n3")
    ]
    assert behind.exit_code == 0
    assert "messages behind" in behind.stdout


def test_sweeps_say_what_they_would_do_and_do_it_only_when_told(
    spark: SparkSession, server: ServerProcess
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("cli/log", messages=[1])
        begun = now_ms(client)
        client.stream("cli/log").append(2)
        while now_ms(client) <= begun + 1000:
            pass  # ages are counted in whole seconds of the server
        claims = TaskClaims(client.create("cli/jobs"), "worker")
        assert claims.claim("job") is not None
        to_server = ("--url", server.url, "--json")
        bounds = ("retention", "cli/log", "--max-age", "0")

        would = _run(*bounds, "--dry-run", *to_server)
        unasked = _run(*bounds, *to_server)
        kept = list(client.stream("cli/log").read())
        dropped = _run(*bounds, "--yes", *to_server)
        stale = _run("reclaim", "cli/jobs", "--timeout", "0", "--dry-run", *to_server)
        taken = _run("reclaim", "cli/jobs", "--timeout", "0", *to_server)

        assert [(one["messages"], one["outcome"]) for one in _lines(would)] == [(2, "would drop")]
        assert unasked.exit_code == 2
        assert kept == [1, 2]
        assert [one["outcome"] for one in _lines(dropped)] == ["dropped"]
        assert list(client.stream("cli/log").read()) == []
        assert [(one["task"], one["outcome"]) for one in _lines(stale)] == [("job", "stale")]
        assert [one["outcome"] for one in _lines(taken)] == ["reclaimed"]


def test_wrong_use_is_said_in_a_sentence(server: ServerProcess, tmp_path: Path) -> None:
    policies = tmp_path / "policies.toml"
    policies.write_text("[[retention]]\nmatch = 'a'\nmax_age = 1\n")

    nothing = _run("retention", "--url", server.url)
    unknown = _run("retention", "--policies", policies, "--url", server.url)
    nameless = _run("table", "a", tmp_path / "t", "--type", "=x int", "--url", server.url)
    nowhere = _run("lag", tmp_path, "--url", server.url)

    for result, said in (
        (nothing, "give a pattern with bounds, or --policies FILE"),
        (unknown, "each is a [[retention]] with match"),
        (nameless, "--type is a type, or type=columns"),
    ):
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert (nowhere.exit_code, "no folder of tables" in nowhere.stderr) == (1, True)


WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
from fencepost.cli.main import main
main()
"""


def test_without_the_extra_a_sentence_says_what_to_install(server: ServerProcess) -> None:
    command = [sys.executable, "-c", WITHOUT_SPARK, "pipeline", "audit", "--url", server.url]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'fencepost[spark]'" in done.stderr
