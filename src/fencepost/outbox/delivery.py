"""One attempt to deliver a row: what is sent, and which event of `states` the answer is.

The daemon and the relays of a database send through here. A row's payload is the JSON of the send
as it was accepted, without the id and the sender: those are put before it for each attempt, so that
every attempt has the same bytes, and so that a requeued row differs by its id alone.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from fencepost.client.errors import FencepostError, OutcomeUnknownError, ResponseError
from fencepost.client.meshes import SendReceipt, envelope_of
from fencepost.client.operations import encode_json
from fencepost.clock import Clock
from fencepost.outbox.states import (
    RETRY_AFTER_MS_MAX,
    Failed,
    Rejected,
    Row,
    Stored,
    event_of_answer,
)
from fencepost.protocol.envelopes import Send, parse_send
from fencepost.protocol.fingerprints import Unsendable

_SENDER = "outbox"
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

ATTEMPT_SECONDS = 60.0
"""How long one attempt may take as a whole: a server that sends a byte now and then is not waited
for longer. A session gives up earlier."""


class RowIds:
    """Ids of rows: they sort by the order in which they were made, whatever the clock does.

    48 bits of milliseconds and 80 of randomness, as a ULID. Within a millisecond, and while the
    clock stands behind the newest id, the next id is the one before and a little.
    """

    def __init__(self, clock: Clock, newest: str | None = None) -> None:
        self._clock = clock
        self._newest = 0 if newest is None else _number(newest)

    def __call__(self) -> str:
        dice = int.from_bytes(self._clock.token(14), "big")
        fresh = (self._clock.wall_ms() << 80) | dice >> 32
        # A step of 32 random bits: ids of others cannot be guessed from one's own.
        step = 1 + (dice & 0xFFFFFFFF)
        self._newest = max(fresh, self._newest + step)
        return _text(self._newest)


def ulid(clock: Clock) -> str:
    """An id for a message that came without one."""
    return _text((clock.wall_ms() << 80) | int.from_bytes(clock.token(10), "big"))


def _text(number: int) -> str:
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def _number(text: str) -> int:
    number = 0
    for digit in text:
        number = number << 5 | _CROCKFORD.index(digit)
    return number


def encode_send(
    to: str, body: Any, *, id: str, priority: str | None, reply_to: str | None, meta: Any
) -> bytes:
    """The JSON of a send, out of the values of a Python program."""
    more = {"priority": priority, "reply_to": reply_to, "meta": meta}
    return encode_json(envelope_of(to, body, id, more))


def read_send(data: bytes, *, header_id: str | None, minted_id: str) -> Send | Unsendable:
    """The send in the JSON of a caller, or why it is refused.

    A sender is not taken: it is that of the outbox, and not for each caller to choose.
    """
    send = parse_send(data, header_id=header_id, minted_id=minted_id, principal=_SENDER)
    if isinstance(send, Unsendable):
        if send.code == "sender_invalid":
            return Unsendable("sender_invalid", "the sender is that of the outbox: leave it out")
        return send
    if send.body.parts:
        detail = "an outbox takes a body inline: body, body_base64 or json"
        return Unsendable("body_invalid", detail)
    return send


class _Payload(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str
    ref: str
    priority: str
    reply_to: str = ""
    meta: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body_base64: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def payload_of(send: Send) -> bytes:
    """What is kept of a send: body and meta as they came, byte by byte."""
    bodies: dict[str, Any] = {send.body.form: msgspec.Raw(send.body.sent)}
    meta = msgspec.Raw(send.meta) if send.meta else msgspec.UNSET
    kept = _Payload(send.kind, send.ref, send.priority, send.reply_to, meta, **bodies)
    return msgspec.json.encode(kept)


def row_of(send: Send, *, mesh: str, row_id: str, now_ms: int) -> Row:
    """The row that a send is offered as."""
    return Row(
        id=row_id,
        mesh=mesh,
        client_message_id=send.client_message_id,
        request_fingerprint=send.fingerprint,
        destination=f"{send.kind}:{send.ref}",
        payload=payload_of(send),
        priority=send.priority,
        enqueued_ms=now_ms,
        next_attempt_ms=now_ms,
    )


class _Head(msgspec.Struct, frozen=True, omit_defaults=True):
    client_message_id: str
    sender: str | None = None


def body_of(row: Row, sender: str | None) -> bytes:
    """The body of the request: the same bytes for every attempt of a row.

    `sender` is for a server without principals; any other one knows who sends by the token.
    """
    head = msgspec.json.encode(_Head(row.client_message_id, sender))
    return head[:-1] + b"," + row.payload[1:]


class Sends(Protocol):
    """A way to the server. `AsyncMesh` is one, and a session is another."""

    async def send_encoded(self, data: bytes) -> SendReceipt:
        """Send what is JSON already, once: a failure is raised, not repeated."""
        ...


async def attempt(
    mesh: Sends, row: Row, *, sender: str | None, clock: Clock
) -> Stored | Failed | Rejected:
    """Send a row once, and say what came of it.

    The client behind `mesh` has its retries off (`NO_RETRIES`): the outbox owns retrying.
    """
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            receipt = await mesh.send_encoded(body_of(row, sender))
    except TimeoutError:
        return Failed(f"no whole answer within {ATTEMPT_SECONDS:g} s", clock.random())
    except FencepostError as error:
        return event_of_failure(error, clock)
    return Stored(
        receipt.broker_message_id,
        duplicate=receipt.duplicate,
        history_available=receipt.history_available,
    )


def event_of_failure(error: FencepostError, clock: Clock) -> Stored | Failed | Rejected:
    """What a failed attempt means for its row."""
    cause = error
    if isinstance(error, OutcomeUnknownError) and isinstance(error.cause, FencepostError):
        cause = error.cause
    if not isinstance(cause, ResponseError):
        # Without an answer the message may have arrived: the next attempt finds out.
        return Failed(f"{type(cause).__name__}: {cause}", clock.random())
    seconds = cause.retry_after
    asked_ms = cause.problem.get("retry_after_ms")
    if seconds is None and type(asked_ms) is int:  # an answer in a session has no headers
        seconds = asked_ms / 1000
    return event_of_answer(
        cause.status,
        {"code": cause.code, "detail": cause.detail},
        random=clock.random(),
        # Bounded before it is made whole: a header of 400 digits is an infinite number.
        retry_after_ms=None if seconds is None else int(min(seconds * 1000, RETRY_AFTER_MS_MAX)),
    )
