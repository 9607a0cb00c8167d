"""A batch read of the log by a real Spark from a real server."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (its usual name)

import fencepost
from fencepost.client.operations import Producing
from tests.integration.auth_support import place, principal, token
from tests.pipeline.reading_support import messages, read, rows, values
from tests.serving import ServerProcess


def test_every_column_says_what_the_log_says(spark: SparkSession, server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        stream = client.create("columns/a")
        stream.append_many([{"n": 1}, {"n": 2}], producer=Producing(id="p", epoch=3, seq=0))
        client.create("columns/b", content_type="text/plain").append("text")

    found = rows(read(spark, server, match="columns/*"))

    expected = messages(server, match="columns/*")
    assert [row["position"] for row in found] == [entry.position for entry in expected]
    for row, entry in zip(found, expected, strict=True):
        assert (row["stream"], row["offset"], row["version"], row["content_type"]) == (
            entry.stream,
            entry.offset,
            entry.version,
            entry.content_type,
        )
        instant = datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC)
        assert row["timestamp"].astimezone(UTC) == instant
    sent = [(row["producer_id"], row["producer_epoch"], row["producer_seq"]) for row in found]
    assert sent == [("p", 3, 0), ("p", 3, 0), (None, None, None)]
    assert [bytes(row["value"]) for row in found] == [b'{"n":1}', b'{"n":2}', b"text"]


def test_streams_are_selected_by_path_by_paths_or_by_pattern(
    spark: SparkSession, server: ServerProcess
) -> None:
    with fencepost.connect(server.url) as client:
        for path in ("select/a", "select/b", "select/deep/c", "select/x,y"):
            client.create(path).append(path)

    def found(**options: object) -> set[str]:
        return {row["stream"] for row in rows(read(spark, server, **options))}

    assert found(stream="select/x,y") == {"select/x,y"}
    assert found(streams="select/a, select/deep/c") == {"select/a", "select/deep/c"}
    assert found(match="select/*") == {"select/a", "select/b", "select/x,y"}
    assert found(match="select/**") >= {"select/a", "select/deep/c"}
    assert found(stream="select/nothing") == set()


def test_positions_and_times_bound_what_is_read(spark: SparkSession, server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        stream = client.create("bounds")
        for n in range(5):
            stream.append(n)
    log = messages(server, streams=["bounds"])
    third = log[2]

    def found(**options: object) -> list[bytes]:
        return values(read(spark, server, stream="bounds", **options))

    everything = [b"0", b"1", b"2", b"3", b"4"]
    assert found() == found(startingPosition="earliest", endingPosition="latest") == everything
    assert found(startingPosition=third.position) == everything[2:]
    assert found(endingPosition=third.position) == everything[:3]
    assert found(startingPosition=third.position, endingPosition=third.position) == [b"2"]
    since = [
        str(n).encode() for n, entry in enumerate(log) if entry.timestamp_ms >= third.timestamp_ms
    ]
    assert found(startingTimestamp=third.timestamp_ms) == since
    shown = datetime.fromtimestamp(third.timestamp_ms / 1000, UTC).isoformat(
        timespec="milliseconds"
    )
    assert found(endingTimestamp=shown) == everything[: len(everything) - len(since)]
    assert found(startingTimestamp="2100-01-01T00:00:00Z") == []
    assert found(endingTimestamp="2001-01-01T00:00:00Z") == []


def test_a_range_that_the_log_has_not_reached_is_refused(
    spark: SparkSession, server: ServerProcess
) -> None:
    for option in ("startingPosition", "endingPosition"):
        frame = read(spark, server, match="**", **{option: 10**12})
        with pytest.raises(Exception, match=f"{option} is 1000000000000, but .* log ends at"):
            frame.count()


def test_wrong_options_are_refused_when_the_read_is_made(
    spark: SparkSession, server: ServerProcess
) -> None:
    with pytest.raises(Exception, match=r"there is no option strem \(did you mean stream\?\)"):
        read(spark, server, strem="a")
    with pytest.raises(Exception, match="minPartitions is 'many': it must be a whole number"):
        read(spark, server, stream="a", minPartitions="many")
    with pytest.raises(Exception, match="maxRowsPerTrigger is for readStream"):
        read(spark, server, stream="a", maxRowsPerTrigger=3).count()


def test_markers_are_not_rows_and_deleted_messages_are(
    spark: SparkSession, server: ServerProcess
) -> None:
    with fencepost.connect(server.url) as client:
        client.create("gone/a").append_many([1, 2])
        client.create("gone/b").append_many([3])
        client.stream("gone/b").close()
        client.stream("gone/a").truncate(before=client.stream("gone/a").head().next_offset)
        client.stream("gone/a").delete()
        markers = [entry.marker for entry in client.log(match="gone/*") if entry.marker]

    assert markers == ["closed", "truncated", "deleted"]
    assert values(read(spark, server, match="gone/*")) == [b"1", b"2", b"3"]


def test_partitions_together_are_the_log_exactly(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    """For random appends and any number of partitions: the union is the log, nothing twice."""
    dice = random.Random(7)
    with fencepost.connect(own_server.url) as client:
        streams = [client.create(f"union/{n}") for n in range(7)]
        for n in range(150):
            batch = [
                {"n": n, "pad": "x" * dice.randrange(2000)} for _ in range(dice.randrange(1, 9))
            ]
            dice.choice(streams).append_many(batch)
        client.stream("union/3").delete()
    log = messages(own_server, match="union/*")

    for partitions in (1, 2, 3, 8, 31):
        frame = read(spark, own_server, match="union/*", minPartitions=partitions)
        found = rows(frame)

        assert frame.rdd.getNumPartitions() == partitions
        assert [row["position"] for row in found] == [entry.position for entry in log]
        assert [row["offset"] for row in found] == [entry.offset for entry in log]
    once = values(read(spark, own_server, match="union/*", minPartitions=5))
    assert values(read(spark, own_server, match="union/*", minPartitions=2)) == once


def test_a_filter_takes_nothing_from_other_uses_of_its_frame(
    spark: SparkSession, server: ServerProcess
) -> None:
    """Spark 4.3 gave what was planned with one filter pushed down to every use of the frame."""
    with fencepost.connect(server.url) as client:
        client.create("filtered").append_many(list(range(40)))
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.python.filterPushdown.enabled", "true")

    for session in (spark, theirs):
        frame = read(session, server, stream="filtered")
        few = frame.where("version < 10 AND stream = 'filtered' AND position >= 0")
        many = frame.where(F.col("position") >= frame.agg({"position": "min"}).collect()[0][0] + 10)

        assert [one.count() for one in (frame, few, frame, many, few, frame)] == [
            *(40, 10, 40),
            *(30, 10, 40),
        ]
        assert few.unionAll(many).count() == 40
        assert few.crossJoin(frame.select("version")).count() == 400


def test_columns_can_be_chosen_by_the_schema(spark: SparkSession, server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        client.create("chosen").append({"a": 1})

    frame = (
        spark.read.format("fencepost")
        .options(url=server.url, stream="chosen")
        .schema("value BINARY, stream STRING")
        .load()
    )

    assert [(bytes(value), stream) for value, stream in frame.collect()] == [(b'{"a":1}', "chosen")]


def test_a_pattern_over_two_thousand_streams_reads_them_all(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    appends = [
        fencepost.CommitAppend(stream=f"many/{n % 40}/{n}", messages=[n], auto_create=True)
        for n in range(2000)
    ]
    with fencepost.connect(own_server.url) as client:
        client.commit(appends)
        client.create("other").append("not this")

    frame = read(spark, own_server, match="many/*/*", minPartitions=2)

    assert frame.select("stream").distinct().count() == 2000
    assert sorted(int(value) for value in values(frame)) == list(range(2000))
    assert len(values(read(spark, own_server, match="many/7/*"))) == 50


def test_large_messages_arrive_whole(spark: SparkSession, server: ServerProcess) -> None:
    large = bytes(random.Random(1).randbytes(9 << 20))
    with fencepost.connect(server.url) as client:
        binary = client.create("large", content_type="application/octet-stream")
        for body in (b"small", large, b"last"):
            binary.append(body)

    assert values(read(spark, server, stream="large")) == [b"small", large, b"last"]


def test_a_server_with_a_small_page_is_read_in_small_pages(
    spark: SparkSession, tmp_path: Path
) -> None:
    environment = {"FENCEPOST_LOG_ROWS_MAX": "7"}
    with ServerProcess(tmp_path / "data", environment=environment) as small:
        with fencepost.connect(small.url) as client:
            client.create("paged").append_many(list(range(100)))

        assert values(read(spark, small, stream="paged")) == [str(n).encode() for n in range(100)]


def test_a_token_lets_only_its_principal_read(spark: SparkSession, tmp_path: Path) -> None:
    people = (
        principal("root", ("**", ["admin"])),
        principal("ann", ("orders/**", ["read"])),
        principal("writer", ("**", ["append", "create"])),
    )
    with place(tmp_path, *people) as here:
        for path in ("orders/1", "bills/1"):
            assert here("root").create(path).status_code == 201
            assert here("root").append(path, path).status_code == 204
        server = here.process

        seen = values(read(spark, server, match="**", token=token("ann"), startingPosition=0))

        assert seen == [b'"orders/1"']
        everything = read(spark, server, match="**", token=token("ann"))
        assert values(everything.where("stream = 'bills/1'")) == []
        refusals = {
            "the server does not know who asks": {"match": "**", "token": "wrong"},
            "the server does not know who asks ": {"match": "**"},
            "may not read the stream bills/1": {"stream": "bills/1", "token": token("ann")},
            "may not read the stream orders/1": {"stream": "orders/1", "token": token("writer")},
            "may not read any stream": {"match": "orders/*", "token": token("writer")},
        }
        for words, options in refusals.items():
            frame = read(spark, server, **options)
            with pytest.raises(Exception, match=words.strip()) as caught:
                frame.count()
            assert options.get("token", "a token that was not given") not in str(caught.value)


def test_a_token_is_not_in_plans(spark: SparkSession, server: ServerProcess) -> None:
    frame = read(spark, server, stream="plans", token="sesame")

    plan = frame._jdf.queryExecution().toString()

    assert "sesame" not in plan


def _rows_scanned(frame: object) -> int:
    """How many rows left the source in the last run of a frame, by Spark's own count."""
    counts: list[int] = []

    def visit(plan: object) -> None:
        name = plan.nodeName()  # type: ignore[attr-defined]
        metrics = plan.metrics()  # type: ignore[attr-defined]
        if "Scan" in name and metrics.contains("numOutputRows"):
            counts.append(metrics.apply("numOutputRows").value())
        children = plan.children()  # type: ignore[attr-defined]
        for index in range(children.size()):
            visit(children.apply(index))

    executed = frame._jdf.queryExecution().executedPlan()  # type: ignore[attr-defined]
    visit(executed)
    assert len(counts) == 1, executed.toString()
    return counts[0]
