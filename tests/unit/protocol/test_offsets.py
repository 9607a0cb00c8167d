"""Offsets: tokens sort like the places they name, and nothing but a token is read as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.offsets import START, Offset, parse_offset, wire

OFFSETS = st.builds(Offset, st.integers(0, 2**53), st.integers(0, 2**53))


@given(OFFSETS)
def test_a_token_reads_back_as_the_offset_it_was_made_from(offset: Offset) -> None:
    """parse(str(offset)) is offset, and the header form is the same token."""
    assert parse_offset(str(offset)) == offset
    assert wire(offset).decode() == str(offset)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2**40)), max_size=8))
def test_tokens_of_one_stream_sort_as_strings_in_the_order_of_the_stream(
    steps: list[tuple[int, int]],
) -> None:
    """Whatever a stream grows by, its later offsets are greater, as text too."""
    offsets = [START]
    for messages, size in steps:
        offsets.append(Offset(offsets[-1].messages + messages, offsets[-1].bytes + size))

    tokens = [str(offset) for offset in offsets]

    assert tokens == sorted(tokens)
    assert len(set(tokens)) == len(tokens)


@given(OFFSETS)
def test_a_token_is_safe_in_a_url_and_is_never_a_sentinel(offset: Offset) -> None:
    """The protocol forbids , & = ? and / in offsets, and reserves -1 and now."""
    assert set(str(offset)) <= set("0123456789_")
    assert str(offset) not in ("-1", "now")


def test_the_sentinels_are_themselves() -> None:
    assert parse_offset("-1") == "-1"
    assert parse_offset("now") == "now"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-2",
        "NOW",
        "now ",
        " now",
        "0_0",
        "0000000000000000",
        "0000000000000000_000000000000000",
        "0000000000000000_00000000000000000",
        "0000000000000000-0000000000000000",
        "0000000000000000_000000000000000a",
        "0000000000000000_0000000000000000\n",
        "0000000000000000_0000000000000000,",
        "-000000000000001_0000000000000000",
        "+000000000000001_0000000000000000",
        "\u0660" * 16 + "_0000000000000000",
    ],
)
def test_anything_else_is_no_offset(text: str) -> None:
    assert parse_offset(text) is None


@given(st.text())
def test_what_is_read_as_an_offset_is_exactly_its_token(text: str) -> None:
    """There is one spelling of each offset."""
    parsed = parse_offset(text)
    assert parsed is None or str(parsed) == text
