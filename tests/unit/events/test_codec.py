"""Events as messages and back: checked, upcast, and named when they do not fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fencepost.client.results import LogEntry
from fencepost.events import DefinitionError, Event, EventInvalidError, UnknownEventError, upcasts
from fencepost.events.codec import Codec, Envelope, Place, encoded, envelope
from tests.unit.events.shop import Placed, Reserved

PLACE = Place("orders/7", 3, 41)


class Moved(Event, schema=3):
    shelf: str
    row: int


@upcasts(Moved, 1)
def _named(data: dict[str, Any]) -> dict[str, Any]:
    return {"shelf": data["place"]}


@upcasts(Moved, 2)
def _numbered(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "row": 0}


def entry(data: Any) -> LogEntry:
    return LogEntry(
        position=41,
        stream="orders/7",
        incarnation=1,
        timestamp_ms=5_000,
        offset="0_0",
        version=3,
        data=data,
    )


def test_an_event_is_a_message_with_name_data_meta_and_schema() -> None:
    message = encoded(Placed(sku="tea", quantity=2), {"correlation": "c"}, "orders/7")

    assert message == {
        "name": "Placed",
        "data": {"sku": "tea", "quantity": 2},
        "meta": {"correlation": "c"},
        "schema": 1,
    }


def test_an_event_with_values_of_other_types_is_not_written() -> None:
    with pytest.raises(EventInvalidError, match="quantity"):
        encoded(Placed(sku="tea", quantity="two"), {}, "orders/7")  # type: ignore[arg-type]


def test_an_entry_of_the_log_becomes_an_event_where_it_lies() -> None:
    message = encoded(Placed(sku="tea", quantity=2), {"correlation": "c", "causation": "7"}, "o")

    event = Codec([Placed]).recorded(entry(message))

    assert event.data == Placed(sku="tea", quantity=2)
    assert (event.stream, event.version, event.position) == ("orders/7", 3, 41)
    assert (event.correlation, event.causation) == ("c", "7")
    assert event.created is not None
    assert event.created.timestamp() == 5.0


def test_an_older_schema_is_upcast_step_by_step() -> None:
    codec = Codec([Moved])

    assert codec.decode(Envelope("Moved", {"place": "a"}, schema=1), PLACE) == Moved(
        shelf="a", row=0
    )
    assert codec.decode(Envelope("Moved", {"shelf": "b"}, schema=2), PLACE) == Moved(
        shelf="b", row=0
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"name": "Moved", "data": {"shelf": 1, "row": 2}, "schema": 3}, "shelf"),
        ({"name": "Moved", "data": {}, "schema": 4}, "its schema is 4, and we know up to 3"),
        ({"name": "Moved", "data": {}, "schema": 1}, "KeyError"),
        ({"name": "Moved", "data": None, "schema": 1}, "Moved"),
        ({"name": "Moved", "data": {}, "schema": -(10**18)}, "count from 1"),
        ({"title": "Moved"}, "no event"),
        ([1], "no event"),
    ],
)
def test_an_event_that_does_not_fit_names_its_position(message: Any, reason: str) -> None:
    with pytest.raises(EventInvalidError, match=reason) as caught:
        Codec([Moved]).recorded(entry(message))

    found = caught.value
    assert (found.stream, found.version, found.position) == ("orders/7", 3, 41)
    assert "position 41" in str(found)


def test_an_older_event_without_an_upcaster_says_which_one_is_missing() -> None:
    class Grown(Event, schema=3):
        shelf: int
        room: int

    @upcasts(Grown, 2)
    def forgetful(data: dict[str, Any]) -> Any:
        data["room"] = 1

    codec = Codec([Grown])
    for schema, said in (
        (1, r"no function @upcasts\(Grown, 1\)"),
        (2, "its upcaster of schema 2 returned NoneType$"),
    ):
        with pytest.raises(EventInvalidError, match=said):
            codec.decode(Envelope(name="Grown", data={"shelf": 1}, schema=schema), Place("s", 0))


def test_an_unknown_event_names_its_place() -> None:
    with pytest.raises(UnknownEventError, match="position 41") as caught:
        Codec([]).decode(envelope({"name": "Lost"}, PLACE), PLACE)

    assert caught.value.name == "Lost"


def test_two_classes_of_one_name_are_refused() -> None:
    class Other(Event, name="Placed"):
        pass

    with pytest.raises(DefinitionError, match="Placed"):
        Codec([Placed, Reserved, Other])


class Counted(Event):
    by_shelf: dict[int, float | None]


def test_an_event_is_read_as_it_was_written() -> None:
    event = Counted(by_shelf={7: 1.5, 8: None})

    message = msgspec.json.decode(msgspec.json.encode(encoded(event, {}, "o")))

    assert Codec([Counted]).recorded(entry(message)).data == event


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "no NaN"),
        (float("-inf"), "no infinity"),
        ("\ud800", "surrogates"),
    ],
)
def test_an_event_that_no_reader_could_read_is_not_written(value: Any, reason: str) -> None:
    with pytest.raises(EventInvalidError, match=reason):
        encoded(Counted(by_shelf={7: value}), {}, "orders/7")


@pytest.mark.parametrize("correlation", ["", "c" * 257, 5])
def test_a_correlation_that_no_commit_takes_is_none(correlation: Any) -> None:
    message = encoded(Placed(sku="tea", quantity=2), {"correlation": correlation}, "o")

    assert Codec([Placed]).recorded(entry(message)).correlation is None
