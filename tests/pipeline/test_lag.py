"""Lag: of queries by their checkpoints, of tables by their commits, and as metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import fencepost
from fencepost.cli.pipeline import app
from fencepost.client.groups import LeaseAck
from fencepost.pipeline import tables
from fencepost.pipeline.lag import CheckpointError, Reached, lag, lags, reached
from fencepost.pipeline.metrics import Place, PortError, places, tasks, watch
from tests.pipeline.reading_support import stream, until
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Source:
    def __init__(self, end: str | None, latest: str | None) -> None:
        self.endOffset, self.latestOffset = end, latest


def test_positions_are_read_from_what_spark_reports_of_sources() -> None:
    sources: list[Any] = [
        _Source('{"position": 4}', '{"position": 9}'),
        _Source('"{\\"position\\": 4}"', None),
        _Source('{"logOffset": 3}', None),
        _Source("17", "nonsense"),
        _Source(None, None),
    ]

    found = list(places(sources))
    assert found == [Place(4, {"position": 9}), Place(4, {}), None, None, None]
    assert [place and place.head for place in found] == [9, None, None, None, None]


def test_a_checkpoint_is_read_up_to_its_newest_batch_that_is_done(tmp_path: Path) -> None:
    for name in ("offsets", "commits"):
        (tmp_path / name).mkdir()
    (tmp_path / "metadata").write_text('{"id":"abc"}')
    for batch, position in enumerate((5, 9)):
        lines = ["v1", "{}", f'{{"position": {position}}}', '{"other": 1}']
        (tmp_path / "offsets" / str(batch)).write_text("\n".join(lines))
    (tmp_path / "offsets" / ".1.crc").write_text("")

    (before,) = reached(tmp_path)
    (tmp_path / "commits" / "0").write_text("v1\n{}")
    (after,) = reached(tmp_path)

    assert (before.position, before.batch) == (-1, None)
    assert (after.position, after.batch, after.query) == (5, 0, "abc")


def test_other_folders_are_named_as_what_they_are_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of a query and no folder of tables"):
        reached(tmp_path)


def test_what_is_said_of_queries_does_not_change_which_streams_a_table_has(
    server: ServerProcess,
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("said/a", messages=[1, 2])
        client.create("said/b", messages=[3])
        behind = [
            lag(client, Reached(place="here", position=-1, **consumer), "said/b")
            for consumer in (
                {"kind": "table", "match": "said/*"},
                {"kind": "table", "streams": ("said/a",)},
                {"kind": "query"},
            )
        ]

    assert [one.messages for one in behind] == [3, 2, 1]
    assert [one.bytes for one in behind] == [3, 2, 1]
    assert all(one.seconds is not None and 0 < one.seconds < 60 for one in behind)


def test_a_query_is_measured_while_it_runs_and_its_checkpoint_and_table_tell_its_lag(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("lagging/a", messages=[{"n": n} for n in range(5)])
        with watch(spark, port=0) as watching:
            query = tables.follow(
                spark,
                tmp_path,
                match="lagging/*",
                kind="rows",
                options={"url": server.url},
                trigger={"availableNow": True},
                name="lagging",
            )
            query.awaitTermination(240)
            error = query.exception()
            assert error is None, error
            metrics = _until_ended(watching.port)
        client.stream("lagging/a").append_many([{"n": n} for n in range(3)])
        client.create("elsewhere", messages=[1])

        (of_table,) = [lag(client, one) for one in reached(tmp_path)]
        checkpoint = tmp_path / "_checkpoint"
        (of_query,) = [lag(client, one, "lagging/*") for one in reached(checkpoint)]
        (of_all,) = [lag(client, one) for one in reached(checkpoint)]

    assert 'fencepost_query_rows_total{query="lagging"} 5.0' in metrics
    assert 'fencepost_query_position{query="lagging",source="0"}' in metrics
    assert 'fencepost_query_lag_positions{query="lagging",source="0"}' in metrics
    assert (of_table.kind, of_table.messages, of_table.selection) == ("table", 3, "lagging/*")
    assert 0 < (of_table.seconds or 0) < 60
    assert (of_query.kind, of_query.messages, of_query.batch) == ("query", 3, 0)
    assert of_all.messages >= 4


def test_progress_spark_and_we_tell_the_same_lag_of_a_running_query(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    """It reads one of five messages, and then nothing for an hour: four are left to do.

    What comes while it waits, and what does not concern it, is told without a batch.
    """
    with fencepost.connect(own_server.url) as client:
        client.create("behind", messages=[1, 2, 3, 4, 5])
    writer = stream(
        spark, own_server, stream="behind", startingPosition="earliest", maxRowsPerTrigger=1
    ).writeStream.queryName("behind")
    writer = writer.format("noop").option("checkpointLocation", str(tmp_path))
    with (
        fencepost.connect(own_server.url) as client,
        watch(spark, port=0, lag_seconds=0.05) as watching,
    ):
        query = writer.trigger(processingTime="1 hour").start()
        try:
            until(lambda: query.lastProgress is not None)
            until(lambda: _ours(watching.port, "lag_rows") is not None)
            progress = query.lastProgress
            assert progress is not None
            [source] = progress.sources
            ours = _ours(watching.port, "lag_positions")
            sparks = _sparks(spark, "lag_positions")
            page = _fetched(f"{spark.sparkContext.uiWebUrl}/StreamingQuery/")
            by_command = CliRunner().invoke(
                app, ["lag", str(tmp_path), "--match", "behind", "--json", "--url", own_server.url]
            )
            client.create("beside", messages=[1, 2, 3])
            client.stream("behind").append_many([6, 7])
            until(lambda: _ours(watching.port, "lag_rows") == 6)
            until(lambda: _sparks(spark, "lag_rows") == 6)
            aged = _ours(watching.port, "lag_seconds") or 0.0
            until(lambda: (_ours(watching.port, "lag_seconds") or 0.0) > aged)
            moved = _ours(watching.port, "lag_positions"), _ours(watching.port, "lag_bytes")
            batches = _fetched(f"http://127.0.0.1:{watching.port}/metrics")
        finally:
            query.stop()

    [place] = places([source])
    assert place is not None
    assert place.head is not None
    assert (place.head - place.position, ours, sparks) == (4, 4.0, 4)
    told = {name: place.told[name] for name in sorted(place.told) if name != "behind_seconds"}
    assert told == {
        "batch_bytes": 1,
        "batch_rows": 1,
        "behind_bytes": 4,
        "behind_rows": 4,
        "losses": 0,
        "position": 4,
        "retries": 0,
        "streams": ["behind"],
        "url": own_server.url,
    }
    assert 0 < place.told["behind_seconds"] < 60
    assert moved == (9.0, 6.0)
    assert 'fencepost_query_batches_total{query="behind"} 1.0' in batches
    assert 'fencepost_query_bytes_total{query="behind"} 1.0' in batches
    assert json.loads(by_command.stdout)["messages"] == 4
    assert "Active Streaming Queries (1)" in page
    assert ">behind<" in page


def _fetched(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read(), "utf-8")


def _ours(port: int | None, name: str) -> float | None:
    text = _fetched(f"http://127.0.0.1:{port}/metrics")
    found = re.search(rf'^fencepost_query_{name}{{query="behind",source="0"}} (\S+)$', text, re.M)
    return None if found is None else float(found[1])


def _sparks(spark: SparkSession, name: str) -> int | None:
    gauges = json.loads(_fetched(f"{spark.sparkContext.uiWebUrl}/metrics/json/"))["gauges"]
    [found] = [
        gauge["value"]
        for place, gauge in gauges.items()
        if place.endswith(f".fencepost.behind.0.{name}")
    ]
    return int(found)


def _until_ended(port: int | None) -> str:
    """The metrics once the listener has heard that the query ended, which may take a moment."""
    page = f"http://127.0.0.1:{port}/metrics"
    until(lambda: 'fencepost_query_active{query="lagging"} 0.0' in _fetched(page))
    return _fetched(page)


def test_a_port_that_is_taken_is_said_so(spark: SparkSession) -> None:
    with (
        watch(spark, port=0) as first,
        pytest.raises(PortError, match="choose another port"),
    ):
        watch(spark, port=first.port)


def test_nothing_is_under_way_when_spark_is_idle(spark: SparkSession) -> None:
    assert tasks(spark) is None


def test_a_group_is_behind_by_what_waits_for_its_targets(server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        for name in ("a", "b"):
            client.create(f"lag-group/{name}").append_many([1, 2, 3])
        group = client.group("lag-group")
        group.make(["lag-group/*"])
        [before] = lags(client, "lag-group")
        lease = group.claim("worker", streams_max=1).leases[0]
        group.ack(LeaseAck(token=lease.token, at=lease.read_to))
        # Those who ask soon after each other are given the same figures.
        while group.stats()["lag"] != 3:
            pass

        assert (before.kind, before.messages) == ("group", 6)
        assert [after.messages for after in lags(client, "lag-group")] == [3]
        result = CliRunner().invoke(app, ["lag", "lag-group", "--url", server.url, "--json"])
        assert json.loads(result.stdout)["messages"] == 3
        with pytest.raises(CheckpointError, match="no folder nowhere"):
            lags(client, "nowhere")
