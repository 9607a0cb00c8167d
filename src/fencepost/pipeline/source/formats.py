"""How messages become columns: the options `format`, `schema` and `mode`.

| format | columns beside those of the log | `value` |
|---|---|---|
| `raw` | | BINARY: the message as it is |
| `json` | `corrupt` | the message, by its type |
| `state` | `type`, `key`, `operation`, `control`, `txid`, `headers`, `corrupt`, | the value |
| | `old_value` | of the change |
| `events` | `name`, `correlation`, `meta`, `corrupt` | the event's data |

The type of `value` is the option `schema`, or what `.schema(...)` gives it; STRING is the JSON
text. `.schema(...)` may also leave columns out. A message that does not fit the schema is
malformed, whatever its neighbours are: `mode` says whether it is kept in `corrupt` (permissive),
dropped, or fails the query (failfast).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import BinaryType, DataType, StructType

from fencepost.pipeline.errors import MalformedError, OptionError
from fencepost.pipeline.options import Options
from fencepost.pipeline.source.columns import (
    CORRUPT,
    FORMAT_COLUMNS,
    MARKER,
    PAYLOADS,
    PLACE_COLUMNS,
    SQL_NAMES,
    VALUE,
    arrow_schema,
)
from fencepost.pipeline.source.payloads import TYPES, opened, typed, unreadable

if TYPE_CHECKING:
    import pyarrow as pa

RAW = "raw"
PERMISSIVE, DROPMALFORMED, FAILFAST = MODES = ("permissive", "dropmalformed", "failfast")
SHOWN_BYTES = 200
"""How much of a malformed message an error shows."""

_ONE_TYPE = re.compile(r"\w+(\s*\(.*\))?|(struct|array)\s*<.*>", re.IGNORECASE | re.DOTALL)

_BESIDE_TYPES = re.compile(
    r"""\([^)]*\)|\bNOT\s+NULL\b|\bCOMMENT\s+('[^']*'|"[^"]*")""", re.IGNORECASE
)
_QUOTED_NAME = re.compile("`[^`]*`")
_TYPE_WORDS = frozenset(
    {
        *("boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long"),
        *("float", "real", "double", "decimal", "dec", "numeric", "string", "text", "char"),
        *("character", "varchar", "binary", "date", "time", "timestamp", "timestamp_ltz"),
        *("timestamp_ntz", "interval", "array", "map", "struct", "object", "variant", "void"),
        *("geography", "geometry"),
    }
)
"""Every word that Spark begins a type with; which of them can be read is checked later."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of a read, and how they come out of the log.

    `schema` is None as long as only the options are known.
    """

    format: str
    mode: str
    value_sql: str
    schema: StructType | None

    @property
    def ddl(self) -> str:
        """Every column of the format, for Spark to parse."""
        payloads = dict.fromkeys(PAYLOADS[self.format], self.value_sql)
        columns = {**_fixed(self.format), **payloads}
        if self.format != RAW:
            columns[CORRUPT] = "BINARY"
        return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())

    @property
    def log_columns(self) -> list[str]:
        """The columns of the log that the declared ones are made of, and what markers are."""
        assert self.schema is not None
        needed = {*self.schema.names, MARKER}
        if self.format != RAW:
            needed |= {VALUE, "content_type"}
            if self.mode == FAILFAST:
                needed |= {"stream", "position"}  # its error names the message
        return [name for name in (*PLACE_COLUMNS, VALUE, MARKER) if name in needed]

    def shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Messages of the log as the columns that were declared."""
        assert self.schema is not None
        declared = arrow_schema(self.schema)
        columns: dict[str, Any] = {
            name: batch.column(name) for name in PLACE_COLUMNS if name in declared.names
        }
        if self.format == RAW:
            columns[VALUE] = batch.column(VALUE)
            return _chosen(columns, declared)
        inner, bad = self._inner(batch, declared)
        if bad and self.mode == FAILFAST:
            raise _malformed(batch, min(bad), self.format)
        columns |= inner
        if self.mode == DROPMALFORMED:
            rows = _chosen({**columns, CORRUPT: _nulls(batch)}, declared)
            return rows.filter(_mask(batch, bad, inverted=True)) if bad else rows
        columns[CORRUPT] = _blanked(batch.column(VALUE), _mask(batch, bad, inverted=True))
        return _chosen(columns, declared)

    def _inner(self, batch: pa.RecordBatch, declared: pa.Schema) -> tuple[dict[str, Any], set[int]]:
        """The columns that come out of messages, null where they are malformed; and which are.

        A value that is not asked for is not looked into: only its message has to be in order.
        """
        columns, bad = opened(self.format, batch.column(VALUE), batch.column("content_type"))
        for name in PAYLOADS[self.format]:
            if name not in declared.names:
                del columns[name]
                continue
            texts = _blanked(columns[name], _mask(batch, bad))
            columns[name], also_bad = typed(texts, declared.field(name).type)
            bad |= also_bad
        mask = _mask(batch, bad)
        return {name: _blanked(column, mask) for name, column in columns.items()}, bad


def shape_of(options: Options, schema: StructType | None) -> Shape:
    """The columns and the mode that the options and `.schema(...)` ask for."""
    name = options.choice("format", tuple(FORMAT_COLUMNS), RAW)
    asked = options.text("schema")
    mode_given = "mode" in options
    mode = options.choice("mode", MODES, PERMISSIVE)
    if name == RAW:
        for given in ("schema", "mode"):
            if given in options:
                raise OptionError(
                    f"option {given} says how messages are read: it needs the option format"
                    " (json, state or events)"
                )
    if schema is not None and name != RAW and CORRUPT not in schema.names and mode == PERMISSIVE:
        if mode_given:
            raise OptionError(
                f"mode permissive keeps malformed messages in the column {CORRUPT}: add"
                f" `{CORRUPT} BINARY` to the schema, or choose dropmalformed or failfast"
            )
        # Without a place for them, malformed messages are an error rather than rows of nulls.
        mode = FAILFAST
    if schema is not None:
        _check(name, schema)
    if asked is not None and (wrong := _no_type(asked)) is not None:
        raise options.refusal(
            "schema", f"columns like `id BIGINT, total DOUBLE`, or one type; {wrong} is no type"
        )
    return Shape(name, mode, _value_sql(name, asked), schema)


def messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows that are messages, without the markers."""
    markers = batch.column(MARKER)
    return batch.filter(markers.is_null()) if markers.null_count < len(markers) else batch


def _fixed(name: str) -> dict[str, str]:
    kinds = {**PLACE_COLUMNS, **FORMAT_COLUMNS[name]}
    return {column: SQL_NAMES[type(kind)] for column, kind in kinds.items()}


def _value_sql(name: str, asked: str | None) -> str:
    if name == RAW:
        return "BINARY"
    if asked is None:
        return "STRING"
    # `id BIGINT, total DOUBLE` stands for the fields of an object.
    return asked if _ONE_TYPE.fullmatch(asked.strip()) else f"STRUCT<{asked}>"


def _no_type(asked: str) -> str | None:
    """The first word of a schema that stands where a type should and is none; else None.

    Only Spark's own parser knows the whole language, and it reads all columns at once: its error
    would name columns that the user did not write.
    """
    text = _QUOTED_NAME.sub("quoted", _BESIDE_TYPES.sub("", asked))
    for piece in re.split("[<>,]", text):
        words = piece.replace(":", " ").split()
        if words and not any(word.lower() in _TYPE_WORDS for word in words[1:] or words):
            return words[-1]
    return None


def _check(name: str, schema: StructType) -> None:
    """Refuse columns that there are not, or not of this type."""
    fixed: dict[str, DataType] = {**PLACE_COLUMNS, **FORMAT_COLUMNS[name]}
    fixed[VALUE if name == RAW else CORRUPT] = BinaryType()
    payloads = () if name == RAW else PAYLOADS[name]
    known = (*fixed, *payloads)
    if not schema.fields:
        raise OptionError(f"the schema has no columns: choose from {', '.join(known)}")
    for field in schema.fields:
        if field.name in payloads:
            wrong = unreadable(field.dataType)
            if wrong is not None:
                raise OptionError(
                    f"format {name} cannot read {field.name} as {wrong}: use {TYPES}, or STRING for"
                    " the JSON text and from_json"
                )
        elif field.name not in fixed:
            raise OptionError(
                f"format {name} has no column {field.name}: the columns are {', '.join(known)}"
            )
        elif field.dataType != fixed[field.name]:
            raise OptionError(
                f"column {field.name} is {SQL_NAMES[type(fixed[field.name])]}, not"
                f" {field.dataType.simpleString().upper()}"
            )
        if not field.nullable:
            raise OptionError(f"column {field.name} may be null: leave out NOT NULL")


def _chosen(columns: dict[str, Any], declared: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.record_batch([columns[name] for name in declared.names], schema=declared)


def _mask(batch: pa.RecordBatch, rows: set[int], *, inverted: bool = False) -> pa.Array:
    """Which rows of a batch are among these, or, inverted, are not."""
    import pyarrow as pa

    flags = bytearray([inverted]) * batch.num_rows
    for row in rows:
        flags[row] = not inverted
    return pa.array(flags, pa.uint8()).cast(pa.bool_())


def _blanked(column: pa.Array, mask: pa.Array) -> pa.Array:
    """A column with nulls where the mask says so."""
    import pyarrow as pa

    if not mask.true_count:
        return column
    return pa.compute.if_else(mask, pa.scalar(None, column.type), column)


def _nulls(batch: pa.RecordBatch) -> pa.Array:
    import pyarrow as pa

    return pa.nulls(batch.num_rows, pa.binary())


def _malformed(batch: pa.RecordBatch, row: int, name: str) -> MalformedError:
    value = batch.column(VALUE)[row].as_py()
    return MalformedError(
        f"the message at position {batch.column('position')[row].as_py()} of stream"
        f" {batch.column('stream')[row].as_py()} is not what format {name} and its schema say:"
        f" {value[:SHOWN_BYTES]!r}. Change the schema, or choose the mode permissive or"
        " dropmalformed"
    )
