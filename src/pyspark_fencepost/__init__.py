"""`.format("fencepost")` in every Spark session, without registering it.

Spark looks through top-level modules whose names begin with `pyspark_`, and takes their
`DefaultSource`. So a session that Fencepost did not make has the format as well, where this package
is installed: in notebooks, with Spark Connect, in `spark-pipelines` and in SQL. What is found in
this way cannot be replaced, so it is the same source as `register` adds elsewhere.
"""

from __future__ import annotations

from fencepost.pipeline.datasource import FencepostDataSource

__all__ = ["DefaultSource"]


class DefaultSource(FencepostDataSource):
    """The format as Spark finds it by itself."""
