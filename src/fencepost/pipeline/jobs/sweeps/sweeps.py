"""Sweeps: work over very many streams, done by executors, safe to stop and to run again.

A sweep has two halves. The driver finds out what there is to do; `on_executors` then does it, a
stream at a time, each with what became of it. A stream that refuses spoils nothing for the others:
its error is part of the result. Both sweeps do only what has not been done yet, so running one
again is how it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from fencepost.client.errors import FencepostError
from fencepost.client.sync import Client
from fencepost.coordination.rules.entries import server_now_ms
from fencepost.pipeline.connection import Connection
from fencepost.pipeline.jobs.tables.parquet import struct_of
from fencepost.pipeline.source.columns import arrow_schema

STREAMS_PER_TASK = 50
TASKS_MAX = 64

Work = Callable[[Client, dict[str, Any]], list[dict[str, Any]]]
"""What is done with one row: the rows of its result."""


def on_executors(
    spark: SparkSession,
    connection: Connection,
    rows: Sequence[tuple[Any, ...]],
    given: str,
    made: str,
    work: Work,
) -> list[dict[str, Any]]:
    """Do `work` with every row, on executors, and give back what was made.

    `given` and `made` are the columns of rows and results as DDL. Results have a column `error`;
    a row whose work failed gives its own columns, as far as `made` has them, and why.
    """
    if not rows:
        return []
    declared = arrow_schema(struct_of(made))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with connection.client() as client:
            for batch in batches:
                for row in batch.to_pylist():
                    done = attempted(client, row, work)
                    kept = [{name: one.get(name) for name in declared.names} for one in done]
                    yield pa.RecordBatch.from_pylist(kept, schema=declared)

    tasks = min(TASKS_MAX, -(-len(rows) // STREAMS_PER_TASK))
    asked = spark.createDataFrame(list(rows), given).repartition(tasks)
    return [row.asDict() for row in asked.mapInArrow(run, made).collect()]


def attempted(client: Client, row: dict[str, Any], work: Work) -> list[dict[str, Any]]:
    """What the work with a row made, or the row with its error."""
    try:
        return work(client, row)
    except FencepostError as error:
        return [{**row, "error": str(error)}]


def now_ms(client: Client) -> int:
    """What time it is at the server: its clock decides what is stale or old."""
    driver = client._driver
    return driver.run(server_now_ms(driver.settings))
