"""The class that Spark knows as `.format("fencepost")`; it hands over to source and sink.

Spark pickles an instance of it and makes readers and writers from it in processes of its own, so
every method only reads options and calls `source` or `sink`. Spark calls the methods with keywords:
the names of the arguments are part of its interface.
"""

from __future__ import annotations

import importlib

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from fencepost.pipeline.errors import SparkMissingError, without_traceback

FORMAT = "fencepost"


class FencepostDataSource(DataSource):
    """Streams of a Fencepost server as tables."""

    @classmethod
    def name(cls) -> str:
        """The name that users give to `.format(...)`."""
        return FORMAT

    @without_traceback
    def schema(self) -> str:
        """The columns of the format, used when `.schema(...)` does not name them."""
        from fencepost.pipeline.source.options import source_options

        return source_options(self.options).shape.ddl

    @without_traceback
    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        from fencepost.pipeline.source.batch import Reader
        from fencepost.pipeline.source.options import source_options

        return Reader(source_options(self.options, schema, streaming=False))

    @without_traceback
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A streaming read."""
        _check_offers(
            "ReadLimit",
            "pyspark.sql.streaming.datasource",
            "4.2",
            "reading streams with readStream",
        )
        from fencepost.pipeline.source.options import source_options
        from fencepost.pipeline.source.stream import StreamReader

        return StreamReader(source_options(self.options, schema, streaming=True))

    @without_traceback
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        from fencepost.pipeline.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    @without_traceback
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """A streaming write, exactly once."""
        _check_offers(
            "DataSourceStreamArrowWriter",
            "pyspark.sql.datasource",
            "4.1",
            "writing with writeStream",
        )
        from fencepost.pipeline.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


def _check_offers(name: str, module: str, least: str, what: str) -> None:
    """Raise `SparkMissingError` if the PySpark that is running lacks a class that we build on."""
    from pyspark.version import __version__ as found

    try:
        is_there = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise SparkMissingError(
            f"PySpark {found} offers no {name}: {what} takes PySpark {least} or newer. Batch reads"
            " and writes work with this one"
        )
