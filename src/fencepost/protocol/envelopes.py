"""The envelope of a send: what a client writes, and what ends up in streams.

`parse_send` makes a `Send` with its fingerprint out of the JSON that came by HTTP, in a session or
over the socket of an outbox. `Sealed` turns an accepted one into the JSON of its message and of
the entry that goes into every inbox.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

import msgspec

from fencepost.protocol.commits import Part
from fencepost.protocol.fingerprints import (
    DEFAULT_PRIORITY,
    Kind,
    Priority,
    Unsendable,
    canonical_meta,
    fingerprint,
    refuse_fields,
    refuse_id,
)
from fencepost.protocol.offsets import Offset
from fencepost.protocol.strict_json import BadJson, parse_fields

PARTS_MAX = 64
"""Staged parts of one body."""

_BODIES = ("body", "body_base64", "json", "parts")
_TEXTS = ("client_message_id", "sender", "kind", "ref", "reply_to", "priority")
_FIELDS = frozenset((*_TEXTS, *_BODIES, "meta"))
_text = msgspec.json.Decoder(str).decode


class Body(NamedTuple):
    """The bytes of a message, in the form in which they were sent.

    `sent` is the JSON value of the field `form`, so that readers get it as the sender wrote it. A
    staged body has parts instead; its size and its hash are known when they have been read, and
    `chunks` are the digests of what was read.
    """

    form: str
    sent: bytes
    size: int
    sha256: bytes
    parts: tuple[Part, ...] = ()
    chunks: tuple[bytes, ...] = ()


class Send(msgspec.Struct, frozen=True, gc=False):
    """A send that is understood. `meta` is as it was sent; the fingerprint covers its meaning."""

    client_message_id: str
    sender: str
    kind: Kind
    ref: str
    reply_to: str
    priority: Priority
    meta: bytes
    body: Body
    fingerprint: bytes


def parse_send(
    data: bytes, *, header_id: str | None, minted_id: str, principal: str | None
) -> Send | Unsendable:
    """The send in `data`, or why it is none.

    The id is that of the header, else that of the body, else `minted_id`. The sender is the
    principal; without one the body names it.
    """
    fields = parse_fields(data, _FIELDS)
    if isinstance(fields, BadJson):
        return Unsendable("send_invalid", f"a send is a JSON object: {fields.detail}")
    texts = _texts(fields)
    if isinstance(texts, Unsendable):
        return texts
    client_id = texts.get("client_message_id", minted_id) if header_id is None else header_id
    sender = texts.get("sender", "") if principal is None else principal
    kind, ref = texts.get("kind", ""), texts.get("ref", "")
    reply_to, priority = texts.get("reply_to", ""), texts.get("priority", DEFAULT_PRIORITY)
    refused = (
        refuse_id(client_id)
        or refuse_fields(kind, ref, reply_to, priority)
        or _refuse_sender(sender, texts, principal)
    )
    if refused is not None:
        return refused
    sent_meta = fields.get("meta", b"")
    meta = canonical_meta(sent_meta)
    if isinstance(meta, Unsendable):
        return meta
    body = _body(fields)
    if isinstance(body, Unsendable):
        return body
    return Send(
        client_id,
        sender,
        kind,  # type: ignore[arg-type]  # refuse_fields took it
        ref,
        reply_to,
        priority,  # type: ignore[arg-type]  # refuse_fields took it
        sent_meta if meta else b"",
        body,
        b""
        if body.parts
        else fingerprint(
            kind=kind,
            ref=ref,
            reply_to=reply_to,
            priority=priority,
            meta=meta,
            body_sha256=body.sha256,
        ),
    )


def in_scope(send: Send, scope: str) -> Send:
    """The send with the parts that its principal has staged; `scope` begins their names."""
    parts = tuple(Part(scope + part.txn, part.part) for part in send.body.parts)
    return msgspec.structs.replace(send, body=send.body._replace(parts=parts))


def with_staged_body(
    send: Send, *, size: int, body_sha256: bytes, chunks: tuple[bytes, ...] = ()
) -> Send:
    """The send when its staged parts have been read: now it has a fingerprint."""
    meta = canonical_meta(send.meta)
    assert isinstance(meta, bytes), "it was canonical when the send was parsed"
    found = fingerprint(
        kind=send.kind,
        ref=send.ref,
        reply_to=send.reply_to,
        priority=send.priority,
        meta=meta,
        body_sha256=body_sha256,
    )
    body = send.body._replace(size=size, sha256=body_sha256, chunks=chunks)
    return msgspec.structs.replace(send, body=body, fingerprint=found)


def _texts(fields: dict[str, bytes]) -> dict[str, str] | Unsendable:
    texts = {}
    for name in _TEXTS:
        if name in fields:
            try:
                texts[name] = _text(fields[name])
            except (msgspec.DecodeError, UnicodeDecodeError):
                return Unsendable("send_invalid", f"{name} is not a string")
    return texts


def _refuse_sender(sender: str, texts: dict[str, str], principal: str | None) -> Unsendable | None:
    if principal is not None and texts.get("sender", principal) != principal:
        return Unsendable("sender_invalid", f"the sender is the principal, {principal!r}")
    if refuse_id(sender) is not None:
        return Unsendable("sender_invalid", "sender is 1 to 256 bytes, no control characters")
    return None


def _body(fields: dict[str, bytes]) -> Body | Unsendable:
    forms = [form for form in _BODIES if form in fields]
    if len(forms) != 1:
        return Unsendable("body_invalid", "a send has one of body, body_base64, json and parts")
    form = forms[0]
    sent = fields[form]
    if form == "json":
        return Body(form, sent, len(sent), sha256(sent).digest())
    if form == "parts":
        return _staged(sent)
    try:
        text = _text(sent)
        data = text.encode() if form == "body" else base64.b64decode(text, validate=True)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Unsendable("body_invalid", f"{form} is not a string")
    except (binascii.Error, ValueError):
        return Unsendable("body_invalid", "body_base64 is not base64")
    return Body(form, sent, len(data), sha256(data).digest())


class _SentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    txn: str
    part: str


def _staged(sent: bytes) -> Body | Unsendable:
    try:
        parts = msgspec.json.decode(sent, type=list[_SentPart])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unsendable("body_invalid", f"parts: {error}")
    if not 1 <= len(parts) <= PARTS_MAX:
        return Unsendable("body_invalid", f"parts names 1 to {PARTS_MAX} staged parts")
    if any("\0" in part.txn or "\0" in part.part for part in parts):
        return Unsendable("body_invalid", "the names of a part have no NUL")
    return Body("parts", sent, 0, b"", tuple(Part(part.txn, part.part) for part in parts))


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message as it lies in a stream, and an entry of an inbox."""

    broker_message_id: str
    client_message_id: str
    sender: str
    kind: str
    ref: str
    priority: str
    sent_ms: int
    fingerprint: str = ""
    deduplicated: bool = True
    reply_to: str = ""
    meta: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body_base64: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body_at: dict[str, object] | msgspec.UnsetType = msgspec.UNSET


class BodyPlace(NamedTuple):
    """Where the bytes of a staged body begin: a stream, and an offset in it."""

    path: str
    offset: Offset


class Sealed(NamedTuple):
    """An accepted send with its place: what there is to write."""

    send: Send
    broker_message_id: str
    path: str
    offset: Offset
    sent_ms: int
    deduplicated: bool
    body_at: BodyPlace | None = None
    """Where a staged body lies."""

    def message(self) -> bytes:
        """The JSON of the message itself, body and fingerprint included.

        With the fingerprint in it a lost dedupe row can be written again from the message.
        """
        body = self.send.body
        bodies = self._staged_at() or {body.form: msgspec.Raw(body.sent)}
        return self._encoded(bodies, fingerprint=self.send.fingerprint.hex())

    def delivery(self, inline_bytes_max: int) -> bytes:
        """The JSON of an inbox entry: the body if it is small, else the place where it lies."""
        body = self.send.body
        staged = self._staged_at()
        if staged:
            return self._encoded(staged)
        if body.size <= inline_bytes_max:
            return self._encoded({body.form: msgspec.Raw(body.sent)})
        place = {"stream": self.path, "offset": str(self.offset), "bytes": body.size}
        return self._encoded({"body_at": place})

    def _staged_at(self) -> dict[str, object]:
        """Where a staged body lies; nothing for one that came with the send."""
        if self.body_at is None:
            return {}
        path, offset = self.body_at
        place = {"stream": path, "offset": str(offset), "bytes": self.send.body.size}
        return {"body_at": place}

    def _encoded(self, more: Mapping[str, object], fingerprint: str = "") -> bytes:
        send = self.send
        return msgspec.json.encode(
            _Message(
                broker_message_id=self.broker_message_id,
                client_message_id=send.client_message_id,
                sender=send.sender,
                kind=send.kind,
                ref=send.ref,
                priority=send.priority,
                sent_ms=self.sent_ms,
                fingerprint=fingerprint,
                deduplicated=self.deduplicated,
                reply_to=send.reply_to,
                meta=msgspec.Raw(send.meta) if send.meta else msgspec.UNSET,
                **more,  # type: ignore[arg-type]  # one of the fields for bodies
            )
        )
