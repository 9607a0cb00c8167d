"""Lease tokens: what a worker holds, as text that only the server can make.

A token names the group, the incarnation of the group, the target and the number of the lease, and
carries a signature over them, so that no worker can make up a lease. It says nothing about whether
the lease is still current: the store decides that, with everything else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from fencepost.protocol.leases import LeaseRef

SECRET = "lease-tokens"
"""The name of the key in the store: the same for all servers that share it."""
TOKEN_BYTES_MAX = 4_096
_SIGNATURE_BYTES = 16


class LeaseTokens:
    """Makes and reads tokens with one key."""

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)

    def make(self, ref: LeaseRef) -> str:
        """The token of a lease."""
        said = f"{ref.group_id}.{ref.number}.{ref.group}/{ref.target}".encode()
        return base64.urlsafe_b64encode(self._sign(said) + said).rstrip(b"=").decode()

    def read(self, text: str) -> LeaseRef | None:
        """What a token says; None when this server did not make it."""
        if len(text) > TOKEN_BYTES_MAX:
            return None
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        signature, said = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(said)):
            return None
        numbers, _, target = said.decode().partition("/")
        group_id, number, group = numbers.split(".", 2)
        return LeaseRef(group, int(group_id), target, int(number))

    def _sign(self, said: bytes) -> bytes:
        signing = self._hmac.copy()
        signing.update(said)
        return signing.digest()[:_SIGNATURE_BYTES]
