"""Who a batch is written by, and what becomes of it when it comes again: against a real server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import fencepost
from fencepost.pipeline.errors import (
    FencedRunError,
    ForgottenWriterError,
    NewCheckpointError,
    ReplayMismatchError,
)
from tests.pipeline.sink_driver import Driver, LocalDriver, parts_waiting
from tests.pipeline.sink_support import messages, waiting_parts
from tests.serving import ServerProcess


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of runs go where Spark's scratch folder would be."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


def writer_metrics(server: ServerProcess) -> dict[str, float]:
    """What the server has counted of batches that came again."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r"^fencepost_writer_(replays|mismatches)_total (\S+)$", text, re.M)
    return {kind: float(count) for kind, count in found}


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream of the test's own."""
    return f"sink/{request.node.name[:80]}"


def test_partitions_are_published_together_and_in_their_order(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    staged = driver.stage(0, ["1", "2"], ["3"], [], ["4"])
    assert messages(server.url, name) == []

    driver.writer().commit(staged[::-1], 0)

    assert messages(server.url, name) == [1, 2, 3, 4]


def test_a_column_sends_rows_to_many_streams_in_one_commit(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    columns = "stream string, value string"
    driver = Driver(server, tmp_path, columns, sinkName=name)

    driver.write(
        0, [(f"{name}/a", "1"), (f"{name}/b", "2"), (f"{name}/a", "3")], [(f"{name}/a", "4")]
    )

    assert messages(server.url, f"{name}/a") == [1, 3, 4]
    assert messages(server.url, f"{name}/b") == [2]


def test_a_batch_that_comes_again_changes_nothing_whatever_its_division(
    server: ServerProcess, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["1", "2"], ["3"])

    again = driver.restarted()
    staged = again.stage(0, ["3"], ["2", "1"])
    again.writer().commit(staged, 0)

    assert messages(server.url, name) == [1, 2, 3]
    assert [written.parts for written in staged] == [[], []], "a known batch is not uploaded"
    assert not caplog.records


def test_a_replay_that_was_planned_before_its_batch_was_published_is_a_duplicate_too(
    server: ServerProcess, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run commits while the second one's tasks are on; then the second commits."""
    first = Driver(server, tmp_path, stream=name)
    first.write(0, ["0"])
    second = first.restarted()
    staged = second.stage(1, ["2", "1"])
    first.write(1, ["1", "2"])

    second.writer().commit(staged, 1)

    assert messages(server.url, name) == [0, 1, 2]
    assert not caplog.records
    assert parts_waiting(server, staged) == [False], "what was uploaded in vain is dropped"


def test_a_batch_that_comes_again_with_other_rows_is_counted_and_warned_of(
    server: ServerProcess, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(server, tmp_path, stream=name, onReplayMismatch="warn")
    driver.write(0, ["1", "2"])
    before = writer_metrics(server)

    driver.restarted().write(0, ["2", "1"])
    driver.restarted().write(0, ["1", "3"])

    assert messages(server.url, name) == [1, 2]
    counted = {kind: count - before[kind] for kind, count in writer_metrics(server).items()}
    assert counted == {"replays": 2, "mismatches": 1}
    [record] = caplog.records
    assert "batch 0 of sink" in record.message
    assert "other rows" in record.message
    assert "mismatch 1 of this run" in record.message


def test_a_batch_that_comes_again_with_other_rows_fails_the_query_if_asked_to(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name, onReplayMismatch="fail")
    driver.write(0, ["1", "2"])

    with pytest.raises(ReplayMismatchError, match="batch 0"):
        driver.restarted().write(0, ["1"])

    assert messages(server.url, name) == [1, 2]


def test_a_driver_that_was_replaced_is_fenced_and_stays_so(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    zombie = Driver(server, tmp_path, stream=name)
    zombie.write(0, ["1"])
    asleep = zombie.stage(1, ["2"])
    replacement = zombie.restarted()
    replacement.write(1, ["2"])

    with pytest.raises(FencedRunError, match=r"another run .* \(epoch 2\): batch 1"):
        zombie.writer().commit(asleep, 1)
    with pytest.raises(FencedRunError):
        zombie.write(2, ["999"])
    replacement.write(2, ["3"])

    assert messages(server.url, name) == [1, 2, 3]


def test_a_deleted_checkpoint_is_refused_before_anything_is_uploaded(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    Driver(server, tmp_path, stream=name).write(4, ["1"])
    fresh = Driver(server, tmp_path, stream=name)

    with pytest.raises(NewCheckpointError, match=r"came to batch 4.*allowNewCheckpoint"):
        fresh.stage(0, ["1"])

    assert messages(server.url, name) == [1]


def test_a_deleted_checkpoint_is_refused_by_the_commit_too(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    """The record was not there yet when the batch was planned."""
    fresh = Driver(server, tmp_path, stream=name)
    staged = fresh.stage(0, ["1"])
    Driver(server, tmp_path, stream=name).write(4, ["2"])

    with pytest.raises(NewCheckpointError, match="came to batch 4"):
        fresh.writer().commit(staged, 0)

    assert messages(server.url, name) == [2]


def test_a_new_checkpoint_takes_over_if_allowed_and_restarts_are_replays_again(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    Driver(server, tmp_path, stream=name).write(4, ["1"])
    fresh = Driver(server, tmp_path, stream=name, allowNewCheckpoint="true")

    fresh.write(0, ["2"])
    fresh.restarted().write(0, ["2"])

    assert messages(server.url, name) == [1, 2]


def test_a_checkpoint_that_is_behind_is_said_so(
    server: ServerProcess, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    for batch in range(3):
        driver.write(batch, [str(batch)])

    restored = driver.restarted()
    for batch in range(1, 4):
        restored.write(batch, [str(batch)])

    assert messages(server.url, name) == [0, 1, 2, 3]
    [record] = caplog.records
    assert "is behind: it goes on with batch 1" in record.message
    assert "published up to batch 2" in record.message


def test_an_empty_batch_moves_the_writer_on(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)

    driver.write(0, [])

    with fencepost.connect(server.url) as client:
        assert client.writer(name).batch == 0
    assert messages(server.url, name) == []


def test_a_run_keeps_one_epoch_over_its_batches(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    for batch in range(3):
        driver.write(batch, ["1"])
    driver.restarted().write(3, ["1"])

    with fencepost.connect(server.url) as client:
        assert client.writer(name).epoch == 2


def test_a_record_removed_under_a_run_fails_it_and_the_next_run_writes(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["1"])
    with fencepost.connect(server.url) as client:
        client.forget_writer(name)

    with pytest.raises(ForgottenWriterError, match="start the query again"):
        driver.write(1, ["2"])
    driver.restarted().write(1, ["2"])

    assert messages(server.url, name) == [1, 2]


def test_a_replay_whose_record_was_removed_meanwhile_is_not_taken_for_an_empty_batch(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["1"])
    again = driver.restarted()
    staged = again.stage(0, ["1"])
    with fencepost.connect(server.url) as client:
        client.forget_writer(name)

    with pytest.raises(ForgottenWriterError, match="nothing of this batch was written"):
        again.writer().commit(staged, 0)
    again.restarted().write(0, ["1"])

    assert messages(server.url, name) == [1, 1], "a deleted writer begins anew"


# The fence: a run takes its epoch before its first task uploads.


def epoch_of(server: ServerProcess, name: str) -> int:
    with fencepost.connect(server.url) as client:
        return client.writer(name).epoch


def test_a_run_takes_its_epoch_before_its_first_upload(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = LocalDriver(server, tmp_path, stream=name)

    staged = driver.stage(0, ["1"])
    assert epoch_of(server, name) == 1
    driver.commit(staged, 0)
    driver.commit(driver.stage(1, ["2"]), 1)

    assert epoch_of(server, name) == 1, "all batches of a run share its epoch"
    assert messages(server.url, name) == [1, 2]


def test_a_driver_that_slept_between_upload_and_commit_loses_to_one_that_has_only_started(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    old = LocalDriver(server, tmp_path, stream=name)
    asleep = old.stage(0, ["1"])
    new = old.restarted()
    planned = new.stage(0, ["1"])

    with pytest.raises(FencedRunError, match=r"epoch 2"):
        old.commit(asleep, 0)
    new.commit(planned, 0)
    new.commit(new.stage(1, ["2"]), 1)

    assert messages(server.url, name) == [1, 2]


def test_a_driver_that_slept_between_its_look_and_its_start_loses_and_the_new_one_lives(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    old = LocalDriver(server, tmp_path, stream=name)
    looked = old.writer()
    new = old.restarted()
    new.commit(new.stage(0, ["1"]), 0)
    waiting = waiting_parts(server.data)

    with pytest.raises(FencedRunError):
        old.stage(0, ["1"], writer=looked)
    new.commit(new.stage(1, ["2"]), 1)

    assert waiting_parts(server.data) == waiting, "the old one uploaded nothing"
    assert messages(server.url, name) == [1, 2]


def test_a_driver_that_slept_between_batches_is_refused_before_it_uploads(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    old = LocalDriver(server, tmp_path, stream=name)
    old.commit(old.stage(0, ["1"]), 0)
    new = old.restarted()
    new.commit(new.stage(1, ["2"]), 1)
    waiting = waiting_parts(server.data)

    with pytest.raises(FencedRunError):
        old.stage(1, ["2"])
    new.commit(new.stage(2, ["3"]), 2)

    assert waiting_parts(server.data) == waiting
    assert messages(server.url, name) == [1, 2, 3]


def test_a_query_that_is_started_again_by_a_driver_that_was_fenced_takes_over(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    old = LocalDriver(server, tmp_path, stream=name)
    old.commit(old.stage(0, ["1"]), 0)
    new = old.restarted()
    new.commit(new.stage(1, ["2"]), 1)

    again = old.rerun()
    again.commit(again.stage(2, ["3"]), 2)

    with pytest.raises(FencedRunError):
        new.commit(new.stage(3, ["4"]), 3)
    assert messages(server.url, name) == [1, 2, 3]


def test_a_query_with_a_checkpoint_elsewhere_loses_to_a_run_that_began_since_it_planned(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    """The query id is not known before the tasks: the first commit takes the epoch."""
    old = Driver(server, tmp_path, stream=name, checkpointLocation="s3a://elsewhere/checkpoint")
    asleep = old.stage(0, ["1"])
    new = old.restarted()
    new.write(0, ["1"])

    with pytest.raises(FencedRunError):
        old.writer().commit(asleep, 0)
    new.write(1, ["2"])

    assert messages(server.url, name) == [1, 2]


def test_a_second_query_under_the_same_name_does_not_end_the_run_of_the_first(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    first = LocalDriver(server, tmp_path / "first", stream=name)
    first.commit(first.stage(0, ["1"]), 0)
    second = LocalDriver(server, tmp_path / "second", stream=name)

    with pytest.raises(NewCheckpointError):
        second.stage(0, ["9"])
    first.commit(first.stage(1, ["2"]), 1)

    assert messages(server.url, name) == [1, 2]
