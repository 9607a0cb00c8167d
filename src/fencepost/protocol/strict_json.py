"""Strict JSON: no duplicate keys, no deep nesting, UTF-8 throughout.

msgspec refuses what is not JSON, but takes the last of several equal keys. Two programs that pick
different ones would read two messages out of the same bytes, so a duplicate key is refused here.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import msgspec

DEPTH_MAX = 32
"""Arrays and objects that may be open at once, the outermost included."""

_ANY = msgspec.json.Decoder()
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BadJson(NamedTuple):
    """The bytes are refused: they are no JSON, or they can be read in more than one way."""

    reason: Literal["malformed", "number", "duplicate_key", "too_deep", "not_object"]
    detail: str


def parse(data: bytes, *, depth_max: int = DEPTH_MAX) -> Any | BadJson:
    """The value that `data` stands for, as dicts, lists, strings, ints, floats, bools and None."""
    refused = _not_utf8(data)
    if refused is not None:
        return refused
    try:
        value = _ANY.decode(data)
    except msgspec.ValidationError:
        # The decoder has no type to hold values against: only a number can be out of range.
        return BadJson("number", "a number is too large to be one")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadJson("malformed", f"this is not JSON: {error}")
    except RecursionError:
        return _too_deep(depth_max)
    colons = _colons(value, depth_max)
    if colons is None:
        return _too_deep(depth_max)
    # Each key has a colon behind it, and the other colons are inside strings. As long as none is
    # written as an escape, there are as many in the bytes as in the value, or a key got lost.
    if (b"\\u" in data or data.count(b":") != colons) and (key := _duplicate_key(data)) is not None:
        return BadJson("duplicate_key", f"the key {key!r} stands twice in one object")
    return value


def parse_fields(data: bytes, known: frozenset[str]) -> dict[str, bytes] | BadJson:
    """The fields of a JSON object, each as the bytes it was sent as.

    Only `known` names are taken, and none of them has a colon. What is inside of a value is
    checked to be JSON and nothing more.
    """
    refused = _not_utf8(data)
    if refused is not None:
        return refused
    try:
        found = _FIELDS.decode(data)
    except msgspec.ValidationError:
        return BadJson("not_object", "this is not a JSON object")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadJson("malformed", f"this is not JSON: {error}")
    except RecursionError:
        return BadJson("too_deep", "this is nested too deeply to be read")
    fields = {}
    colons = 0
    for name, raw in found.items():
        if name not in known:
            names = ", ".join(sorted(known))
            return BadJson("malformed", f"the field {name!r} is unknown; known are {names}")
        fields[name] = value = bytes(raw)
        colons += 1 + value.count(b":")
    # A field that stands twice brings at least one colon more than those that are left.
    if data.count(b":") != colons:
        return BadJson("duplicate_key", "a field stands twice in the object")
    return fields


def _not_utf8(data: bytes) -> BadJson | None:
    # msgspec looks at structure, not at the encoding inside of raw values.
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            return BadJson("malformed", f"this is not UTF-8: {error.reason} at byte {error.start}")
    return None


def _too_deep(depth_max: int) -> BadJson:
    return BadJson("too_deep", f"arrays and objects are nested more than {depth_max} deep")


def _colons(value: object, depth_max: int) -> int | None:
    """How many colons the value has when it is written without escapes; None: it is too deep."""
    colons = 0
    level: list[Any] = [[value]]
    # The list around the value is no level of its own.
    for _ in range(depth_max + 1):
        below: list[Any] = []
        for container in level:
            if type(container) is dict:
                colons += len(container) + sum(key.count(":") for key in container)
                container = container.values()
            for inner in container:
                if type(inner) is str:
                    colons += inner.count(":")
                elif type(inner) is dict or type(inner) is list:
                    below.append(inner)
        if not below:
            return colons
        level = below
    return None


class _FoundTwice(Exception):  # noqa: N818 - it carries the key out of the parser
    pass


def _duplicate_key(data: bytes) -> str | None:
    try:
        _PAIRS.decode(data.decode())
    except _FoundTwice as found:
        return str(found)
    return None


def _unique(pairs: list[tuple[str, object]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise _FoundTwice(key)
        seen.add(key)


# Numbers are skipped over, not made: what they come to does not matter here.
_PAIRS = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=bool, parse_float=bool, parse_constant=bool
)
