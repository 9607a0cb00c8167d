"""How ranges become tasks: rules without Spark and without a server."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fencepost.client.results import Split
from fencepost.pipeline.source.batch import (
    PARTS_MAX,
    TASK_BYTES,
    TASK_ROWS,
    joined,
    parts_by_weight,
    parts_to_ask,
)
from fencepost.pipeline.source.reader import Range


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
