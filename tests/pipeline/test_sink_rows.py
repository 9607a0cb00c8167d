"""How rows become messages: the types, the refusals, and the sums over them."""

import datetime as dt
import json
import sys
from decimal import Decimal
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.pipeline.errors import RowError
from fencepost.pipeline.sink.chunks import (
    NOTHING,
    Chunk,
    Chunks,
    cut_points,
    digest_text,
    merged,
    row_sum,
)
from fencepost.pipeline.sink.options import SinkOptions, sink_options
from fencepost.pipeline.sink.rows import RowsEncoder, encoded_as
from tests.pipeline.sink_support import schema_of


def options_for(schema: str, **given: str) -> SinkOptions:
    parsed = schema_of(schema)
    named = {"stream": "s"} if "stream" not in parsed.fieldNames() else {"sinkName": "n"}
    return sink_options({**named, **given}, parsed, False, streaming=True)


def encoded(options: SinkOptions, columns: dict[str, pa.Array]) -> list[Any]:
    rows = RowsEncoder(options, 0).encode(pa.RecordBatch.from_pydict(columns))
    return [json.loads(row) for row in rows.payloads]


def test_columns_become_one_object_per_row_without_its_nulls() -> None:
    options = options_for("id other, name string, at other, price other")
    at = dt.datetime(2026, 1, 31, 13, 0, tzinfo=dt.timezone(dt.timedelta(hours=1)))

    rows = encoded(
        options,
        {
            "id": pa.array([1, 2]),
            "name": pa.array(['"a"', None]),
            "at": pa.array([at, None], pa.timestamp("us", "Europe/Berlin")),
            "price": pa.array([Decimal("1.10"), None]),
        },
    )

    assert rows == [
        {"id": 1, "name": '"a"', "at": "2026-01-31T12:00:00Z", "price": 1.10},
        {"id": 2},
    ]


def test_nested_columns_keep_their_shape() -> None:
    options = options_for("who other, tags other, by other, raw binary, seen other")
    entry = pa.struct([("k", pa.string()), ("v", pa.int32())])
    counted = pa.map_(pa.string(), pa.struct([("n", pa.int32())]))
    instants = pa.list_(pa.timestamp("us", "UTC"))
    who = pa.struct([("name", pa.string()), ("born", pa.date32())])

    [row] = encoded(
        options,
        {
            "who": pa.array([{"name": None, "born": dt.date(1999, 12, 31)}], who),
            "tags": pa.array([[{"k": "a", "v": None}, None]], pa.list_(entry)),
            "by": pa.array([[("x", {"n": 1}), ("y", {"n": None})]], counted),
            "raw": pa.array([b"\x00\xff"]),
            "seen": pa.array([[dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]], instants),
        },
    )

    assert row == {
        "who": {"born": "1999-12-31"},
        "tags": [{"k": "a"}, None],
        "by": {"x": {"n": 1}, "y": {}},
        "raw": "AP8=",
        "seen": ["2026-01-01T00:00:00Z"],
    }


def test_numbers_that_json_has_no_word_for_are_null() -> None:
    options = options_for("x other")

    rows = encoded(options, {"x": pa.array([1.5, float("nan"), float("inf")])})

    assert rows == [{"x": 1.5}, {"x": None}, {"x": None}]


def test_changes_of_the_state_protocol_come_from_columns() -> None:
    options = options_for("type string, key other, operation string, value string", format="state")

    rows = encoded(
        options,
        {
            "type": pa.array(["order", "order"]),
            "key": pa.array([7, 8]),
            "operation": pa.array(["upsert", "delete"]),
            "value": pa.array(['{"eur": 3}', None]),
        },
    )

    assert rows == [
        {"type": "order", "key": "7", "headers": {"operation": "upsert"}, "value": {"eur": 3}},
        {"type": "order", "key": "8", "headers": {"operation": "delete"}},
    ]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (["{}", None], r"row 1 of partition 4: the column value is null"),
        (["{}", "1,2"], r"row 1 of partition 4: value is not JSON: .*'1,2'"),
        (["{}", "[1", "2],3"], r"row 1 of partition 4: value is not JSON"),
        (["{}", ""], r"row 1 of partition 4: value is not JSON"),
        ([b"{}", b'"\xff"'], r"row 1 of partition 4: value is not UTF-8"),
        (["{}", "[" * 100_000 + "]" * 100_000], r"row 1 of partition 4: value is nested too deep"),
    ],
)
def test_a_value_that_is_not_one_json_value_is_refused_by_its_row(
    values: list[Any], complaint: str
) -> None:
    encoder = RowsEncoder(options_for("value binary"), 4)

    with pytest.raises(RowError, match=complaint):
        encoder.encode(pa.RecordBatch.from_pydict({"value": pa.array(values)}))


def test_rows_are_counted_over_the_record_batches_of_a_task() -> None:
    encoder = RowsEncoder(options_for("value string"), 0)
    encoder.encode(pa.RecordBatch.from_pydict({"value": pa.array(["1"] * 10)}))

    with pytest.raises(RowError, match="row 11 of partition 0"):
        encoder.encode(pa.RecordBatch.from_pydict({"value": pa.array(["1", "no"])}))


def test_an_operation_that_is_none_is_refused_by_its_row() -> None:
    options = options_for("type string, key string, operation string", format="state")
    encoder = RowsEncoder(options, 0)
    columns = {name: pa.array(["x"]) for name in ("type", "key", "operation")}

    with pytest.raises(RowError, match="row 0 of partition 0: operation is 'x'"):
        encoder.encode(pa.RecordBatch.from_pydict(columns))


def test_other_streams_take_any_bytes_a_chunk_for_each_row() -> None:
    options = options_for("value binary", contentType="application/octet-stream")
    rows = RowsEncoder(options, 0).encode(
        pa.RecordBatch.from_pydict({"value": pa.array([b"\xff", b"", b"1,2"])})
    )
    chunks = Chunks("s", chunk_bytes=1024, json=False)

    made = [*chunks.add(rows), *chunks.rest()]

    assert [chunk.body for chunk in made] == [b"\xff", b"", b"1,2"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**6)), max_size=300),
    st.integers(1, 60),
    st.integers(1, 50),
)
def test_chunks_hold_every_row_once_in_order_and_within_bounds(
    rows: list[tuple[str, int]], chunk_bytes: int, at_once: int
) -> None:
    """Whatever the streams, sizes and record batches: joined again, the chunks are the rows."""
    chunks = Chunks(None, chunk_bytes=chunk_bytes, json=True)

    made: list[Chunk] = []
    for start in range(0, len(rows), at_once):
        piece = rows[start : start + at_once]
        streams = pa.array([stream for stream, _ in piece])
        payloads = pa.array([str(number).encode() for _, number in piece], pa.binary())
        made += chunks.add(encoded_as(payloads, streams))
    made += chunks.rest()

    for stream in "abc":
        mine = [chunk for chunk in made if chunk.stream == stream]
        numbers = [n for chunk in mine for n in json.loads(chunk.body)]
        assert numbers == [number for name, number in rows if name == stream]
        assert all(len(chunk.body) <= chunk_bytes or chunk.rows == 1 for chunk in mine)
        assert sum(chunk.rows for chunk in mine) == len(numbers)
        payloads = [b"%d" % number for name, number in rows if name == stream]
        assert chunks.sums.get(stream, NOTHING) == row_sum(objects(payloads))
    assert chunks.payload_bytes == sum(len(str(number)) for _, number in rows)


def test_small_record_batches_of_many_streams_cost_little_for_each_row() -> None:
    """Counted in calls of functions: a row or two of each stream in a batch is the common case."""
    streams, batches = 500, 20
    chunks = Chunks(None, chunk_bytes=1 << 20, json=True)
    names = pa.array([f"s/{number}" for number in range(streams)])
    rows = [
        encoded_as(pa.array([b"%d" % batch] * streams, pa.binary()), names)
        for batch in range(batches)
    ]
    list(chunks.add(rows[0]))  # the first time imports modules
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        made = [chunk for batch in rows[1:] for chunk in chunks.add(batch)]
        made += chunks.rest()
    finally:
        sys.setprofile(None)

    assert len(made) == streams
    assert calls < streams * batches


def test_cuts_obey_the_bound_on_rows_too() -> None:
    assert cut_points(np.array([1] * 10), 1000, 4) == [0, 4, 8, 10]
    assert cut_points(np.array([5, 5000, 5]), 100, 4) == [0, 1, 2, 3]
    assert cut_points(np.array([], dtype=np.int64), 100, 4) == [0]


def objects(rows: list[bytes]) -> np.ndarray:
    return encoded_as(pa.array(rows, pa.binary())).payloads


@given(st.lists(st.binary(max_size=20)), st.randoms(use_true_random=False))
def test_the_digest_knows_neither_order_nor_division(rows: list[bytes], dice: Any) -> None:
    """However a batch is divided among tasks and ordered in them, it amounts to the same."""
    shuffled = rows[:]
    dice.shuffle(shuffled)
    at = dice.randint(0, len(rows))

    whole = digest_text({"s": row_sum(objects(rows))})
    parts = [{"s": row_sum(objects(half))} for half in (shuffled[:at], shuffled[at:])]

    assert digest_text(merged(parts)) == whole


def test_the_digest_tells_other_rows_other_counts_and_other_streams() -> None:
    def digest(**streams: list[bytes]) -> str:
        return digest_text({name: row_sum(objects(rows)) for name, rows in streams.items()})

    same = digest(a=[b"1", b"2"])

    assert same == digest(a=[b"2", b"1"])
    assert (
        len({same, digest(a=[b"1", b"3"]), digest(a=[b"1", b"2", b"2"]), digest(b=[b"1", b"2"])})
        == 4
    )
    assert len(digest(**{"x" * 1000: [b"1"]})) <= 256


def test_the_digest_is_the_same_in_every_release() -> None:
    """A replay after an upgrade must not look like other rows."""
    rows = [b'{"id":1}', b'{"id":2}']

    assert digest_text({"orders": row_sum(objects(rows))}) == PINNED


PINNED = "v1 rows=2 streams=1 8d9b3a9e5715f91dc3dcb6f774f6f7f5"
