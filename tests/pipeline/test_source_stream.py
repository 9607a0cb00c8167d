"""A streaming read of the log: starts, limits, restarts from the checkpoint, its reports."""

from __future__ import annotations

import threading
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import fencepost
from fencepost.pipeline.source.options import source_options
from fencepost.pipeline.source.stream import StreamReader
from tests.pipeline.reading_support import collecting, messages, stream, until
from tests.serving import ServerProcess

AVAILABLE_NOW = {"availableNow": True}


def numbers(first: int, last: int) -> list[bytes]:
    return [str(n).encode() for n in range(first, last)]


def test_a_query_reads_what_is_there_and_what_comes(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("follow/a").append_many(list(range(10)))
        frame = stream(spark, server, match="follow/*", startingPosition="earliest")

        with collecting(frame, tmp_path) as collected:
            collected.wait_for(10)
            client.stream("follow/a").append_many(list(range(10, 15)))
            # A stream that did not exist when the query began.
            client.create("follow/b").append_many(list(range(15, 20)))
            collected.wait_for(20)

    assert collected.values == numbers(0, 20)


def test_latest_begins_now_and_misses_nothing_across_a_restart(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        made = client.create("latest")
        made.append("before")
        frame = stream(spark, server, stream="latest")

        with collecting(frame, tmp_path) as first:
            # The start is settled, and stored, by an empty first batch.
            until(lambda: first.batches.get(0) == [])
            made.append(1)
            first.wait_for(1)
            first.query.processAllAvailable()
        made.append(2)
        with collecting(frame, tmp_path) as second:
            second.wait_for(1)

    assert (first.values, second.values) == ([b"1"], [b"2"])


def test_limits_bound_every_batch(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        made = client.create("limits")
        for first in range(0, 50, 5):
            made.append_many([f"{n:04}" for n in range(first, first + 5)])
    asked = {"stream": "limits", "startingPosition": "earliest"}

    with collecting(
        stream(spark, server, maxRowsPerTrigger=7, **asked), tmp_path / "rows", **AVAILABLE_NOW
    ) as by_rows:
        assert by_rows.query.awaitTermination(60)
    with collecting(
        stream(spark, server, maxBytesPerTrigger=60, **asked), tmp_path / "bytes", **AVAILABLE_NOW
    ) as by_bytes:
        assert by_bytes.query.awaitTermination(60)

    assert [len(batch) for batch in by_rows.batches.values()] == [7, 7, 7, 7, 7, 7, 7, 1]
    assert [len(batch) for batch in by_bytes.batches.values()] == [10, 10, 10, 10, 10]
    assert by_rows.values == by_bytes.values == [f'"{n:04}"'.encode() for n in range(50)]


def test_available_now_stops_where_the_log_ended_when_it_began(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        made = client.create("available")
        made.append_many(list(range(6)))
        frame = stream(
            spark, server, stream="available", startingPosition="earliest", maxRowsPerTrigger=2
        )

        def append_more(*_: object) -> None:
            made.append("late")

        with collecting(frame, tmp_path, **AVAILABLE_NOW) as first:
            until(lambda: len(first.batches) >= 1)
            append_more()
            assert first.query.awaitTermination(60)
        assert first.values == numbers(0, 6)
        with collecting(frame, tmp_path, **AVAILABLE_NOW) as second:
            assert second.query.awaitTermination(60)
        with collecting(frame, tmp_path, **AVAILABLE_NOW) as third:
            assert third.query.awaitTermination(60)

    assert second.values == [b'"late"']
    assert third.batches == {}


def test_a_query_begins_at_a_position_or_at_a_time(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        made = client.create("starts")
        for n in range(5):
            made.append(n)
    log = messages(server, streams=["starts"])
    third = log[2]
    at_or_after = [entry for entry in log if entry.timestamp_ms >= third.timestamp_ms]

    with collecting(
        stream(spark, server, stream="starts", startingPosition=third.position),
        tmp_path / "position",
        **AVAILABLE_NOW,
    ) as by_position:
        assert by_position.query.awaitTermination(60)
    with collecting(
        stream(spark, server, stream="starts", startingTimestamp=third.timestamp_ms),
        tmp_path / "time",
        **AVAILABLE_NOW,
    ) as by_time:
        assert by_time.query.awaitTermination(60)
    with collecting(
        stream(spark, server, stream="starts", startingTimestamp="2100-01-01T00:00:00Z"),
        tmp_path / "future",
        **AVAILABLE_NOW,
    ) as in_future:
        assert in_future.query.awaitTermination(60)

    assert by_position.values == numbers(2, 5)
    assert len(by_time.values) == len(at_or_after)
    assert in_future.rows == []


def test_a_batch_that_was_not_committed_is_read_again_the_same(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    """What was deleted, truncated or appended meanwhile changes nothing of a range."""
    with fencepost.connect(server.url) as client:
        for name in "abc":
            client.create(f"again/{name}").append_many([f"{name}{n}" for n in range(4)])
        frame = stream(spark, server, match="again/*", startingPosition="earliest")
        with collecting(frame, tmp_path, **AVAILABLE_NOW) as first:
            assert first.query.awaitTermination(60)
        client.stream("again/a").delete()
        client.stream("again/b").truncate(before="now")
        client.stream("again/c").append("later")
        for name in ("0", ".0.crc"):
            (tmp_path / "commits" / name).unlink(missing_ok=True)

        with collecting(frame, tmp_path, **AVAILABLE_NOW) as second:
            assert second.query.awaitTermination(60)

    assert second.batches[0] == first.batches[0]
    assert [bytes(row["value"]) for row in second.batches[1]] == [b'"later"']


def test_progress_says_how_far_the_log_is(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("lag").append_many(list(range(10)))
        frame = stream(
            spark, server, stream="lag", startingPosition="earliest", maxRowsPerTrigger=4
        )
        with collecting(frame, tmp_path, **AVAILABLE_NOW) as collected:
            assert collected.query.awaitTermination(60)
        head = client.log_head()

    sources = [progress["sources"][0] for progress in collected.query.recentProgress]
    assert [source["numInputRows"] for source in sources if source["numInputRows"]] == [4, 4, 2]
    assert all('"position": ' in source["latestOffset"] for source in sources)
    assert f'"position": {head}' in sources[-1]["latestOffset"]


def test_news_end_the_wait_of_an_idle_query(server: ServerProcess) -> None:
    """The reader is asked as Spark asks it, with a wait that would outlast the test."""
    with fencepost.connect(server.url) as client:
        made = client.create("news")
        client.create("noise")
        reader = reader_of(server, stream="news", waitMs="3600000")
        start = {"position": client.log_head()}
        found: list[dict[str, int]] = []
        thread = threading.Thread(
            target=lambda: found.append(reader.latestOffset(start, ReadAllAvailable()))
        )
        thread.start()
        # Others' messages are no news: the server's wait (half a second) passes, and it returns.
        client.stream("noise").append(1)
        thread.join(60)
        assert found == [start]
        waiting = threading.Thread(
            target=lambda: found.append(reader.latestOffset(start, ReadAllAvailable()))
        )
        waiting.start()
        position = made.append("news").position
        waiting.join(60)

        if found[1] == start:
            # The wait was over before the append arrived; the next call must see it.
            found[1] = reader.latestOffset(start, ReadAllAvailable())
        reader.stop()

    assert found[1] == {"position": position}


def test_stopping_an_idle_query_does_not_wait_for_news(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    frame = stream(spark, server, stream="never", startingPosition="earliest", waitMs=3_600_000)

    with collecting(frame, tmp_path) as collected:
        until(lambda: collected.query.status["isTriggerActive"])
        collected.query.stop()

    assert not collected.query.isActive


def test_a_checkpoint_of_another_server_is_refused(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(own_server.url) as client:
        client.create("moved").append_many(list(range(10)))
    asked = {"stream": "moved", "startingPosition": "earliest"}
    with collecting(stream(spark, own_server, **asked), tmp_path / "c", **AVAILABLE_NOW) as first:
        assert first.query.awaitTermination(60)
    with ServerProcess(tmp_path / "another") as another:
        with fencepost.connect(another.url) as client:
            client.create("moved").append(1)

        with collecting(stream(spark, another, **asked), tmp_path / "c") as second:
            until(lambda: second.query.exception() is not None)

    said = str(second.query.exception())
    assert "the query stands at position 9" in said
    assert "log ends at 0" in said
    assert "new checkpoint" in said


def test_an_end_is_refused_when_the_query_starts(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    frame = stream(spark, server, stream="ends", endingPosition=3)

    with collecting(frame, tmp_path) as collected:
        until(lambda: collected.query.exception() is not None)

    said = str(collected.query.exception())
    assert "endingPosition is for read, not for readStream" in said


def test_an_empty_log_and_a_start_in_the_future_are_waited_for(own_server: ServerProcess) -> None:
    """Asked as Spark asks, with Trigger.AvailableNow and without."""
    everything = ReadAllAvailable()
    earliest = reader_of(own_server, stream="empty", startingPosition="earliest", waitMs="100")
    future = reader_of(own_server, match="**", startingTimestamp="2100-01-01T00:00:00Z")
    at_once = reader_of(own_server, stream="empty", startingPosition="earliest")
    at_once.prepareForTriggerAvailableNow()
    newest = reader_of(own_server, stream="empty")
    newest.prepareForTriggerAvailableNow()

    assert earliest.latestOffset({"position": -1}, everything) == {"position": -1}
    assert at_once.latestOffset({"position": -1}, everything) == {"position": -1}
    assert future.latestOffset(future.initialOffset(), everything) == future.initialOffset()
    with fencepost.connect(own_server.url) as client:
        client.create("empty").append(1)
    # What came after the query began is not for it.
    assert newest.latestOffset(newest.initialOffset(), everything) == {"position": -1}
    assert at_once.latestOffset({"position": -1}, everything) == {"position": -1}
    assert earliest.latestOffset({"position": -1}, everything) == {"position": 0}
    assert future.latestOffset(future.initialOffset(), everything) == future.initialOffset()
    assert future.partitions(future.initialOffset(), future.initialOffset()) == []
    for reader in (earliest, future, at_once, newest):
        reader.stop()


def reader_of(server: ServerProcess, **options: str) -> StreamReader:
    given = {"url": server.url, **options}
    schema = StructType().add("position", "long")
    return StreamReader(source_options(given, schema, streaming=True))
