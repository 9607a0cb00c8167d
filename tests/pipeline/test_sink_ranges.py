"""Batches that come again from other positions: an old checkpoint must not lose rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fencepost
from fencepost.cli.pipeline import app
from fencepost.pipeline.checkpoints import batch_range
from fencepost.pipeline.errors import OldCheckpointError, ReplayMismatchError
from fencepost.pipeline.recovery import UnrecoverableError, recovery
from tests.pipeline.sink_driver import Driver, LocalDriver
from tests.pipeline.sink_support import messages
from tests.serving import ServerProcess


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of runs go where Spark's scratch folder would be."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream of the test's own."""
    return f"ranges/{request.node.name[:80]}"


def plan(driver: LocalDriver, batch: int, *offsets: object) -> None:
    """Write down where a batch ends, as Spark does before it runs the batch."""
    folder = driver.folder / "checkpoint" / "offsets"
    folder.mkdir(exist_ok=True)
    lines = ["v1", "{}", *map(json.dumps, offsets)]
    (folder / str(batch)).write_text("\n".join(lines))


def write(driver: LocalDriver, batch: int, until: int, rows: list[str]) -> None:
    plan(driver, batch, {"position": until})
    driver.commit(driver.stage(batch, rows), batch)


def run_three(server: ServerProcess, folder: Path, name: str) -> LocalDriver:
    driver = LocalDriver(server, folder, stream=name)
    write(driver, 0, 10, ["0"])
    write(driver, 1, 20, ["1"])
    write(driver, 2, 30, ["2"])
    return driver


def test_an_older_checkpoint_that_cuts_a_batch_elsewhere_is_refused(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    restored = run_three(server, tmp_path, name).restarted()

    with pytest.raises(OldCheckpointError, match="writer_range_mismatch") as refused:
        write(restored, 1, 40, ["1", "2", "3"])

    assert "batch 1 was published from the positions after 10 up to 20" in str(refused.value)
    assert "cuts it from after 10 up to 40" in str(refused.value)
    assert messages(server.url, name) == [0, 1, 2]


def test_an_older_checkpoint_that_cuts_batches_as_before_goes_on(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    restored = run_three(server, tmp_path, name).restarted()

    write(restored, 1, 20, ["1"])
    write(restored, 2, 30, ["2"])
    write(restored, 3, 40, ["3"])

    assert messages(server.url, name) == [0, 1, 2, 3]


def test_other_rows_from_the_same_positions_are_warned_of_by_default(
    server: ServerProcess, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = run_three(server, tmp_path, name)

    write(driver.restarted(), 2, 30, ["22"])

    [record] = caplog.records
    assert "batch 2 of sink" in record.message
    assert "other rows" in record.message
    assert messages(server.url, name) == [0, 1, 2]


def test_other_rows_fail_the_query_by_default_where_no_range_is_known(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    for batch in range(3):
        driver.write(batch, [str(batch)])

    with pytest.raises(ReplayMismatchError, match=r"batch 1 .*`fencepost pipeline recover`"):
        driver.restarted().write(1, ["1", "2"])

    assert messages(server.url, name) == [0, 1, 2]


def test_a_batch_that_the_server_does_not_know_any_more_is_refused(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = LocalDriver(server, tmp_path, stream=name)
    write(driver, 7, 20, ["7"])

    with pytest.raises(OldCheckpointError, match="writer_history_gone"):
        write(driver.restarted(), 3, 10, ["3"])


def test_the_range_of_a_batch_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    offsets = tmp_path / "offsets"
    offsets.mkdir()
    for batch, lines in enumerate(
        (
            ['{"position": 5}'],
            ['{"position": 9}'],
            ['{"position": 9}', '{"position": 2}'],
            ['{"position": 9}'],
            ['{"logOffset": 9}'],
            ["-"],
            ['{"start": "latest"}'],
            ['{"position": 12}'],
            ['{"position": 11}'],
        )
    ):
        (offsets / str(batch)).write_text("\n".join(["v1", "{}", *lines]))

    found = [batch_range(tmp_path.as_uri(), batch) for batch in range(10)]

    assert found == [
        fencepost.PositionRange(until=5),
        fencepost.PositionRange(after=5, until=9),
        *(None, None, None, None, None),
        fencepost.PositionRange(until=12),
        *(None, None),
    ]
    assert batch_range("s3://bucket/checkpoint", 0) is None
    assert batch_range(None, 0) is None


def test_a_recovery_goes_on_behind_the_last_published_batch(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    run_three(server, tmp_path, name)

    with fencepost.connect(server.url) as client:
        found = recovery(client, name)
    shown = CliRunner().invoke(app, ["recover", name, "--url", server.url])
    listed = CliRunner().invoke(app, ["recover", name, "--url", server.url, "--json"])

    assert (found.batch, found.after, found.until) == (2, 20, 30)
    assert found.source_options == {"startingPosition": "31"}
    assert found.sink_options["allowNewCheckpoint"] == "true"
    assert "the positions after 20 up to 30" in shown.stdout
    assert "startingPosition" in shown.stdout
    assert json.loads(listed.stdout)["source_options"] == {"startingPosition": "31"}


def test_a_recovery_says_when_the_server_cannot_tell(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    Driver(server, tmp_path, stream=name).write(0, ["1"])
    with fencepost.connect(server.url) as client:
        client.open_writer(f"{name}/idle", "q")

        with pytest.raises(UnrecoverableError, match="without the positions"):
            recovery(client, name)
        with pytest.raises(UnrecoverableError, match="has published nothing"):
            recovery(client, f"{name}/idle")
