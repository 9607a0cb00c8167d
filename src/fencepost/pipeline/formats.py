"""How messages become columns: as they are, or by the option `format`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from fencepost.pipeline.columns import LOG_COLUMNS, MARKER, arrow_schema, log_schema
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of a read, and how they come out of the log."""

    schema: StructType

    def shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the log as the columns that were declared."""
        import pyarrow as pa

        declared = arrow_schema(self.schema)
        return pa.record_batch([batch.column(name) for name in declared.names], schema=declared)


def shape_of(options: Options, schema: StructType | None) -> Shape:
    """What the options and `.schema(...)` ask for."""
    options.choice("format", ("raw",), "raw")
    if schema is None:
        return Shape(log_schema())
    for field in schema.fields:
        if LOG_COLUMNS.get(field.name) != field.dataType:
            raise OptionError(f"there is no column {field.simpleString()}")
    return Shape(schema)


def messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows that are messages, without the markers."""
    markers = batch.column(MARKER)
    return batch.filter(markers.is_null()) if markers.null_count < len(markers) else batch
