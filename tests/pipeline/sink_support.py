"""What tests of the sink share: schemas without a JVM, and servers' streams as lists."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

import fencepost

_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "variant": VariantType(),
    "other": LongType(),
}


def schema_of(columns: str) -> StructType:
    """A schema from `name type, name type`; what is neither string nor binary is `other`."""
    pairs = [column.split() for column in columns.split(",")]
    return StructType([StructField(name, _TYPES[kind]) for name, kind in pairs])


def messages(url: str, stream: str) -> list[Any]:
    """Everything that a JSON stream holds; nothing when it is not there."""
    with fencepost.connect(url) as client:
        try:
            return list(client.stream(stream).read())
        except fencepost.StreamNotFoundError:
            return []


def waiting_parts(data: Path) -> int:
    """Uploads that no commit has used, from the server's own file: it has no other way to ask."""
    with closing(sqlite3.connect(f"file:{data / 'fencepost.db'}?mode=ro", uri=True)) as database:
        [(count,)] = database.execute("SELECT count(*) FROM parts WHERE committed IS NULL")
    return int(count)
