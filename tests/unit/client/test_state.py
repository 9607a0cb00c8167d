"""State messages and the rows that come of them, without a server."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.client import state
from fencepost.client.state import Rows, StateMessageError


class User(msgspec.Struct):
    name: str


@dataclass
class Flag:
    enabled: bool


def wire(message: state.Change | state.Control) -> Any:
    """The message as a reader gets it."""
    return msgspec.json.decode(msgspec.json.encode(message))


def test_messages_look_as_the_protocol_writes_them() -> None:
    at = datetime(2026, 1, 15, 10, 30, tzinfo=UTC)

    assert wire(state.insert("user", "1", {"name": "Ada"}, txid="t", timestamp=at)) == {
        "type": "user",
        "key": "1",
        "value": {"name": "Ada"},
        "headers": {"operation": "insert", "txid": "t", "timestamp": "2026-01-15T10:30:00Z"},
    }
    assert wire(state.update("n", "1", 2, old_value=1)) == {
        "type": "n",
        "key": "1",
        "value": 2,
        "old_value": 1,
        "headers": {"operation": "update"},
    }
    assert wire(state.delete("n", "1")) == {
        "type": "n",
        "key": "1",
        "headers": {"operation": "delete"},
    }
    assert wire(state.upsert("n", "1", None))["value"] is None
    assert wire(state.snapshot_start()) == {"headers": {"control": "snapshot-start"}}
    assert wire(state.snapshot_end(offset="7")) == {
        "headers": {"control": "snapshot-end", "offset": "7"}
    }
    assert wire(state.reset(offset="3")) == {"headers": {"control": "reset", "offset": "3"}}


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {},
        {"type": "n", "key": "1", "value": 1},
        {"type": "", "key": "1", "value": 1, "headers": {"operation": "insert"}},
        {"type": "n", "key": "", "value": 1, "headers": {"operation": "insert"}},
        {"type": "n", "key": 1, "value": 1, "headers": {"operation": "insert"}},
        {"type": "n", "key": "1", "headers": {"operation": "insert"}},
        {"type": "n", "key": "1", "value": 1, "headers": {"operation": "replace"}},
        {"type": "n", "key": "1", "value": 1, "headers": {"operation": "insert", "txid": ""}},
        {
            "type": "n",
            "key": "1",
            "value": 1,
            "headers": {"operation": "insert", "timestamp": "2026-01-15T10:30:00"},
        },
        {"headers": {"control": "stop"}},
        {"headers": {"control": "reset", "offset": 7}},
    ],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(StateMessageError):
        state.parse(message)


def test_a_builder_refuses_what_a_reader_would_refuse() -> None:
    with pytest.raises(StateMessageError):
        state.insert("", "1", 1)
    with pytest.raises(StateMessageError):
        state.update("n", "1", 1, timestamp=datetime(2026, 1, 1))


def test_a_reader_lets_fields_pass_that_it_does_not_know() -> None:
    message = {"type": "n", "key": "1", "value": 1, "headers": {"operation": "insert", "from": "x"}}

    assert state.parse(message) == state.insert("n", "1", 1)


def test_values_get_the_type_of_their_messages() -> None:
    rows = Rows({"user": User, "flag": Flag})
    rows.apply(state.insert("user", "1", {"name": "Ada"}))
    rows.apply(state.insert("flag", "f", {"enabled": True}))
    rows.apply(state.insert("other", "o", [1]))

    assert rows.of("user") == {"1": User("Ada")}
    assert rows.of("flag") == {"f": Flag(enabled=True)}
    assert rows.of("other") == {"o": [1]}
    with pytest.raises(StateMessageError, match="user/1 is no User"):
        rows.apply(state.update("user", "1", {"name": 7}))
    assert rows.of("user") == {"1": User("Ada")}


def test_a_row_of_null_is_a_row() -> None:
    rows = Rows()
    rows.apply(state.insert("n", "1", None))

    assert dict(rows.of("n")) == {"1": None}


def test_what_did_not_come_in_a_snapshot_is_gone_at_its_end() -> None:
    rows = Rows()
    rows.apply(state.insert("n", "old", 1))
    rows.apply(state.insert("n", "kept", 1))
    rows.apply(state.snapshot_start())
    rows.apply(state.insert("n", "kept", 2))
    rows.apply(state.insert("n", "new", 3))
    assert set(rows.of("n")) == {"old", "kept", "new"}

    rows.apply(state.snapshot_end())

    assert dict(rows.of("n")) == {"kept": 2, "new": 3}
    assert rows.types == ["n"]


def test_the_end_of_a_snapshot_that_was_not_begun_removes_nothing() -> None:
    rows = Rows()
    rows.apply(state.insert("n", "1", 1))
    rows.apply(state.snapshot_end())

    assert dict(rows.of("n")) == {"1": 1}


def test_a_reset_empties_the_rows_that_somebody_already_looks_at() -> None:
    rows = Rows()
    seen = rows.of("n")
    rows.apply(state.insert("n", "1", 1))
    assert dict(seen) == {"1": 1}

    rows.apply(state.reset())

    assert dict(seen) == {}
    rows.apply(state.insert("n", "2", 2))
    assert dict(seen) == {"2": 2}


KEYS = st.sampled_from("abc")
CHANGES = st.one_of(
    st.builds(state.insert, st.just("n"), KEYS, st.integers(0, 9)),
    st.builds(state.update, st.just("n"), KEYS, st.integers(0, 9)),
    st.builds(state.upsert, st.just("n"), KEYS, st.integers(0, 9)),
    st.builds(state.delete, st.just("n"), KEYS),
)


@given(st.lists(CHANGES), st.lists(CHANGES))
def test_a_snapshot_leaves_what_its_own_changes_leave(
    before: list[state.Change], inside: list[state.Change]
) -> None:
    """Whatever came before, after a snapshot the rows are those of the snapshot alone."""
    rows, alone = Rows(), Rows()
    for change in before:
        rows.apply(change)
    rows.apply(state.snapshot_start())
    for change in inside:
        rows.apply(change)
        alone.apply(change)
    rows.apply(state.snapshot_end())

    assert rows.of("n") == alone.of("n")


def test_sync_and_async_have_the_same_names_and_signatures() -> None:
    ours, theirs = state.Materialized, state.AsyncMaterialized
    for name in ("__init__", "refresh", "follow"):
        seen = [
            str(inspect.signature(getattr(kind, name)).parameters).replace("Async", "")
            for kind in (ours, theirs)
        ]
        assert seen[0] == seen[1], name
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)
