"""Checks of the functions that users hand in, before any work is claimed for them.

`async_check_handler` is what `check_handler` is called in the async classes: they take both kinds.
"""

from __future__ import annotations

import inspect

from fencepost.client.errors import InvalidArgumentError


def async_check_handler(handler: object, takes: tuple[str, ...] = ()) -> None:
    """A handler is something to call, with the arguments that it will be called with."""
    if not callable(handler):
        raise InvalidArgumentError(f"a handler is a function, not {type(handler).__name__}")
    if not takes:
        return
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some that are written in C do not say what they take
    try:
        signature.bind(*takes)
    except TypeError:
        raise InvalidArgumentError(
            f"the handler is called with ({', '.join(takes)}), and takes {signature}"
        ) from None


def check_handler(handler: object, takes: tuple[str, ...] = ()) -> None:
    """The same, and a sync class cannot await what a handler returns."""
    async_check_handler(handler, takes)
    by_class = vars(type(handler)).get("__call__")  # of an object that can be called
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(by_class):
        raise InvalidArgumentError(
            "the handler is async, and this class cannot await: use the async class, or give it a"
            " plain function"
        )
