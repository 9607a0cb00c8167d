"""Deciding a send: first, repeated, or another message under a used id.

The order of the checks is the contract. The dedupe row is looked at before size, rate and
destination, so the retry of a message that was stored is answered as such whatever has changed
since. A refused send leaves no row: its id stays free.

The row, the message and one delivery for each recipient are one outcome, `Sent`, which the store
writes in one transaction. The id of a message names its stream and its number there, so it needs
no randomness, is never used twice, and leads back to the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from fencepost.protocol.commits import PartRefusal
from fencepost.protocol.envelopes import BodyPlace, Sealed, Send
from fencepost.protocol.fingerprints import Kind, Unsendable, prefix
from fencepost.protocol.meshes import Mesh, destination_path
from fencepost.protocol.offsets import Offset
from fencepost.protocol.rates import Bucket, Rate, TooFast, Wait, take
from fencepost.protocol.strict_json import BadJson, parse_fields

BODY_TYPE = "application/octet-stream"
"""The type of the parts of a staged body, and of the stream in which it comes to lie."""
BODY_CHUNKS_MAX = 4_096
"""Chunks of one staged body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLimits:
    """What one send may cost."""

    inline_bytes_max: int = 1 << 20
    """Bytes of a body that comes with the send itself; larger ones are staged."""
    blob_bytes_max: int = 64 << 20
    """Bytes of a staged body."""
    delivery_inline_bytes_max: int = 4 << 10
    """Bytes of a body that an inbox entry repeats."""
    recipients_max: int = 10_000
    """Members of a topic that one send may reach."""
    batch_sends_max: int = 1_000
    """Sends in one batch."""


DEFAULT_LIMITS = SendLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLimits(SendLimits):
    """Every bound on meshes and sends, and the switch for dedupe."""

    dedupe: bool = True
    """Whether sends are deduplicated. Off: no row is read or written, and rows that exist stay."""
    sends_per_s: float = 0.0
    """Sends a second of one sender; 0 is no limit. A repeated send is never counted."""
    sends_burst_s: float = 2.0
    """How many seconds' worth of sends may come at once."""
    meshes_max: int = 1_000
    """Meshes that exist at once."""
    mesh_names_max: int = 100_000
    """Members, topics and queues of one mesh, together."""

    @property
    def rate(self) -> Rate | None:
        """How fast one sender may go."""
        if not self.sends_per_s:
            return None
        return Rate(self.sends_per_s, max(1.0, self.sends_per_s * self.sends_burst_s))


class SendKey(NamedTuple):
    """What an id is unique within: without the sender, one could swallow another's message."""

    mesh: str
    sender: str
    client_message_id: str


class DedupeRow(msgspec.Struct, frozen=True, gc=False):
    """What the server remembers of a stored message. Its existence means: the id is used."""

    mesh: str
    sender: str
    client_message_id: str
    broker_message_id: str
    fingerprint: bytes
    kind: Kind
    ref: str
    stream_id: int
    offset: Offset
    first_seen_ms: int
    expires_ms: int | None

    @property
    def key(self) -> SendKey:
        return SendKey(self.mesh, self.sender, self.client_message_id)

    def is_due(self, now_ms: int) -> bool:
        """Whether a sweep may delete the row. Until one does, the row counts."""
        return self.expires_ms is not None and self.expires_ms <= now_ms


class Origin(NamedTuple):
    """The stream at the path of a stored message, as it is now."""

    stream_id: int
    first: Offset


class Destination(NamedTuple):
    """Where a send goes: the stream, where it ends, and the inboxes that get a delivery.

    A direct message and a message of a queue have no recipients: the stream itself is read.
    """

    stream_id: int
    tail: Offset
    recipients: Sequence[str] = ()
    body_at: BodyPlace | None = None
    """Where a staged body comes to lie."""


class SendFacts(NamedTuple):
    """Everything a send is decided on, as it is at the decision."""

    mesh: Mesh | None
    row: DedupeRow | None = None
    origin: Origin | None = None
    """The stream at the path of the row's message; None when there is none."""
    destination: Destination | None = None
    rate: Rate | None = None
    """How fast the sender may go; None: as fast as it likes."""
    bucket: Bucket | None = None
    dedupes: bool = True
    """Whether the server's switch for dedupe is on. Off: no row is read or written."""


class Sent(NamedTuple):
    """Stored: write the message, a delivery into each inbox, and the row, together.

    `row` is None when dedupe is switched off. `bucket` is what is left of the sender's rate.
    """

    row: DedupeRow | None
    sealed: Sealed
    message: bytes
    delivery: bytes | None
    recipients: Sequence[str]
    bucket: Bucket | None


class Repeated(NamedTuple):
    """The same send was stored before. The message may be gone from its stream since."""

    row: DedupeRow
    history_available: bool


class IdReused(NamedTuple):
    """The id stands for another message."""

    client_message_id: str
    broker_fingerprint_prefix: str


class MeshNotFound(NamedTuple):
    """There is no such mesh."""


class DestinationNotFound(NamedTuple):
    """The mesh has no such topic, member or queue."""

    kind: Kind
    ref: str


class SendTooLarge(NamedTuple):
    """The send goes past a limit of the server."""

    limit: str
    value_max: int
    value: int


SendDecision = (
    Sent | Repeated | IdReused | MeshNotFound | DestinationNotFound | SendTooLarge | TooFast
)
SendOutcome = SendDecision | PartRefusal
"""What a store answers: staged parts may be gone, or may have been used before."""


def decide_send(
    facts: SendFacts, send: Send, *, now_ms: int, limits: SendLimits = DEFAULT_LIMITS
) -> SendDecision:
    """What `send` does, given `facts`."""
    mesh, row, destination = facts.mesh, facts.row, facts.destination
    if mesh is None:
        return MeshNotFound()
    if row is not None and facts.dedupes:
        if row.fingerprint != send.fingerprint:
            return IdReused(send.client_message_id, prefix(row.fingerprint))
        return Repeated(row, is_history_available(row, facts.origin))
    too_large = _refuse_size(send, limits)
    if too_large is not None:
        return too_large
    bucket = facts.bucket
    if facts.rate is not None:
        # A sender that is refused further down keeps its old bucket: the unit is given back.
        taken = take(bucket, facts.rate, now_ms)
        if isinstance(taken, Wait):
            return TooFast("sends_per_s", taken.ms)
        bucket = taken
    if destination is None:
        return DestinationNotFound(send.kind, send.ref)
    recipients = destination.recipients
    if len(recipients) > limits.recipients_max:
        return SendTooLarge("recipients_max", limits.recipients_max, len(recipients))
    return _sent(mesh, destination, send, bucket, now_ms, limits, dedupes=facts.dedupes)


def is_history_available(row: DedupeRow, origin: Origin | None) -> bool:
    """Whether the message of a row can still be read: its stream lives and begins before it."""
    return (
        origin is not None
        and origin.stream_id == row.stream_id
        and origin.first.messages <= row.offset.messages
    )


def broker_message_id(stream_id: int, offset: Offset) -> str:
    """The id of the message at this place of this incarnation of a stream."""
    return f"m{stream_id}.{offset.messages}"


def _refuse_size(send: Send, limits: SendLimits) -> SendTooLarge | None:
    body = send.body
    if body.parts:
        limit, value_max = "blob_bytes", limits.blob_bytes_max
    else:
        limit, value_max = "inline_bytes", limits.inline_bytes_max
    return SendTooLarge(limit, value_max, body.size) if body.size > value_max else None


def _sent(
    mesh: Mesh,
    destination: Destination,
    send: Send,
    bucket: Bucket | None,
    now_ms: int,
    limits: SendLimits,
    *,
    dedupes: bool,
) -> Sent:
    assert send.fingerprint, "a staged body is read before its send is decided"
    stream_id, offset, recipients, body_at = destination
    assert (body_at is not None) == bool(send.body.parts), "a staged body has a place"
    message_id = broker_message_id(stream_id, offset)
    path = destination_path(mesh.name, send.kind, send.ref)
    sealed = Sealed(send, message_id, path, offset, now_ms, dedupes, body_at)
    row = None
    if dedupes:
        row = DedupeRow(
            mesh.name,
            send.sender,
            send.client_message_id,
            message_id,
            send.fingerprint,
            send.kind,
            send.ref,
            stream_id,
            offset,
            now_ms,
            mesh.expires_ms(now_ms),
        )
    delivery = sealed.delivery(limits.delivery_inline_bytes_max) if recipients else None
    return Sent(row, sealed, sealed.message(), delivery, recipients, bucket)


class SendAnswer(NamedTuple):
    """The status and the fields that answer a send, over HTTP, in a batch and in a session.

    `code` is that of the problem; None when the send was stored, now or earlier.
    """

    status: int
    code: str | None
    fields: dict[str, object]


def answer_send(outcome: SendDecision | Unsendable) -> SendAnswer:
    """The answer to the sender: status, code and fields."""
    match outcome:
        case Sent(sealed=sealed):
            return SendAnswer(
                201,
                None,
                {
                    "broker_message_id": sealed.broker_message_id,
                    "client_message_id": sealed.send.client_message_id,
                    "history_id": str(sealed.offset),
                    "duplicate": False,
                },
            )
        case Repeated(row, history_available):
            return SendAnswer(
                200,
                None,
                {
                    "broker_message_id": row.broker_message_id,
                    "client_message_id": row.client_message_id,
                    "history_id": str(row.offset),
                    "duplicate": True,
                    "history_available": history_available,
                    "first_seen_at": _instant(row.first_seen_ms),
                },
            )
        case IdReused(client_message_id, broker_prefix):
            return SendAnswer(
                409,
                "idempotency_key_reused",
                {
                    "detail": "this id stands for another message",
                    "client_message_id": client_message_id,
                    "conflict": "request_fingerprint_mismatch",
                    "broker_fingerprint_prefix": broker_prefix,
                },
            )
        case MeshNotFound():
            return SendAnswer(404, "mesh_not_found", {"detail": "there is no such mesh"})
        case DestinationNotFound(kind, ref):
            noun = "member" if kind == "dm" else kind
            detail = f"the mesh has no {noun} {ref!r}"
            return SendAnswer(404, "destination_not_found", {"detail": detail})
        case SendTooLarge(limit, value_max, value):
            detail = f"{limit} is {value_max}, and this send has {value}"
            return SendAnswer(413, "limit_exceeded", {"detail": detail, "limit": limit})
        case TooFast(limit, retry_after_ms):
            detail = f"{limit}: try again in {retry_after_ms} ms"
            fields = {"detail": detail, "limit": limit, "retry_after_ms": retry_after_ms}
            return SendAnswer(429, "too_fast", fields)
        case Unsendable(code, detail):
            return SendAnswer(400, code, {"detail": detail})


def batch_body(answers: Sequence[SendAnswer]) -> bytes:
    """The body that answers a batch: each send with its own status."""
    return msgspec.json.encode({"sends": [answer_item(answer) for answer in answers]})


def answer_item(answer: SendAnswer) -> dict[str, object]:
    """One answer inside of a batch or of a session's frame."""
    coded = answer.fields if answer.code is None else {"code": answer.code, **answer.fields}
    return {"status": answer.status, "body": coded}


def split_batch(data: bytes, limits: SendLimits = DEFAULT_LIMITS) -> list[bytes] | Unsendable:
    """The sends of a batch, `{"sends": [...]}`, each as the bytes it came in."""
    fields = parse_fields(data, _BATCH_FIELDS)
    if isinstance(fields, BadJson):
        return Unsendable("send_invalid", f"a batch has one field, sends: {fields.detail}")
    try:
        sends = _BATCH.decode(fields.get("sends", b"[]"))
    except msgspec.DecodeError:
        return Unsendable("send_invalid", "sends is an array")
    if not 1 <= len(sends) <= limits.batch_sends_max:
        return Unsendable("send_invalid", f"a batch has 1 to {limits.batch_sends_max} sends")
    return [bytes(raw) for raw in sends]


_BATCH_FIELDS = frozenset({"sends"})
_BATCH = msgspec.json.Decoder(list[msgspec.Raw])


def _instant(at_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
