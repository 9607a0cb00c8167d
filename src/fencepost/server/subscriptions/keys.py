"""The webhook signing key (Ed25519) and how it is published.

The key is made once and kept in the store. Its `kid` comes from the key itself (the thumbprint of
RFC 7638), so it stays the same over restarts and cannot name two keys.
"""

from __future__ import annotations

import base64
import hashlib
import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNING_SECRET = "webhook-signing-key"
KEY_BYTES = 32


class SigningKey:
    """Signs webhook requests; `secret` is the 32 bytes of an Ed25519 private key."""

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        x = _text(self._key.public_key().public_bytes_raw())
        public = {"crv": "Ed25519", "kty": "OKP", "x": x}
        canonical = json.dumps(public, sort_keys=True, separators=(",", ":")).encode()
        self.kid = "ds_" + _text(hashlib.sha256(canonical).digest())
        self.jwk = {**public, "kid": self.kid, "use": "sig", "alg": "EdDSA"}

    def signature(self, body: bytes, *, now_ms: int) -> bytes:
        """The value of Webhook-Signature for `body` sent now."""
        seconds = now_ms // 1000
        signed = _text(self._key.sign(b"%d.%b" % (seconds, body)))
        return f"t={seconds},kid={self.kid},ed25519={signed}".encode()

    def jwks(self) -> bytes:
        """The public half, as a JSON Web Key Set."""
        return json.dumps({"keys": [self.jwk]}).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
