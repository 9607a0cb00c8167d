"""Tables as users hold them: made by a backfill or followed, killed, and read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

import fencepost
from fencepost.client import state
from fencepost.pipeline import tables
from fencepost.pipeline.errors import DataLossError
from fencepost.pipeline.tables.files import TableError
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS = ("parquet", "delta")
USER = "name string, age int"
FEW = {"buckets": 2}
"""Every bucket is a task, and two are as many as eight to a test."""


def _users(count: int, *, begin: int = 0) -> list[state.Change]:
    return [
        state.upsert("user", f"u{number}", {"name": f"n{number}", "age": number})
        for number in range(begin, begin + count)
    ]


def _fill(server: ServerProcess, path: str, messages: Iterable[Any]) -> None:
    with fencepost.connect(server.url) as client:
        client.stream(path).append_many(list(messages), auto_create=True)


def _rows(spark: SparkSession, place: Path, type: str = "user") -> list[Any]:
    found = tables.read(spark, place, type)
    return sorted(tuple(row) for row in found.collect())


def _names(spark: SparkSession, place: Path) -> dict[str, str]:
    return {row.key: row.name for row in tables.read(spark, place, "user").collect()}


def _backfill(spark: SparkSession, place: Path, **options: Any) -> tables.Reached:
    return tables.backfill(spark, place, **{**FEW, **options})


def _follow_to_the_end(spark: SparkSession, place: Path, **options: Any) -> None:
    query = tables.follow(spark, place, trigger={"availableNow": True}, **{**FEW, **options})
    query.awaitTermination(240)
    error = query.exception()
    assert error is None, error
    assert not query.isActive


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_holds_what_the_client_materializes(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, format: Any
) -> None:
    path = f"tables/whole-{format}"
    _fill(
        server,
        path,
        [
            *_users(20),
            state.delete("user", "u3"),
            state.update("user", "u4", {"name": "new", "age": 40}),
            state.insert("order", "o1", {"total": 12.5}),
            {"no": "message"},
        ],
    )

    reached = _backfill(
        spark,
        tmp_path,
        stream=path,
        format=format,
        types={"user": USER, "order": None},
        options={"url": server.url},
    )

    with fencepost.connect(server.url) as client:
        expected = state.Materialized(client.stream(path)).refresh()
    assert _names(spark, tmp_path) == {
        key: value["name"] for key, value in expected.rows("user").items()
    }
    (order,) = tables.read(spark, tmp_path, "order").collect()
    assert (order.stream, order.key, json.loads(order.value)) == (path, "o1", {"total": 12.5})
    assert order.version == 22
    assert (reached.rows, reached.invalid) == (24, 1)
    assert tables.types(tmp_path) == ["order", "user"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_backfill_in_pieces_and_a_query_that_follows_give_equal_tables(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, format: Any
) -> None:
    path = f"tables/equal-{format}"
    options = {"url": server.url}
    followed, filled = tmp_path / "followed", tmp_path / "filled"
    first = [*_users(10), state.reset(), *_users(6), state.snapshot_start(), *_users(4, begin=2)]
    then = [state.snapshot_end(), state.delete("user", "u3"), *_users(3, begin=20)]

    for piece in (first, then):
        _fill(server, path, piece)
        _follow_to_the_end(spark, followed, stream=path, format=format, options=options)
    _backfill(spark, filled, stream=path, format=format, options=options, rows_per_commit=11)

    assert _rows(spark, followed) == _rows(spark, filled)
    assert {row[1] for row in _rows(spark, filled)} == {"u2", "u4", "u5", "u20", "u21", "u22"}
    assert tables.position(followed) <= tables.position(filled)


def test_a_snapshot_that_ended_takes_away_what_did_not_come_in_it(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    path = "tables/snapshot"
    _fill(
        server,
        path,
        [*_users(6), state.snapshot_start(), *_users(2, begin=4), state.snapshot_end()],
    )

    _backfill(spark, tmp_path, stream=path, options={"url": server.url}, rows_per_commit=3)

    assert {row[1] for row in _rows(spark, tmp_path)} == {"u4", "u5"}


def test_a_stream_that_was_made_again_begins_with_no_rows(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    path = "tables/again"
    _fill(server, path, _users(5))
    _backfill(spark, tmp_path, stream=path, options={"url": server.url})
    with fencepost.connect(server.url) as client:
        client.stream(path).delete()
    _fill(server, path, _users(1, begin=7))

    _backfill(spark, tmp_path, stream=path, options={"url": server.url})

    assert {row[1] for row in _rows(spark, tmp_path)} == {"u7"}


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_any_streams_are_appended_with_the_columns_of_their_values(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, format: Any
) -> None:
    match, options = f"tables/rows-{format}/*", {"url": server.url}
    for shop in ("a", "b"):
        _fill(
            server, f"tables/rows-{format}/{shop}", [{"total": n, "shop": shop} for n in range(5)]
        )
    settings: dict[str, Any] = {
        "match": match,
        "kind": "rows",
        "format": format,
        "schema": "shop string, total long",
        "options": options,
    }
    _backfill(spark, tmp_path, **settings)
    _fill(server, f"tables/rows-{format}/a", [{"total": 5, "shop": "a"}, "no object"])

    _follow_to_the_end(spark, tmp_path, **settings)
    _backfill(spark, tmp_path, **settings)

    found = tables.read(spark, tmp_path).orderBy("stream", "version").collect()
    assert [(row.shop, row.total) for row in found[:7]] == [
        *(("a", n) for n in range(6)),
        (None, None),
    ]
    assert found[6]._corrupt == '"no object"'
    assert len(found) == 12


def test_a_delta_table_is_read_without_fencepost_and_tells_its_batches(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    path = "tables/plain-delta"
    _fill(server, path, _users(4))

    _follow_to_the_end(spark, tmp_path, stream=path, format="delta", options={"url": server.url})

    table = DeltaTable(str(tmp_path / "user"))
    assert sorted(table.to_pyarrow_table().column("key").to_pylist()) == ["u0", "u1", "u2", "u3"]
    (metadata,) = (tmp_path / "_checkpoint").glob("metadata")
    query = json.loads(metadata.read_text())["id"]
    assert table.transaction_version(query) == 0


def test_a_table_is_one_thing_and_refuses_to_become_another(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    path = "tables/one-thing"
    _fill(server, path, _users(1))
    _backfill(spark, tmp_path, stream=path, options={"url": server.url})

    with pytest.raises(TableError, match="made with another match and streams"):
        _backfill(spark, tmp_path, match="tables/*", options={"url": server.url})
    with pytest.raises(TableError, match="columns that the table has itself: version"):
        _backfill(spark, tmp_path / "other", stream=path, types={"user": "version int"})
    with pytest.raises(TableError, match="say which one \\(user\\)"):
        tables.read(spark, tmp_path)


def test_a_table_of_another_server_is_refused(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    path, options = "tables/elsewhere", {"url": server.url}
    _fill(server, path, _users(1))
    _backfill(spark, tmp_path / "tables", stream=path, options=options)

    with ServerProcess(tmp_path / "data") as other, pytest.raises(DataLossError, match="another"):
        _backfill(spark, tmp_path / "tables", stream=path, options={"url": other.url})


def test_vacuum_removes_old_files_and_leaves_the_table(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    path = "tables/vacuum"
    _fill(server, path, _users(30))
    _backfill(spark, tmp_path, stream=path, options={"url": server.url}, rows_per_commit=10)
    before, named = _rows(spark, tmp_path), len(list(tmp_path.rglob("*.parquet")))

    removed = tables.vacuum(tmp_path, keep_versions=1, unnamed_seconds=0)

    left = len(list(tmp_path.rglob("*.parquet")))
    assert removed > named - left > 0
    assert _rows(spark, tmp_path) == before
    assert len(list((tmp_path / "_manifests").iterdir())) == 1


CHILD = """
import sys
from fencepost.pipeline import session
from fencepost.pipeline import tables
url, filled, followed, path = sys.argv[1:]
spark = session("child", master="local[2]", conf={"spark.ui.enabled": False,
    "spark.sql.shuffle.partitions": 2})
spark.sparkContext.setLogLevel("OFF")
started = []
def committed(*_):
    if started:
        return
    started.append(True)
    query = tables.follow(spark, followed, stream=path, format="parquet",
        buckets=2, options={"url": url, "maxRowsPerTrigger": 50})
    while not query.lastProgress:
        query.awaitTermination(0.1)
    print("committed", flush=True)
tables.backfill(spark, filled, stream=path, format="delta", options={"url": url},
    buckets=2, rows_per_commit=50, on_commit=committed)
"""


def test_runs_killed_in_the_middle_and_run_again_give_equal_tables(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    """Both are in one process, and die together: each has committed once, and goes on."""
    path, options = "tables/killed", {"url": server.url}
    filled, followed, whole = (tmp_path / name for name in ("filled", "followed", "whole"))
    for begin in range(0, 1000, 100):
        _fill(server, path, [*_users(40, begin=begin), state.delete("user", f"u{begin}")])
    command = [sys.executable, "-c", CHILD, server.url, str(filled), str(followed), path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "committed\n"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    stopped_at = [tables.position(place) for place in (filled, followed)]
    _backfill(spark, filled, stream=path, format="delta", options=options)
    _follow_to_the_end(spark, followed, stream=path, format="parquet", options=options)
    _backfill(spark, whole, stream=path, options=options)

    expected = _rows(spark, whole)
    assert len(expected) == 10 * 39
    assert _rows(spark, filled) == expected
    assert _rows(spark, followed) == expected
    assert -1 < min(stopped_at) <= max(stopped_at) < tables.position(whole)
