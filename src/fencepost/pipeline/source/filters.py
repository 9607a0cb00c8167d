"""Filters of a query that the server can apply: on stream, position and timestamp.

A filter narrows what is read. Spark checks every row again, so a narrowing must keep every row that
passes and may keep more. Filters that are not understood here are left to Spark alone. The
functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from fencepost.pipeline.options import STREAMS_MAX, Selection
from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.limits import Limits

PATH_BYTES_MAX = Limits().path_bytes_max


@dataclass(frozen=True, slots=True)
class Narrowing:
    """The part of a read that filters leave: streams, positions in (`after`, `until`], times."""

    selection: Selection
    after: int = -1
    until: int | None = None
    from_ms: int | None = None
    before_ms: int | None = None


def narrowed(narrowing: Narrowing, filters: Iterable[Filter]) -> Narrowing:
    """The narrowing after all of these filters."""
    for one in filters:
        match getattr(one, "attribute", None):
            case ("stream",):
                narrowing = replace(narrowing, selection=_by_stream(narrowing.selection, one))
            case ("position",):
                narrowing = _by_position(narrowing, one)
            case ("timestamp",):
                narrowing = _by_time(narrowing, one)
            case _:
                pass
    return narrowing


def _by_stream(selection: Selection, one: Filter) -> Selection:
    match one:
        case EqualTo(_, str(path)) | EqualNullSafe(_, str(path)):
            wanted = {path}
        case In(_, values):
            wanted = {value for value in values if isinstance(value, str)}
        case StringStartsWith(_, prefix):
            return _by_prefix(selection, prefix)
        case _:
            return selection
    kept = tuple(sorted(path for path in wanted if selection.takes(path)))
    if not kept:
        return Selection(nothing=True)
    return Selection(kept) if len(kept) <= STREAMS_MAX and all(map(_is_plain, kept)) else selection


def _is_plain(path: str) -> bool:
    """Whether the server can be asked for a path; it refuses its own, and what is no path."""
    is_long = len(path.encode()) > PATH_BYTES_MAX
    return not (is_long or path.startswith("__") or isinstance(parse_glob(path), BadGlob))


def _by_prefix(selection: Selection, prefix: str) -> Selection:
    if selection.match is None:
        kept = tuple(path for path in selection.streams if path.startswith(prefix))
        return Selection(kept, nothing=not kept)
    pattern = f"{prefix}**" if prefix.endswith("/") else f"{prefix}*/**"
    # Patterns cannot be intersected; one that takes everything can be replaced.
    if selection.match != "**" or "*" in prefix or not _is_plain(pattern):
        return selection
    return Selection(match=pattern)


def _by_position(narrowing: Narrowing, one: Filter) -> Narrowing:
    low: int
    high: int | None
    match one:
        case EqualTo(_, int(at)) | EqualNullSafe(_, int(at)):
            low, high = at, at
        case GreaterThan(_, int(at)):
            low, high = at + 1, None
        case GreaterThanOrEqual(_, int(at)):
            low, high = at, None
        case LessThan(_, int(at)):
            low, high = 0, at - 1
        case LessThanOrEqual(_, int(at)):
            low, high = 0, at
        case In(_, values) if values and all(isinstance(value, int) for value in values):
            low, high = min(values), max(values)
        case _:
            return narrowing
    return replace(
        narrowing, after=max(narrowing.after, low - 1), until=_least(narrowing.until, high)
    )


def _by_time(narrowing: Narrowing, one: Filter) -> Narrowing:
    low: int | None
    high: int | None
    match one:
        case EqualTo(_, datetime() as at) | EqualNullSafe(_, datetime() as at):
            low, high = _ms(at), _ms(at) + 1
        case GreaterThan(_, datetime() as at) | GreaterThanOrEqual(_, datetime() as at):
            low, high = _ms(at), None
        case LessThan(_, datetime() as at) | LessThanOrEqual(_, datetime() as at):
            low, high = None, _ms(at) + 1
        case _:
            return narrowing
    return replace(
        narrowing,
        from_ms=_most(narrowing.from_ms, low),
        before_ms=_least(narrowing.before_ms, high),
    )


def _ms(at: datetime) -> int:
    """The millisecond that an instant lies in; one without a zone is in UTC, as Spark sends it."""
    known = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    whole = int(known.replace(microsecond=0).timestamp())
    return max(whole * 1000 + known.microsecond // 1000, 0)


def _least(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else min(one, other)


def _most(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else max(one, other)
