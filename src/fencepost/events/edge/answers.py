"""What the middleware sends and reads itself: problems, replays, bodies of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

from fencepost.events.edge.rules import Answer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

REPLAYED = (b"idempotency-replayed", b"true")
NOT_KEPT = (b"idempotency-kept", b"false")
BODILESS = (204, 205, 304)


class TooLarge(Exception):  # noqa: N818  # it never leaves the middleware
    """The body of a request is larger than `request_bytes_max`."""


class Disconnected(Exception):  # noqa: N818  # it never leaves the middleware
    """The client left before its request was complete."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A refusal of the middleware itself, as problem+json."""

    status: int
    code: str
    detail: str
    retry_after_s: int | None = None

    async def send(self, send: Send) -> None:
        document = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        body = msgspec.json.encode(document)
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


CLAIM_LOST = Problem(
    status=503,
    code="idempotency_claim_lost",
    detail="this process was cut off or stopped for longer than its lease, and another request"
    " may have taken the key over: send the request again with the same key",
    retry_after_s=1,
)


async def send_replay(answer: Answer, send: Send) -> None:
    """Send a kept answer again, marked as what it is."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    headers.append(REPLAYED)
    if answer.status not in BODILESS:
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def read_body(receive: Receive, *, bytes_max: int) -> bytes:
    """The whole body of a request; raises `TooLarge` or `Disconnected`."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > bytes_max:
            raise TooLarge
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def receive_again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, then what follows it."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
