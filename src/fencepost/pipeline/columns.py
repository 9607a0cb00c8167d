"""The columns of the log, as Spark and as Arrow declare them.

They are the columns of `/v1/log` in Arrow, without the one for markers: deletions, truncations and
closures are not messages, and are not rows here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

if TYPE_CHECKING:
    import pyarrow as pa

VALUE = "value"
MARKER = "marker"

LOG_COLUMNS: dict[str, DataType] = {
    "stream": StringType(),
    "offset": StringType(),
    "version": LongType(),
    "position": LongType(),
    "timestamp": TimestampType(),
    "content_type": StringType(),
    "producer_id": StringType(),
    "producer_epoch": LongType(),
    "producer_seq": LongType(),
    VALUE: BinaryType(),
}


def log_schema() -> StructType:
    """Every column of the log."""
    return StructType([StructField(name, kind) for name, kind in LOG_COLUMNS.items()])


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark expects of record batches with these columns, exactly."""
    return to_arrow_schema(schema, timezone="UTC")
