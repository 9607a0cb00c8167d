"""What counts on a coordination stream: the newest message that was sent under its own id."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fencepost.client import state
from fencepost.client.http import parse_url
from fencepost.client.operations import Producing
from fencepost.client.results import LogEntry, LogProducer
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.entries import Entries, new_move
from fencepost.coordination.rules.resources import Rows

SETTINGS = ClientSettings(address=parse_url("http://localhost:4437"))


def entries() -> Entries:
    return Entries(SETTINGS, "s", Rows("n"))


def stored(epoch: int, version: int, **more: Any) -> LogEntry:
    """A message of row n/1 as the log shows it."""
    fields: dict[str, Any] = {
        "position": 0,
        "stream": "s",
        "incarnation": 1,
        "timestamp_ms": 1000,
        "offset": "0",
        "producer": LogProducer("row:n:1", epoch, version),
        "data": {
            "type": "n",
            "key": "1",
            "value": {"epoch": epoch, "version": version},
            "headers": {"operation": "update"},
        },
    }
    return LogEntry(**(fields | more))


def place(known: Entries) -> tuple[int, int] | None:
    entry = known.get("1")
    return None if entry is None else entry.place


def test_entries_are_ordered_by_epoch_and_then_version() -> None:
    known = entries()
    for epoch, version in [(0, 0), (0, 5), (1, 0), (0, 6), (1, 1), (1, 0)]:
        known._take(stored(epoch, version))

    assert place(known) == (1, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"producer": None},
        {"producer": LogProducer("row:n:2", 0, 0)},
        {"data": None},
        {"data": {"headers": {"control": "reset"}}},
        {"data": {"type": "n", "key": "1", "value": 7, "headers": {"operation": "update"}}},
        {"data": None, "marker": "closed"},
    ],
)
def test_what_was_not_sent_under_its_own_id_does_not_count(more: dict[str, Any]) -> None:
    known = entries()
    known._take(stored(0, 0, **more))

    assert place(known) is None


@pytest.mark.parametrize("value", [{}, {"version": 0}, {"epoch": 7, "version": 7}])
def test_epoch_and_version_are_those_of_the_producer(value: dict[str, Any]) -> None:
    known = entries()
    data = {"type": "n", "key": "1", "value": value, "headers": {"operation": "update"}}
    known._take(stored(2, 3, data=data))

    assert place(known) == (2, 3)


def test_what_cannot_be_read_is_remembered_by_its_number_until_something_newer_comes() -> None:
    known = entries()
    known._take(stored(0, 0))
    known._take(stored(0, 1, data={"hello": "world"}))
    skipped = known.skipped("1")
    assert skipped is not None
    assert (skipped.place, known.place("1"), place(known)) == ((0, 1), (0, 1), (0, 0))
    assert known.all_skipped() == {"1": skipped}

    known._take(stored(1, 0))

    assert known.skipped("1") is None
    assert known.place("1") == (1, 0)
    assert known.all_skipped() == {}


def test_a_deleted_stream_leaves_nothing() -> None:
    known = entries()
    known._take(stored(3, 3))
    known._take(stored(0, 0, data=None, producer=None, marker="deleted"))
    known._take(stored(0, 0))

    assert place(known) == (0, 0)


def test_two_moves_that_say_the_same_differ_by_their_nonce() -> None:
    at = Producing("row:n:1", 0, 0)
    one, two = (new_move(SETTINGS, at, "insert", "n", "1", {"x": 1}) for _move in range(2))

    assert one.body != two.body
    assert one.change.value == two.change.value == {"x": 1, "epoch": 0, "version": 0}
    assert isinstance(state.parse(_wire(one.body)), state.Change)


def _wire(body: bytes) -> Any:
    return msgspec.json.decode(body)[0]
