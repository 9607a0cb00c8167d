"""`.format("fencepost")` in every Spark session, without registering it.

Spark looks through top-level modules whose names begin with `pyspark_`, and takes their
`DefaultSource`. So a session that Fencepost did not make has the format as well, where this package
is installed: in notebooks, with Spark Connect, in `spark-pipelines` and in SQL.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from fencepost.pipeline.datasource import FencepostDataSource
from fencepost.pipeline.errors import without_traceback

__all__ = ["DefaultSource"]


class DefaultSource(FencepostDataSource):
    """The format as Spark finds it by itself."""

    @without_traceback
    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read. Spark filters: by default it refuses a reader that filters for it.

        `fencepost.pipeline.register` sets what it takes for filters to be pushed down.
        """
        from fencepost.pipeline.source.batch import Reader
        from fencepost.pipeline.source.options import source_options

        return Reader(source_options(self.options, schema, streaming=False))
