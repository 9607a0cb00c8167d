"""`python -m benchmarks.pipeline_sink`: the Spark sink, beside Spark writing Parquet.

The same cached rows, 100-byte JSON messages, are written in turn to Parquet, to Spark's `noop`
sink and to Fencepost, as a batch on two cores, round after round in one session; then as
micro-batches of a query, large, small and empty. What bounds the sink is told by the parts it is
made of: rows to chunks on one core without a server, and the server's processor time per million
rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

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
from benchmarks.postgres import on_postgres
from benchmarks.subjects import OURS, Running, running
from fencepost.pipeline import session
from fencepost.pipeline.sink import upload
from fencepost.pipeline.sink.chunks import Chunks
from fencepost.pipeline.sink.options import CHUNK_BYTES_MAX, sink_options
from fencepost.pipeline.sink.rows import Encoded, RowsEncoder, encoded_as
from fencepost.testing.postgres import PostgresServer

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
    parser.add_argument(
        "--store", choices=("sqlite", "postgres"), default="sqlite", help="of --wide"
    )
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    console = Console()
    if options.wide:
        table = Table("what", "median", "all rounds")
        with (
            tempfile.TemporaryDirectory(dir=options.data) as folder,
            served(options.store, Path(folder)) as server,
        ):
            wide_rounds(table, server, options.wide, options.rows, options.rounds)
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


@contextlib.contextmanager
def served(store: str, folder: Path) -> Iterator[Running]:
    """A server on either store."""
    if store == "sqlite":
        with running(OURS, folder / "data") as server:
            yield server
        return
    with (
        PostgresServer() as postgres,
        running(on_postgres(postgres, 1), folder / "data") as server,
    ):
        yield server


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


def wide_rounds(table: Table, server: Running, widths: list[int], count: int, rounds: int) -> None:
    """One task's rows to so many streams, without Spark, in turns; each beside the first."""
    rows = encoded_rows(count)
    found: dict[int, list[Wide]] = {width: [] for width in widths}
    for number in range(rounds):
        for width in widths:
            names = pa.array([f"wide/{number}/{width}/{index % width}" for index in range(count)])
            found[width].append(write_wide(server, rows._replace(streams=names)))
    for width, runs in found.items():
        what = f"{width:,} streams"
        add(table, what, [count / run.seconds for run in runs], "rows/s")
        ratios = [
            first.seconds / run.seconds for first, run in zip(found[widths[0]], runs, strict=True)
        ]
        add(table, f"{what} : {widths[0]:,}", ratios, "", ".2f")
        add(table, f"{what}, of it the commit", [run.commit for run in runs], "s", ".2f")
        for whose, spent in (
            ("client's", [run.client for run in runs]),
            ("server's", [run.server for run in runs]),
        ):
            per_million = [seconds / count * 1e6 for seconds in spent]
            add(table, f"{what}, the {whose} processor, a million rows", per_million, "s", ".2f")


class Wide(NamedTuple):
    """What a task's rows took, in seconds: all of it, the commit, and of the processors."""

    seconds: float
    commit: float
    client: float
    server: float


def write_wide(server: Running, rows: Encoded) -> Wide:
    """What a task and the driver do: chunks from record batches, uploads, a commit."""
    began, client_began = time.perf_counter(), time.process_time()
    server_began = cpu_seconds(server.pid)
    with fencepost.connect(f"http://127.0.0.1:{server.port}") as client:
        chunks = Chunks(None, chunk_bytes=CHUNK_BYTES_MAX, json=True)
        made = chain.from_iterable(chunks.add(batch) for batch in record_batches(rows))
        parts = upload.Uploads(client, "application/json").send(chain(made, chunks.rest()))
        uploaded = time.perf_counter()
        client.commit(
            [
                fencepost.CommitAppend(
                    stream=part.stream,
                    parts=[(part.txn, part.part, part.chunks)],
                    auto_create=True,
                )
                for part in parts
            ]
        )
    ended = time.perf_counter()
    client_spent = time.process_time() - client_began
    return Wide(
        ended - began, ended - uploaded, client_spent, cpu_seconds(server.pid) - server_began
    )


def record_batches(rows: Encoded) -> Iterator[Encoded]:
    """Rows as Spark hands them over, some at a time."""
    assert rows.streams is not None
    for start in range(0, len(rows.payloads), ARROW_ROWS):
        piece = slice(start, start + ARROW_ROWS)
        streams = rows.streams.slice(start, ARROW_ROWS)
        yield Encoded(streams, rows.payloads[piece], rows.lengths[piece])


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
