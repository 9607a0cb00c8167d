"""`python -m benchmarks.pipeline_sink`: the Spark sink, beside Spark writing Parquet.

The same cached rows, 100-byte JSON messages, are written in turn to Parquet, to Spark's `noop`
sink and to Fencepost, as a batch on two cores, round after round in one session; then as
micro-batches of a query, large, small and empty. What bounds the sink is told by the parts it is
made of: rows to chunks on one core without a server, and the server's processor time per million
rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StringType, StructField, StructType
from rich.console import Console
from rich.table import Table

import fencepost
from benchmarks.subjects import OURS, Running, running
from fencepost.pipeline import session
from fencepost.pipeline.sink import upload
from fencepost.pipeline.sink.chunks import Chunks
from fencepost.pipeline.sink.options import CHUNK_BYTES_MAX, sink_options
from fencepost.pipeline.sink.rows import Encoded, RowsEncoder, encoded_as

CORES = 2
ARROW_ROWS = 10_000
"""What Spark hands to Python at once."""
PAD = "x" * 76
FIRST_ID = 10_000_000


def main() -> int:
    """Run everything, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_sink")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20, help="small micro-batches")
    parser.add_argument(
        "--wide",
        type=int,
        nargs="*",
        default=[],
        help="only one task that writes to so many streams",
    )
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    console = Console()
    if options.wide:
        table = Table("what", "median", "all rounds")
        with (
            tempfile.TemporaryDirectory(dir=options.data) as folder,
            running(OURS, Path(folder) / "data") as server,
        ):
            url = f"http://127.0.0.1:{server.port}"
            wide_rounds(table, url, options.wide, options.rows, options.rounds)
        console.print(table)
        console.print(f"load average at the end: {os.getloadavg()}")
        return 0
    conf = {"spark.ui.enabled": False, "spark.sql.shuffle.partitions": CORES}
    spark = session("benchmark", master=f"local[{CORES},4]", conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    table = Table("what", "median", "all rounds")
    with (
        tempfile.TemporaryDirectory(dir=options.data) as folder,
        running(OURS, Path(folder) / "data") as server,
    ):
        work = Path(folder)
        rows = cached_rows(spark, options.rows)
        batch_rounds(table, rows, server, work, options.rows, options.rounds)
        encode_rounds(table, options.rows, options.rounds)
        query_rounds(table, spark, server, work, options.batches)
    console.print(table)
    console.print(f"load average at the end: {os.getloadavg()}")
    spark.stop()
    return 0


def cached_rows(spark: SparkSession, count: int) -> DataFrame:
    """Messages of 100 bytes, in memory, so that making them is not measured."""
    rows = spark.range(count, numPartitions=CORES).select(message_of("id")).cache()
    size = rows.selectExpr("avg(length(value))").head()
    assert size is not None
    assert round(size[0]) == 100, size
    return rows


def message_of(number: str) -> Column:
    """A message of 100 bytes from a column of numbers."""
    text = F.format_string('{"id":%d,"pad":"%s"}', F.col(number) + FIRST_ID, F.lit(PAD))
    return text.alias("value")


def batch_rounds(
    table: Table, rows: DataFrame, server: Running, work: Path, count: int, rounds: int
) -> None:
    """Each way of writing once per round, in turn, so that all see the same machine."""
    url = f"http://127.0.0.1:{server.port}"
    names = iter(range(10_000))

    def fencepost() -> None:
        writing = rows.write.format("fencepost").mode("append").option("url", url)
        writing.option("stream", f"bench/{next(names)}").option("autoCreate", "true").save()

    ways: dict[str, Callable[[], None]] = {
        "noop": lambda: rows.write.format("noop").mode("overwrite").save(),
        "Parquet": lambda: rows.write.mode("overwrite").parquet(str(work / "parquet")),
        "Fencepost": fencepost,
    }
    for write in ways.values():
        write()  # the first time starts Python workers and compiles
    found: dict[str, list[float]] = {name: [] for name in ways}
    spent: list[float] = []
    for _ in range(rounds):
        for name, write in ways.items():
            before = cpu_seconds(server.pid)
            found[name].append(count / timed(write))
            if name == "Fencepost":
                spent.append((cpu_seconds(server.pid) - before) / count * 1e6)
    for name, rates in found.items():
        add(table, f"batch to {name}", rates, "rows/s")
    ratios = [ours / peer for ours, peer in zip(found["Fencepost"], found["Parquet"], strict=True)]
    table.add_row("Fencepost : Parquet", f"{statistics.median(ratios):.2f}", shown(ratios, ".2f"))
    add(table, "server's processor time per million rows", spent, "s", ".2f")


def wide_rounds(table: Table, url: str, widths: list[int], count: int, rounds: int) -> None:
    """One task's rows to so many streams, without Spark: with bundles, and an upload for each."""
    rows = encoded_rows(count)
    names = iter(range(10_000))
    most = upload.BUNDLE_PIECES_MAX
    for width in widths:
        found: dict[str, list[float]] = {"a bundle": [], "a request each": []}
        for _ in range(rounds):
            for way, pieces in (("a request each", 1), ("a bundle", most)):
                upload.BUNDLE_PIECES_MAX = pieces
                name = f"wide/{next(names)}"
                streams = pa.array([f"{name}/{index % width}" for index in range(count)])
                wide = rows._replace(streams=streams)
                found[way].append(count / timed(partial(write_wide, url, wide)))
        for way, rates in found.items():
            add(table, f"{width:,} streams, {way}", rates, "rows/s")


def write_wide(url: str, rows: Encoded) -> None:
    """What a task and the driver do: chunks, uploads, a commit."""
    with fencepost.connect(url) as client:
        chunks = Chunks(None, chunk_bytes=CHUNK_BYTES_MAX, json=True)
        made = chain(chunks.add(rows), chunks.rest())
        parts = upload.Uploads(client, "application/json").send(made)
        client.commit(
            [
                fencepost.CommitAppend(
                    stream=part.stream, parts=[(part.txn, part.part)], auto_create=True
                )
                for part in parts
            ]
        )


def encoded_rows(count: int) -> Encoded:
    """The same messages of 100 bytes, as a task has them."""
    texts = [b'{"id":%d,"pad":"%s"}' % (FIRST_ID + id_, PAD.encode()) for id_ in range(count)]
    return encoded_as(pa.array(texts, pa.binary()))


def encode_rounds(table: Table, count: int, rounds: int) -> None:
    """Rows to chunks that are not sent: what one core of an executor could do."""
    schema = StructType([StructField("value", StringType())])
    options = sink_options({"stream": "s"}, schema, False, streaming=True)
    values = [f'{{"id":{FIRST_ID + index},"pad":"{PAD}"}}' for index in range(ARROW_ROWS)]
    batch = pa.RecordBatch.from_pydict({"value": pa.array(values)})

    def encode() -> None:
        encoder = RowsEncoder(options, 0)
        chunks = Chunks("s", chunk_bytes=CHUNK_BYTES_MAX, json=True)
        for _ in range(count // ARROW_ROWS):
            for _ in chunks.add(encoder.encode(batch)):
                pass

    encode()
    rates = [count / timed(encode) for _ in range(rounds)]
    add(table, "check, hash and join, one core, nothing sent", rates, "rows/s")


def query_rounds(
    table: Table, spark: SparkSession, server: Running, work: Path, batches: int
) -> None:
    """How long micro-batches take, from Spark's own account of them."""
    url = f"http://127.0.0.1:{server.port}"
    spark.dataSource.register(IdleSource)
    kinds = (
        ("empty", "value < 0", 100, batches),
        ("small", "true", 100, batches),
        ("100,000 rows", "true", 100_000, 5),
    )
    for name, wanted, per_batch, count in kinds:
        for sink in ("parquet", IdleSource.name(), "fencepost"):
            source = (
                spark.readStream.format("rate-micro-batch")
                .option("rowsPerBatch", per_batch)
                .option("numPartitions", CORES)
                .load()
                .where(wanted)
            )
            folder = work / f"{sink}-{name}"
            writing = source.select(message_of("value")).writeStream.format(sink)
            writing = writing.option("checkpointLocation", str(folder / "checkpoint"))
            if sink == "fencepost":
                writing = writing.option("url", url).option("stream", f"query/{name}")
                writing = writing.option("autoCreate", "true")
            if sink == "parquet":
                writing = writing.option("path", str(folder / "rows"))
            query = writing.start()
            # The first batches start workers and compile.
            progress = batches_of(query, count + 3)[3:]
            query.stop()
            add(
                table,
                f"micro-batch, {name}, to {sink}",
                [float(one["durationMs"]["triggerExecution"]) for one in progress],
                "ms",
                ".0f",
            )


class IdleSource(DataSource):
    """A sink in Python that does nothing: what Spark itself takes for one."""

    @classmethod
    def name(cls) -> str:
        return "idle-python"

    def streamWriter(self, schema: StructType, overwrite: bool) -> IdleWriter:  # noqa: N802, ARG002
        return IdleWriter()


class IdleWriter(DataSourceStreamArrowWriter):
    """Takes rows and forgets them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


def batches_of(query: Any, count: int) -> list[Any]:
    """The first batches of a query, as it reports them."""
    seen: dict[int, Any] = {}
    while len(seen) < count:
        assert query.isActive, query.exception()
        for one in query.recentProgress:
            seen[one["batchId"]] = one
        time.sleep(0.1)
    return [seen[batch] for batch in sorted(seen)][:count]


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add(table: Table, what: str, values: list[float], unit: str, style: str = ",.0f") -> None:
    table.add_row(what, f"{statistics.median(values):{style}} {unit}", shown(values, style))


def shown(values: list[float], style: str) -> str:
    return "  ".join(f"{value:{style}}" for value in values)


if __name__ == "__main__":
    raise SystemExit(main())
