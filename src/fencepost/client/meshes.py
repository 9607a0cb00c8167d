"""Requests about meshes, as generators without I/O, and the records that they answer with.

A send is safe to repeat: it has an id, given or made here, and the server stores it once. So these
requests are retried as writes that the server knows again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.errors import MeshNotFoundError, NotFoundError
from fencepost.client.http import Request, target_of
from fencepost.client.operations import decoded, encode_json, new_key, stage
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings

RECEIPT_BYTES_MAX = 1 << 20
"""The answer to a send; an outbox has many sends under way, and must not hold whatever comes."""
PAGE_BYTES_MAX = 64 << 20
"""The answer to a negotiation, or a page of a check."""
INLINE_BYTES_MAX = 1 << 20
"""A longer body is uploaded before its send (the server's `inline_bytes_max`)."""
CHUNK_BYTES = 4 << 20
CHARACTER_BYTES_MAX = 4
BODY_TYPE = "application/octet-stream"


class MeshInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh and its settings."""

    mesh: str
    dedupe_mode: Literal["retention_scoped", "permanent"]
    dedupe_retention_days: int
    default_policy: Literal["prefer_newest", "prefer_oldest", "allow_concurrent"]
    created_ms: int


class MeshName(msgspec.Struct, frozen=True, kw_only=True):
    """A member, topic or queue: its stream, and the group through which it is consumed."""

    stream: str
    created_ms: int
    member: str | None = None
    topic: str | None = None
    queue: str | None = None
    group: str | None = None

    @property
    def name(self) -> str:
        """Its name in the mesh."""
        return self.member or self.topic or self.queue or ""


class TopicMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member that listens to a topic."""

    member: str
    topic: str | None = None
    joined_ms: int | None = None


class SendReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is stored. `duplicate`: by an earlier send with the same id."""

    broker_message_id: str
    client_message_id: str
    history_id: str
    duplicate: bool
    history_available: bool = True
    first_seen_at: str | None = None


class SendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one send of a batch: the status and the body that it would have had alone."""

    status: int
    body: dict[str, Any]


class DedupeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the server remembers of a send."""

    sender: str
    client_message_id: str
    broker_message_id: str
    fingerprint: str
    kind: str
    ref: str
    incarnation: int
    offset: str
    first_seen_at: str
    expires_at: str | None


class OrphanFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the orphan check found."""

    code: str
    detail: str


class OrphanReport(msgspec.Struct, frozen=True, kw_only=True):
    """How much the orphan check looked at, and what it found."""

    rows: int
    messages: int
    findings: list[OrphanFinding]


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages were looked at, how many have no row, and how many rows were written."""

    messages: int
    missing: int
    written: int


def mesh_target(mesh: str, what: str = "", query: Mapping[str, str] | None = None) -> str:
    """The target of a request about a mesh."""
    return target_of(f"/v1/mesh/{mesh}" + (f"/{what}" if what else ""), (query or {}).items())


def put(
    settings: ClientSettings, mesh: str, what: str = "", values: Mapping[str, Any] | None = None
) -> Operation[dict[str, Any]]:
    """Make a mesh or something in it; fine if it is there as it should be."""
    given = {key: value for key, value in (values or {}).items() if value is not None}
    headers = (("Content-Type", JSON),) if given else ()
    body = encode_json(given) if given else b""
    request = Request("PUT", mesh_target(mesh, what), headers, body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    found: dict[str, Any] = decoded(answer.response, dict[str, Any])
    return found


def get(settings: ClientSettings, mesh: str, what: str = "") -> Operation[dict[str, Any]]:
    """A mesh, or something in it."""
    answer = yield from exchange(settings, Request("GET", mesh_target(mesh, what)), Kind.READ)
    found: dict[str, Any] = decoded(answer.response, dict[str, Any])
    return found


def delete(settings: ClientSettings, mesh: str, what: str = "") -> Operation[None]:
    """Delete a mesh or something in it; if an attempt may have arrived, finding none is done."""
    try:
        yield from exchange(settings, Request("DELETE", mesh_target(mesh, what)), Kind.WRITE)
    except (NotFoundError, MeshNotFoundError) as error:
        if not error.uncertain:
            raise


def envelope(
    settings: ClientSettings, to: str, body: Any, message_id: str | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a send, with an id that is made here if none is given."""
    return envelope_of(to, body, message_id or new_key(settings), more)


def envelope_of(to: str, body: Any, message_id: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a send: text as `body`, bytes as `body_base64`, anything else as `json`."""
    kind, _, ref = to.partition(":")
    fields: dict[str, Any] = {key: value for key, value in more.items() if value is not None}
    fields |= {"kind": kind, "ref": ref, "client_message_id": message_id}
    if isinstance(body, str):
        fields["body"] = body
    elif isinstance(body, bytes | bytearray | memoryview):
        fields["body_base64"] = base64.b64encode(body).decode()
    else:
        fields["json"] = body
    return fields


def send(
    settings: ClientSettings, mesh: str, to: str, body: Any, message_id: str | None, **more: Any
) -> Operation[SendReceipt]:
    """Store a message once, however often this is repeated; a large body is staged first."""
    fields = envelope(settings, to, body, message_id, more)
    if len(fields.get("body", "")) * CHARACTER_BYTES_MAX > INLINE_BYTES_MAX:
        data = body.encode()
    elif len(fields.get("body_base64", "")) > INLINE_BYTES_MAX:
        data = bytes(body)
    else:
        data = b""
    if len(data) > INLINE_BYTES_MAX:
        fields.pop("body", None)
        fields.pop("body_base64", None)
        fields["parts"] = [(yield from _stage_body(settings, data))]
    return (yield from send_encoded(settings, mesh, encode_json(fields)))


def _stage_body(settings: ClientSettings, data: bytes) -> Operation[dict[str, str]]:
    """Upload a body, and name the part that it is.

    The name is new for each call: the fingerprint is that of the bytes, so a send that is repeated
    with another upload of the same body is known as the same.
    """
    txn = f"send-{new_key(settings)}"
    for chunk, at in enumerate(range(0, len(data), CHUNK_BYTES)):
        piece = data[at : at + CHUNK_BYTES]
        yield from stage(settings, txn, "body", chunk, piece, BODY_TYPE)
    return {"txn": txn, "part": "body"}


class BodyPlace(msgspec.Struct, frozen=True):
    """Where the body of an entry lies, if the entry does not hold it."""

    stream: str
    offset: str
    bytes: int

    @property
    def is_staged(self) -> bool:
        """Whether the bytes lie there by themselves, and not in a message."""
        return self.stream.split("/")[2:3] == ["body"]


def place_of(message: Mapping[str, Any]) -> BodyPlace | None:
    """Where the body of a message or an entry lies; None when it is inside."""
    place = message.get("body_at")
    return None if place is None else msgspec.convert(place, BodyPlace)


def body_inside(message: Mapping[str, Any]) -> Any:
    """The body of a message that holds it: text, bytes, or a JSON value."""
    if "body_base64" in message:
        return base64.b64decode(message["body_base64"])
    return message["body"] if "body" in message else message["json"]


def send_encoded(settings: ClientSettings, mesh: str, data: bytes) -> Operation[SendReceipt]:
    """The same for a send that is JSON already."""
    headers = (("Content-Type", JSON),)
    target = mesh_target(mesh, "send")
    request = Request("POST", target, headers, data, answer_bytes_max=RECEIPT_BYTES_MAX)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, SendReceipt)


class _Outcomes(msgspec.Struct):
    sends: list[SendOutcome]


def send_all(
    settings: ClientSettings, mesh: str, sends: list[dict[str, Any]]
) -> Operation[list[SendOutcome]]:
    """Store several messages, each once; what came of each."""
    data = encode_json({"sends": sends})
    request = Request("POST", mesh_target(mesh, "sends"), (("Content-Type", JSON),), data)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, _Outcomes).sends


def post(
    settings: ClientSettings,
    mesh: str,
    what: str,
    query: Mapping[str, str] | None = None,
    body: Any = None,
) -> Operation[dict[str, Any]]:
    """Another request about a mesh."""
    headers = () if body is None else (("Content-Type", JSON),)
    data = b"" if body is None else encode_json(body)
    target = mesh_target(mesh, what, query)
    request = Request("POST", target, headers, data, answer_bytes_max=PAGE_BYTES_MAX)
    answer = yield from exchange(settings, request, Kind.WRITE)
    found: dict[str, Any] = decoded(answer.response, dict[str, Any])
    return found


def check(settings: ClientSettings, mesh: str) -> Operation[OrphanReport]:
    """The whole orphan check, page by page."""
    rows = messages = 0
    findings: list[OrphanFinding] = []
    query: dict[str, str] = {"limit": "1000"}
    while True:
        page = yield from post(settings, mesh, "check", query)
        rows += page["rows"]
        messages += page["messages"]
        findings += [OrphanFinding(**found) for found in page["findings"]]
        if page["next"] is None:
            return OrphanReport(rows=rows, messages=messages, findings=findings)
        query["after"] = page["next"]


def rebuild(settings: ClientSettings, mesh: str, *, dry_run: bool) -> Operation[Rebuilt]:
    """Write every missing dedupe row from its message, or only count them."""
    messages = missing = written = 0
    query: dict[str, str] = {"limit": "1000"}
    if dry_run:
        query["dry_run"] = "true"
    while True:
        page = yield from post(settings, mesh, "rebuild", query)
        messages += page["messages"]
        missing += page["missing"]
        written += page["written"]
        if page["next"] is None:
            return Rebuilt(messages=messages, missing=missing, written=written)
        query["after"] = page["next"]


def sweep(settings: ClientSettings, mesh: str) -> Operation[int]:
    """Forget the sends whose time is over; how many there were."""
    swept = 0
    while True:
        page = yield from post(settings, mesh, "sweep")
        if not page["swept"]:
            return swept
        swept += page["swept"]
