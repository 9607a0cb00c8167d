"""What a format finds in a message beside its value: a state change's key, an event's name.

The value itself stays as the bytes it was sent in, for whoever gives it a type. Messages of streams
that are not JSON are looked at here before anything trusts them to be one JSON value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from fencepost.client.operations import is_json
from fencepost.client.state import ChangeHeaders, Control, Name
from fencepost.pipeline.source.columns import FORMAT_COLUMNS, OLD_VALUE, VALUE

if TYPE_CHECKING:
    import pyarrow as pa

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


class _Event(msgspec.Struct, gc=False):
    name: str
    data: msgspec.Raw = _ABSENT
    meta: msgspec.Raw = _ABSENT


_decode_any = msgspec.json.Decoder(msgspec.Raw).decode
_decode_change = msgspec.json.Decoder(_Change).decode
_decode_control = msgspec.json.Decoder(Control).decode
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
    return found.type, found.key, headers.operation, None, txid, held, old


def _control(value: bytes) -> tuple[Any, ...]:
    return None, None, None, _decode_control(value).control, None, None, None


def _event(value: bytes) -> tuple[Any, ...]:
    """An event: a name, its data, and what it says about itself."""
    found = _decode_event(value)
    if not found.name:
        raise ValueError("no name")
    meta = bytes(found.meta).decode() or None
    return found.name, meta, bytes(found.data) or None


_READERS: dict[str, Callable[[bytes], tuple[Any, ...]]] = {"state": _state, "events": _event}
