"""Producer ids: every name has one, and no two names share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost import FencepostError
from fencepost.coordination.rules.ids import claim_id, parse_id, row_id

NAMES = st.text(st.characters(codec="utf-8"), min_size=1)


def test_ids_are_readable_where_names_are_plain() -> None:
    assert claim_id("task", "build-7") == "task:build-7"
    assert claim_id("tool", "call_abc") == "tool:call_abc"
    assert row_id("user", "123") == "row:user:123"


def test_what_would_be_read_as_something_else_is_escaped() -> None:
    assert claim_id("task", "a:b/*%é") == "task:a%3Ab%2F%2A%25%C3%A9"
    assert row_id("a:b", "c") != row_id("a", "b:c")


def test_an_empty_name_has_no_id() -> None:
    with pytest.raises(FencepostError):
        claim_id("task", "")


@given(NAMES, NAMES)
def test_an_id_tells_the_names_it_was_made_of(type: str, key: str) -> None:
    """Escaping loses nothing, leaves plain ASCII and never adds a colon or a star."""
    made = row_id(type, key)

    assert parse_id(made) == ("row", type, key)
    assert made.isascii()
    assert "*" not in made
