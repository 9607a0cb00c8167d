"""Pause the garbage collector for a large request, and free its objects a few at a time.

The collector looks through everything that is alive whenever that has grown by a quarter. While a
large commit is read and decided there are a million objects, none of them in a cycle, and each look
holds every other request up for a good part of a second. Reference counting frees all of them in
any case; but to free all at once takes time as well, so `dissolve` frees a few at a time.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_paused = 0

OBJECTS_PER_TURN = 2_048
"""Entries of a collection that are let go of in one turn of the loop."""


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


async def dissolve(*collections: dict[Any, Any] | set[Any] | list[Any]) -> None:
    """Empty collections that are not needed any more, a few objects at a time."""
    for collection in collections:
        while collection:
            if isinstance(collection, list):
                del collection[-OBJECTS_PER_TURN:]
            else:
                take = collection.popitem if isinstance(collection, dict) else collection.pop
                for _ in range(min(OBJECTS_PER_TURN, len(collection))):
                    take()
            await asyncio.sleep(0)
