"""The columns of a read, as Spark and as Arrow declare them.

Those of the log are what `/v1/log` has in Arrow, without the one for markers: deletions,
truncations and closures are not messages, and are not rows here. A format adds columns of its own
before `value`, and `corrupt` behind it.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

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
OLD_VALUE = "old_value"
CORRUPT = "corrupt"
MARKER = "marker"

PLACE_COLUMNS: dict[str, DataType] = {
    "stream": StringType(),
    "offset": StringType(),
    "version": LongType(),
    "position": LongType(),
    "timestamp": TimestampType(),
    "content_type": StringType(),
    "producer_id": StringType(),
    "producer_epoch": LongType(),
    "producer_seq": LongType(),
}
"""Where a message stands and who sent it."""

FORMAT_COLUMNS: dict[str, dict[str, DataType]] = {
    "raw": {},
    "json": {},
    "state": {
        name: StringType() for name in ("type", "key", "operation", "control", "txid", "headers")
    },
    "events": {name: StringType() for name in ("name", "correlation", "meta")},
}
"""What a format takes out of a message beside its value."""

PAYLOADS: dict[str, tuple[str, ...]] = {
    "raw": (VALUE,),
    "json": (VALUE,),
    "state": (VALUE, OLD_VALUE),
    "events": (VALUE,),
}
"""The columns of a format whose type the reader chooses."""

SQL_NAMES: dict[type[DataType], str] = {
    StringType: "STRING",
    LongType: "BIGINT",
    TimestampType: "TIMESTAMP",
    BinaryType: "BINARY",
}


def log_schema() -> StructType:
    """Every column of the log, with values as they are."""
    columns = {**PLACE_COLUMNS, VALUE: BinaryType()}
    return StructType([StructField(name, kind) for name, kind in columns.items()])


_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)
"""PySpark 4.0 and 4.1 have times in UTC without being told."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark expects of record batches with these columns, exactly."""
    return to_arrow_schema(schema, **_UTC)


def struct_of(ddl: str) -> StructType:
    """A schema from its DDL, as in `name string, total double`."""
    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found
