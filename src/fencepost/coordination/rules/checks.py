"""Checks of what users hand in, before anything is sent; each error says what to give instead.

`async_check_handler` is what `check_handler` is called in the async classes: they take both kinds.
"""

from __future__ import annotations

import inspect
from typing import Any

from fencepost.client.errors import FencepostError


def check_stream(stream: object, kind: type[Any]) -> None:
    """A sync class takes a stream of a sync client, an async class one of an async client."""
    if not isinstance(stream, kind):
        how = "connect_async" if kind.__name__.startswith("Async") else "connect"
        raise FencepostError(
            f"a {kind.__name__} is needed, not {type(stream).__name__}:"
            f" take the stream from fencepost.{how}"
        )


def async_check_handler(handler: object) -> None:
    """A handler is something to call."""
    if not callable(handler):
        raise FencepostError(f"a handler is a function, not {type(handler).__name__}")


def check_handler(handler: object) -> None:
    """The same, and a sync class cannot await what a handler returns."""
    async_check_handler(handler)
    by_class = vars(type(handler)).get("__call__")  # of an object that can be called
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(by_class):
        raise FencepostError(
            "the handler is async, and this class cannot await: use the async class, or give it a"
            " plain function"
        )


def check_timeout(seconds: float) -> None:
    """Heartbeats go out within it, so it cannot be nothing."""
    if not seconds > 0:
        raise FencepostError(f"the timeout of claims is more than 0 seconds, not {seconds!r}")
