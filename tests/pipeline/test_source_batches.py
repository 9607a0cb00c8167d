"""When a micro-batch begins: `minRowsPerTrigger` and `maxTriggerDelay`, asked as Spark asks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

import fencepost
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.source import stream as stream_module
from fencepost.pipeline.source.options import source_options
from fencepost.pipeline.source.stream import StreamReader
from tests.serving import ServerProcess

SCHEMA = StructType().add("position", "long")
EVERYTHING = ReadAllAvailable()


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1_000.0
        told = SimpleNamespace(monotonic=lambda: self.seconds)
        monkeypatch.setattr(stream_module, "time", told)


def reader_of(server: ServerProcess, path: str, **options: str) -> StreamReader:
    given = {"url": server.url, "stream": path, "waitMs": "50", **options}
    return StreamReader(source_options(given, SCHEMA, streaming=True))


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    return f"batches/{request.node.name[:80]}"


def test_few_rows_wait_for_more_and_begin_a_batch_when_there_are_enough(
    server: ServerProcess, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    with fencepost.connect(server.url) as client:
        start = {"position": client.log_head()}
        client.create(path).append_many([1, 2])
        reader = reader_of(server, path, minRowsPerTrigger="3")

        few = reader.latestOffset(start, EVERYTHING)
        position = client.stream(path).append(3).position
        enough = reader.latestOffset(start, EVERYTHING)
        reader.stop()

    assert few == start
    assert enough == {"position": position}


def test_few_rows_wait_no_longer_than_the_delay(
    server: ServerProcess, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with fencepost.connect(server.url) as client:
        start = {"position": client.log_head()}
        first = client.create(path).append(1).position
        reader = reader_of(server, path, minRowsPerTrigger="3", maxTriggerDelay="10s")

        at_once = reader.latestOffset(start, EVERYTHING)
        clock.seconds += 9.9
        before = reader.latestOffset(start, EVERYTHING)
        clock.seconds += 0.2
        after = reader.latestOffset(start, EVERYTHING)
        client.stream(path).append(2)
        next_batch = reader.latestOffset({"position": first}, EVERYTHING)
        reader.stop()

    assert (at_once, before, after) == (start, start, {"position": first})
    assert next_batch == {"position": first}, "the delay of the next batch begins anew"


def test_rows_that_another_limit_cuts_do_not_wait(
    server: ServerProcess, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of as many bytes as it may have is full, however few its rows are."""
    Clock(monkeypatch)
    with fencepost.connect(server.url) as client:
        start = {"position": client.log_head()}
        client.create(path).append_many(["x" * 100 for _ in range(4)])
        reader = reader_of(server, path, minRowsPerTrigger="3")

        found = reader.latestOffset(start, ReadMaxBytes(110))
        reader.stop()

    assert start["position"] < found["position"] < start["position"] + 4


def test_a_query_that_reads_what_is_there_and_stops_does_not_wait_for_more(
    server: ServerProcess, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    with fencepost.connect(server.url) as client:
        start = {"position": client.log_head()}
        position = client.create(path).append(1).position
        reader = reader_of(server, path, minRowsPerTrigger="3")
        reader.prepareForTriggerAvailableNow()

        found = reader.latestOffset(start, EVERYTHING)
        reader.stop()

    assert found == {"position": position}


def test_what_is_behind_a_batch_is_what_the_server_counts_there(
    own_server: ServerProcess,
) -> None:
    """While messages of its streams and of others come between batches, and after a restart."""
    dice = random.Random(5)
    schema = StructType().add("position", "long")
    given = {"url": own_server.url, "match": "mine/*", "waitMs": "1", "maxRowsPerTrigger": "7"}
    with fencepost.connect(own_server.url) as client:
        mine, other = client.create("mine/a"), client.create("other")
        mine.append_many(list(range(60)))
        start = {"position": -1}
        reader = StreamReader(source_options(given, schema, streaming=True))
        behind = []
        for batch in range(25):
            for stream in (mine, other):
                stream.append_many(["x" * dice.randrange(9)] * dice.randrange(1, 9))
            if batch == 4:
                reader.stop()
                reader = StreamReader(source_options(given, schema, streaming=True))
            start = reader.latestOffset(start, ReadMaxRows(dice.randrange(1, 20)))
            told = reader.reportLatestOffset()
            plan = client.plan(after=start["position"], match="mine/*")
            assert told is not None
            assert (told["behind_rows"], told["behind_bytes"]) == (plan.rows, plan.bytes)
            assert (told["behind_seconds"] > 0) == (plan.rows > 0)
            behind.append(plan.rows)
        reader.stop()

    assert min(behind) == 0 < max(behind)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"minRowsPerTrigger": "0"}, "minRowsPerTrigger is '0'"),
        ({"minRowsPerTrigger": "5", "maxRowsPerTrigger": "4"}, r"at most maxRowsPerTrigger \(4\)"),
        ({"maxTriggerDelay": "1m"}, "needs minRowsPerTrigger"),
        ({"minRowsPerTrigger": "5", "maxTriggerDelay": "soon"}, "500ms, 30s, 15m or 1h"),
        ({"minRowsPerTrigger": "5", "maxTriggerDelay": "2d"}, "from 1ms to 1d"),
    ],
)
def test_a_wrong_wait_is_refused_with_what_is_legal(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        source_options({"stream": "a", **given}, SCHEMA, streaming=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30 s", 30.0), ("15m", 900.0), ("15min", 900.0), ("1H", 3_600.0)],
)
def test_a_delay_has_a_unit(text: str, seconds: float) -> None:
    given = {"stream": "a", "minRowsPerTrigger": "5", "maxTriggerDelay": text}

    assert source_options(given, SCHEMA, streaming=True).delay_seconds_max == seconds
