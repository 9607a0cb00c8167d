"""The plot of an audit's report: what it shows of a month, a day and a minute. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from matplotlib import pyplot

from fencepost.pipeline.audit.reports import Count, Report, Unit, drawn, timeline, unit_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOON = int(datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp())
DAY = 86_400


def report_of(unit: Unit, counted: dict[int, tuple[int, int]], days: int) -> Report:
    return Report(
        selection="**",
        after=-1,
        until=10,
        messages=sum(messages for messages, _ in counted.values()),
        streams=1,
        producers=0,
        keys=0,
        pruned=None,
        lists_compared=True,
        defects={},
        samples=[],
        days=[Count(f"2026-11-{16 + day}", 1, 1) for day in range(days)],
        largest=[Count("orders", 3, 3)],
        by_stream_and_day=[],
        timeline_unit=unit,
        timeline=timeline(unit, counted),
    )


@contextmanager
def times_of(report: Report) -> Iterator[Axes]:
    figure = drawn(report)
    yield figure.axes[0]
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("span_seconds", "unit"),
    [(0, "second"), (179, "second"), (180, "minute"), (3 * 3_600, "hour"), (3 * DAY, "day")],
)
def test_the_unit_is_one_of_which_the_messages_fill_more_than_a_few(
    span_seconds: int, unit: Unit
) -> None:
    assert unit_for(span_seconds) == unit


def test_one_day_of_messages_is_shown_by_the_hour_with_the_hours_that_had_none() -> None:
    report = report_of("hour", {NOON: (5, 50), NOON + 3 * 3_600: (2, 20)}, days=1)

    with times_of(report) as times:
        assert [bar.get_height() for bar in times.containers[0]] == [5, 0, 0, 2]
        assert times.get_xticklabels()[0].get_text() == "11-16 12:00"
        assert times.get_title() == "messages by hour of 2026-11-16 (UTC): 7 in 1 streams"


def test_many_days_have_bars_by_day_and_not_more_labels_than_can_be_read() -> None:
    first = NOON - NOON % DAY
    report = report_of("day", {first + day * DAY: (1, 1) for day in range(100)}, days=2)

    with times_of(report) as times:
        assert len(times.patches) == 100
        assert len(times.get_xticklabels()) <= 31
        assert times.get_title().startswith("messages by day (UTC)")


def test_a_log_without_messages_is_drawn_too() -> None:
    with times_of(report_of("day", {}, days=0)) as times:
        assert len(times.patches) == 0
