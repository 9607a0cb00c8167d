"""Checks of what users hand in, before anything is sent; each error says what to give instead."""

from __future__ import annotations

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


def check_timeout(seconds: float) -> None:
    """Heartbeats go out within it, so it cannot be nothing."""
    if not seconds > 0:
        raise FencepostError(f"the timeout of claims is more than 0 seconds, not {seconds!r}")
