"""The query that the kill tests run: a process of its own, so that it can be killed.

Reads every stream `in/*`, computes something of each row, and writes it to `out/KEY`. One argument,
a JSON object: see `Job`. Ends with the query: exit code 3 and the reason on standard output. When
the test asks for it, the same Spark audits the server, beside the query, and the report is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import fencepost
from fencepost.pipeline import session
from fencepost.pipeline.audit import audit

FAILED = 3
SINK_NAME = "kills"
AUDITED = "audited: "
POLL_SECONDS = 1
SPECULATION_SECONDS_MAX = 20.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    master: str
    url: str
    checkpoint: str
    sink: str = "fencepost"
    """Or `naive`: appends inside `write()`, as many sinks do."""
    rows_per_batch: int = 60
    slow_task_seconds: float = 0.0
    """How slow the first attempt at a batch's first partition is, so that Spark speculates; until
    it has done so once, slower."""
    attempts_file: str = ""
    """Where a slow partition notes which attempt it is."""
    starting_position: str = "earliest"
    new_checkpoint: bool = False
    """Whether the query may go on under the name of another one."""
    audit_file: str = ""
    """Once this file is there, it is removed, and everything audited."""
    conf: dict[str, Any] = {}


def main(job: Job) -> int:
    spark = session("kills", master=job.master, conf={"spark.ui.enabled": False, **job.conf})
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(NaiveSource)
    query = (
        transformed(spark, job)
        .writeStream.format(job.sink)
        .option("url", job.url)
        .option("checkpointLocation", job.checkpoint)
    )
    if job.sink == "fencepost":
        query = query.option("sinkName", SINK_NAME).option("autoCreate", "true")
        query = query.option("allowNewCheckpoint", job.new_checkpoint)
    running = query.start()
    say("started")
    try:
        while not running.awaitTermination(POLL_SECONDS):
            if job.audit_file and Path(job.audit_file).exists():
                Path(job.audit_file).unlink()
                report = audit(spark, once="n", options={"url": job.url})
                say(AUDITED + msgspec.json.encode(report).decode())
    except Exception as error:
        say(f"failed: {error}")
        return FAILED
    return 0


def say(line: str) -> None:
    """Tell the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def transformed(spark: SparkSession, job: Job) -> DataFrame:
    """Each order with its price doubled, on its way to its key's stream."""
    read = (
        spark.readStream.format("fencepost")
        .option("url", job.url)
        .option("match", "in/*")
        .option("startingPosition", job.starting_position)
        .option("maxRowsPerTrigger", job.rows_per_batch)
        .option("minPartitions", 2)
        .load()
    )
    order = F.from_json(F.col("value").cast("string"), "key string, n long")
    rows = read.select(order.alias("order")).select(
        F.concat(F.lit("out/"), F.col("order.key")).alias("stream"),
        F.to_json(
            F.struct(F.col("order.n").alias("n"), (F.col("order.n") * 2).alias("twice"))
        ).alias("value"),
    )
    if job.slow_task_seconds:
        return rows.mapInArrow(slowly(job.slow_task_seconds, job.attempts_file), rows.schema)
    return rows


def slowly(seconds: float, attempts_file: str) -> Any:
    """A step that is slow in the first attempt at the first partition.

    On a busy machine a second attempt may take long to come: the first one waits for it.
    """

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 0:
            with open(attempts_file, "a") as file:
                file.write(f"{context.attemptNumber()}\n")
            if context.attemptNumber() == 0:
                time.sleep(seconds)
                ends = time.monotonic() + SPECULATION_SECONDS_MAX
                while "1" not in Path(attempts_file).read_text() and time.monotonic() < ends:
                    time.sleep(0.1)
        yield from batches

    return step


class NaiveSource(DataSource):
    """What exactly-once is compared with."""

    @classmethod
    def name(cls) -> str:
        return "naive"

    def streamWriter(self, schema: StructType, overwrite: bool) -> NaiveWriter:  # noqa: N802
        return NaiveWriter(str(self.options["url"]))


class NaiveWriter(DataSourceStreamArrowWriter):
    """Appends as it goes: a task that is repeated appends again."""

    def __init__(self, url: str) -> None:
        self._url = url

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with fencepost.connect(self._url) as client:
            for batch in iterator:
                for row in batch.to_pylist():
                    message = msgspec.json.decode(row["value"])
                    client.stream(row["stream"]).append(message, auto_create=True)
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Job)))
