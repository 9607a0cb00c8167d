"""Reading what an audit needs of the log: every message and marker of a range, without payloads.

The source of `.format("fencepost")` leaves markers out, because they are not messages; here they
are half of the matter. The range is split by the server's plan, and executors read a split each,
page by page, and keep of every payload its length; what of it makes a message that very one is cut
out by Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fencepost.client.errors import DataDamagedError
from fencepost.pipeline.audit.rules import DAMAGED, FACTS
from fencepost.pipeline.connection import Connection
from fencepost.pipeline.options import Selection

PARTS_MAX = 64
ROWS_PER_PART = 100_000
_KEPT = (
    *("stream", "offset", "version", "position", "timestamp"),
    *("producer_id", "producer_epoch", "producer_seq"),
)
_FACTS_ARROW = pa.schema(
    [
        *(("stream", pa.string()), ("offset", pa.string())),
        *(("version", pa.int64()), ("position", pa.int64())),
        *(("timestamp", pa.timestamp("us", "UTC")), ("producer_id", pa.string())),
        *(("producer_epoch", pa.int64()), ("producer_seq", pa.int64())),
        *(("size", pa.int64()), ("marker", pa.string()), ("identity", pa.binary())),
    ]
)
_READ = FACTS.replace("identity string", "identity binary")
_RANGE = "after long, until long"


class Span(NamedTuple):
    """The part of the log that an audit is about."""

    after: int
    until: int
    rows: int
    pruned: int
    """The newest position of it whose row is gone; -1 when all are there."""


def facts(
    spark: SparkSession,
    connection: Connection,
    selection: Selection,
    after: int,
    until: int,
    once: str | None = None,
) -> tuple[DataFrame, Span]:
    """The facts above one position up to another; Spark reads them when an action needs them.

    `once` is the JSON path of what identifies a message.
    """
    with connection.client() as client:
        whole = client.plan(after=after, until=until, **selection.asked())
        parts = max(1, min(PARTS_MAX, whole.rows // ROWS_PER_PART))
        plan = whole
        if parts > 1:
            plan = client.plan(after=after, until=until, parts=parts, **selection.asked())
    edges = [split.after for split in plan.splits[1:]]
    # Splits end with the last message; markers may follow it.
    starts, ends = [after, *edges], [*edges, until]
    ranges = [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]
    asked = spark.createDataFrame(ranges, _RANGE).repartition(max(1, len(ranges)))
    found = asked.mapInArrow(_reading(connection, selection, payloads=once is not None), _READ)
    value = F.col("identity").cast("string")
    found = found.withColumn("identity", value if once is None else F.get_json_object(value, once))
    pruned = -1 if plan.pruned is None else plan.pruned
    return found, Span(after, until, whole.rows, pruned)


def _reading(
    connection: Connection, selection: Selection, *, payloads: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                yield from _facts_in(
                    connection, selection, row["after"], row["until"], payloads=payloads
                )

    return read


def _facts_in(
    connection: Connection, selection: Selection, after: int, until: int, *, payloads: bool
) -> Iterator[pa.RecordBatch]:
    """The facts of a range. What the server finds damaged is a fact too, and is read around."""
    end, damage = until, None
    columns = (*_KEPT, "size", "marker", *(("value",) if payloads else ()))
    with connection.client() as client:
        while after < until:
            try:
                page = client.log_arrow(
                    after=after,
                    until=end,
                    columns=columns,
                    skip_pruned=True,
                    **selection.asked(),
                )
            except DataDamagedError as error:
                if error.position is None or error.behind is None:
                    raise
                damage = error
                end = max(after, error.position - 1)  # what comes before it is read first
                if end == after and error.behind <= after:
                    raise  # there is no way around it
            else:
                with pa.ipc.open_stream(pa.py_buffer(page.data)) as reader:
                    for batch in reader:
                        yield _facts_of(batch, payloads=payloads)
                after = page.next
            if damage is not None and after >= end:
                yield _damaged(damage)
                after = max(after, damage.behind or after)
                end, damage = until, None


def _damaged(error: DataDamagedError) -> pa.RecordBatch:
    row = {"stream": error.stream or "", "position": error.position, "marker": DAMAGED}
    return pa.RecordBatch.from_pylist([row], schema=_FACTS_ARROW)


def _facts_of(batch: pa.RecordBatch, *, payloads: bool) -> pa.RecordBatch:
    columns = [batch.column(name) for name in (*_KEPT, "size", "marker")]
    nothing = pa.nulls(batch.num_rows, pa.binary())
    columns.append(batch.column("value") if payloads else nothing)
    cast = [one.cast(field.type) for one, field in zip(columns, _FACTS_ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(cast, schema=_FACTS_ARROW)
