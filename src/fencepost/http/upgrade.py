"""The request that turns a connection into a WebSocket (RFC 6455, 4.2).

It is a GET like any other, with our limits, grants and refusals; only what its own headers must say
is here. The library that does the frames is loaded when the first one succeeds.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from hashlib import sha1
from typing import NamedTuple

_KEY_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, 1.3."""


class Upgrade(NamedTuple):
    """A request that may become a WebSocket. `accept` answers its key."""

    accept: bytes

    def head(self, date_line: bytes) -> bytes:
        """The 101 that ends HTTP on this connection."""
        return (
            b"HTTP/1.1 101 Switching Protocols\r\n%bUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n" % (date_line, self.accept)
        )


class UpgradeRefused(NamedTuple):
    """A request that asks for a WebSocket in a way that is not understood."""

    status: int
    detail: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


_SINGLE = frozenset(
    {b"upgrade", b"connection", b"sec-websocket-key", b"sec-websocket-version", b"origin"}
)


def read_upgrade(
    method: str, version: str, headers: Mapping[bytes, bytes], repeated: frozenset[bytes]
) -> Upgrade | UpgradeRefused:
    """What a request with an Upgrade header asks for; header names are in lower case."""
    twice = sorted(_SINGLE & repeated)
    if twice:
        return UpgradeRefused(400, f"the header {twice[0].decode()} came more than once")
    if method != "GET" or version != "1.1":
        return UpgradeRefused(400, "a WebSocket begins with a GET of HTTP/1.1")
    if headers.get(b"upgrade", b"").lower() != b"websocket":
        return UpgradeRefused(400, "the only protocol to change to is websocket")
    options = headers.get(b"connection", b"").lower().split(b",")
    if b"upgrade" not in (option.strip() for option in options):
        return UpgradeRefused(400, "the Connection header does not name upgrade")
    if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
        return UpgradeRefused(400, "a request for a WebSocket has no body")
    if headers.get(b"sec-websocket-version") != b"13":
        known = ((b"Sec-WebSocket-Version", b"13"),)
        return UpgradeRefused(426, "the version of WebSockets here is 13", known)
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_key = False
    if not is_key:
        return UpgradeRefused(400, "Sec-WebSocket-Key is not 16 bytes in base64")
    return Upgrade(base64.b64encode(sha1(key + _KEY_SUFFIX).digest()))
