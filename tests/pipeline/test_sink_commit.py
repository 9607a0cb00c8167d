"""Who a batch is written by, and what becomes of it when it comes again: against a real server.

Tasks and the driver's side are called here as Spark calls them, without Spark around them; that
Spark does call them so is shown in `test_sink_queries.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pytest

import fencepost
from fencepost.pipeline import sink_commit
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.sink import BatchWriter, Sink, StreamWriter, batch_writer, stream_writer
from fencepost.pipeline.sink_commit import TaskWritten
from fencepost.pipeline.sink_errors import (
    CommitTooLargeError,
    FencedRunError,
    ForgottenWriterError,
    MissingStreamError,
    NewCheckpointError,
    ReplayMismatchError,
    RowError,
    SinkError,
    SinkNameUsedError,
    StagingExpiredError,
)
from fencepost.pipeline.sink_identity import Place
from tests.integration.auth_support import principal, token
from tests.pipeline.sink_support import messages, schema_of, waiting_parts
from tests.serving import ServerProcess


class Driver:
    """A driver of a query: starts runs, plans batches, commits them, as Spark does."""

    def __init__(
        self, server: ServerProcess, folder: Path, columns: str = "value string", **options: str
    ) -> None:
        self.url = server.url
        self.folder = folder
        self.columns = columns
        self.options = {"url": server.url, "autoCreate": "true", **options}
        self.query = str(uuid4())
        self.run = str(uuid4())

    def restarted(self) -> Driver:
        """The same query in a new process: another run, another scratch folder."""
        other = Driver.__new__(Driver)
        other.__dict__.update(self.__dict__)
        other.run = str(uuid4())
        return other

    def writer(self) -> StreamWriter:
        return stream_writer(self.options, schema_of(self.columns), False)

    def stage(self, batch: int, *partitions: list[Any], writer: Any = None) -> list[TaskWritten]:
        # What goes to executors is pickled on the way there, and so is what comes back.
        sent: Sink = pickle.loads(pickle.dumps((writer or self.writer())._sink))  # noqa: S301
        return [
            pickle.loads(pickle.dumps(sent.stage(iter(rows_of(rows)), self.place(index, batch))))  # noqa: S301
            for index, rows in enumerate(partitions)
        ]

    def place(self, partition: int, batch: int) -> Place:
        return Place(partition, 0, self.query, batch, self.run)

    def write(self, batch: int, *partitions: list[Any]) -> None:
        self.writer().commit(list(self.stage(batch, *partitions)), batch)


def rows_of(rows: list[Any]) -> Iterator[pa.RecordBatch]:
    """Texts are values; pairs are a stream and a value."""
    if rows and isinstance(rows[0], tuple):
        streams, values = zip(*rows, strict=True)
        yield pa.RecordBatch.from_pydict({"stream": list(streams), "value": list(values)})
    else:
        yield pa.RecordBatch.from_pydict({"value": pa.array(rows, pa.string())})


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of runs go where Spark's scratch folder would be."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream of the test's own."""
    return f"sink/{request.node.name[:80]}"


def parts_waiting(server: ServerProcess, parts: list[TaskWritten]) -> list[bool]:
    """Whether each part is still there: dropping it tells."""
    found = []
    with fencepost.connect(server.url) as client:
        for written in parts:
            for part in written.parts:
                try:
                    client.unstage(part.txn, part.part)
                    found.append(True)
                except fencepost.PartError:
                    found.append(False)
    return found


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
    second = first.restarted()
    staged = second.stage(0, ["2", "1"])
    first.write(0, ["1", "2"])

    second.writer().commit(staged, 0)

    assert messages(server.url, name) == [1, 2]
    assert not caplog.records
    assert parts_waiting(server, staged) == [False], "what was uploaded in vain is dropped"


def test_a_batch_that_comes_again_with_other_rows_is_counted_and_warned_of(
    server: ServerProcess, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["1", "2"])

    driver.restarted().write(0, ["1", "3"])

    assert messages(server.url, name) == [1, 2]
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

    with pytest.raises(ForgottenWriterError, match="the batch is written"):
        again.writer().commit(staged, 0)
    again.restarted().write(0, ["1"])

    assert messages(server.url, name) == [1, 1], "whoever forgets a writer takes this upon them"


def test_abort_drops_what_no_commit_used_and_keeps_what_one_did(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    used = driver.stage(0, ["1"])
    driver.writer().commit(used, 0)
    unused = driver.stage(1, ["2"], ["3"])

    driver.writer().abort([*used, None], 0)
    driver.writer().abort([None, unused[1]], 1)

    assert messages(server.url, name) == [1]
    assert parts_waiting(server, unused) == [True, False]


def test_an_expired_upload_fails_the_batch_and_leaves_everything_as_it_was(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    driver.write(0, ["1"])
    staged = driver.stage(1, ["2"], ["3"])
    # To the commit it is the same whether time or somebody dropped the part.
    assert parts_waiting(server, staged[1:]) == [True]

    with pytest.raises(StagingExpiredError, match=r"staging_ttl_s.*maxRowsPerTrigger"):
        driver.writer().commit(staged, 1)
    assert messages(server.url, name) == [1]
    driver.restarted().write(1, ["2"], ["3"])

    assert messages(server.url, name) == [1, 2, 3]


def test_a_replay_is_known_although_its_parts_are_gone(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name)
    again = driver.restarted()
    staged = again.stage(0, ["1"])
    driver.write(0, ["1"])
    assert parts_waiting(server, staged) == [True]

    again.writer().commit(staged, 0)

    assert messages(server.url, name) == [1]


def test_a_task_that_fails_drops_its_own_uploads(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    waiting = waiting_parts(server.data)
    driver = Driver(server, tmp_path, stream=name, chunkBytes="1024")

    with pytest.raises(RowError, match="row 200 of partition 0"):
        driver.stage(0, [*(f'"{"x" * 100}"' for _ in range(200)), "no"])

    assert waiting_parts(server.data) == waiting


@pytest.mark.parametrize("bound", ["COMMIT_STREAMS_MAX", "COMMIT_PARTS_MAX", "COMMIT_BYTES_MAX"])
def test_a_batch_beyond_a_bound_of_commits_is_refused_by_its_name(
    server: ServerProcess, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(sink_commit, bound, 1)
    driver = Driver(server, tmp_path, "stream string, value string", sinkName=name)
    staged = driver.stage(0, [(f"{name}/a", "1"), (f"{name}/b", "22")])

    with pytest.raises(CommitTooLargeError, match=f"{bound}.*maxRowsPerTrigger"):
        driver.writer().commit(staged, 0)

    assert messages(server.url, f"{name}/a") == []


def test_a_missing_stream_is_refused_before_anything_is_uploaded(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name, autoCreate="false")

    with pytest.raises(MissingStreamError, match="autoCreate"):
        driver.writer()


def test_a_missing_stream_of_a_column_is_named_and_nothing_is_written(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    columns = "stream string, value string"
    driver = Driver(server, tmp_path, columns, sinkName=name, autoCreate="false")
    with fencepost.connect(server.url) as client:
        client.create(f"{name}/a")

    with pytest.raises(MissingStreamError, match=f"{name}/b"):
        driver.write(0, [(f"{name}/a", "1"), (f"{name}/b", "2")])

    assert messages(server.url, f"{name}/a") == []


def test_a_closed_stream_is_named(server: ServerProcess, tmp_path: Path, name: str) -> None:
    with fencepost.connect(server.url) as client:
        client.create(name, closed=True)

    with pytest.raises(SinkError, match=f"{name}.*stream_closed"):
        Driver(server, tmp_path, stream=name).write(0, ["1"])


def test_a_byte_stream_takes_a_message_for_each_row(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    driver = Driver(server, tmp_path, stream=name, contentType="text/plain")

    driver.write(0, ["one\n", "two\n"], ["three\n"])

    with fencepost.connect(server.url) as client:
        assert "".join(client.stream(name).read()) == "one\ntwo\nthree\n"
        assert client.stream(name, content_type="text/plain").head().content_type == "text/plain"


class Job:
    """A batch write, as Spark makes it: in a plain job, or inside foreachBatch of a query."""

    def __init__(self, server: ServerProcess, query: Driver | None = None, **options: str) -> None:
        self.options = {"url": server.url, "autoCreate": "true", **options}
        self.query = query

    def save(self, rows: list[str], batch: int = 0) -> None:
        writer: BatchWriter = batch_writer(self.options, schema_of("value string"), False)
        place = self.query.place(0, batch) if self.query else Place(0, 0)
        written = writer._sink.stage(rows_of(rows), place)
        # Spark keeps the pickled writer for the commit, unlike that of a stream.
        pickle.loads(pickle.dumps(writer)).commit([written])  # noqa: S301


def test_the_same_job_twice_writes_once(server: ServerProcess, name: str) -> None:
    job = Job(server, stream=name, jobId=f"load-{name}")

    job.save(["1", "2"])
    job.save(["1", "2"])

    assert messages(server.url, name) == [1, 2]


def test_jobs_without_an_id_are_different_jobs(server: ServerProcess, name: str) -> None:
    Job(server, stream=name).save(["1"])
    Job(server, stream=name).save(["1"])
    Job(server, stream=name).save([])

    assert messages(server.url, name) == [1, 1]


def test_a_write_inside_foreach_batch_goes_by_its_query_and_batch(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    query = Driver(server, tmp_path)
    Job(server, query, stream=name, sinkName=name).save(["1"], batch=0)
    Job(server, query, stream=name, sinkName=name).save(["2"], batch=1)

    Job(server, query.restarted(), stream=name, sinkName=name).save(["2"], batch=1)

    assert messages(server.url, name) == [1, 2]


def test_a_write_inside_foreach_batch_needs_a_name(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    query = Driver(server, tmp_path)

    with pytest.raises(OptionError, match="sinkName is missing: inside foreachBatch"):
        Job(server, query, stream=name).save(["1"])
    with pytest.raises(OptionError, match="jobId inside foreachBatch"):
        Job(server, query, stream=name, sinkName=name, jobId="1").save(["1"])


def test_a_name_without_a_query_is_refused(server: ServerProcess, name: str) -> None:
    """A thread inside foreachBatch may not see its query: silence would append twice."""
    with pytest.raises(OptionError, match="belongs to no query"):
        Job(server, stream=name, sinkName=name).save(["1"])


def test_a_job_group_that_hides_the_run_does_not_fence_the_next_start(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    query = Driver(server, tmp_path)
    query.run = "my group"
    for batch in range(2):
        Job(server, query, stream=name, sinkName=name).save([str(batch)], batch=batch)
    with fencepost.connect(server.url) as client:
        client.open_writer(name, query.query)

    Job(server, query, stream=name, sinkName=name).save(["2"], batch=2)

    assert messages(server.url, name) == [0, 1, 2]


def test_the_same_name_twice_in_one_batch_is_an_error_in_replays_too(
    server: ServerProcess, tmp_path: Path, name: str
) -> None:
    query = Driver(server, tmp_path)
    for run in (query, query.restarted()):
        Job(server, run, stream=name, sinkName=name).save(["1"])
        with pytest.raises(SinkNameUsedError, match="used before in batch 0"):
            Job(server, run, stream=name, sinkName=name).save(["2"])

    assert messages(server.url, name) == [1]


def test_a_server_that_is_away_is_waited_for(tmp_path: Path, name: str) -> None:
    with ServerProcess(tmp_path / "data") as own:
        driver = Driver(own, tmp_path, stream=name)
        staged = driver.stage(0, ["1"])
        writer = driver.writer()
        own.kill()
        own.restart()

        writer.commit(staged, 0)

        assert messages(own.url, name) == [1]


def test_who_may_append_may_write_and_nobody_else(tmp_path: Path) -> None:
    principals = [
        principal("pipeline", ("allowed/**", ["append", "create"])),
        principal("other", ("allowed/**", ["append", "create", "read"])),
    ]
    environment = {"FENCEPOST_PRINCIPALS": msgspec.json.encode(principals).decode()}
    with ServerProcess(tmp_path / "data", environment=environment) as own:
        columns = "stream string, value string"
        driver = Driver(own, tmp_path, columns, sinkName="s", token=token("pipeline"))
        driver.write(0, [("allowed/a", "1")])
        driver.restarted().write(0, [("allowed/a", "1")])

        with pytest.raises((fencepost.ForbiddenError, SinkError), match="403"):
            driver.write(1, [("elsewhere/a", "1")])
        driver.options["token"] = token("other")
        with pytest.raises(fencepost.WriterHeldError):
            driver.restarted().write(1, [("allowed/a", "2")])
        del driver.options["token"]
        with pytest.raises(fencepost.UnauthorizedError):
            driver.restarted().write(1, [("allowed/a", "2")])
        with fencepost.connect(own.url, token=token("other")) as client:
            assert list(client.stream("allowed/a").read()) == [1]
