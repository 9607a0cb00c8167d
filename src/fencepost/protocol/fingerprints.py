"""The fingerprint of a send: 32 bytes that tell a repeated send from another one.

The canonical form is a contract with programs in other languages; docs/reference/fingerprints.md
is its page, and tests/interop/fingerprints.mjs was written from that page alone. A send that cannot
be brought into the canonical form without doubt is refused, and each refusal has a code.

`meta` is written by the rules of RFC 8785 (JCS). The library for that walks through Python objects
one by one; msgspec writes the same bytes much faster as long as no number has a fraction and no key
needs UTF-16 to be sorted, which is nearly always.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec
import rfc8785

from fencepost.protocol.strict_json import BadJson, parse

FINGERPRINT_BYTES = 32
PREFIX_DIGITS = 16
"""Hexadecimal digits of a fingerprint that a refusal shows."""
ENVELOPE_VERSION = "1"

Kind = Literal["topic", "dm", "queue"]
Priority = Literal["now", "next", "low"]
KINDS: tuple[Kind, ...] = ("topic", "dm", "queue")
PRIORITIES: tuple[Priority, ...] = ("now", "next", "low")
DEFAULT_PRIORITY: Priority = "next"

ID_BYTES_MAX = 256
"""Bytes of a client_message_id, and of a reply_to."""
META_BYTES_MAX = 16 * 1024
"""Bytes of meta as it was sent: the slow path takes four milliseconds for so much."""
INTEGER_MAX = 2**53 - 1
"""Beyond this a number of another language is no longer the one that was sent."""

Code = Literal[
    "message_id_invalid",
    "kind_invalid",
    "ref_invalid",
    "reply_to_invalid",
    "priority_invalid",
    "meta_invalid",
    "meta_not_object",
    "meta_too_deep",
    "meta_too_large",
    "meta_duplicate_key",
    "meta_number_invalid",
    "body_invalid",
    "sender_invalid",
    "send_invalid",
]


class Unsendable(NamedTuple):
    """The send is refused for what it says; its id is not consumed. `code` names the reason."""

    code: Code
    detail: str


NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}")
"""Names of meshes, members, topics and queues: segments of paths, so that none is . or .."""
# C0 and DEL, as in the paths of streams; lone surrogates cannot be written as UTF-8.
_UNFIT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def fingerprint(
    *, kind: str, ref: str, reply_to: str, priority: str, meta: bytes, body_sha256: bytes
) -> bytes:
    """The 32 bytes that stand for a send.

    `meta` is what `canonical_meta` gave, `reply_to` is empty when there is none. The texts have
    passed `refuse_fields`: with a NUL in one of them two different sends could be written alike.
    """
    texts = f"{ENVELOPE_VERSION}\0{kind}\0{ref}\0{reply_to}\0{priority}\0"
    return sha256(b"%b%b\0%b" % (texts.encode(), meta, body_sha256.hex().encode())).digest()


def prefix(fingerprint: bytes) -> str:
    """The first digits, for a person who compares two of them."""
    return fingerprint.hex()[:PREFIX_DIGITS]


def refuse_fields(kind: str, ref: str, reply_to: str, priority: str) -> Unsendable | None:
    """Why these fields are refused; None when they are good."""
    if kind not in KINDS:
        return Unsendable("kind_invalid", f"kind is topic, dm or queue, not {kind!r}")
    if NAME.fullmatch(ref) is None:
        return Unsendable(
            "ref_invalid", "ref is a name of 1 to 64 letters, digits, dots, hyphens, underscores"
        )
    if reply_to:
        refused = _refuse_id(reply_to)
        if refused is not None:
            return Unsendable("reply_to_invalid", f"reply_to {refused}")
    if priority not in PRIORITIES:
        return Unsendable("priority_invalid", f"priority is now, next or low, not {priority!r}")
    return None


def refuse_id(client_message_id: str) -> Unsendable | None:
    """Why this id is refused; None when it is good."""
    refused = _refuse_id(client_message_id)
    if refused is None:
        return None
    return Unsendable("message_id_invalid", f"the message id {refused}")


def _refuse_id(text: str) -> str | None:
    if not text:
        return "is empty: leave it out, or give it 1 to 256 bytes"
    if _UNFIT.search(text) is not None:
        return "has a control character or a lone surrogate"
    # A character has four bytes at most.
    if len(text) > ID_BYTES_MAX // 4 and len(text.encode()) > ID_BYTES_MAX:
        return f"has more than {ID_BYTES_MAX} bytes"
    return None


def canonical_meta(data: bytes) -> bytes | Unsendable:
    """The JSON object `data` as JCS writes it; nothing at all for an empty object."""
    if data in (b"", b"{}"):
        return b""
    if len(data) > META_BYTES_MAX:
        return Unsendable("meta_too_large", f"meta has more than {META_BYTES_MAX} bytes")
    value = parse(data)
    if isinstance(value, BadJson):
        return Unsendable(_META_CODES[value.reason], f"meta: {value.detail}")
    if type(value) is not dict:
        return Unsendable("meta_not_object", "meta is a JSON object")
    if not value:
        return b""
    plain = _is_plain(value)
    if isinstance(plain, Unsendable):
        return plain
    if plain:
        return _encode(value)
    return rfc8785.dumps(value)


_META_CODES: dict[str, Code] = {
    "malformed": "meta_invalid",
    "number": "meta_number_invalid",
    "not_object": "meta_not_object",
    "duplicate_key": "meta_duplicate_key",
    "too_deep": "meta_too_deep",
}
_encode = msgspec.json.Encoder(order="deterministic").encode
# JCS sorts keys by UTF-16, msgspec by UTF-8. They agree on all keys below the surrogates.
_SURROGATES = "\ud800"


def _is_plain(value: Any) -> bool | Unsendable:
    """Whether msgspec writes this value as JCS does; the reason if it may not be sent at all."""
    plain = True
    waiting = [value]
    while waiting:
        container = waiting.pop()
        if type(container) is dict:
            if plain and max(map(max, filter(None, container)), default="") >= _SURROGATES:
                plain = False
            container = container.values()
        for inner in container:
            kind = type(inner)
            if kind is int:
                if not -INTEGER_MAX <= inner <= INTEGER_MAX:
                    return Unsendable(
                        "meta_number_invalid",
                        f"meta holds an integer beyond {INTEGER_MAX}: send it as a string",
                    )
            elif kind is float:
                plain = False
            elif kind is dict or kind is list:
                waiting.append(inner)
    return plain
