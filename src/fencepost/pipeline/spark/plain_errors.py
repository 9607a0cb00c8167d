"""Errors that are sentences stay sentences on their way through Spark.

What is raised in one of Spark's Python processes reaches the user as the text of a traceback, in
one message with Spark's own. An error of this package says what was wrong and what to do; thirty
lines of how it was noticed would only hide that, so the frames are left out at the border to Spark.
They are in the log at the level DEBUG. Errors that are not ours keep everything.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from fencepost.client.errors import FencepostError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Let Spark call this: its errors on purpose arrive without frames and causes."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except FencepostError as error:
            raise _bare(error) from None

    return called


def rows_plainly(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """The same for what gives rows, whose errors come while they are taken."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from function(*args, **kwargs)
        except FencepostError as error:
            raise _bare(error) from None

    return called


def _bare(error: FencepostError) -> FencepostError:
    log.debug("on its way to Spark: %s", error, exc_info=error)
    return error.with_traceback(None)
