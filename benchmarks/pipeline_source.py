"""`python -m benchmarks.pipeline_source`: Spark reading Fencepost beside Spark reading Parquet.

The same rows, in the same run, on the same cores: 100-byte messages through the source and from a
Parquet file, each into Spark's sink that throws everything away. What a micro-batch costs beside
its rows is measured with batches of one row and of a hundred, beside a query from Parquet to
Parquet. A pattern over many streams shows that their number does not matter. Two lines without
Spark, the pages of the log as they come and as columns, say what the rest is made of.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

import fencepost
from benchmarks.subjects import OURS, running
from fencepost.pipeline import session
from fencepost.pipeline.source.formats import messages

APPEND_MESSAGES = 500
COMMIT_STREAMS = 5_000
STREAM_MESSAGES = 5
BATCHES = 12
MESSAGE = b'{"order":1%09d,"pad":"' + b"x" * 71 + b'"}'


def main() -> int:
    """Run everything, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_source")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--master", default="local[2,4]")
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    table = Table("what", "median", "every run")
    with (
        tempfile.TemporaryDirectory(dir=options.data) as name,
        running(OURS, Path(name) / "data") as server,
    ):
        folder = Path(name)
        url = f"http://127.0.0.1:{server.port}"
        spark = session("bench", master=options.master, conf={"spark.ui.enabled": False})
        spark.sparkContext.setLogLevel("ERROR")
        try:
            _throughput(spark, url, folder, options, table)
            _micro_batches(spark, url, folder, table)
            _many_streams(spark, url, folder, options, table)
        finally:
            # What was measured before something failed is worth seeing.
            load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
            rows = f"{options.rows:,} rows of 100 bytes"
            table.caption = f"{rows}, {options.master}, load average {load}"
            Console().print(table)
            spark.stop()
    return 0


def _throughput(
    spark: SparkSession, url: str, folder: Path, options: argparse.Namespace, table: Table
) -> None:
    _fill(url, options.rows)
    parquet = str(folder / "rows.parquet")
    source = _source(spark, url, match="rows/*")
    source.write.parquet(parquet)
    count = source.count()
    assert count == options.rows, (count, options.rows)
    everything = _source(spark, url, match="**")
    chosen = (
        spark.read.format("fencepost")
        .options(url=url, match="rows/*")
        .schema("value BINARY")
        .load()
    )
    measured: dict[str, Callable[[], object]] = {
        "pages of the log, no Spark": lambda: _pages(url, columns=False),
        "pages as columns, no Spark": lambda: _pages(url, columns=True),
        "source, batch": lambda: _drained(source),
        "source, batch, every stream": lambda: _drained(everything),
        "source, batch, the value alone": lambda: _drained(chosen),
        "source, stream": lambda: _streamed(spark, url, folder),
        "Parquet, batch": lambda: _drained(spark.read.parquet(parquet)),
    }
    times: dict[str, list[float]] = {what: [] for what in measured}
    for _ in range(options.runs):
        for what, run in measured.items():
            times[what].append(_timed(run))
            print(f"{what}: {options.rows / times[what][-1]:,.0f} rows/s", flush=True)
    for what, seconds in times.items():
        rates = [options.rows / one for one in seconds]
        table.add_row(
            what, f"{statistics.median(rates):,.0f} rows/s", ", ".join(f"{r:,.0f}" for r in rates)
        )
    ratio = statistics.median(times["source, batch"]) / statistics.median(times["Parquet, batch"])
    table.add_row("source beside Parquet", f"{ratio:.1f}x its time", "")


def _micro_batches(spark: SparkSession, url: str, folder: Path, table: Table) -> None:
    """What a batch takes, the first ones aside, into Parquet from both sources."""
    for rows in (1, 100):
        with fencepost.connect(url) as client:
            client.create(f"small/{rows}").append_many(list(range(BATCHES * rows)))
        files = str(folder / f"files-{rows}")
        frame = spark.range(BATCHES * rows).selectExpr(
            "cast(cast(id as string) as binary) as value"
        )
        frame.repartition(BATCHES).write.parquet(files)
        ours = (
            spark.readStream.format("fencepost")
            .options(url=url, stream=f"small/{rows}", maxRowsPerTrigger=rows)
            .option("startingPosition", "earliest")
            .load()
        )
        theirs = (
            spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1).parquet(files)
        )
        medians = []
        queries = (("source", ours.select("value")), ("Parquet", theirs))
        for what, query in queries:
            # Spark becomes faster for a while, and the way that comes first would pay for both.
            _batch_ms(query, folder / f"first-{what}-{rows}", BATCHES)
        for what, query in queries:
            took = _batch_ms(query, folder / f"{what}-{rows}", BATCHES)
            medians.append(statistics.median(took))
            shown = ", ".join(f"{one:.0f}" for one in took)
            table.add_row(
                f"batch of {rows} rows, {what} to Parquet", f"{medians[-1]:.0f} ms", shown
            )
        table.add_row(f"batch of {rows} rows, ratio", f"{medians[0] / medians[1]:.2f}", "")


def _many_streams(
    spark: SparkSession, url: str, folder: Path, options: argparse.Namespace, table: Table
) -> None:
    rows = STREAM_MESSAGES * options.streams
    with fencepost.connect(url) as client:
        for start in range(0, rows, COMMIT_STREAMS):
            # One round over all streams after another: neighbours in the log are of other streams.
            numbers = range(start, min(start + COMMIT_STREAMS, rows))
            client.commit(
                fencepost.CommitAppend(
                    stream=f"many/{n % options.streams}",
                    messages=[msgspec.Raw(MESSAGE % n)],
                    auto_create=True,
                )
                for n in numbers
            )
    frame = _source(spark, url, match="many/*")
    assert frame.count() == rows
    rates = [rows / _timed(lambda: _drained(frame)) for _ in range(options.runs)]
    table.add_row(
        f"source, batch, over {options.streams:,} streams",
        f"{statistics.median(rates):,.0f} rows/s",
        ", ".join(f"{rate:,.0f}" for rate in rates),
    )
    with fencepost.connect(url) as client:
        start = client.log_head() - 1_000 * BATCHES
    following = (
        spark.readStream.format("fencepost")
        .options(url=url, match="many/*", startingPosition=str(start), maxRowsPerTrigger=1_000)
        .load()
    )
    took = _batch_ms(following.select("value"), folder / "many", BATCHES)
    table.add_row(
        f"batch of 1,000 of {options.streams:,} streams",
        f"{statistics.median(took):.0f} ms",
        ", ".join(f"{one:.0f}" for one in took),
    )


def _fill(url: str, rows: int) -> None:
    with fencepost.connect(url) as client:
        streams = [client.create(f"rows/{n}") for n in range(64)]
        for first in range(0, rows, APPEND_MESSAGES):
            last = min(first + APPEND_MESSAGES, rows)
            body = [MESSAGE % n for n in range(first, last)]
            stream = streams[(first // APPEND_MESSAGES) % len(streams)]
            stream.append_many([msgspec.Raw(one) for one in body])


def _source(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("fencepost").options(url=url, **options).load()


def _drained(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _streamed(spark: SparkSession, url: str, folder: Path) -> None:
    checkpoint = tempfile.mkdtemp(dir=folder)
    frame = (
        spark.readStream.format("fencepost")
        .options(url=url, match="rows/*", startingPosition="earliest")
        .load()
    )
    writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


def _pages(url: str, *, columns: bool) -> None:
    with fencepost.connect(url) as client:
        after = -1
        while True:
            page = client.log_arrow(after=after, match="rows/*", page_rows=100_000)
            if columns:
                with pa.ipc.open_stream(page.data) as reader:
                    for batch in reader:
                        messages(batch)
            if page.up_to_date:
                return
            after = page.next


def _batch_ms(frame: DataFrame, folder: Path, batches: int) -> list[float]:
    """How long each batch of a query took, by Spark's own account, the first three aside."""
    writer = frame.writeStream.format("parquet").option("path", str(folder / "out"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    took = [
        progress["durationMs"]["triggerExecution"]
        for progress in query.recentProgress
        if progress["numInputRows"]
    ]
    return [float(one) for one in took[3:batches]]


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
