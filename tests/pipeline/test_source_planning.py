"""How ranges become tasks and filters become ranges: rules without Spark and without a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from fencepost.client.results import Split
from fencepost.pipeline.options import Selection
from fencepost.pipeline.source.batch import (
    PARTS_MAX,
    TASK_BYTES,
    TASK_ROWS,
    joined,
    parts_by_weight,
    parts_to_ask,
)
from fencepost.pipeline.source.filters import Narrowing, narrowed
from fencepost.pipeline.source.reader import Range

PATHS = ["orders", "orders/1", "orders/2", "orders/1/deep", "order", "bills/1", "or*ders"]
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def test_small_ranges_are_one_task_and_large_ones_not_too_many() -> None:
    assert parts_to_ask(1, 1) == 1
    assert parts_to_ask(TASK_ROWS * 3, 1) == 3
    assert parts_to_ask(TASK_ROWS * 10_000, 1) == PARTS_MAX
    assert parts_to_ask(1, 8) == 8
    assert parts_by_weight(0, 1) == 1
    assert parts_by_weight(TASK_BYTES * 5, 1) == 5
    assert parts_by_weight(TASK_BYTES * 10_000, 100) == 100


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), max_size=40), st.integers(1, 9)
)
def test_joined_splits_cover_every_row_once_and_in_order(
    weights: list[tuple[int, int]], parts: int
) -> None:
    """Property: whatever the splits weigh, each with rows lies in exactly one range, in order."""
    splits, after = [], -1
    for rows, size in weights:
        splits.append(Split(after, after + rows + 1, rows, size if rows else 0))
        after += rows + 1

    ranges = joined(splits, parts)

    for one, following in pairwise(ranges):
        assert one.after < one.until <= following.after
    for split in splits:
        if split.rows:
            holding = [r for r in ranges if r.after <= split.after and split.until <= r.until]
            assert len(holding) == 1
        else:
            assert Range(split.after, split.until) not in ranges
    assert len(ranges) <= 2 * parts


def literal(name: str) -> st.SearchStrategy[Any]:
    if name == "stream":
        return st.sampled_from(PATHS)
    if name == "position":
        return st.integers(-2, 12)
    return st.integers(-2_000_000, 12_000_000).map(lambda us: EPOCH + timedelta(microseconds=us))


def filters_on(name: str) -> st.SearchStrategy[Filter]:
    one = literal(name)
    column = (name,)
    kinds: list[st.SearchStrategy[Filter]] = [
        one.map(lambda value: EqualTo(column, value)),
        one.map(lambda value: EqualNullSafe(column, value)),
        one.map(lambda value: Not(EqualTo(column, value))),
        st.lists(one, min_size=1, max_size=3).map(lambda many: In(column, tuple(many))),
        one.map(lambda value: GreaterThan(column, value)),
        one.map(lambda value: GreaterThanOrEqual(column, value)),
        one.map(lambda value: LessThan(column, value)),
        one.map(lambda value: LessThanOrEqual(column, value)),
        st.just(IsNotNull(column)),
    ]
    if name == "stream":
        prefix = st.sampled_from(["", "or", "order", "orders/", "orders/1", "x", "or*", "/"])
        kinds.append(prefix.map(lambda value: StringStartsWith(column, value)))
        kinds.append(st.just(StringContains(column, "1")))
    return st.one_of(kinds)


FILTERS = st.lists(
    st.sampled_from(["stream", "position", "timestamp"]).flatmap(filters_on), max_size=4
)
SELECTIONS = st.sampled_from(
    [Selection(match="**"), Selection(match="orders/*"), Selection(("orders/1", "bills/1"))]
)


def holds(one: Filter, row: dict[str, Any]) -> bool:
    """Whether Spark would let a row pass."""
    match one:
        case Not(child):
            return not holds(child, row)
        case EqualTo((name,), value) | EqualNullSafe((name,), value):
            return bool(row[name] == value)
        case In((name,), many):
            return row[name] in many
        case GreaterThan((name,), value):
            return bool(row[name] > value)
        case GreaterThanOrEqual((name,), value):
            return bool(row[name] >= value)
        case LessThan((name,), value):
            return bool(row[name] < value)
        case LessThanOrEqual((name,), value):
            return bool(row[name] <= value)
        case StringStartsWith((name,), value):
            return bool(row[name].startswith(value))
        case StringContains((name,), value):
            return value in row[name]
        case _:
            return True


def keeps(narrowing: Narrowing, row: dict[str, Any]) -> bool:
    """Whether a row would be read."""
    at_ms = int((row["timestamp"] - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    return (
        not narrowing.selection.nothing
        and narrowing.selection.takes(row["stream"])
        and row["position"] > narrowing.after
        and (narrowing.until is None or row["position"] <= narrowing.until)
        and (narrowing.from_ms is None or at_ms >= narrowing.from_ms)
        and (narrowing.before_ms is None or at_ms < narrowing.before_ms)
    )


@given(SELECTIONS, FILTERS)
def test_a_row_that_passes_the_filters_is_read(selection: Selection, asked: list[Filter]) -> None:
    """Property: narrowing loses no row that is selected and passes; Spark drops the others."""
    narrowing = narrowed(Narrowing(selection), asked)

    for position in range(11):
        for stream in PATHS:
            at = EPOCH + timedelta(milliseconds=position * 1000)
            row = {"stream": stream, "position": position, "timestamp": at}
            if selection.takes(stream) and all(holds(one, row) for one in asked):
                assert keeps(narrowing, row), (row, asked, narrowing)


def test_narrowing_is_worth_it_for_each_kind_of_column() -> None:
    everything = Narrowing(Selection(match="**"))
    at = datetime(2026, 1, 1, tzinfo=UTC)

    by_stream = narrowed(everything, [EqualTo(("stream",), "orders/1")])
    by_prefix = narrowed(everything, [StringStartsWith(("stream",), "orders/")])
    by_position = narrowed(everything, [GreaterThan(("position",), 4), LessThan(("position",), 9)])
    by_time = narrowed(everything, [GreaterThanOrEqual(("timestamp",), at)])
    by_contradiction = narrowed(
        Narrowing(Selection(("a",))), [EqualTo(("stream",), "b"), EqualTo(("version",), 3)]
    )

    assert by_stream.selection == Selection(("orders/1",))
    assert by_prefix.selection == Selection(match="orders/**")
    assert (by_position.after, by_position.until) == (4, 8)
    assert by_time.from_ms == 1_767_225_600_000
    assert by_contradiction.selection.nothing


@pytest.mark.parametrize("path", ["", "/a", "a//b", "a/..", "a\nb", "__audit", "x" * 2000])
def test_what_a_server_cannot_be_asked_for_is_left_to_spark(path: str) -> None:
    everything = Narrowing(Selection(match="**"))

    for one in (EqualTo(("stream",), path), In(("stream",), ("orders/1", path))):
        assert narrowed(everything, [one]) == everything
