"""Rows become messages: one binary payload per row, checked before it is uploaded.

| `format` | a message is |
|---|---|
| `value` | the column `value`: text that is JSON on JSON streams, any bytes on others |
| `json` | an object of all columns but `stream` |
| `state` | a change of the State Protocol from `type`, `key`, `operation`, `value` ... |

Columns are encoded without a loop over the rows in Python. Each struct type of the schema becomes a
msgspec struct whose fields are left out when they are null, so that encoding is two passes in C:
columns to values, values to text. The types become:

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

from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fencepost.pipeline.errors import RowError
from fencepost.pipeline.sink.options import SinkOptions

OPERATIONS = ("insert", "update", "upsert", "delete")

_VALUE = msgspec.json.Decoder(msgspec.Raw)
_ENCODER = msgspec.json.Encoder(decimal_format="number")


class Encoded(NamedTuple):
    """Rows ready to be sent."""

    streams: pa.Array | None
    """The stream of each row; None when all rows go to the one stream of the options."""
    payloads: np.ndarray
    """The message of each row, as an object array of bytes."""
    lengths: np.ndarray
    """The bytes of each message."""


def encoded_as(payloads: pa.Array, streams: pa.Array | None = None) -> Encoded:
    """Payloads that are an Arrow array of binary, each made a Python object once."""
    objects = payloads.to_numpy(zero_copy_only=False)
    lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False).astype(np.int64)
    return Encoded(streams, objects, lengths)


class RowsEncoder:
    """Encodes the record batches of one task, and counts its rows for error messages."""

    def __init__(self, options: SinkOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._row = 0
        self._encode: Callable[[pa.RecordBatch], Encoded] | None = None

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """The messages of a record batch, or `RowError`."""
        if self._encode is None:
            self._encode = self._encoder(batch.schema)
        streams = None
        if self._options.stream is None:
            streams = batch.column("stream")
            self._refuse_null(streams, "stream")
        rows = self._encode(batch)
        self._row += batch.num_rows
        return rows._replace(streams=streams)

    def _encoder(self, schema: pa.Schema) -> Callable[[pa.RecordBatch], Encoded]:
        if self._options.format == "value":
            return self._values
        if self._options.format == "state":
            return self._states
        fields = [schema.field(name) for name in self._options.columns]
        return RowEncoder(fields).encode

    def _values(self, batch: pa.RecordBatch) -> Encoded:
        column = batch.column("value")
        self._refuse_null(column, "value")
        payloads = column.cast(pa.binary())
        rows = encoded_as(payloads)
        if self._options.json:
            self._check_json(rows.payloads, column)
        return rows

    def _states(self, batch: pa.RecordBatch) -> Encoded:
        columns = {name: batch.column(name) for name in self._options.columns}
        for name in ("type", "key", "operation"):
            self._refuse_null(columns[name], name)
        operations = columns["operation"].to_pylist()
        self._check_operations(operations)
        nothing = [None] * batch.num_rows
        values = {name: state_values(name, column) for name, column in columns.items()}
        headers = map(
            _Headers, operations, values.get("txid", nothing), values.get("timestamp", nothing)
        )
        changes = map(
            _Change,
            values["type"],
            map(str, values["key"]),
            headers,
            values.get("value", nothing),
            values.get("old_value", nothing),
        )
        rows = _encoded_rows(changes, batch.num_rows)
        if any(_is_text(columns[name].type) for name in ("value", "old_value") if name in columns):
            # A value that came as text went into its change as it was.
            self._check_json(rows.payloads)
        return rows

    def _check_operations(self, operations: list[str]) -> None:
        wrong = set(operations) - set(OPERATIONS)
        if wrong:
            row = next(index for index, found in enumerate(operations) if found in wrong)
            legal = ", ".join(OPERATIONS)
            raise self._error(row, f"operation is {operations[row]!r}, and may be {legal}")

    def _refuse_null(self, column: pa.Array, name: str) -> None:
        row = first_null(column)
        if row is not None:
            raise self._error(row, f"the column {name} is null")

    def _check_json(self, payloads: np.ndarray, column: pa.Array | None = None) -> None:
        """Refuse a payload that is not one JSON value in UTF-8.

        Joined by commas, a payload `1,2` would pass for two messages. This is the only look that
        the executor takes at the text. `column` holds the same bytes, if Arrow has them.
        """
        try:
            _check_utf8(payloads, column)  # msgspec does not look into strings
            deque(map(_VALUE.decode, payloads), maxlen=0)
        except (pa.ArrowInvalid, UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            for row, data in enumerate(payloads):
                self._check_row(row, data)
            raise

    def _check_row(self, row: int, data: bytes) -> None:
        try:
            data.decode()
            _VALUE.decode(data)
        except UnicodeDecodeError as error:
            raise self._error(row, f"value is not UTF-8: {error.reason}") from None
        except msgspec.DecodeError as error:
            shown = data[:80].decode(errors="replace")
            raise self._error(row, f"value is not JSON: {error}: {shown!r}") from None
        except RecursionError:
            raise self._error(row, "value is nested too deeply") from None

    def _error(self, row: int, what: str) -> RowError:
        return RowError(f"row {self._row + row} of partition {self._partition}: {what}")


def _check_utf8(payloads: np.ndarray, column: pa.Array | None) -> None:
    if column is None:
        b"".join(payloads).decode()
    else:
        column.cast(pa.binary()).cast(pa.string())


def _encoded_rows(rows: Iterable[Any], count: int) -> Encoded:
    """Values as JSON texts."""
    payloads = np.fromiter(map(_ENCODER.encode, rows), object, count)
    return Encoded(None, payloads, np.fromiter(map(len, payloads), np.int64, count))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def state_values(name: str, column: pa.Array) -> list[Any]:
    """A column of a change; a value that comes as text is JSON already and goes in as it is."""
    if name in ("value", "old_value") and _is_text(column.type):
        texts = column.cast(pa.binary()).to_pylist()
        return [None if text is None else msgspec.Raw(text) for text in texts]
    return values_of(column, shape_of(column.type))


class _Headers(msgspec.Struct, omit_defaults=True, gc=False):
    operation: Any
    txid: Any = None
    timestamp: Any = None


class _Change(msgspec.Struct, omit_defaults=True, gc=False):
    type: Any
    key: Any
    headers: _Headers
    value: Any = None
    old_value: Any = None


class RowEncoder:
    """Encodes the columns of record batches of one schema."""

    def __init__(self, fields: list[pa.Field]) -> None:
        self._names = [field.name for field in fields]
        self._struct: Any = struct_of("Row", fields)
        self._shapes = [shape_of(field.type) for field in fields]

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """One JSON object per row."""
        columns = [
            values_of(batch.column(name), shape)
            for name, shape in zip(self._names, self._shapes, strict=True)
        ]
        if not columns:
            return _encoded_rows(({} for _ in range(batch.num_rows)), batch.num_rows)
        return _encoded_rows(map(self._struct, *columns), batch.num_rows)


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
