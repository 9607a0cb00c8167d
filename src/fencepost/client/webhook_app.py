"""An ASGI application that receives webhooks and hands verified wakes to a function.

Mount it in FastAPI or Starlette, or serve it alone. It answers 200 when the wake was taken, 401
when the request was not signed by the server, 409 when the very same request came before, and 500
when the function raised: the server then delivers the wake again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.subscriptions import AsyncWake
from fencepost.client.aio.webhooks import AsyncWebhookVerifier
from fencepost.client.errors import FencepostError, WebhookReplayedError, WebhookSignatureError
from fencepost.client.signatures import WINDOW_SECONDS

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 8 << 20
"""The largest body that is read: a wake that lists 10,000 streams is smaller."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
WebhookHandler = Callable[[AsyncWake], Awaitable[bool | None]]


class WebhookApp:
    """The application. `handler` is an async function that gets an `AsyncWake`.

    When it returns, the wake is done: what it read through `wake.read` is acknowledged as far as it
    was read, any other stream up to its `tail_offset`. When it returns False, the wake goes on: the
    program calls back with `wake.ack` or `wake.done`, and keeps the lease with `async with wake`.
    The server waits 15 seconds for the answer, or the lease, if that is shorter.
    """

    def __init__(
        self,
        client: AsyncClient,
        handler: WebhookHandler,
        *,
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self._verifier = AsyncWebhookVerifier(client, window_seconds=window_seconds)
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            status, body = await self._answer(scope, receive)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            if status == 405:
                headers.append((b"allow", b"POST"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            raise RuntimeError(f"webhooks come by HTTP, not by {scope['type']}")

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        if scope["method"] != "POST":
            return 405, b'{"error":"webhooks are sent by POST"}'
        body = await _body(receive)
        if body is None:
            return 413, b'{"error":"the body is too large"}'
        given = [value for name, value in scope["headers"] if name == b"webhook-signature"]
        signature = given[0].decode("latin-1") if len(given) == 1 else None
        try:
            wake = await self._verifier.verify(signature, body)
        except WebhookReplayedError:
            return 409, b'{"error":"this very request came before"}'
        except WebhookSignatureError as error:
            log.warning("a webhook request was refused: %s", error)
            return 401, b'{"error":"the request is not signed by the server"}'
        except FencepostError:
            log.exception("the keys of the server could not be fetched")
            return 503, b'{"error":"the keys of the server are not known"}'
        try:
            return 200, await self._handled(wake)
        except Exception:
            self._verifier.forget(signature)
            log.exception("%s could not be handled", wake)
            return 500, b'{"error":"the wake could not be handled"}'

    async def _handled(self, wake: AsyncWake) -> bytes:
        goes_on = await self._handler(wake) is False
        if wake.is_over or goes_on:
            return b"{}"
        if wake.was_read:
            # More exact than the answer can be, which stands for the tails that the wake listed.
            await wake.done()
            return b"{}"
        return b'{"done":true}'


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None when it is too large."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(pieces)
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > BODY_BYTES_MAX:
            return None
        if not message.get("more_body"):
            return b"".join(pieces)


async def _live(receive: Receive, send: Send) -> None:
    """Take part in the start and the end of a host that serves nothing else."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
