"""`python -m benchmarks.pipeline_parquet`: source and sink beside Parquet, incompressible rows.

JSON texts of 100 random bytes lie in Spark's memory. Round after round, in one session, they are
written to Parquet and to Fencepost in turn, read back in turn as the one column that both have, and
read as a query into Spark's `noop` sink in turn. What such a query takes to begin is told by one
over a source in Python that has a single row, and over a file with that row. Parquet is a file
format in Spark's own process: Fencepost makes messages that are on disk, and a server does most of
the work. `--store postgres` with `--workers` or `--nodes` puts the server on PostgreSQL; with two
nodes one is written to and the other one read from.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline_sink import add, cpu_seconds, shown, timed
from benchmarks.postgres import nodes, on_postgres
from benchmarks.subjects import OURS, running
from fencepost.pipeline import session
from fencepost.testing.postgres import PostgresServer

CORES = 2
_BYTES = (
    "concat(unhex(sha2(cast(id as string), 512)),"
    " unhex(substr(sha2(cast(-1 - id as string), 512), 1, 18)))"
)
RANDOM = (
    f"concat('\"', substr(translate(base64({_BYTES}), chr(13) || chr(10), ''), 1, 98), '\"')"
    " AS value"
)
"""JSON texts of 100 bytes in which nothing comes twice: Parquet's codec makes them no shorter."""


def main() -> int:
    """Run everything, print a table for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_parquet")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--workers", type=int, default=1, help="processes of the one server")
    parser.add_argument("--nodes", type=int, default=1, help="servers on one database: 1 or 2")
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    conf = {"spark.ui.enabled": False, "spark.driver.memory": "3g"}
    spark = session("benchmark", master=f"local[{CORES},4]", conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    console = Console()
    for count in options.rows:
        table = Table(f"{count:,} rows", "median", "all rounds")
        with (
            tempfile.TemporaryDirectory(dir=options.data) as folder,
            served(options, Path(folder)) as (written, read, pid),
        ):
            rounds(table, spark, (written, read, pid), Path(folder), count, options.rounds)
        console.print(table)
        console.print(f"load average: {os.getloadavg()}")
    spark.stop()
    return 0


@contextlib.contextmanager
def served(options: Any, folder: Path) -> Iterator[tuple[str, str, int | None]]:
    """Where to write and where to read, and the process to take the time of, if it is one."""
    if options.store == "sqlite":
        with running(OURS, folder / "data") as server:
            url = f"http://127.0.0.1:{server.port}"
            yield url, url, server.pid
        return
    with PostgresServer() as postgres:
        if options.nodes > 1:
            with nodes(postgres, folder / "data", options.nodes) as ports:
                urls = [f"http://127.0.0.1:{port}" for port in ports]
                yield urls[0], urls[1], None
            return
        with running(on_postgres(postgres, options.workers), folder / "data") as server:
            url = f"http://127.0.0.1:{server.port}"
            yield url, url, None


def rounds(
    table: Table,
    spark: SparkSession,
    server: tuple[str, str, int | None],
    work: Path,
    count: int,
    times: int,
) -> None:
    """Write, read and follow, each in turn with Parquet, so that both see the same machine."""
    to, at, pid = server
    rows = spark.range(count, numPartitions=CORES).selectExpr(RANDOM).cache()
    assert rows.count() == count
    few = rows.limit(1000)
    few.write.parquet(str(work / "warm"))
    write(few, to, "warm")
    spark.read.format("fencepost").options(url=at, stream="warm").load().count()
    found: dict[str, dict[str, list[float]]] = {}
    spent: dict[str, list[float]] = {}
    for turn in range(times):
        folder = str(work / f"parquet-{turn}")
        stream = f"rows/{turn}"
        steps: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "write": (
                lambda folder=folder: rows.write.parquet(folder),  # type: ignore[misc]
                lambda stream=stream: write(rows, to, stream),  # type: ignore[misc]
            ),
            "read": (
                lambda folder=folder: emptied(spark.read.parquet(folder)),  # type: ignore[misc]
                lambda stream=stream: emptied(read(spark, at, stream)),  # type: ignore[misc]
            ),
            "query to noop": (
                lambda folder=folder: follow(  # type: ignore[misc]
                    spark.readStream.schema("value STRING").parquet(folder), work / folder / "c"
                ),
                lambda stream=stream: follow(  # type: ignore[misc]
                    reading(spark.readStream, at, stream), work / stream / "c"
                ),
            ),
        }
        for name, (peer, ours) in steps.items():
            rates = found.setdefault(name, {"Parquet": [], "Fencepost": []})
            rates["Parquet"].append(count / timed(peer))
            before = 0.0 if pid is None else cpu_seconds(pid)
            rates["Fencepost"].append(count / timed(ours))
            if pid is not None:
                seconds = (cpu_seconds(pid) - before) / count * 1e6
                spent.setdefault(name, []).append(seconds)
    for name, rates in found.items():
        for way, values in rates.items():
            add(table, f"{name}, {way}", values, "rows/s")
        ratios = [o / p for o, p in zip(rates["Fencepost"], rates["Parquet"], strict=True)]
        table.add_row(f"{name}, ratio", f"{statistics.median(ratios):.2f}", shown(ratios, ".2f"))
        if name in spent:
            add(table, f"{name}, the server's processor per million", spent[name], "s", ".2f")
    rows.unpersist()
    starts(table, spark, work / f"starts-{count}", times)


def starts(table: Table, spark: SparkSession, work: Path, times: int) -> None:
    """What a query takes that reads one row, from a source in Python and from a file."""
    spark.dataSource.register(OneRow)
    spark.range(1).selectExpr(RANDOM).write.parquet(str(work / "row"))
    seconds: dict[str, list[float]] = {}
    for turn in range(times + 1):
        one = {
            "a source in Python": spark.readStream.format(OneRow.name()).load(),
            "a file": spark.readStream.schema("value STRING").parquet(str(work / "row")),
        }
        for name, frame in one.items():
            checkpoint = work / name.replace(" ", "-") / str(turn)
            took = timed(lambda frame=frame, at=checkpoint: follow(frame, at))  # type: ignore[misc]
            if turn:  # the first time loads and compiles
                seconds.setdefault(name, []).append(took)
    for name, found in seconds.items():
        add(table, f"query to noop over one row of {name}", found, "s", ".2f")


class OneRow(DataSource):
    """A source in Python with one row: what Spark itself takes for one."""

    @classmethod
    def name(cls) -> str:
        return "one-row-python"

    def schema(self) -> str:
        return "value BINARY"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002
        return OneRowReader()


class OneRowReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the row once."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"row": 0}

    def getDefaultReadLimit(self) -> ReadAllAvailable:  # noqa: N802
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802, ARG002
        return {"row": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:  # noqa: ARG002
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        yield pa.RecordBatch.from_pydict({"value": pa.array([b"row"], pa.binary())})

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        pass


def write(rows: DataFrame, url: str, stream: str) -> None:
    writing = rows.write.format("fencepost").mode("append").option("url", url)
    writing.option("stream", stream).option("autoCreate", "true").save()


def read(spark: SparkSession, url: str, stream: str) -> DataFrame:
    frame: DataFrame = reading(spark.read, url, stream)
    return frame


def reading(reader: Any, url: str, stream: str) -> Any:
    options = {"url": url, "stream": stream, "startingPosition": "earliest"}
    return reader.format("fencepost").options(**options).schema("value BINARY").load()


def emptied(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def follow(frame: DataFrame, checkpoint: Path) -> None:
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    assert writer.trigger(availableNow=True).start().awaitTermination(600)


if __name__ == "__main__":
    raise SystemExit(main())
