"""Options are read with care: in any case, typed, and refused when they are not understood."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    NullType,
    StringType,
    StructType,
)

from fencepost.pipeline.connection import URL_DEFAULT, connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options
from fencepost.pipeline.source.options import Bound, source_options

VALUES = StructType().add("position", "long").add("value", "binary")


def refused(given: dict[str, str], *, streaming: bool | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        source_options(given, VALUES, streaming=streaming)
    return str(caught.value)


def test_names_of_options_are_read_in_any_case() -> None:
    options = source_options({"STREAM": "a", "MinPartitions": "3", "maxrowspertrigger": "7"})

    assert options.selection.streams == ("a",)
    assert (options.partitions_min, options.rows_max) == (3, 7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["stream", "streams", "match"]),
        ({"stream": "a", "match": "b"}, ["only one", "stream", "match"]),
        ({"stream": ""}, ["stream", "not empty"]),
        ({"stream": "a/*"}, ["stream", "match"]),
        ({"stream": "a//b"}, ["stream", "segments"]),
        ({"streams": "a,,b"}, ["streams", "segments"]),
        ({"streams": "[1]"}, ["streams", "segments"]),
        ({"streams": "[not json"}, ["streams", "segments"]),
        ({"streams": ",".join(f"s{n}" for n in range(65))}, ["streams", "64", "match"]),
        ({"match": "a/**b"}, ["match", "**"]),
        ({"stream": "a", "startingPosition": "first"}, ["startingPosition", "earliest", "latest"]),
        ({"stream": "a", "startingPosition": "-3"}, ["startingPosition", "from 0 on"]),
        ({"stream": "a", "startingPosition": "1.5"}, ["startingPosition", "'1.5'"]),
        ({"stream": "a", "startingTimestamp": "yesterday"}, ["startingTimestamp", "2026-"]),
        ({"stream": "a", "startingTimestamp": "2026-01-01 10:00"}, ["startingTimestamp"]),
        (
            {"stream": "a", "startingTimestamp": "1", "startingPosition": "1"},
            ["startingTimestamp", "startingPosition", "not both"],
        ),
        ({"stream": "a", "endingPosition": "earliest"}, ["endingPosition", "latest"]),
        ({"stream": "a", "startingPosition": "5", "endingPosition": "3"}, ["endingPosition", "5"]),
        (
            {"stream": "a", "endingTimestamp": "1", "endingPosition": "1"},
            ["endingTimestamp", "not both"],
        ),
        ({"stream": "a", "minPartitions": "0"}, ["minPartitions", "1 to 256"]),
        ({"stream": "a", "minPartitions": "257"}, ["minPartitions", "1 to 256"]),
        ({"stream": "a", "minPartitions": "two"}, ["minPartitions", "'two'"]),
        ({"stream": "a", "maxRowsPerTrigger": "0"}, ["maxRowsPerTrigger"]),
        ({"stream": "a", "maxBytesPerTrigger": "much"}, ["maxBytesPerTrigger", "64m"]),
        ({"stream": "a", "failOnDataLoss": "maybe"}, ["failOnDataLoss", "true or false"]),
        ({"stream": "a", "waitMs": "0"}, ["waitMs"]),
        ({"stream": "a", "format": "xml"}, ["format", "raw, json, state or events"]),
        ({"stream": "a", "format": "json", "mode": "lenient"}, ["mode", "permissive", "failfast"]),
        ({"stream": "a", "schema": "a INT"}, ["schema", "format"]),
        ({"stream": "a", "url": "ftp://x"}, ["url", URL_DEFAULT]),
        ({"stream": "a", "url": "http://x:port"}, ["url", URL_DEFAULT]),
        ({"stream": "a", "requestTimeoutMs": "-1"}, ["requestTimeoutMs"]),
        (
            {"stream": "a", "startPosition": "1"},
            ["startposition", "startingPosition", "options are"],
        ),
        ({"stream": "a", "path": "x"}, ["path", "load()"]),
    ],
)
def test_a_wrong_option_is_named_with_what_is_legal(
    given: dict[str, str], words: list[str]
) -> None:
    said = refused(given)

    assert [word for word in words if word not in said] == []


def test_an_end_is_not_for_streams_and_a_limit_not_for_batches() -> None:
    ends = refused({"stream": "a", "endingPosition": "4"}, streaming=True)
    limits = refused({"stream": "a", "maxBytesPerTrigger": "1m"}, streaming=False)
    latest = refused({"stream": "a", "startingPosition": "latest"}, streaming=False)

    assert "endingPosition is for read, not for readStream" in ends
    assert "maxBytesPerTrigger is for readStream, not for read" in limits
    assert "startingPosition" in latest


def test_starts_and_ends_are_inclusive_positions_or_times() -> None:
    given = {"stream": "a", "startingPosition": "10", "endingTimestamp": "2026-01-01T00:00:00Z"}
    options = source_options(given)

    assert options.start == Bound(position=9)
    assert options.end == Bound(timestamp_ms=1_767_225_600_000)


def test_a_batch_begins_with_everything_and_a_stream_now_unless_told_otherwise() -> None:
    assert source_options({"stream": "a"}, streaming=False).start == Bound(position=-1)
    assert source_options({"stream": "a"}, streaming=True).start.is_head


def test_streams_are_a_list_with_commas_or_a_json_array_for_paths_with_commas() -> None:
    plain = source_options({"streams": "a, b/c,a"}).selection
    exact = source_options({"streams": '["a,b", "c"]'}).selection

    assert plain.streams == ("a", "b/c")
    assert exact.streams == ("a,b", "c")


@pytest.mark.parametrize(
    ("text", "size"), [("10", 10), ("2k", 2048), ("3M", 3 << 20), ("1g", 1 << 30), ("4kb", 4096)]
)
def test_sizes_are_bytes_or_powers_of_1024(text: str, size: int) -> None:
    assert source_options({"stream": "a", "maxBytesPerTrigger": text}).bytes_max == size


def test_the_environment_says_where_the_server_is_unless_an_option_does() -> None:
    environment = {"FENCEPOST_URL": "http://there:1", "FENCEPOST_TOKEN": "t1"}

    found = connection_of(Options({}), environment)
    told = connection_of(Options({"url": "http://here:2", "token": "t2"}), environment)
    default = connection_of(Options({}), {})

    assert (found.url, found.token) == ("http://there:1", "t1")
    assert (told.url, told.token) == ("http://here:2", "t2")
    assert (default.url, default.token) == (URL_DEFAULT, None)


def test_a_token_is_never_shown_but_travels_to_the_executors() -> None:
    options = source_options({"stream": "a", "token": "sesame"}, VALUES)

    assert "sesame" not in repr(options)
    assert pickle.loads(pickle.dumps(options)).connection.token == "sesame"  # noqa: S301
    with pytest.raises(OptionError) as caught:
        source_options({"stream": "a", "token": " "})
    assert str(caught.value) == "option token must be a text that is not empty"


def test_columns_that_a_format_does_not_have_are_refused() -> None:
    cases = {
        "nothing STRING": (StructType().add("nothing", "string"), "no column nothing"),
        "position STRING": (StructType().add("position", "string"), "BIGINT, not STRING"),
        "value STRING": (StructType().add("value", "string"), "BINARY, not STRING"),
        "NOT NULL": (StructType().add("stream", "string", nullable=False), "leave out NOT NULL"),
        "no columns": (StructType(), "no columns"),
    }
    for schema, words in cases.values():
        with pytest.raises(OptionError, match=words):
            source_options({"stream": "a"}, schema)


def test_types_that_json_cannot_be_read_as_are_refused_with_those_that_can() -> None:
    for kind, words in (("binary", "BINARY"), ("map<string,int>", "MAP"), ("void", "VOID")):
        schema = StructType().add("value", StructType().add("a", _type(kind)))
        with pytest.raises(OptionError, match=words) as caught:
            source_options({"stream": "a", "format": "json"}, schema)
        assert "TIMESTAMP" in str(caught.value)


def test_permissive_needs_the_column_that_malformed_messages_go_to() -> None:
    asked = {"stream": "a", "format": "json"}
    schema = StructType().add("value", "string")

    with pytest.raises(OptionError, match="corrupt BINARY"):
        source_options({**asked, "mode": "permissive"}, schema)

    assert source_options(asked, schema).shape.mode == "failfast"
    assert source_options(asked, schema.add("corrupt", "binary")).shape.mode == "permissive"


def _type(text: str) -> DataType:
    return {
        "binary": BinaryType(),
        "map<string,int>": MapType(StringType(), IntegerType()),
        "void": NullType(),
    }[text]


@pytest.mark.parametrize(
    "schema",
    [
        "id BIGINT, total DOUBLE",
        "id: bigint NOT NULL COMMENT 'never a BIGNIT, or so', price DECIMAL(10, 2)",
        "`a, strange name` STRING, nested STRUCT<a: INT, b ARRAY<TIMESTAMP_NTZ>>",
        "ARRAY<STRING>",
        "decimal(10,2)",
        "m MAP<STRING, INT>",
    ],
)
def test_a_schema_in_words_of_spark_is_left_to_spark(schema: str) -> None:
    assert source_options({"stream": "a", "format": "json", "schema": schema}).shape.value_sql


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ("id BIGNIT", "BIGNIT"),
        ("id BIGINT, total", "total"),
        ("a STRUCT<b: STRNG>", "STRNG"),
        ("id BIGINT NOT NULL, string text5", "text5"),
    ],
)
def test_a_schema_with_a_word_that_is_no_type_is_refused_by_that_word(
    schema: str, word: str
) -> None:
    with pytest.raises(OptionError) as caught:
        source_options({"stream": "a", "format": "json", "schema": schema})
    message = str(caught.value)

    assert message.startswith(f"option schema is {schema!r}")
    assert message.endswith(f"{word} is no type")
