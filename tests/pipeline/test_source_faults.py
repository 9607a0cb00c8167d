"""A source whose server goes away, comes back, forgets, or loses rows that were not read yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from typer.testing import CliRunner

import fencepost
from fencepost.cli.pipeline import app
from fencepost.pipeline import tables
from fencepost.pipeline.metrics import places
from tests.pipeline.reading_support import collecting, messages, read, stream, until, values
from tests.serving import ServerProcess

AVAILABLE_NOW = {"availableNow": True}


def test_a_query_survives_restarts_of_the_server(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    """Killed while a writer writes and a query reads: every message comes once, in order."""
    with fencepost.connect(own_server.url) as client:
        made = client.create("restarts")
        frame = stream(
            spark,
            own_server,
            stream="restarts",
            startingPosition="earliest",
            maxRowsPerTrigger=150,
            minPartitions=3,
        )
        with collecting(frame, tmp_path / "checkpoint") as collected:
            for restart in range(3):
                for n in range(10):
                    first = restart * 500 + n * 50
                    made.append_many(list(range(first, first + 50)))
                collected.wait_for(restart * 500 + 100)
                own_server.kill()
                own_server.restart()
            collected.wait_for(1500)

    assert [int(value) for value in collected.values] == list(range(1500))


def test_a_task_waits_for_a_server_that_is_being_restarted(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    with fencepost.connect(own_server.url) as client:
        client.create("away").append_many(list(range(1000)))
    frame = read(spark, own_server, stream="away", minPartitions=2)
    frame.rdd.getNumPartitions()  # planned: from here on only the tasks ask the server
    own_server.kill()
    back = threading.Thread(target=own_server.restart)
    back.start()

    found = values(frame)

    back.join()
    assert found == [str(n).encode() for n in range(1000)]


def test_a_server_that_stays_away_ends_the_query_with_a_word(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(own_server.url) as client:
        client.create("stays").append(1)
    frame = stream(
        spark, own_server, stream="stays", startingPosition="earliest", retryTimeoutMs=500
    )
    with collecting(frame, tmp_path / "checkpoint") as collected:
        collected.wait_for(1)
        own_server.kill()

        until(lambda: collected.query.exception() is not None)
        own_server.restart()

    assert f"cannot connect to 127.0.0.1:{own_server.port}" in str(collected.query.exception())


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose log forgets deleted messages at once."""
    environment = {
        "FENCEPOST_STORE_LOG_RETENTION_MS": "1",
        "FENCEPOST_STORE_SWEEP_INTERVAL_MS": "20",
    }
    sent = ["--long-poll-ms", "500"]
    with ServerProcess(tmp_path / "data", arguments=sent, environment=environment) as server:
        yield server


def prune(client: fencepost.Client, path: str) -> int:
    """Delete a stream and wait until its rows have left the log; the last position that did."""
    last = max(entry.position for entry in client.log(streams=[path]))
    client.stream(path).delete()
    found: list[int] = []

    def is_pruned() -> bool:
        pruned = client.plan(streams=[path], until=last).pruned
        found[:] = [] if pruned is None else [pruned]
        return pruned == last

    until(is_pruned)
    return found[0]


def test_rows_that_are_gone_are_an_error_that_says_how_to_go_on(
    spark: SparkSession, forgetful: ServerProcess
) -> None:
    with fencepost.connect(forgetful.url) as client:
        client.create("lost/a").append_many([1, 2, 3])
        client.create("lost/b").append_many([4, 5])
        prune(client, "lost/a")

        with pytest.raises(Exception, match=r"rows of lost/\* that were not read yet") as caught:
            read(spark, forgetful, match="lost/*").count()

        assert "failOnDataLoss=false" in str(caught.value)
        rest = [b"4", b"5"]
        assert values(read(spark, forgetful, match="lost/*", failOnDataLoss=False)) == rest
        # What is gone of other streams, or outside the range, does not matter.
        assert values(read(spark, forgetful, stream="lost/b")) == rest
        asked = {"startingPosition": 3, "endingPosition": 4}
        assert values(read(spark, forgetful, match="lost/*", **asked)) == rest


def test_a_table_is_made_of_what_is_left_when_told_so(
    spark: SparkSession, forgetful: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(forgetful.url) as client:
        client.create("left/a").append_many([1, 2, 3])
        client.create("left/b").append_many([4, 5])
        prune(client, "left/a")
    command = ["table", "left/*", str(tmp_path / "t"), "--kind", "rows", "--url", forgetful.url]

    refused = CliRunner().invoke(app, command)
    made = CliRunner().invoke(app, [*command, "--skip-lost"])

    assert refused.exit_code == 1
    assert "--skip-lost" in refused.stderr
    assert made.exit_code == 0, made.stderr
    assert sorted(row.value for row in tables.read(spark, tmp_path / "t").collect()) == [b"4", b"5"]


def test_a_query_fails_on_rows_that_went_while_it_was_away_unless_told_otherwise(
    spark: SparkSession, forgetful: ServerProcess, tmp_path: Path
) -> None:
    asked = {"match": "while/*", "startingPosition": "earliest"}
    with fencepost.connect(forgetful.url) as client:
        client.create("while/a").append(1)
        with collecting(stream(spark, forgetful, **asked), tmp_path / "c", **AVAILABLE_NOW) as run:
            assert run.query.awaitTermination(60)
        client.create("while/b").append_many([21, 22, 23])
        prune(client, "while/b")
        made = client.create("while/c")
        made.append(3)

        with collecting(stream(spark, forgetful, **asked), tmp_path / "c") as failing:
            until(lambda: failing.query.exception() is not None)
        lenient = stream(spark, forgetful, failOnDataLoss=False, **asked)
        with collecting(lenient, tmp_path / "c") as going_on:
            going_on.wait_for(1)
            made.append(4)
            going_on.wait_for(2)
            until(lambda: _told(going_on.query).get("losses") is not None)
            losses = _told(going_on.query)["losses"]

    assert "failOnDataLoss=false" in str(failing.query.exception())
    assert going_on.values == [b"3", b"4"]
    # Three messages, and the marker that says that their stream was deleted.
    assert losses == 4


def _told(query: StreamingQuery) -> Mapping[str, Any]:
    """What the source says in the progress of its query."""
    progress = query.lastProgress
    [place] = [None] if progress is None else places(progress.sources)
    return {} if place is None else place.told


def test_a_query_tells_how_often_its_requests_failed_on_the_way(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(own_server.url) as client:
        made = client.create("often")
        made.append(1)
        frame = stream(spark, own_server, stream="often", startingPosition="earliest")
        with collecting(frame, tmp_path / "checkpoint") as collected:
            collected.wait_for(1)
            until(lambda: "retries" in _told(collected.query))
            before = _told(collected.query)["retries"]
            own_server.kill()
            own_server.restart()
            made.append(2)
            collected.wait_for(2)
            until(lambda: _told(collected.query)["retries"] > 0)

    assert before == 0


def test_deleted_streams_are_read_to_their_end_within_the_retention(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    frame = stream(spark, own_server, match="under/*", startingPosition="earliest")
    with fencepost.connect(own_server.url) as client, collecting(frame, tmp_path) as collected:
        for n in range(30):
            client.create(f"under/{n}").append_many([n, n])
            client.stream(f"under/{n}").delete()
        collected.wait_for(60)

    log = messages(own_server, match="under/*")
    assert [row["position"] for row in collected.rows] == [entry.position for entry in log]
