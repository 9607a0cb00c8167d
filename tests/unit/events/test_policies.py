"""When the books of an entity are due, by its newest event and its age."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fencepost.events import Recorded
from fencepost.events.closing import Policy
from tests.unit.events.shop import Order

NOW = datetime(2026, 11, 19, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def newest(name: str, age: timedelta) -> Recorded[Any]:
    created_ms = int((NOW - age).timestamp() * 1000)
    return Recorded(
        data={}, name=name, stream="orders/7", version=3, position=9, timestamp_ms=created_ms
    )


def policy(then: Any, *, final: tuple[str, ...] = (), age: timedelta | None = None) -> Policy:
    return Policy(entity=Order, then=then, final=final, age=age, archive=None)


OLD = policy("restart", age=DAY)
ENDED = policy("retire", final=("Shipped",))
ENDED_LONG_AGO = policy("retire", final=("Shipped",), age=DAY)
WINDOW = policy("window", age=DAY)


@pytest.mark.parametrize(
    ("chosen", "name", "age", "is_due"),
    [
        (OLD, "Placed", 2 * DAY, True),
        (OLD, "Placed", DAY / 2, False),
        (OLD, "$opened", 2 * DAY, False),  # nothing has happened since
        (OLD, "$closed", DAY / 2, True),  # a close that has begun is ended
        (ENDED, "Shipped", timedelta(0), True),
        (ENDED, "Placed", 2 * DAY, False),
        (ENDED_LONG_AGO, "Shipped", 2 * DAY, True),
        (ENDED_LONG_AGO, "Shipped", DAY / 2, False),
        (ENDED_LONG_AGO, "Placed", 2 * DAY, False),
        (WINDOW, "Placed", DAY / 2, True),  # what is older is asked of the stream
    ],
)
def test_an_entity_is_due_by_its_newest_event_and_its_age(
    chosen: Policy, name: str, age: timedelta, is_due: bool
) -> None:
    assert chosen.is_due(newest(name, age), NOW) is is_due


def test_an_entity_without_events_is_not_due() -> None:
    assert not OLD.is_due(None, NOW)
