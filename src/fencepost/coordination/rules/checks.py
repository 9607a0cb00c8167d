"""Checks of what users hand in, before anything is sent; each error says what to give instead."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

from fencepost.client.errors import InvalidArgumentError, require


def check_stream(stream: object, kind: type[Any]) -> None:
    """A sync class takes a stream of a sync client, an async class one of an async client."""
    if not isinstance(stream, kind):
        how = "connect_async" if kind.__name__.startswith("Async") else "connect"
        raise InvalidArgumentError(
            f"a stream of fencepost.{how} is needed ({kind.__name__}), not {type(stream).__name__}"
        )


def check_timeout(seconds: float) -> None:
    """Heartbeats go out within it, so it cannot be nothing."""
    check_seconds(seconds, "the timeout of claims")


def check_seconds(seconds: object, what: str, *, zero: bool = False) -> None:
    """Refuse a time that is no number, is negative, or is 0 where `zero` is not allowed."""
    fits = isinstance(seconds, int | float) and (seconds > 0 or (zero and seconds == 0))
    least = "at least" if zero else "more than"
    require(fits, f"{what} is {least} 0 seconds, not {seconds!r}")


def check_event(event: object, kind: type[Any]) -> None:
    """Refuse a `stop` that is no event, or one that this class (sync or async) cannot wait for."""
    where, wait = kind.__module__.partition(".")[0], getattr(event, "wait", None)
    is_awaited = iscoroutinefunction(wait)
    fits = hasattr(event, "is_set") and is_awaited == iscoroutinefunction(kind.wait)
    require(event is None or fits, f"stop is a {where}.{kind.__name__}, not {type(event).__name__}")
