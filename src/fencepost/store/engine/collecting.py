"""Keeping the garbage collector out of the way of a request that holds very many objects.

The collector looks through everything that is alive whenever that has grown by a quarter. While a
large commit is read and decided there are a million objects, none of them in a cycle, and each look
holds everybody up for a good part of a second. Reference counting frees all of it in any case.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_paused = 0


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collections in here; several may overlap. For use on the event loop's thread only."""
    global _paused
    _paused += 1
    gc.disable()
    try:
        yield
    finally:
        _paused -= 1
        if not _paused:
            gc.enable()
