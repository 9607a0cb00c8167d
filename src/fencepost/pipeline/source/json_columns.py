"""JSON texts as typed columns, by Arrow's own parser: no Python object for each message.

A text either has the type or is malformed, by itself: the parser refuses a whole batch for one bad
row, so a refused batch is halved until the bad rows are alone. What a row becomes thus never
depends on its neighbours, and a clean batch is parsed at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

if TYPE_CHECKING:
    import pyarrow as pa

TYPES = (
    "BOOLEAN, TINYINT, SMALLINT, INT, BIGINT, FLOAT, DOUBLE, DECIMAL, STRING, DATE, TIMESTAMP,"
    " TIMESTAMP_NTZ, ARRAY and STRUCT"
)
_LEAVES = (
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    StringType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


def unreadable(kind: DataType) -> str | None:
    """The part of a type that JSON cannot be read as here, in words; None when all of it can."""
    if isinstance(kind, StructType):
        if not kind.fields:
            return "a STRUCT without fields"
        for field in kind.fields:
            if not field.nullable:
                return f"{field.name} NOT NULL"
            if (wrong := unreadable(field.dataType)) is not None:
                return wrong
        return None
    if isinstance(kind, ArrayType):
        if not kind.containsNull:
            return "an ARRAY whose elements are NOT NULL"
        return unreadable(kind.elementType)
    return None if isinstance(kind, _LEAVES) else kind.simpleString().upper()


def typed(texts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, set[int]]:
    """JSON texts (binary; null stays null) as a column, and the rows that do not have its type."""
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _as_text(texts, kind)
    pieces: list[Any] = []
    bad: set[int] = set()
    waiting = [(0, len(texts))]
    while waiting:
        first, length = waiting.pop()
        if length == 0:
            continue
        try:
            pieces.append(_parsed(texts.slice(first, length), kind))
        except (pa.ArrowInvalid, UnicodeDecodeError):
            if length == 1:
                bad.add(first)
                pieces.append(pa.nulls(1, kind))
            else:
                half = length // 2
                waiting += [(first + half, length - half), (first, half)]
    return (pa.concat_arrays(pieces) if pieces else pa.nulls(0, kind)), bad


def _as_text(texts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, set[int]]:
    import pyarrow as pa

    try:
        return texts.cast(kind), set()
    except pa.ArrowInvalid:
        values: list[str | None] = []
        bad: set[int] = set()
        for row, value in enumerate(texts.to_pylist()):
            try:
                values.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                bad.add(row)
                values.append(None)
        return pa.array(values, kind), bad


def _parsed(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse all of them, or raise."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    known = texts.fill_null(b"null") if texts.null_count else texts
    # Each text as the one field of an object, so that numbers, arrays and nulls are rows as well.
    lines = pa.compute.binary_join_element_wise(
        pa.scalar(b'{"v":'), known, pa.scalar(b"}\n"), pa.scalar(b"")
    )
    ends = memoryview(lines.buffers()[1]).cast("i")
    data = lines.buffers()[2].slice(ends[lines.offset], ends[lines.offset + len(lines)])
    table = arrow_json.read_json(
        pa.BufferReader(data),
        # One block, so that no text is cut.
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=data.size + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=pa.schema([pa.field("v", _spelled(kind))]),
            unexpected_field_behavior="ignore",
        ),
    )
    if table.num_rows != len(texts):
        raise pa.ArrowInvalid("a text holds more than one value")
    column = table.column("v").combine_chunks()
    return column if column.type == kind else column.cast(kind)


def _spelled(kind: pa.DataType) -> pa.DataType:
    """The type as the parser is asked for it: it does not know dates in words."""
    import pyarrow as pa

    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_spelled(kind.value_type)))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_spelled(field.type)) for field in fields])
    return kind
