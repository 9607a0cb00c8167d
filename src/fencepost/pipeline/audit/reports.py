"""The report of an audit as a value: to be shown, written as JSON, or drawn.

A report is clean when it has no defects. Each kind of defect is counted in full and shown with a
few examples; `rules.KINDS` says what the kinds mean.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

import msgspec

from fencepost.pipeline.errors import PipelineError

DAYS_LABELLED_MAX = 31


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

    @property
    def is_clean(self) -> bool:
        return not self.defects


BLUE, RED = "#3b6ea5", "#b23a48"


def plot(report: Report, path: Path) -> None:
    """Draw messages by day, the largest streams, and defects by kind, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = sorted(report.defects.items())[::-1]
    panels = 3 if kinds else 2
    figure, axes = pyplot.subplots(panels, 1, figsize=(9, 3.5 * panels), layout="constrained")
    days, streams = axes[:2]
    names = [one.name for one in report.days]
    days.bar(names, [one.messages for one in report.days], color=BLUE)
    days.margins(x=max(0.02, 1.5 / (len(names) + 1)))  # one day alone is no wall
    days.set_title(f"messages by day: {report.messages:,} in {report.streams:,} streams")
    if len(names) > DAYS_LABELLED_MAX:
        days.set_xticks(range(0, len(names), len(names) // DAYS_LABELLED_MAX + 1))
    days.tick_params(axis="x", rotation=45)
    largest = report.largest[:10][::-1]
    sizes = [one.messages for one in largest]
    streams.barh([_short(one.name) for one in largest], sizes, color=BLUE)
    streams.set_title("largest streams" if kinds else "largest streams; no defects")
    if kinds:
        defects = axes[2]
        defects.barh([kind for kind, _ in kinds], [count for _, count in kinds], color=RED)
        defects.set_title("defects")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise PlotError(f"the plot cannot be written to {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def day_name(day: date) -> str:
    return day.isoformat()


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:19]}…{name[-20:]}"
