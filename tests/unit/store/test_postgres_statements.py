"""SQL with its values numbered, and columns packed as arrays."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.store.postgres.driver.statements import QUERIES, packer, prepare, statement

# What an array looks like on the wire, written down once more: dimensions, flag, type of the
# elements, how many, from which index; then length and bytes of each, -1 for a null.
ELEMENT_TYPES = {"bigint": 20, "text": 25, "bytea": 17, "boolean": 16}


def unpacked(array: bytes, type_name: str) -> list[bytes | None]:
    dimensions, has_nulls, element_type = struct.unpack_from(">iiI", array)
    assert element_type == ELEMENT_TYPES[type_name]
    if dimensions == 0:
        assert len(array) == 12
        return []
    count, first = struct.unpack_from(">ii", array, 12)
    assert (dimensions, first) == (1, 1)
    elements: list[bytes | None] = []
    at = 20
    for _ in range(count):
        (length,) = struct.unpack_from(">i", array, at)
        at += 4
        elements.append(None if length < 0 else array[at : at + length])
        at += max(length, 0)
    assert at == len(array)
    assert has_nulls == (None in elements)
    return elements


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_numbers_are_packed_as_eight_bytes_each(values: list[int | None]) -> None:
    packed = unpacked(packer("bigint")(values), "bigint")

    assert packed == [None if v is None else v.to_bytes(8, "big", signed=True) for v in values]


@given(st.lists(st.none() | st.text()))
def test_texts_are_packed_as_their_characters_in_utf_8(values: list[str | None]) -> None:
    packed = unpacked(packer("text")(values), "text")

    assert packed == [None if v is None else v.encode() for v in values]


@given(st.lists(st.none() | st.binary()))
def test_bytes_are_packed_as_they_are(values: list[bytes | None]) -> None:
    assert unpacked(packer("bytea")(values), "bytea") == values


@given(st.lists(st.none() | st.booleans()))
def test_truths_are_packed_as_a_byte_each(values: list[bool | None]) -> None:
    packed = unpacked(packer("boolean")(values), "boolean")

    assert packed == [None if v is None else bytes([v]) for v in values]


def test_names_become_numbers_and_a_name_used_twice_one_number() -> None:
    found = prepare("SELECT :b, :a, :b::text FROM t WHERE x::json ->> 1 = :c")

    assert found.text == b"SELECT $1, $2, $1::text FROM t WHERE x::json ->> 1 = $3"
    assert found.names == ("b", "a", "c")
    assert list(found.values({"a": 1, "b": 2, "c": 3, "unused": 4})) == [2, 1, 3]


def test_a_value_cast_to_an_array_is_packed_whether_it_is_a_list_or_json() -> None:
    found = prepare("SELECT * FROM t WHERE id = ANY (:ids::bigint[]) AND name = :name")

    from_list = found.values({"ids": [1, 2], "name": "n"})
    from_json = found.values({"ids": "[1, 2]", "name": "n"})

    assert from_list == from_json == [packer("bigint")([1, 2]), "n"]


def test_rows_become_columns_of_the_types_that_the_statement_names() -> None:
    found = prepare("INSERT INTO t SELECT * FROM unnest($1::bigint[], $2::text[])")

    assert found.by_columns
    assert found.columns([(1, "a"), (None, "b")]) == [
        packer("bigint")([1, None]),
        packer("text")(["a", "b"]),
    ]


def test_rows_of_different_lengths_are_refused() -> None:
    found = prepare("INSERT INTO t SELECT * FROM unnest($1::bigint[], $2::text[])")

    with pytest.raises(ValueError, match="shorter"):
        found.columns([(1, "a"), (2,)])


def test_a_query_over_rows_numbers_the_values_of_both() -> None:
    found = statement("bucket_sums", "source_part")

    assert found.names == ("width", "low", "high", "parts", "part")
    assert b"/*rows*/" not in found.text


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_a_statement_by_columns_names_the_type_of_each(name: str) -> None:
    found = statement(name)

    if found.by_columns:
        assert sorted(found.packers) == list(range(len(found.packers)))
    assert b"?" not in found.text, "that is how the embedded store writes a value"
