"""Sessions: the JSON frames between a daemon and the server, and when a session has to end.

A session begins with the client's hello. After the welcome the client sends messages and
acknowledges deliveries, each under an id of its own; the server answers with that id. A client
that has as many frames open as it may is not read until some of them are answered. Nothing here
knows of WebSockets: a frame is the bytes of one text message, and a `Close` has the code and the
reason with which the connection is to be closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from fencepost.protocol.features import (
    BadWishes,
    FeatureRefused,
    Negotiated,
    Wishes,
    negotiated_body,
    read_wishes,
)
from fencepost.protocol.groups import POSITION_MAX, TEXT_MAX, check_text
from fencepost.protocol.meshes import refuse_name
from fencepost.protocol.strict_json import BadJson, parse, parse_fields

REASON_BYTES_MAX = 123
"""What a close frame of RFC 6455 has room for beside its code."""
TOKEN_BYTES_MAX = 1024
PING_BYTES_MAX = 125
ID_BYTES_MAX = 128
"""Bytes of a frame's id as JSON."""

EXIT_CODES = {4010: 10, 4011: 11, 4012: 12, 4003: 13, 4004: 14}
"""With which code a daemon exits when its session is closed for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What sessions may cost."""

    frame_bytes_max: int = 2 << 20
    """Bytes of one frame of a client; beyond it the session is closed with 1009."""
    in_flight_max: int = 64
    """Sends and acks that wait for their answer; beyond it the client is not read."""
    deliveries_max: int = 16
    """Deliveries that wait for their ack; beyond it nothing more is delivered."""
    entries_max: int = 100
    """Entries of one delivery."""
    delivery_bytes_max: int = 1 << 20
    """Bytes of the entries of one delivery; a single entry may be larger."""
    lease_ms: int = 15_000
    """How long an inbox stays leased after its server was last able to say so. A server that is
    killed leaves the inboxes of its sessions leased for so long."""
    hello_ms_max: int = 10_000
    """Time for the hello."""
    ping_ms: int = 20_000
    """Silence after which the server asks whether the client is still there."""
    pong_ms_max: int = 20_000
    """Time for the answer to that."""
    sessions_per_principal_max: int = 256
    """Sessions of one principal at a server; one more is answered 429 `too_many_sessions`.
    Without authorization all clients are one."""


DEFAULT_LIMITS = SessionLimits()


class Close(NamedTuple):
    """The session ends: the code of the close frame, and what is said of it."""

    code: int
    kind: str
    detail: str
    feature: str = ""

    @property
    def reason(self) -> bytes:
        """What goes into the close frame."""
        return self.kind.encode()[:REASON_BYTES_MAX]


NORMAL = Close(1000, "done", "the session is over")
GOING_AWAY = Close(1001, "server_stopping", "the server stops: connect again")
REPLACED = Close(4003, "replaced_by_newer_connection", "a newer session has the inbox now")
OCCUPIED = Close(4004, "member_already_connected", "another session has the inbox")
SILENT = Close(1008, "pong_missing", "no sign of life within the time for it")
NO_HELLO = Close(1008, "hello_missing", "no hello within the time for it")
EXPIRED = Close(1008, "unauthorized", "the token has expired: connect again with a new one")
TOO_MANY = Close(1008, "too_many_sessions", "the principal has too many sessions at this server")
INBOX_BLOCKED = Close(1008, "inbox_blocked", "an operator has to unblock the group of the inbox")
AWAY = Close(1013, "store_unavailable", "the store cannot be reached: connect again")
DEFECT = Close(1011, "internal_error", "this is a defect; the server's log has more")


def closed_for(refused: FeatureRefused) -> Close:
    """The end of a session whose hello asked for what is not there."""
    return Close(refused.close_code, refused.kind, refused.detail, refused.feature)


def unreadable(detail: str) -> Close:
    """The end of a session that sent no JSON, or JSON that is no frame."""
    return Close(1007, "frame_invalid", detail)


def member_missing(member: str) -> Close:
    """The end of a session for an inbox that does not exist."""
    return Close(1008, "member_not_found", f"the mesh has no member {member!r}")


def forbidden(detail: str) -> Close:
    """The end of a session that asks for what it may not have."""
    return Close(1008, "forbidden", detail)


class Hello(NamedTuple):
    """The first frame of a client; without a member it gets no deliveries.

    A worker is the same client again: under `prefer_oldest` it may come back to the inbox that it
    has. `after` is where a client reads on that keeps its own offset (`allow_concurrent`).
    """

    wishes: Wishes
    member: str | None = None
    worker: str | None = None
    after: int | None = None


class SendFrame(NamedTuple):
    """A message to send; `send` is the body that the HTTP endpoint takes."""

    id: bytes
    send: bytes


class Ack(NamedTuple):
    """Everything of a delivery up to the position `at` is done."""

    id: bytes
    token: str
    at: int


class Ping(NamedTuple):
    """Are you there? `value` comes back in the pong, as JSON."""

    value: bytes


class Pong(NamedTuple):
    """The answer to a ping."""

    value: bytes


ClientFrame = Hello | SendFrame | Ack | Ping | Pong

_CLIENT_FIELDS = frozenset({"hello", "id", "send", "ack", "ping", "pong"})


def parse_client_frame(data: bytes, limits: SessionLimits = DEFAULT_LIMITS) -> ClientFrame | Close:
    """What a client says in one frame."""
    fields = _fields(data, _CLIENT_FIELDS, limits)
    if isinstance(fields, Close):
        return fields
    match fields:
        case {"hello": hello, **rest} if not rest:
            return _hello(hello)
        case {"id": number, "send": send, **rest} if not rest:
            return SendFrame(number, send) if _is_id(number) else _BAD_ID
        case {"id": number, "ack": ack, **rest} if not rest:
            return _ack(number, ack) if _is_id(number) else _BAD_ID
        case {"ping": value, **rest} if not rest and len(value) <= PING_BYTES_MAX:
            return Ping(value)
        case {"pong": value, **rest} if not rest and len(value) <= PING_BYTES_MAX:
            return Pong(value)
    return unreadable("a frame is one of hello, send with id, ack with id, ping and pong")


_BAD_ID = unreadable("the id of a frame is a string or a whole number from 0, up to 128 bytes")


def _fields(data: bytes, known: frozenset[str], limits: SessionLimits) -> dict[str, bytes] | Close:
    if len(data) > limits.frame_bytes_max:
        detail = f"frame_bytes_max is {limits.frame_bytes_max}, and this frame has {len(data)}"
        return Close(1009, "frame_too_large", detail)
    fields = parse_fields(data, known)
    return unreadable(fields.detail) if isinstance(fields, BadJson) else fields


def _is_id(number: bytes) -> bool:
    return len(number) <= ID_BYTES_MAX and (number[:1] == b'"' or number.isdigit())


def _hello(data: bytes) -> Hello | Close:
    value = parse(data)
    if isinstance(value, BadJson):
        return unreadable(value.detail)
    if type(value) is not dict:
        return unreadable("hello is an object")
    member, worker = value.pop("member", None), value.pop("worker", None)
    after = value.pop("after", None)
    wishes = read_wishes(value)
    if isinstance(wishes, BadWishes):
        return unreadable(wishes.detail)
    if member is not None and (type(member) is not str or refuse_name("member", member)):
        return unreadable("member is the name of a member")
    if worker is not None and (type(worker) is not str or check_text("worker", worker)):
        return unreadable(f"worker is a text of 1 to {TEXT_MAX} characters")
    if after is not None and (type(after) is not int or not -1 <= after <= POSITION_MAX):
        return unreadable("after is a position: -1 or a whole number")
    return Hello(wishes, member, worker, after)


class _SentAck(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    at: int


_ACK = msgspec.json.Decoder(_SentAck)


def _ack(number: bytes, data: bytes) -> Ack | Close:
    try:
        ack = _ACK.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return unreadable(f"ack: {error}")
    if len(ack.token.encode()) > TOKEN_BYTES_MAX or not -1 <= ack.at < 2**63:
        return unreadable("ack has the token of a delivery and a position")
    return Ack(number, ack.token, ack.at)


class Session(NamedTuple):
    """Where a session stands."""

    phase: Literal["hello", "open"] = "hello"
    in_flight: int = 0


NEW = Session()


def receive(session: Session, frame: ClientFrame) -> Session | Close:
    """The session after a frame of its client, or the end of a session that is out of order.

    The hello opens the session; the caller closes it when the negotiation fails.
    """
    match frame:
        case Hello():
            if session.phase != "hello":
                return Close(1002, "frame_unexpected", "the hello came before")
            return Session("open")
        case Ping() | Pong():
            return session
        case SendFrame() | Ack():
            if session.phase != "open":
                return Close(1002, "frame_unexpected", "the first frame is the hello")
            return session._replace(in_flight=session.in_flight + 1)


def answered(session: Session) -> Session:
    """The session after the answer to a send or an ack has left."""
    assert session.in_flight > 0, "every answer belongs to a frame"
    return session._replace(in_flight=session.in_flight - 1)


class Quiet(NamedTuple):
    """All is well until `look_again_ms`."""

    look_again_ms: int


class AskPing(NamedTuple):
    """The client was silent for long: send a ping now."""


def decide_liveness(
    *,
    phase: Literal["hello", "open"],
    opened_ms: int,
    heard_ms: int,
    pinged_ms: int | None,
    now_ms: int,
    limits: SessionLimits = DEFAULT_LIMITS,
) -> Quiet | AskPing | Close:
    """What to do about a session that was last heard at `heard_ms`, times of a monotonic clock.

    `pinged_ms` is when the server last asked, and None when the client was heard after that.
    """
    if phase == "hello":
        due_ms = opened_ms + limits.hello_ms_max
        return NO_HELLO if now_ms >= due_ms else Quiet(due_ms)
    if pinged_ms is None:
        due_ms = heard_ms + limits.ping_ms
        return AskPing() if now_ms >= due_ms else Quiet(due_ms)
    due_ms = pinged_ms + limits.pong_ms_max
    return SILENT if now_ms >= due_ms else Quiet(due_ms)


# What the two sides write.


def hello_frame(hello: Hello) -> bytes:
    """The first frame of a client."""
    wishes = hello.wishes
    fields = {"member": hello.member, "worker": hello.worker, "after": hello.after}
    said = {name: value for name, value in fields.items() if value is not None}
    hello_fields = {"require": wishes.require, "optional": wishes.optional, **said}
    return msgspec.json.encode({"hello": hello_fields})


def send_frame(number: int, send: bytes) -> bytes:
    """A send of a client; `send` is its JSON."""
    return b'{"id":%d,"send":%b}' % (number, send)


def ack_frame(number: int, token: str, at: int) -> bytes:
    """An ack of a client."""
    return msgspec.json.encode({"id": number, "ack": {"token": token, "at": at}})


def welcome_frame(negotiated: Negotiated) -> bytes:
    """The server's answer to a hello that it accepts."""
    return msgspec.json.encode({"welcome": negotiated_body(negotiated)})


def refused_frame(close: Close) -> bytes:
    """What goes out before a session is closed for a reason of ours."""
    said = {"kind": close.kind, "feature": close.feature, "detail": close.detail}
    return msgspec.json.encode({"refused": said})


def answer_frame(frame_id: bytes, status: int, body: Mapping[str, object] | None = None) -> bytes:
    """The server's answer to a send or an ack."""
    if body is None:
        return b'{"id":%b,"status":%d}' % (frame_id, status)
    return b'{"id":%b,"status":%d,"body":%b}' % (frame_id, status, msgspec.json.encode(body))


def deliver_frame(token: str, entries: Sequence[bytes]) -> bytes:
    """Entries of the inbox, each as JSON, to be acknowledged with the token."""
    written = msgspec.json.encode(token)
    return b'{"deliver":{"token":%b,"entries":[%b]}}' % (written, b",".join(entries))


def ping_frame(value: bytes = b"0") -> bytes:
    """A question whether the other side is there."""
    return b'{"ping":%b}' % value


def pong_frame(ping: Ping) -> bytes:
    """The answer to a ping."""
    return b'{"pong":%b}' % ping.value


# What the client reads.


class Welcome(NamedTuple):
    """The session is open; `body` is the JSON of the negotiation's 200."""

    body: bytes


class Refused(NamedTuple):
    """The server is about to close the session, and says why."""

    kind: str
    feature: str
    detail: str


class Answered(NamedTuple):
    """The answer to the frame with this id."""

    id: int
    status: int
    body: Any


class Deliver(NamedTuple):
    """Entries to handle and to acknowledge."""

    token: str
    entries: Sequence[bytes]


ServerFrame = Welcome | Refused | Answered | Deliver | Ping | Pong

_SERVER_FIELDS = frozenset(
    {"welcome", "refused", "deliver", "id", "status", "body", "ping", "pong"}
)


class _SentRefused(msgspec.Struct):
    kind: str
    feature: str = ""
    detail: str = ""


class _SentDeliver(msgspec.Struct):
    token: str
    entries: list[msgspec.Raw]


_number = msgspec.json.Decoder(int).decode
_refused = msgspec.json.Decoder(_SentRefused).decode
_deliver = msgspec.json.Decoder(_SentDeliver).decode


def parse_server_frame(data: bytes, limits: SessionLimits = DEFAULT_LIMITS) -> ServerFrame | Close:
    """What the server says in one frame, as a client whose ids are whole numbers reads it."""
    fields = _fields(data, _SERVER_FIELDS, limits)
    if isinstance(fields, Close):
        return fields
    try:
        match fields:
            case {"id": number, "status": status, **rest} if rest.keys() <= {"body"}:
                body = rest.get("body")
                return Answered(
                    _number(number),
                    _number(status),
                    None if body is None else msgspec.json.decode(body),
                )
            case {"deliver": deliver, **rest} if not rest:
                sent = _deliver(deliver)
                return Deliver(sent.token, [bytes(entry) for entry in sent.entries])
            case {"welcome": body, **rest} if not rest:
                return Welcome(body)
            case {"refused": refused, **rest} if not rest:
                said = _refused(refused)
                return Refused(said.kind, said.feature, said.detail)
            case {"ping": value, **rest} if not rest and len(value) <= PING_BYTES_MAX:
                return Ping(value)
            case {"pong": value, **rest} if not rest and len(value) <= PING_BYTES_MAX:
                return Pong(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return unreadable(f"a frame of the server: {error}")
    return unreadable("this is no frame that a server sends")
