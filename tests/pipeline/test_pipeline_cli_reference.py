"""docs/reference/pipeline-jobs.md names every command, option, defect and metric; its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main
from typer.core import TyperGroup

import fencepost
from fencepost.cli.pipeline import _show, app
from fencepost.client import state
from fencepost.pipeline.audit import KINDS
from fencepost.pipeline.audit.reports import Report
from fencepost.pipeline.metrics import QueryMetrics
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs/reference/pipeline-jobs.md"
EVERYWHERE = ("--help", "--url", "--token", "--json", "--master", "--spark-log", "--dry-run")


def _section(name: str) -> str:
    found = re.search(rf"^## {name}s?$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S | re.I)
    assert found is not None, name
    return found[1]


def test_every_command_and_option_is_on_the_page() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)

    for name, command in group.commands.items():
        section = _section(name)
        assert f"fencepost pipeline {name}" in (command.help or "")
        for parameter in command.params:
            (first, *_others) = [one for one in parameter.opts if not re.fullmatch("-[a-z]", one)]
            if first not in EVERYWHERE:
                assert f"`{first if first.startswith('-') else first.upper()}`" in section, first


def test_every_kind_of_defect_is_on_the_page_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", _section("audit"), re.M))

    assert {kind: rows.get(kind) for kind in KINDS} == KINDS


def test_every_kind_of_defect_is_shown_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    _show(
        Report(
            selection="**",
            after=-1,
            until=1,
            messages=0,
            streams=0,
            producers=0,
            keys=0,
            pruned=None,
            lists_compared=True,
            defects=dict.fromkeys(KINDS, 1),
            samples=[],
            days=[],
            largest=[],
            by_stream_and_day=[],
            timeline_unit="day",
            timeline=[],
        )
    )

    shown = capsys.readouterr().out
    assert all(kind in shown for kind in KINDS)


def test_every_metric_is_on_the_page() -> None:
    page = PAGE.read_text()

    for metric in QueryMetrics().registry.collect():
        assert metric.name in page


def test_the_python_of_the_page_runs(
    spark: SparkSession,
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with fencepost.connect(server.url) as client:
        client.create("users/eu", messages=[state.insert("user", "a", {"name": "Ann", "age": 3})])
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)

    exec(block.replace("http://localhost:4437", server.url), {})  # noqa: S102  (it is ours)

    assert capsys.readouterr().out == "1 1\n"
