"""Columns made one JSON object per row, without a loop over the rows in Python.

Each struct type of the schema becomes a msgspec struct whose fields are left out when they are
null, so that encoding is two passes in C: columns to values, values to text. How types map:

| Spark | JSON |
|---|---|
| boolean, string, integers | the same |
| float, double | a number; NaN and infinities are null |
| decimal | a number with all of its digits |
| date | `"2026-01-31"` |
| timestamp | `"2026-01-31T12:00:00Z"`, in UTC; timestamp_ntz without a zone |
| binary | base64 |
| array | array |
| map | object; keys are text, numbers or dates |
| struct | object; fields that are null are left out |
| day-time interval | ISO 8601 duration |
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

_ENCODER = msgspec.json.Encoder(decimal_format="number")


class RowEncoder:
    """Encodes the columns of record batches of one schema."""

    def __init__(self, fields: list[pa.Field]) -> None:
        self._names = [field.name for field in fields]
        self._struct: Any = struct_of("Row", fields)
        self._shapes = [shape_of(field.type) for field in fields]

    def encode(self, batch: pa.RecordBatch) -> pa.Array:
        """One JSON object per row, as binary."""
        columns = [
            values_of(batch.column(name), shape)
            for name, shape in zip(self._names, self._shapes, strict=True)
        ]
        if not columns:
            return pa.array([b"{}"] * batch.num_rows, pa.binary())
        rows = map(self._struct, *columns)
        return pa.array(map(_ENCODER.encode, rows), pa.binary(), size=batch.num_rows)


def struct_of(name: str, fields: list[pa.Field]) -> Any:
    """A struct whose fields are numbered inside and carry the columns' names outside."""
    return msgspec.defstruct(
        name,
        [(f"f{index}", Any, None) for index in range(len(fields))],
        rename={f"f{index}": field.name for index, field in enumerate(fields)},
        omit_defaults=True,
        gc=False,
    )


def shape_of(kind: pa.DataType) -> Any:
    """The type that values of a column are converted to, or None if they are fine as they are."""
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return msgspec.defstruct(
            "Struct",
            [
                (f"f{index}", shape_of(field.type) or Any, None)
                for index, field in enumerate(fields)
            ],
            rename={f"f{index}": field.name for index, field in enumerate(fields)},
            omit_defaults=True,
            gc=False,
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = shape_of(kind.value_type)
        return None if inner is None else list[inner | None]  # type: ignore[valid-type]
    if pa.types.is_map(kind):
        inner = shape_of(kind.item_type)
        return None if inner is None else dict[Any, inner | None]  # type: ignore[valid-type]
    return None


def values_of(column: pa.Array, shape: Any) -> list[Any]:
    """A column as Python values that msgspec encodes as the table above says."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # An array's values carry the session's time zone; on the wire every instant is UTC.
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    values: list[Any] = (
        column.to_pylist(maps_as_pydicts="strict")
        if pa.types.is_nested(kind)
        else column.to_pylist()
    )
    if shape is None:
        if pa.types.is_nested(kind) and _holds_instants(kind):
            return [_in_utc(value) for value in values]
        return values
    if _holds_instants(kind):
        values = [_in_utc(value) for value in values]
    converted: list[Any] = msgspec.convert(values, list[shape | None])
    return converted


def _holds_instants(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_instants(kind.field(index).type) for index in range(kind.num_fields))
    if pa.types.is_map(kind):
        return _holds_instants(kind.key_type) or _holds_instants(kind.item_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_instants(kind.value_type)
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


def _in_utc(value: Any) -> Any:
    """Nested instants in UTC: Arrow cannot cast inside every nested type, so Python does."""
    if isinstance(value, datetime):
        return value if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, dict):
        return {_in_utc(key): _in_utc(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_in_utc(inner) for inner in value]
    return value


def first_null(column: pa.Array) -> int | None:
    """The first row that is null."""
    if column.null_count == 0:
        return None
    found = pc.index(pc.is_null(column), True).as_py()
    return int(found)
