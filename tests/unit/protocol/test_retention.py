"""The rules of retention: what holds for a stream, where it begins, what a truncation does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.globs import Glob
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import (
    KEEP_ALL,
    BeyondTail,
    Cut,
    IdGlobs,
    Kept,
    Policy,
    Retention,
    Uncut,
    decide_truncation,
    first_to_keep,
    is_within,
    retention_of,
)

NOW_MS = 1_000_000
TAIL = Offset(10, 100)

policies = (
    Policy(Glob("logs/**"), Retention(age_s=60)),
    Policy(Glob("**"), Retention(bytes=1000)),
)


def test_a_stream_without_retention_takes_the_first_policy_that_fits() -> None:
    assert retention_of("logs/a", KEEP_ALL, policies) == Retention(age_s=60)
    assert retention_of("other", KEEP_ALL, policies) == Retention(bytes=1000)
    assert retention_of("other", KEEP_ALL, ()) == KEEP_ALL


def test_a_retention_of_its_own_replaces_every_policy_as_a_whole() -> None:
    own = Retention(messages=5)

    assert retention_of("logs/a", own, policies) == own


@pytest.mark.parametrize(
    ("retention", "row", "within"),
    [
        (KEEP_ALL, Kept(START, 0), True),
        (Retention(age_s=10), Kept(START, NOW_MS - 10_000), False),
        (Retention(age_s=10), Kept(START, NOW_MS - 9_999), True),
        (Retention(bytes=60), Kept(Offset(4, 40), 0), True),
        (Retention(bytes=59), Kept(Offset(4, 40), 0), False),
        (Retention(messages=6), Kept(Offset(4, 40), 0), True),
        (Retention(messages=5), Kept(Offset(4, 40), 0), False),
        (Retention(age_s=10, bytes=60, messages=6), Kept(Offset(4, 40), NOW_MS), True),
        (Retention(age_s=10, bytes=60, messages=6), Kept(Offset(4, 40), 0), False),
    ],
)
def test_each_bound_counts(retention: Retention, row: Kept, within: bool) -> None:
    assert is_within(retention, row, TAIL, NOW_MS) == within


def test_an_append_larger_than_its_bounds_is_kept_while_it_is_the_newest() -> None:
    newest = Kept(Offset(9, 20), NOW_MS)

    assert first_to_keep(Retention(bytes=10), None, newest, TAIL, NOW_MS) == newest.start
    assert first_to_keep(Retention(messages=0), None, newest, TAIL, NOW_MS) == newest.start


def test_age_may_empty_a_stream() -> None:
    newest = Kept(Offset(9, 20), NOW_MS - 60_000)

    assert first_to_keep(Retention(age_s=60), None, newest, TAIL, NOW_MS) == TAIL


@pytest.mark.parametrize(
    ("before", "outcome"),
    [
        (START, Uncut(Offset(2, 20), TAIL)),
        (Offset(2, 20), Uncut(Offset(2, 20), TAIL)),
        (Offset(3, 30), Cut(Offset(3, 30), TAIL)),
        (TAIL, Cut(TAIL, TAIL)),
        (Offset(10, 101), BeyondTail(TAIL)),
        (Offset(11, 100), BeyondTail(TAIL)),
    ],
)
def test_a_truncation_moves_the_beginning_forwards_only(before: Offset, outcome: object) -> None:
    assert decide_truncation(Offset(2, 20), TAIL, before) == outcome


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 50), st.integers(0, 5_000)), min_size=1
    ),
    retention=st.builds(
        Retention,
        st.none() | st.integers(1, 20),
        st.none() | st.integers(1, 500),
        st.none() | st.integers(1, 50),
    ),
)
def test_once_within_always_within(steps: list[tuple[int, int, int]], retention: Retention) -> None:
    """Along a stream, appends out of bounds come before those within: halving finds the first."""
    rows = []
    at, at_ms = START, NOW_MS - 40_000
    for messages, size, later_ms in steps:
        rows.append(Kept(at, at_ms))
        at = Offset(at.messages + messages, at.bytes + size)
        at_ms += later_ms

    found = [is_within(retention, row, at, NOW_MS) for row in rows]

    assert found == sorted(found)


@pytest.mark.parametrize(
    ("producer_id", "claimed"),
    [
        ("task:1", True),
        ("task:a/b\nc", True),
        ("task", False),
        ("my-task:1", False),
        ("row:x:y", True),
        ("a.b", True),
        ("aXb", False),
    ],
)
def test_ids_are_matched_as_a_whole_and_stars_take_anything(
    producer_id: str, claimed: bool
) -> None:
    assert IdGlobs(["task:*", "row:*:*", "a.b"]).matches(producer_id) == claimed
