"""Batch writes: plain jobs, and those inside foreachBatch, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

import fencepost
from fencepost.pipeline.errors import (
    OptionError,
    SinkNameUsedError,
)
from tests.pipeline.sink_driver import Driver, Job
from tests.pipeline.sink_support import messages
from tests.serving import ServerProcess


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of runs go where Spark's scratch folder would be."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream of the test's own."""
    return f"sink/{request.node.name[:80]}"


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
