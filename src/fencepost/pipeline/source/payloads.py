"""JSON messages as columns: values by their type, and what a format finds beside the value.

`typed` gives JSON texts a type with Arrow's parser, without a Python object for each message. The
parser refuses a whole batch for one bad row, so a refused batch is halved until the bad rows are
alone: what a row becomes never depends on its neighbours, and a clean batch is parsed at once.

`opened` takes a message apart for its format: the key of a State change, the name of an event. It
leaves the value as the bytes that were sent, for `typed`. It also checks messages of streams that
are not JSON streams, because the server has not checked that those are JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
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

from fencepost.client.operations import is_json
from fencepost.client.state import ChangeHeaders, Control, Name
from fencepost.pipeline.source.columns import FORMAT_COLUMNS, OLD_VALUE, VALUE

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


Fields = dict[str, Any]
_ABSENT = msgspec.Raw(b"")


class _Headers(ChangeHeaders, frozen=True, kw_only=True, gc=False):
    control: msgspec.Raw = _ABSENT


class _Change(msgspec.Struct, kw_only=True, gc=False):
    """`fencepost.client.state.Change`, with its values left as they came."""

    type: Name
    key: Name
    value: msgspec.Raw = _ABSENT
    old_value: msgspec.Raw = _ABSENT
    headers: _Headers


class _WithHeaders(msgspec.Struct, gc=False):
    headers: msgspec.Raw


class _Meta(msgspec.Struct, gc=False):
    correlation: Any = None


class _Event(msgspec.Struct, gc=False):
    name: str
    data: msgspec.Raw = _ABSENT
    meta: msgspec.Raw = _ABSENT


_decode_any = msgspec.json.Decoder(msgspec.Raw).decode
_decode_change = msgspec.json.Decoder(_Change).decode
_decode_control = msgspec.json.Decoder(Control).decode
_decode_headers = msgspec.json.Decoder(_WithHeaders).decode
_decode_meta = msgspec.json.Decoder(_Meta).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def opened(name: str, values: pa.Array, content_types: pa.Array) -> tuple[Fields, set[int]]:
    """The columns of a format, with values as JSON texts, and the rows that are malformed."""
    bad = _not_json(values, content_types)
    if name == "json":
        return {VALUE: values}, bad
    fields, also_bad = _taken_apart(name, values)
    return fields, bad | also_bad


def _not_json(values: pa.Array, content_types: pa.Array) -> set[int]:
    """Rows of other content types that are not one JSON value each; the server checked the rest."""
    bad: set[int] = set()
    others = {kind for kind in content_types.unique().to_pylist() if not is_json(kind or "")}
    if not others:
        return bad
    for row, (value, kind) in enumerate(
        zip(values.to_pylist(), content_types.to_pylist(), strict=True)
    ):
        if kind in others and not _is_one_value(value):
            bad.add(row)
    return bad


def _is_one_value(value: bytes) -> bool:
    try:
        value.decode()
        _decode_any(value)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return False
    return True


def _taken_apart(name: str, values: pa.Array) -> tuple[Fields, set[int]]:
    import pyarrow as pa

    read = _READERS[name]
    texts = [*FORMAT_COLUMNS[name]]
    payloads = [VALUE, OLD_VALUE] if name == "state" else [VALUE]
    columns: dict[str, list[Any]] = {column: [] for column in (*texts, *payloads)}
    appends = [columns[column].append for column in columns]
    bad: set[int] = set()
    nothing = (None,) * len(columns)
    for row, value in enumerate(values.to_pylist()):
        try:
            found = read(value)
        except (UnicodeDecodeError, msgspec.DecodeError, ValueError, RecursionError):
            bad.add(row)
            found = nothing
        for append, one in zip(appends, found, strict=True):
            append(one)
    fields: Fields = {column: pa.array(columns[column], pa.string()) for column in texts}
    for column in payloads:
        fields[column] = pa.array(columns[column], pa.binary())
    return fields, bad


def _state(value: bytes) -> tuple[Any, ...]:
    """A change or a control of the State Protocol."""
    try:
        found = _decode_change(value)
    except msgspec.ValidationError:
        return _control(value)
    headers = found.headers
    if headers.control:
        return _control(value)
    held = bytes(found.value) or None
    if held is None and headers.operation != "delete":
        raise ValueError("no value")
    txid = None if headers.txid is msgspec.UNSET else headers.txid
    old = bytes(found.old_value) or None
    return found.type, found.key, headers.operation, None, txid, _headers(value), held, old


def _control(value: bytes) -> tuple[Any, ...]:
    control = _decode_control(value).control
    return None, None, None, control, None, _headers(value), None, None


def _headers(value: bytes) -> str:
    return bytes(_decode_headers(value).headers).decode()


def _event(value: bytes) -> tuple[Any, ...]:
    """An event: a name, its data, and what it says about itself."""
    found = _decode_event(value)
    if not found.name:
        raise ValueError("no name")
    meta = bytes(found.meta).decode() or None
    return found.name, _correlation(found.meta), meta, bytes(found.data) or None


def _correlation(meta: msgspec.Raw) -> str | None:
    """What an event belongs to, if its `meta` is an object that says so."""
    if not bytes(meta).startswith(b"{"):
        return None
    found = _decode_meta(meta).correlation
    return found if isinstance(found, str) else None


_READERS: dict[str, Callable[[bytes], tuple[Any, ...]]] = {"state": _state, "events": _event}
