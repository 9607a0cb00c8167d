"""The data pipeline: Fencepost as a source and an exactly-once sink of Spark, through PySpark.

`session()` gives a SparkSession that works after `pip install 'fencepost[spark]'` alone, with
`.format("fencepost")` in it; `register(spark)` adds the format to a session of your own. Everything
here speaks to the server over HTTP, through `fencepost.client`. Nothing of Spark is imported
before it is needed: a machine without PySpark may import this package and is told what is missing
when it asks for a session.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencepost.pipeline.sessions import register, session

__all__ = ["register", "session"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fencepost.pipeline.sessions"), name)
