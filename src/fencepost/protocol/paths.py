"""Which names a stream or the target of a group may have.

The server refuses other names, and the client's side asks before it sends one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fencepost.protocol.grants import AUDIT, GROUPS

RESERVED_SEGMENTS = frozenset(("__ds", AUDIT, GROUPS))
"""First segments that no stream of a client may have."""
_CONTROL = re.compile("[\\x00-\\x1f\\x7f]")


class PathRefused(NamedTuple):
    """Why no stream may have this name; `code` is what the answer says."""

    code: str
    detail: str


def check_path(path: str) -> PathRefused | None:
    """Why a text is no path of a stream; None: it is one. Its length is a limit of the server."""
    if not path or path.startswith("/") or path.endswith("/") or "//" in path:
        detail = "a stream path has one or more segments, none of them empty"
        return PathRefused("path_invalid", detail)
    if _CONTROL.search(path):
        return PathRefused("path_invalid", "a stream path has no control characters")
    segments = path.split("/")
    if "." in segments or ".." in segments:
        return PathRefused("path_invalid", "a stream path has no segments . or ..")
    if segments[0] in RESERVED_SEGMENTS:
        detail = f"stream paths below {segments[0]} are reserved"
        return PathRefused("path_reserved", detail)
    return None
