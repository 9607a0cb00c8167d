"""Tables that Spark makes from streams and keeps up to date.

`operations.py` has the functions, `pieces.py` adds one piece of the log to the tables, `state.py`
knows what State messages do to rows, and `manifests.py` and `delta.py` record which files a table
consists of. The functions are imported at their first use, so that `fencepost pipeline lag` can
read the position of a table on a machine without Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencepost.pipeline.tables.operations import (
        Reached,
        backfill,
        follow,
        position,
        read,
        types,
        vacuum,
    )

__all__ = ["Reached", "backfill", "follow", "position", "read", "types", "vacuum"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fencepost.pipeline.tables.operations"), name)
