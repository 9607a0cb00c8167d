"""Messages as typed columns: what fits, what does not, and what becomes of it."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

import fencepost
from fencepost.client import state
from fencepost.pipeline.errors import MalformedError
from fencepost.pipeline.options import Options
from fencepost.pipeline.source.columns import PLACE_COLUMNS, arrow_schema
from fencepost.pipeline.source.formats import Shape, shape_of
from tests.pipeline.reading_support import collecting, rows
from tests.serving import ServerProcess

JSON = "application/json"


def page(*values: bytes, content_type: str = JSON) -> pa.RecordBatch:
    """A page of the log with these messages."""
    count = len(values)
    place = StructType()
    for name, kind in PLACE_COLUMNS.items():
        place.add(name, kind)
    columns = {field.name: pa.nulls(count, field.type) for field in arrow_schema(place)}
    columns |= {
        "stream": pa.array(["s"] * count, pa.string()),
        "content_type": pa.array([content_type] * count, pa.string()),
        "position": pa.array(range(count), pa.int64()),
        "value": pa.array(values, pa.binary()),
    }
    return pa.record_batch(list(columns.values()), names=list(columns))


def shape(name: str, value: DataType, *, corrupt: bool = True, **options: str) -> Shape:
    schema = StructType().add("value", value)
    if name == "state":
        for column in ("type", "key", "operation", "control", "txid", "headers"):
            schema.add(column, "string")
        schema.add("old_value", value)
    if name == "events":
        schema.add("name", "string").add("correlation", "string").add("meta", "string")
    if corrupt:
        schema.add("corrupt", "binary")
    return shape_of(Options({"format": name, **options}), schema)


def shaped(form: Shape, *values: bytes, content_type: str = JSON) -> list[dict[str, Any]]:
    assert form.schema is not None
    found = form.shaped(page(*values, content_type=content_type))
    assert found.schema.equals(arrow_schema(form.schema))
    assert found.validate(full=True) is None
    listed: list[dict[str, Any]] = found.to_pylist()
    return listed


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (LongType(), b"-7", -7),
        (LongType(), b"null", None),
        (ShortType(), b"300", 300),
        (DoubleType(), b"1", 1.0),
        (DoubleType(), b"1.5e3", 1500.0),
        (BooleanType(), b"true", True),
        (StringType(), b'{"any": [1, "json"]}', '{"any": [1, "json"]}'),
        (DecimalType(10, 2), b"12.50", Decimal("12.50")),
        (DecimalType(10, 2), b'"12.5"', Decimal("12.50")),
        (DateType(), b'"2026-11-16"', datetime.date(2026, 11, 16)),
        (
            TimestampType(),
            b'"2026-11-16T15:00:00.250+02:00"',
            datetime.datetime(2026, 11, 16, 13, 0, 0, 250_000, datetime.UTC),
        ),
        (ArrayType(DateType()), b'["2026-11-16", null]', [datetime.date(2026, 11, 16), None]),
        (StructType().add("a", "long").add("b", "string"), b'{"a":1,"x":[]}', {"a": 1, "b": None}),
        (StructType().add("a", "long"), b'{ "a" :\n 1 }', {"a": 1}),
        (StructType().add("a", "string"), '{"a":"\\u00e9 é 😀"}'.encode(), {"a": "é é 😀"}),
    ],
)
def test_json_becomes_a_column_of_its_type(kind: DataType, text: bytes, value: object) -> None:
    assert shaped(shape("json", kind), text) == [{"value": value, "corrupt": None}]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (LongType(), b"1.5"),
        (LongType(), b'"1"'),
        (LongType(), b"99999999999999999999"),
        (ShortType(), b"70000"),
        (BooleanType(), b"1"),
        (DateType(), b'"2026-13-01"'),
        (DateType(), b"5"),
        (TimestampType(), b'"soon"'),
        (DecimalType(4, 2), b"1.255"),
        (ArrayType(LongType()), b'[1, "2"]'),
        (StructType().add("a", "long"), b'{"a": "x"}'),
        (StructType().add("a", "long"), b"[1]"),
        (StructType().add("a", "string"), b'{"a": {}}'),
        (StructType().add("a", "long"), b'{"a": 1, "a": 2}'),
    ],
)
def test_a_message_of_another_type_is_kept_beside(kind: DataType, text: bytes) -> None:
    assert shaped(shape("json", kind), text) == [{"value": None, "corrupt": text}]


def test_modes_keep_drop_or_refuse_what_is_malformed() -> None:
    kind = StructType().add("a", "long")
    sent = (b'{"a":1}', b'{"a":"x"}', b'{"a":3}')

    kept = shaped(shape("json", kind, mode="permissive"), *sent)
    left = shaped(shape("json", kind, mode="DropMalformed", corrupt=False), *sent)
    with pytest.raises(MalformedError) as caught:
        shaped(shape("json", kind, mode="failfast"), *sent)

    assert [row["value"] for row in kept] == [{"a": 1}, None, {"a": 3}]
    assert [row["corrupt"] for row in kept] == [None, sent[1], None]
    assert left == [{"value": {"a": 1}}, {"value": {"a": 3}}]
    assert "position 1 of stream s" in str(caught.value)
    assert '{"a":"x"}' in str(caught.value)


@given(
    st.lists(
        st.sampled_from(
            [b'{"a":1}', b"{}", b"null", b'{"a":null,"b":"x"}', b'{"a":"no"}', b"7", b'{"b":{}}']
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_what_a_message_becomes_does_not_depend_on_its_neighbours(sent: list[bytes]) -> None:
    """Property: a page of messages is the pages of each of them, one after the other."""
    form = shape("json", StructType().add("a", "long").add("b", "string"))

    together = shaped(form, *sent)

    assert together == [row for value in sent for row in shaped(form, value)]


@pytest.mark.parametrize(
    "text", [b"", b"plain", b"1 2", b'1}\n{"v":2', b'{"a":1}}', b"\xff", b'"\xff"', b"[" * 5000]
)
def test_what_is_not_json_in_other_streams_is_malformed(text: bytes) -> None:
    form = shape("json", LongType())

    assert shaped(form, b"1", text, content_type="text/plain") == [
        {"value": 1, "corrupt": None},
        {"value": None, "corrupt": text},
    ]


STATE_MESSAGES: list[Any] = [
    {"type": "t", "key": "k", "value": {"n": 1}, "headers": {"operation": "insert"}},
    {"type": "t", "key": "k", "value": None, "headers": {"operation": "update", "txid": "7"}},
    {"type": "t", "key": "k", "old_value": {"n": 1}, "headers": {"operation": "delete"}},
    {"type": "t", "key": "k", "headers": {"operation": "upsert"}},
    {"type": "t", "key": "", "value": 1, "headers": {"operation": "insert"}},
    {"type": "t", "key": "k", "value": 1, "headers": {"operation": "merge"}},
    {"type": "t", "key": "k", "value": 1, "headers": {"operation": "insert", "control": "reset"}},
    {"type": "t", "key": "k", "value": 1, "headers": {"operation": "insert", "control": None}},
    {"type": "t", "key": "k", "value": 1, "headers": {"operation": "insert", "txid": ""}},
    {"type": "t", "key": "k", "value": 1, "headers": {"operation": "insert", "timestamp": "?"}},
    {"headers": {"control": "snapshot-start", "offset": "0"}},
    {"headers": {"control": "else"}},
    {"headers": 1},
    [],
    "text",
]


@pytest.mark.parametrize("message", STATE_MESSAGES, ids=json.dumps)
def test_state_is_understood_as_the_client_understands_it(message: Any) -> None:
    [row] = shaped(shape("state", StringType()), json.dumps(message).encode())

    try:
        parsed = state.parse(message)
    except state.StateMessageError:
        assert row["corrupt"] == json.dumps(message).encode()
        assert row["type"] is row["key"] is row["operation"] is row["control"] is None
        assert row["headers"] is None
        return
    assert row["corrupt"] is None
    assert json.loads(row["headers"]) == message["headers"]
    if isinstance(parsed, state.Control):
        assert (row["control"], row["operation"]) == (parsed.control, None)
    else:
        assert (row["type"], row["key"], row["operation"]) == (
            parsed.type,
            parsed.key,
            parsed.operation,
        )
        assert row["value"] == (json.dumps(message["value"]) if "value" in message else None)
        assert row["old_value"] == (
            json.dumps(message["old_value"]) if "old_value" in message else None
        )


def test_events_have_a_name_data_and_what_they_say_about_themselves() -> None:
    form = shape("events", StructType().add("n", "long"))

    found = shaped(
        form,
        b'{"name":"Placed","data":{"n":1},"meta":{"correlation":"c"}}',
        b'{"name":"Shipped"}',
        b'{"name":"Odd","meta":{"correlation":7}}',
        b'{"name":"Odder","meta":["correlation"]}',
        b'{"data":{}}',
    )

    assert [(row["name"], row["value"], row["correlation"], row["meta"]) for row in found] == [
        ("Placed", {"n": 1}, "c", '{"correlation":"c"}'),
        ("Shipped", None, None, None),
        ("Odd", None, None, '{"correlation":7}'),
        ("Odder", None, None, '["correlation"]'),
        (None, None, None, None),
    ]
    assert [row["corrupt"] for row in found] == [None, None, None, None, b'{"data":{}}']


def test_spark_reads_typed_columns_from_a_batch_and_from_a_stream(
    spark: SparkSession, server: ServerProcess, tmp_path: Path
) -> None:
    with fencepost.connect(server.url) as client:
        made = client.create("typed")
        made.append_many([{"order": 1, "total": 2.5, "tags": ["a"]}, {"order": "?"}, {"order": 3}])
    asked = {"url": server.url, "stream": "typed", "format": "json", "startingPosition": "earliest"}
    fields = "order BIGINT, total DOUBLE, tags ARRAY<STRING>"

    batch = spark.read.format("fencepost").options(**asked, schema=fields).load()
    following = spark.readStream.format("fencepost").options(**asked, waitMs=200)
    chosen = following.schema(f"position BIGINT, value STRUCT<{fields}>, corrupt BINARY").load()
    with collecting(chosen, tmp_path, availableNow=True) as collected:
        assert collected.query.awaitTermination(60)

    expected = [(1, 2.5, ["a"], None), (None, None, None, b'{"order":"?"}'), (3, None, None, None)]
    for found in (rows(batch), collected.rows):
        flat = [(row["value"], row["corrupt"]) for row in found]
        assert [
            (value and value.order, value and value.total, value and value.tags, corrupt)
            for value, corrupt in flat
        ] == expected
    assert isinstance(batch.schema["corrupt"].dataType, BinaryType)


def test_failfast_names_the_message(spark: SparkSession, server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        client.create("failfast").append_many([{"n": 1}, {"n": "x"}])
    reader = spark.read.format("fencepost").options(url=server.url, stream="failfast")

    frame = reader.options(format="json", mode="failfast", schema="n BIGINT").load()

    with pytest.raises(Exception, match="of stream failfast is not what format json"):
        frame.collect()
