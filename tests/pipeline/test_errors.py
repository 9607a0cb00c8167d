"""What goes wrong is told in a sentence: what a new user meets first, as Spark shows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import fencepost
from fencepost.client.errors import FencepostError
from fencepost.pipeline import register
from fencepost.pipeline.connection import Connection, say_if_away
from fencepost.pipeline.errors import rows_without_traceback, without_traceback
from tests.pipeline.reading_support import read
from tests.serving import ServerProcess

LINES_MAX = 8
"""Of a whole message: Spark's sentence, one frame, ours."""


def told(action: Callable[[], Any]) -> str:
    with pytest.raises(Exception, match=r"\w") as caught:
        action()
    return str(caught.value).strip()


@without_traceback
def fails(error: Exception) -> None:
    try:
        _deep(error)
    except Exception as cause:
        raise error from cause


def _deep(error: Exception) -> None:
    raise ValueError(f"before {error}")


@rows_without_traceback
def fails_late(error: Exception) -> Iterator[int]:
    yield 1
    raise error


def test_an_error_on_purpose_arrives_without_frames_and_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(FencepostError, match="do this") as caught:
        fails(FencepostError("do this"))

    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "_deep" not in str(caught.traceback[-1])
    assert "before do this" in caplog.text


def test_an_error_of_another_package_keeps_its_frames() -> None:
    with pytest.raises(KeyError) as caught:
        fails(KeyError("a bug"))

    assert isinstance(caught.value.__cause__, ValueError)


def test_rows_before_an_error_are_given() -> None:
    rows = fails_late(FencepostError("do this"))

    assert next(rows) == 1
    with pytest.raises(FencepostError, match="do this"):
        next(rows)


def test_wrong_options_are_a_sentence_in_what_spark_says(
    spark: SparkSession, server: ServerProcess
) -> None:
    wrong = [
        told(lambda: read(spark, server, strem="a")),
        told(lambda: read(spark, server, stream="a", format="json", schema="id BIGNIT")),
        told(
            lambda: (
                spark.range(1)
                .write.format("fencepost")
                .mode("append")
                .options(url=server.url)
                .save("path")
            )
        ),
    ]

    assert "BIGNIT is no type" in wrong[1]
    assert "give the option stream, and save() nothing" in wrong[2]
    assert [text for text in wrong if text.count("\n") >= LINES_MAX] == []


def test_a_server_that_is_not_there_and_a_url_that_is_none_are_sentences(
    spark: SparkSession, server: ServerProcess
) -> None:
    def reading(url: str) -> str:
        given = {"url": url, "stream": "a", "retryTimeoutMs": "1"}
        return told(spark.read.format("fencepost").options(**given).load().count)

    wrong = [reading("http://127.0.0.1:1"), reading(server.url + "/v1")]

    assert "cannot connect to 127.0.0.1:1" in wrong[0]
    assert "there is no log at this url" in wrong[1]
    assert [text for text in wrong if text.count("\n") >= LINES_MAX] == []


def test_a_server_that_is_away_is_said_before_it_is_waited_for(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    say_if_away(Connection(server.url))
    assert caplog.records == []

    say_if_away(Connection("http://127.0.0.1:1", retry_seconds=90.0))

    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert "cannot connect to 127.0.0.1:1" in warning.getMessage()
    assert "trying again for 90 s (retryTimeoutMs)" in warning.getMessage()


def test_a_server_without_arrow_is_said_with_what_to_install(
    spark: SparkSession, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "pyarrow.py").write_text("raise ImportError('not here')\n")
    with ServerProcess(tmp_path / "data", environment={"PYTHONPATH": str(hidden)}) as plain:
        with fencepost.connect(plain.url) as client:
            client.create("orders").append({"id": 1})

        message = told(lambda: read(spark, plain, stream="orders").count())

    assert "where the server runs, pip install 'fencepost[arrow]'" in message


def test_complete_is_refused_with_the_mode_that_there_is(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    rates = spark.readStream.format("rate").load().groupBy("value").count()
    query = (
        rates.writeStream.format("fencepost")
        .outputMode("complete")
        .options(url=server.url, stream="complete", autoCreate="true")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )

    message = told(query.awaitTermination)

    assert 'streams only grow: write with outputMode("append")' in message


def test_a_session_that_has_the_format_is_not_given_it_again(spark: SparkSession) -> None:
    theirs = spark.newSession()
    registered: list[object] = []
    real = theirs.dataSource

    class Counting:
        def register(self, source: Any) -> None:
            registered.append(source)
            real.register(source)

    counting = type(theirs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(counting, "dataSource", Counting())
        register(theirs)
        register(theirs)

    # None if Spark has found the format by itself.
    assert len(registered) <= 1
