"""The rules of current-state tables, held against the client's own materialization."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fencepost.client import state
from fencepost.pipeline.tables.state import (
    Event,
    StreamState,
    advance,
    is_kept,
    parse,
)

TYPES, KEYS = ("user", "order"), ("a", "b", "c")
OPERATIONS = ("insert", "update", "upsert")


def _change(type: str, key: str, number: int) -> state.Change:
    return state.upsert(type, key, {"n": number})


changes = st.builds(
    _change, st.sampled_from(TYPES), st.sampled_from(KEYS), st.integers(min_value=0, max_value=9)
)
deletions = st.builds(state.delete, st.sampled_from(TYPES), st.sampled_from(KEYS))
controls = st.sampled_from([state.snapshot_start(), state.snapshot_end(), state.reset()])
histories = st.lists(st.one_of(changes, changes, deletions, controls), max_size=40)


def _offset(number: int) -> str:
    return f"{number:016d}_{number * 10:016d}"


def _folded(
    messages: list[state.Change | state.Control], cuts: list[int]
) -> dict[tuple[str, str], Any]:
    """Rows by the rules of tables, the history taken in pieces."""
    known, rows = StreamState(), {}
    edges = [0, *sorted(min(cut, len(messages)) for cut in cuts), len(messages)]
    for begin, end in pairwise(edges):
        piece = list(enumerate(messages))[begin:end]
        if not piece:
            continue
        events = [
            Event(at, _offset(at), None if isinstance(one, state.Change) else one.control)
            for at, one in piece
        ]
        moving = [one for one in events if one.control is not None or one is events[0]]
        known = advance(known, moving, events[-1].offset)
        for at, one in piece:
            if isinstance(one, state.Change):
                rows[one.type, one.key] = (at, one)
        rows = {name: row for name, row in rows.items() if is_kept(known, row[0], _offset(row[0]))}
    return {name: one.value for name, (_at, one) in rows.items() if one.operation != "delete"}


@given(histories, st.lists(st.integers(min_value=0, max_value=40), max_size=4))
def test_rows_are_those_of_the_client_however_the_history_is_cut(
    messages: list[state.Change | state.Control], cuts: list[int]
) -> None:
    """For any history and any cuts of it, tables and `Materialized` have the same rows."""
    expected = state.Rows()
    for message in messages:
        expected.apply(message)

    folded = _folded(messages, cuts)

    assert folded == {
        (type, key): value for type in TYPES for key, value in expected.of(type).items()
    }


@given(changes | deletions | controls)
def test_a_message_is_parsed_as_the_client_parses_it(message: state.Change | state.Control) -> None:
    """Every valid message says here what it says to the client."""
    found = parse(msgspec.json.encode(message))

    if isinstance(message, state.Control):
        assert (found.kind, found.control) == ("control", message.control)
    else:
        assert (found.kind, found.type, found.key) == ("change", message.type, message.key)
        assert found.operation == message.operation
        value = None if found.value is None else msgspec.json.decode(found.value)
        assert value == (None if message.operation == "delete" else message.value)


def test_what_is_no_message_is_invalid() -> None:
    for raw in (
        b"",
        b"7",
        b"[]",
        b"{",
        b'{"type":"user","key":"a","headers":{"operation":"insert"}}',
        b'{"type":"user","key":"","value":1,"headers":{"operation":"insert"}}',
        b'{"type":"user","key":"a","value":1,"headers":{"operation":"replace"}}',
        b'{"type":"_streams","key":"a","value":1,"headers":{"operation":"insert"}}',
        b'{"headers":{"control":"stop"}}',
        b'{"type":"user","key":"a","value":"\xff","headers":{"operation":"insert"}}',
    ):
        assert parse(raw).kind == "invalid", raw


def test_a_value_that_speaks_of_control_is_still_a_change() -> None:
    raw = b'{"type":"user","key":"a","value":{"control": 1},"headers":{"operation":"insert"}}'

    found = parse(raw)

    assert (found.kind, found.value) == ("change", '{"control": 1}')


def test_an_offset_that_does_not_grow_is_another_incarnation() -> None:
    known = StreamState(since=-1, offset=_offset(5), floor=_offset(3), snapshot=_offset(4))

    now = advance(known, [Event(20, _offset(0))], _offset(1))

    assert now == StreamState(since=20, offset=_offset(1), floor="", snapshot=None)
    assert not is_kept(now, 19, _offset(5))
    assert is_kept(now, 20, _offset(0))


def test_a_reset_to_an_earlier_place_keeps_what_came_from_there_on() -> None:
    now = advance(
        StreamState(), [Event(0, _offset(0)), Event(9, _offset(9), "reset", _offset(4))], _offset(9)
    )

    assert not is_kept(now, 3, _offset(3))
    assert is_kept(now, 4, _offset(4))


def test_bounds_never_fall_so_a_second_reset_brings_nothing_back() -> None:
    first = advance(
        StreamState(), [Event(0, _offset(0)), Event(5, _offset(5), "reset")], _offset(5)
    )

    second = advance(first, [Event(6, _offset(6), "reset", _offset(1))], _offset(6))

    assert second.floor == _offset(5)
