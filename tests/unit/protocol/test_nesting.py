"""How deep JSON is nested, and how many messages it holds, found out by building nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.batches import (
    TooDeep,
    TooMany,
    holds_more_than,
    is_nested_deeper,
    json_batch,
    json_batch_within,
)

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='[]{}",:\\a', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=40,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(1, 6))
def test_the_depth_is_that_of_the_value(value: object, depth_max: int) -> None:
    body = json.dumps(value).encode()

    assert is_nested_deeper(body, depth_max) == (depth(value) > depth_max)


@given(st.lists(VALUES, max_size=8), st.integers(1, 6))
def test_the_messages_are_the_elements_of_the_outer_array(
    values: list[object], messages_max: int
) -> None:
    body = json.dumps(values).encode()

    assert holds_more_than(body, messages_max) == (len(values) > messages_max)


@given(VALUES, st.integers(1, 6), st.integers(1, 6))
def test_a_body_within_both_bounds_is_its_messages(
    value: object, messages_max: int, depth_max: int
) -> None:
    body = json.dumps(value).encode()
    expected: object = json_batch(body)
    if depth(value) > depth_max:
        expected = TooDeep()
    if isinstance(value, list) and len(value) > messages_max:
        expected = TooMany()

    found = json_batch_within(body, messages_max=messages_max, depth_max=depth_max)

    assert found == expected


@pytest.mark.parametrize("depth_max", [1, 2, 3, 512])
@pytest.mark.parametrize("beside", [b"", b",1"])
def test_the_shortest_body_that_is_nested_too_deeply_is_refused(
    depth_max: int, beside: bytes
) -> None:
    too_deep = b"[" + b"[" * depth_max + b"]" * depth_max + beside + b"]"

    assert json_batch_within(too_deep, messages_max=2, depth_max=depth_max) == TooDeep()
    within = json_batch_within(too_deep, messages_max=2, depth_max=depth_max + 1)
    assert within == json_batch(too_deep)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2_000_000,
        b'{"a":' * 500_000,
        b'["' + b'\\"' * 1_000_000,
        b'[["[' * 300_000,
        b"]" * 600,
    ],
)
def test_what_is_not_json_is_left_to_the_parser(body: bytes) -> None:
    assert not is_nested_deeper(body, 512)
    assert not holds_more_than(body, 100)


@pytest.mark.parametrize("escape", [b"", b'\\"', b"\\\\"])
def test_brackets_in_texts_do_not_hide_the_depth(escape: bytes) -> None:
    levels = 600
    body = (b'["' + escape + b']",') * levels + b"1" + (b',"[' + escape + b'"]') * levels
    json.loads(body)

    assert is_nested_deeper(body, 512)
    assert not is_nested_deeper(body, levels)


def test_one_huge_element_is_walked_over_and_not_built() -> None:
    body = b"[[" + b"1," * 2_000_000 + b"1],2]"

    assert not holds_more_than(body, 100_000)
    assert holds_more_than(body, 1)
    assert not is_nested_deeper(body, 2)
