"""Holds an answer back while the application makes it, stores it, then sends it.

At most `answer_bytes_max` are held. A larger answer, and one that is a stream of events, is sent as
it comes: it says that it is not kept, and only its status is stored.
"""

from __future__ import annotations

import contextlib

from fencepost.events.edge.answers import CLAIM_LOST, NOT_KEPT, Message, Send
from fencepost.events.edge.claims import Claim, ClaimLostError
from fencepost.events.edge.rules import Answer, chosen_headers, is_released_by
from fencepost.events.edge.settings import IdempotencySettings


class Recording:
    """The `send` of one run of the application."""

    def __init__(self, claim: Claim, send: Send, settings: IdempotencySettings) -> None:
        self._claim = claim
        self._send = send
        self._settings = settings
        self._start: Message | None = None
        self._body = bytearray()
        self._is_passing = False
        self._is_lost = False
        self.is_started = False
        """Whether the client got the beginning of an answer."""
        self.is_complete = False
        """Whether the application made a whole answer, and the key was finished or released."""

    async def send(self, message: Message) -> None:
        """Take a message of the application's answer."""
        if self._is_lost:
            return
        match message["type"]:
            case "http.response.start":
                self._start = message
                if self._is_never_kept(message):
                    self._is_passing = True
            case "http.response.body" if self._start is not None:
                await self._take_body(self._start, message)
            case _:
                await self._send(message)

    async def end_as_lost(self) -> None:
        """Tell the client that another request may hold the key, unless an answer has begun."""
        self._is_lost = True
        self.is_complete = True
        if not self.is_started:
            self.is_started = True
            await CLAIM_LOST.send(self._send)

    def _is_never_kept(self, start: Message) -> bool:
        return self._releases(start) or any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in start.get("headers", ())
        )

    def _releases(self, start: Message) -> bool:
        return is_released_by(start["status"], self._settings.released_statuses)

    async def _take_body(self, start: Message, message: Message) -> None:
        is_last = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        if not self._is_passing and len(self._body) + len(body) > self._settings.answer_bytes_max:
            self._is_passing = True
        if self._is_passing:
            await self._pass_on(start, message, is_last)
            return
        self._body += body
        if is_last:
            await self._keep(start)

    async def _pass_on(self, start: Message, message: Message, is_last: bool) -> None:
        releases = self._releases(start)
        if not self.is_started:
            await self._begin(start, is_kept=releases)
            held, self._body = bytes(self._body), bytearray()
            if held:
                await self._send({"type": "http.response.body", "body": held, "more_body": True})
        if is_last:
            if releases:
                await self._claim.release()
            else:
                # What was sent cannot be taken back: if the claim was lost, its taker's answer is
                # the one that is kept.
                with contextlib.suppress(ClaimLostError):
                    await self._claim.finish(start["status"], None)
            self.is_complete = True
        await self._send(message)

    async def _keep(self, start: Message) -> None:
        headers = chosen_headers(start.get("headers", ()), self._settings.replayed_headers)
        body = bytes(self._body)
        answer = Answer(start["status"], headers, body)
        try:
            is_kept = await self._claim.finish(start["status"], answer)
        except ClaimLostError:
            await self.end_as_lost()
            return
        self.is_complete = True
        await self._begin(start, is_kept=is_kept)
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self, start: Message, *, is_kept: bool) -> None:
        self.is_started = True
        headers = list(start.get("headers", ()))
        if not is_kept:
            headers.append(NOT_KEPT)
        await self._send({**start, "headers": headers})
