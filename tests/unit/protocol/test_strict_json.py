"""Strict JSON: what can be read in two ways is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.strict_json import DEPTH_MAX, BadJson, parse, parse_fields
from tests.unit.protocol.strategies import bodies

KNOWN = frozenset({"a", "b", "json"})


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "malformed"),
        (b"{", "malformed"),
        (b"NaN", "malformed"),
        (b"-Infinity", "malformed"),
        (b"{} {}", "malformed"),
        (b'"\xff"', "malformed"),
        (b'"\\ud800"', "malformed"),
        (b"1e400", "number"),
        (b'{"a":1,"a":1}', "duplicate_key"),
        (b'{"a":1,"\\u0061":1}', "duplicate_key"),
        (b'[{"x":{"a":":","a":"::"}}]', "duplicate_key"),
        (b'{"a":"\\u003a","a":1}', "duplicate_key"),
        (nested(DEPTH_MAX + 1), "too_deep"),
        (nested(100_000), "too_deep"),
    ],
)
def test_what_is_no_json_or_has_two_meanings_is_refused(data: bytes, reason: str) -> None:
    parsed = parse(data)

    assert isinstance(parsed, BadJson)
    assert parsed.reason == reason


def test_a_value_may_be_as_deep_as_the_bound() -> None:
    assert not isinstance(parse(nested(DEPTH_MAX)), BadJson)


def test_a_number_of_thousands_of_digits_is_answered_without_an_error() -> None:
    parsed = parse(b"1" * 10_000)

    assert isinstance(parsed, BadJson | int | float)


@given(bodies())
def test_what_is_taken_is_what_the_standard_library_reads(body: bytes) -> None:
    """A value that is taken equals what another strict parser makes of the same bytes."""
    parsed = parse(body)

    if isinstance(parsed, BadJson):
        assert parsed.reason in ("malformed", "too_deep")
    else:
        assert parsed == json.loads(body)


KEYS = st.sampled_from(['"a"', '"b"', '":"', '"\\u0061"', '"\\u003a"', '"\\u003A"'])
OBJECTS = st.recursive(
    st.sampled_from(["1", '":"', '"\\u003a"', "[]"]),
    lambda inner: st.lists(st.tuples(KEYS, inner), max_size=3).map(
        lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
    ),
    max_leaves=6,
)


def has_duplicates(text: str) -> bool:
    found = []

    def look(pairs: list[tuple[str, object]]) -> None:
        found.append(len({key for key, _ in pairs}) < len(pairs))

    json.loads(text, object_pairs_hook=look)
    return any(found)


@given(OBJECTS)
def test_duplicate_keys_are_found_however_they_are_written(text: str) -> None:
    """Counting colons never passes over a duplicate key and never sees one that is not there."""
    assert isinstance(parse(text.encode()), BadJson) == has_duplicates(text)


@given(st.lists(st.tuples(st.sampled_from(['"a"', '"b"', '"\\u0061"']), OBJECTS), max_size=4))
def test_a_field_that_stands_twice_is_found(pairs: list[tuple[str, str]]) -> None:
    """Fields are taken exactly when their names differ; what is inside of them does not matter."""
    data = ("{" + ",".join(f"{key} : {value}" for key, value in pairs) + "}").encode()
    names = [json.loads(key) for key, _ in pairs]

    fields = parse_fields(data, KNOWN)

    if len(set(names)) < len(names):
        assert isinstance(fields, BadJson)
        assert fields.reason == "duplicate_key"
    else:
        assert fields == {
            name: value.encode() for name, (_, value) in zip(names, pairs, strict=True)
        }


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "not_object"),
        (b"1", "not_object"),
        (b'{"a":1', "malformed"),
        (b'{"c":1}', "malformed"),
        (b'{"a":"\xff"}', "malformed"),
        (b'{"a":' + nested(100_000) + b"}", "too_deep"),
    ],
)
def test_fields_of_something_else_are_refused(data: bytes, reason: str) -> None:
    fields = parse_fields(data, KNOWN)

    assert isinstance(fields, BadJson)
    assert fields.reason == reason
