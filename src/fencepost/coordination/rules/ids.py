"""The producer ids that actors meet on: `task:{id}`, `tool:{id}` and `row:{type}:{key}`.

What stands between the colons is escaped like a part of a URL: letters, digits and `_.-~` stay as
they are, every other byte of the UTF-8 becomes `%XX`. Two names therefore never share an id, an id
has as many colons as its form, and none has a `*`, so that it is also a pattern for itself in
grants and lists. The server takes 256 bytes (`producer_id_bytes_max`).
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from fencepost.client.errors import InvalidArgumentError


def claim_id(kind: str, name: str) -> str:
    """The id that actors compete on for a task (`task`) or a tool call (`tool`)."""
    return f"{kind}:{escape(name)}"


def row_id(type: str, key: str) -> str:
    """The id under which a row is versioned."""
    return f"row:{escape(type)}:{escape(key)}"


def parse_id(producer_id: str) -> tuple[str, ...]:
    """The parts of an id as they were before they were escaped."""
    return tuple(unquote(part) for part in producer_id.split(":"))


def check_name(name: object, what: str) -> None:
    """A name is a text, and not empty."""
    if not isinstance(name, str):
        raise InvalidArgumentError(
            f"{what} is named by a str, not by {type(name).__name__}: {name!r}"
        )
    if not name:
        raise InvalidArgumentError(f"{what} has a name that is not empty")


def escape(name: str) -> str:
    """A name as it stands in an id."""
    check_name(name, "a task, a type or a key")
    return quote(name, safe="")
