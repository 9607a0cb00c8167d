"""The sink under real Spark: queries that are started again, replays, foreachBatch, jobs.

A replay is made the way a crash makes it: the checkpoint lacks the newest batch's commit, so that
Spark runs that batch again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import fencepost
from fencepost.pipeline.recovery import recovery
from tests.pipeline.sink_support import messages
from tests.serving import ServerProcess

END_SECONDS_MAX = 280
# The first test waits for Spark to start, on a machine that may be busy with the rest.
pytestmark = pytest.mark.timeout(300)


class Query:
    """A query from one stream to another, run to the end of its input as often as wanted."""

    def __init__(self, spark: SparkSession, server: ServerProcess, folder: Path, name: str) -> None:
        self._spark = spark
        self._server = server
        self.name = name
        self.checkpoint = folder / "checkpoint"
        self.start = "earliest"
        self.options: dict[str, str] = {"stream": f"{name}/out", "autoCreate": "true"}

    def feed(self, *numbers: int) -> None:
        with fencepost.connect(self._server.url) as client:
            client.stream(f"{self.name}/in").append_many(numbers, auto_create=True)

    def run(
        self,
        change: Callable[[DataFrame], DataFrame] = lambda rows: rows,
        each: Callable[[DataFrame, int], None] | None = None,
    ) -> None:
        """Read what is new, two messages a batch, and write it; raises what the query failed by."""
        rows = (
            self._spark.readStream.format("fencepost")
            .option("url", self._server.url)
            .option("stream", f"{self.name}/in")
            .option("startingPosition", self.start)
            .option("maxRowsPerTrigger", 2)
            .load()
            .select(F.col("value").cast("string").alias("value"))
        )
        writing = change(rows).writeStream.option("checkpointLocation", str(self.checkpoint))
        if each is None:
            writing = writing.format("fencepost").option("url", self._server.url)
            writing = writing.options(**self.options)
        else:
            writing = writing.foreachBatch(each)
        query = writing.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(END_SECONDS_MAX), "the query did not end"
        finally:
            query.stop()

    def forget_last_commit(self) -> int:
        """As if the driver had died between its commit at the server and the one in Spark's log."""
        commits = self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)
        return last

    def output(self, name: str = "out") -> list[Any]:
        return messages(self._server.url, f"{self.name}/{name}")


@pytest.fixture
def query(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> Query:
    return Query(spark, server, tmp_path, f"queries/{request.node.name[:60]}")


def test_a_query_goes_on_where_it_was_and_a_replay_changes_nothing(query: Query) -> None:
    query.feed(1, 2, 3, 4, 5)
    query.run()
    assert query.output() == [1, 2, 3, 4, 5]

    query.forget_last_commit()
    query.feed(6, 7)
    query.run()

    assert query.output() == [1, 2, 3, 4, 5, 6, 7]


def test_a_replay_with_other_rows_fails_the_query_if_asked_to(query: Query) -> None:
    query.options["onReplayMismatch"] = "fail"
    query.feed(1, 2)
    query.run()
    query.forget_last_commit()

    with pytest.raises(PySparkException, match="came again with other rows"):
        query.run(lambda rows: rows.where("value != '2'"))

    assert query.output() == [1, 2]


def test_a_restored_older_checkpoint_fails_the_query_instead_of_losing_rows(
    query: Query, server: ServerProcess
) -> None:
    """Batch 1 is planned over more rows than the published batch 1 had: 4 would be lost.

    The options that the recovery gives go on behind what was published.
    """
    query.feed(1, 2)
    query.run()
    shutil.copytree(query.checkpoint, query.checkpoint.with_name("older"))
    query.feed(3)
    query.run()
    shutil.rmtree(query.checkpoint)
    shutil.copytree(query.checkpoint.with_name("older"), query.checkpoint)
    query.feed(4)

    with pytest.raises(PySparkException, match="writer_range_mismatch"):
        query.run()
    failed = query.output()
    with fencepost.connect(server.url) as client:
        found = recovery(client, query.options["stream"])
    query.checkpoint = query.checkpoint.with_name("new")
    query.options["allowNewCheckpoint"] = found.sink_options["allowNewCheckpoint"]
    query.start = found.source_options["startingPosition"]
    query.run()

    assert failed == [1, 2, 3]
    assert found.batch == 1
    assert query.output() == [1, 2, 3, 4]


def test_a_deleted_checkpoint_is_refused_until_it_is_allowed(query: Query) -> None:
    query.feed(1, 2)
    query.run()
    shutil.rmtree(query.checkpoint)

    with pytest.raises(PySparkException, match="Was the checkpoint deleted or moved"):
        query.run()
    assert query.output() == [1, 2]
    query.options["allowNewCheckpoint"] = "true"
    query.run()

    assert query.output() == [1, 2, 1, 2]


def test_a_wrong_option_fails_the_query_by_its_name(query: Query) -> None:
    query.options["autoCraete"] = "true"
    query.feed(1)

    with pytest.raises(PySparkException, match="did you mean autoCreate"):
        query.run()


def test_a_row_that_is_not_json_fails_the_query_by_its_number(query: Query) -> None:
    query.feed(1, 2)

    with pytest.raises(PySparkException, match="row 1 of partition 0: value is not JSON"):
        query.run(
            lambda rows: rows.select(
                F.when(F.col("value") == "2", "no").otherwise("1").alias("value")
            ).coalesce(1)
        )

    assert query.output() == []


def test_a_run_has_its_epoch_before_its_first_batch_is_written(
    query: Query, server: ServerProcess
) -> None:
    """The first batch fails in its tasks, so that no commit can have taken the epoch."""
    query.feed(1)

    with pytest.raises(PySparkException, match="value is not JSON"):
        query.run(lambda rows: rows.select(F.lit("no").alias("value")))
    with fencepost.connect(server.url) as client:
        begun = client.writer(query.options["stream"])
    query.run()

    assert (begun.epoch, begun.batch) == (1, None)
    assert query.output() == [1]


def test_writes_of_a_batch_are_replayed_each_by_its_name(
    query: Query, server: ServerProcess
) -> None:
    def each(rows: DataFrame, batch: int) -> None:
        for target in ("even", "odd"):
            (
                rows.where(F.col("value").cast("int") % 2 == int(target == "odd"))
                .write.format("fencepost")
                .mode("append")
                .option("url", server.url)
                .option("stream", f"{query.name}/{target}")
                .option("sinkName", f"{query.name}/{target}")
                .option("autoCreate", "true")
                .save()
            )

    query.feed(1, 2, 3, 4, 5)
    query.run(each=each)
    query.forget_last_commit()
    query.feed(6, 7)
    query.run(each=each)

    assert query.output("even") == [2, 4, 6]
    assert query.output("odd") == [1, 3, 5, 7]


def test_a_write_inside_foreach_batch_without_a_name_fails_the_query(
    query: Query, server: ServerProcess
) -> None:
    def each(rows: DataFrame, batch: int) -> None:
        writing = rows.write.format("fencepost").mode("append").option("url", server.url)
        writing.options(**query.options).save()

    query.feed(1)

    with pytest.raises(PySparkException, match="sinkName is missing: inside foreachBatch"):
        query.run(each=each)


def test_a_name_used_twice_in_one_batch_fails_the_query(
    query: Query, server: ServerProcess
) -> None:
    def each(rows: DataFrame, batch: int) -> None:
        for _ in range(2):
            writing = rows.write.format("fencepost").mode("append").option("url", server.url)
            writing.options(**query.options, sinkName=query.name).save()

    query.feed(1)

    with pytest.raises(PySparkException, match="was used before in batch 0"):
        query.run(each=each)

    assert query.output() == [1]


def test_columns_of_a_batch_become_objects_and_a_job_happens_once(
    spark: SparkSession, server: ServerProcess
) -> None:
    rows = spark.sql(
        "select id, named_struct('at', timestamp'2026-01-31 12:00:00 UTC', 'none', null) as made,"
        " array(id) as ids, concat('jobs/', id % 2) as stream from range(0, 4, 1, 2)"
    )
    for _ in range(2):
        (
            rows.write.format("fencepost")
            .mode("append")
            .option("url", server.url)
            .option("jobId", "load-7")
            .option("autoCreate", "true")
            .save()
        )

    made = {"at": "2026-01-31T12:00:00Z"}
    assert messages(server.url, "jobs/0") == [
        {"id": 0, "made": made, "ids": [0]},
        {"id": 2, "made": made, "ids": [2]},
    ]
    assert len(messages(server.url, "jobs/1")) == 2


def test_a_stream_cannot_be_overwritten(spark: SparkSession, server: ServerProcess) -> None:
    rows = spark.range(1)

    with pytest.raises(PySparkException, match="streams only grow"):
        rows.write.format("fencepost").mode("overwrite").option("url", server.url).option(
            "stream", "x"
        ).save()
