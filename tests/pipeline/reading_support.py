"""What tests of the source share: reads and queries in a line, and the log to hold them against."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import fencepost
from fencepost.client.results import LogEntry
from tests.serving import ServerProcess

WAIT_SECONDS_MAX = 60.0


def read(spark: SparkSession, server: ServerProcess, **options: Any) -> DataFrame:
    """A batch read."""
    return spark.read.format("fencepost").options(url=server.url, **options).load()


def rows(frame: DataFrame) -> list[Row]:
    """All rows in the order of positions."""
    return sorted(frame.collect(), key=lambda row: row["position"])


def values(frame: DataFrame) -> list[bytes]:
    """The messages in the order of positions."""
    return [bytes(row["value"]) for row in rows(frame)]


def messages(server: ServerProcess, token: str | None = None, **asked: Any) -> list[LogEntry]:
    """What the log holds, markers aside, by the client's own reading of it."""
    with fencepost.connect(server.url, token=token) as client:
        return [entry for entry in client.log(**asked) if entry.marker is None]


def stream(spark: SparkSession, server: ServerProcess, **options: Any) -> DataFrame:
    """A streaming read; waits are short, so that tests which wait for nothing wait briefly."""
    asked: dict[str, Any] = {"url": server.url, "waitMs": 200, **options}
    return spark.readStream.format("fencepost").options(**asked).load()


class Collected:
    """A query that collects what it reads, batch by batch, in the test's own memory."""

    def __init__(self, frame: DataFrame, checkpoint: Path, trigger: dict[str, Any]) -> None:
        self.batches: dict[int, list[Row]] = {}
        name = f"q{uuid.uuid4().hex}"
        writer = frame.writeStream.foreachBatch(self._take).queryName(name)
        writer = writer.option("checkpointLocation", str(checkpoint))
        self.query: StreamingQuery = (writer.trigger(**trigger) if trigger else writer).start()

    def _take(self, frame: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = rows(frame)

    @property
    def rows(self) -> list[Row]:
        return [row for batch_id in sorted(self.batches) for row in self.batches[batch_id]]

    @property
    def values(self) -> list[bytes]:
        return [bytes(row["value"]) for row in self.rows]

    def wait_for(self, count: int) -> None:
        """Wait until so many rows have come."""
        until(lambda: len(self.rows) >= count or self.query.exception() is not None)
        if (failure := self.query.exception()) is not None:
            raise failure


@contextmanager
def collecting(frame: DataFrame, checkpoint: Path, **trigger: Any) -> Iterator[Collected]:
    """Run a query for the length of a block."""
    collected = Collected(frame, checkpoint, trigger)
    try:
        yield collected
    finally:
        collected.query.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a bound."""
    ends = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)
