"""The messages of the State Protocol: built, parsed and checked.

A change names a type, a key and their new value; a control message says something about the stream
itself. The builders make messages that are valid, `parse` checks one that came from elsewhere.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fencepost.client.errors import FencepostError

Name = Annotated[str, Meta(min_length=1)]
Instant = Annotated[datetime, Meta(tz=True)]


class StateMessageError(FencepostError):
    """This is no message of the State Protocol. Build messages with the functions of this module.

    Raised while following only if `strict`; otherwise such a message is counted and passed over.
    """


class ChangeHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, in which transaction, and when, if the writer says so."""

    operation: Literal["insert", "update", "upsert", "delete"]
    txid: Name | UnsetType = UNSET
    timestamp: Instant | UnsetType = UNSET


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the entity `key` of `type`. Append it to a JSON stream as it is."""

    type: Name
    key: Name
    value: Any = UNSET
    old_value: Any = UNSET
    headers: ChangeHeaders

    @property
    def operation(self) -> str:
        return self.headers.operation


class ControlHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """Which signal, and the offset that it is about."""

    control: Literal["snapshot-start", "snapshot-end", "reset"]
    offset: Name | UnsetType = UNSET


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A signal about the stream rather than about an entity."""

    headers: ControlHeaders

    @property
    def control(self) -> str:
        return self.headers.control


def insert(
    type: str,
    key: str,
    value: Any,
    *,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity begins with this value."""
    return _change("insert", type, key, value, None, txid, timestamp)


def update(
    type: str,
    key: str,
    value: Any,
    *,
    old_value: Any = None,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity has this value now; `old_value` is for readers that want to compare."""
    return _change("update", type, key, value, old_value, txid, timestamp)


def upsert(
    type: str,
    key: str,
    value: Any,
    *,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity has this value now, whether or not it was there before.

    The npm package understands it; the written protocol knows insert, update and delete only.
    """
    return _change("upsert", type, key, value, None, txid, timestamp)


def delete(
    type: str,
    key: str,
    *,
    old_value: Any = None,
    txid: str | None = None,
    timestamp: datetime | None = None,
) -> Change:
    """The entity is gone."""
    return _change("delete", type, key, UNSET, old_value, txid, timestamp)


def snapshot_start(*, offset: str | None = None) -> Control:
    """What follows, up to `snapshot_end`, is everything there is."""
    return _control("snapshot-start", offset)


def snapshot_end(*, offset: str | None = None) -> Control:
    """The snapshot is complete: what did not come in it is gone."""
    return _control("snapshot-end", offset)


def reset(*, offset: str | None = None) -> Control:
    """Forget everything, and begin again at `offset` (here)."""
    return _control("reset", offset)


def parse(message: Any) -> Change | Control:
    """The message that a JSON value stands for; raises `StateMessageError` if it is none."""
    headers = message.get("headers") if isinstance(message, dict) else None
    controls = isinstance(headers, dict) and "control" in headers
    parsed: Change | Control
    try:
        parsed = msgspec.convert(message, Control) if controls else msgspec.convert(message, Change)
    except msgspec.ValidationError as error:
        raise StateMessageError(f"no message of the State Protocol: {error}") from None
    if isinstance(parsed, Change) and parsed.value is UNSET and parsed.operation != "delete":
        raise StateMessageError(f"an {parsed.operation} of {parsed.type}/{parsed.key} has no value")
    return parsed


def _change(
    operation: str,
    type: str,
    key: str,
    value: Any,
    old_value: Any,
    txid: str | None,
    timestamp: datetime | None,
) -> Change:
    headers = {"operation": operation, "txid": txid, "timestamp": timestamp}
    given = {name: one for name, one in headers.items() if one is not None}
    message: dict[str, Any] = {"type": type, "key": key, "headers": given}
    if value is not UNSET:
        message["value"] = value
    if old_value is not None:
        message["old_value"] = old_value
    parsed = parse(message)
    assert isinstance(parsed, Change)
    return parsed


def _control(control: str, offset: str | None) -> Control:
    headers = {"control": control} if offset is None else {"control": control, "offset": offset}
    parsed = parse({"headers": headers})
    assert isinstance(parsed, Control)
    return parsed
