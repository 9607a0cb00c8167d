"""Checking that a webhook request comes from the server, unchanged and recently.

The header `Webhook-Signature: t=<seconds>,kid=<key>,ed25519=<signature>` signs `<seconds>.<body>`.
No sockets here: the keys are given, by `Client.webhook_keys` or from `jwks_url` of a subscription.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from fencepost.client.errors import WebhookSignatureError
from fencepost.client.subscriptions import WebhookDelivery
from fencepost.clock import SystemClock

WINDOW_SECONDS = 300.0
"""How far the time of a signature may be off."""


class UnknownKeyError(WebhookSignatureError):
    """The request names a key that is not among those given. Fetch them again, once."""


class Signature(msgspec.Struct, frozen=True):
    """The parts of the header."""

    seconds: int
    kid: str
    signed: bytes


def parse_signature(header: str | None) -> Signature:
    """The parts of a Webhook-Signature header."""
    if not header:
        raise WebhookSignatureError("the request has no Webhook-Signature")
    pairs = [part.strip().partition("=")[::2] for part in header.split(",")]
    parts = dict(pairs)
    seconds = parts.get("t", "")
    known = {"t", "kid", "ed25519"} <= parts.keys() and len(parts) == len(pairs)
    if not known or not seconds.isdecimal() or not seconds.isascii() or len(seconds) > 15:
        raise WebhookSignatureError("the Webhook-Signature is malformed")
    return Signature(int(seconds), parts["kid"], _bytes(parts["ed25519"]))


def verify_webhook(
    body: bytes,
    signature: str | None,
    keys: Mapping[str, Any],
    *,
    window_seconds: float = WINDOW_SECONDS,
    now: float | None = None,
) -> WebhookDelivery:
    """What a webhook request says, once it is known to come from the server.

    Raises `WebhookSignatureError` unless one of the server's keys signed exactly this body within
    `window_seconds`. That the same request did not come before is for the caller to know:
    `WebhookVerifier` remembers it.

    Args:
        body: The body as it came, byte for byte.
        signature: The value of the header `Webhook-Signature`.
        keys: The key set of the server: `client.webhook_keys()`.
        window_seconds: How old, or how far ahead, the time of the signature may be.
        now: Seconds since 1970; the system's clock by default.
    """
    found = parse_signature(signature)
    now = SystemClock().now_ms() / 1000 if now is None else now
    if abs(now - found.seconds) > window_seconds:
        raise WebhookSignatureError(
            f"the request was signed {now - found.seconds:.0f} s ago: check both clocks"
        )
    _check(_key(keys, found.kid), found, body)
    try:
        return msgspec.json.decode(body, type=WebhookDelivery)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WebhookSignatureError(f"the body is signed, but is no wake: {error}") from None


def _key(keys: Mapping[str, Any], kid: str) -> bytes:
    listed = keys.get("keys")
    for key in listed if isinstance(listed, list) else ():
        if isinstance(key, dict) and key.get("kid") == kid:
            if (key.get("kty"), key.get("crv")) != ("OKP", "Ed25519"):
                raise WebhookSignatureError(f"the key {kid!r} is not an Ed25519 key")
            return _bytes(str(key.get("x", "")))
    raise UnknownKeyError(f"the server has no key {kid!r}")


def _check(key: bytes, signature: Signature, body: bytes) -> None:
    # Imported here: a program that receives no webhooks does not wait for it.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(key)
        public.verify(signature.signed, b"%d.%b" % (signature.seconds, body))
    except (InvalidSignature, ValueError):
        raise WebhookSignatureError("the signature does not fit the body") from None


def _bytes(text: str) -> bytes:
    """What an unpadded base64url text stands for."""
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True)
    except ValueError:
        raise WebhookSignatureError("the Webhook-Signature is malformed") from None
