"""The report of an audit as a value: to be shown, written as JSON, or drawn.

A report is clean when it has no defects. Each kind of defect is counted in full and shown with a
few examples; `rules.KINDS` says what the kinds mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from fencepost.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS_MAX = 31


class PlotError(PipelineError):
    """A plot cannot be drawn or written; the sentence says why."""


class Defect(msgspec.Struct, frozen=True):
    """One thing that must not be."""

    kind: str
    stream: str
    position: int | None
    detail: str


class Count(msgspec.Struct, frozen=True):
    """Messages and payload bytes of a stream, or of a day."""

    name: str
    messages: int
    bytes: int


class DayCount(msgspec.Struct, frozen=True):
    """Messages and payload bytes that a stream got on a day."""

    stream: str
    day: str
    messages: int
    bytes: int


Unit = Literal["day", "hour", "minute", "second"]
UNIT_SECONDS: dict[Unit, int] = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}
UNIT_NAMES: dict[Unit, str] = {
    "day": "%Y-%m-%d",
    "hour": "%m-%d %H:00",
    "minute": "%H:%M",
    "second": "%H:%M:%S",
}
UNITS_MIN = 3
"""A unit is used when the messages span more than so many of it."""


def unit_for(span_seconds: int) -> Unit:
    """The largest unit of time of which messages over this span fill more than a few."""
    for unit, seconds in UNIT_SECONDS.items():
        if span_seconds >= UNITS_MIN * seconds:
            return unit
    return "second"


def timeline(unit: Unit, counted: Mapping[int, tuple[int, int]]) -> list[Count]:
    """Messages and bytes by their unit's beginning (seconds since 1970), with those between."""
    if not counted:
        return []
    seconds = UNIT_SECONDS[unit]
    return [
        Count(datetime.fromtimestamp(at, UTC).strftime(UNIT_NAMES[unit]), *counted.get(at, (0, 0)))
        for at in range(min(counted), max(counted) + 1, seconds)
    ]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit of a range of the log."""

    selection: str
    after: int
    until: int
    messages: int
    streams: int
    producers: int
    keys: int
    pruned: int | None
    """The newest position whose row has left the log: what lies below is checked as far as it is
    there."""
    lists_compared: bool
    """Whether the log was also held against the lists, which needs all of it."""
    defects: dict[str, int]
    samples: list[Defect]
    days: list[Count]
    largest: list[Count]
    """The streams with the most messages."""
    by_stream_and_day: list[DayCount]
    """Messages and bytes of each day, for each of the largest streams."""
    timeline_unit: Unit = "day"
    timeline: list[Count] = []
    """Messages by the unit of time that shows how they came; units without messages too."""

    @property
    def is_clean(self) -> bool:
        return not self.defects


BLUE, RED = "#3b6ea5", "#b23a48"


def plot(report: Report, path: Path) -> None:
    """Draw messages by time, the largest streams, and defects by kind, as a PNG."""
    figure = drawn(report)
    from matplotlib import pyplot

    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise PlotError(f"the plot cannot be written to {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def drawn(report: Report) -> Figure:
    """The plot of a report as a figure, which the caller closes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = sorted(report.defects.items())[::-1]
    panels = 3 if kinds else 2
    figure, axes = pyplot.subplots(panels, 1, figsize=(9, 3.5 * panels), layout="constrained")
    times, streams = axes[:2]
    # By place and not by name: minutes of two days may have the same name.
    places = range(len(report.timeline))
    times.bar(places, [one.messages for one in report.timeline], color=BLUE)
    times.margins(x=max(0.02, 1.5 / (len(places) + 1)))  # one bar alone is no wall
    times.set_title(_title(report))
    labelled = places[:: len(places) // LABELS_MAX + 1]
    times.set_xticks(labelled, [report.timeline[place].name for place in labelled], rotation=45)
    largest = report.largest[:10][::-1]
    sizes = [one.messages for one in largest]
    streams.barh([_short(one.name) for one in largest], sizes, color=BLUE)
    streams.set_title("largest streams" if kinds else "largest streams; no defects")
    if kinds:
        defects = axes[2]
        defects.barh([kind for kind, _ in kinds], [count for _, count in kinds], color=RED)
        defects.set_title("defects")
    return figure


def _title(report: Report) -> str:
    day = f" of {report.days[0].name}" if len(report.days) == 1 else ""
    return (
        f"messages by {report.timeline_unit}{day} (UTC): {report.messages:,} in"
        f" {report.streams:,} streams"
    )


def day_name(day: date) -> str:
    return day.isoformat()


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:19]}…{name[-20:]}"
