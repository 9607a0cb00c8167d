"""Receiving webhooks: each request is checked against the server's keys, and is taken once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fencepost.client import subscriptions
from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.subscriptions import AsyncWake
from fencepost.client.errors import WebhookReplayedError, require
from fencepost.client.signatures import WINDOW_SECONDS, UnknownKeyError, verify_webhook

KEYS_MS_MIN = 10_000
"""How often the keys are fetched at most: a stranger who names unknown keys costs no more."""
SEEN_MAX = 100_000
"""How many requests are remembered at most; only those that the server signed are."""


class AsyncWebhookVerifier:
    """Checks webhook requests. It fetches the keys of the server, and remembers what it has seen.

    A request that came before is refused within the window of five minutes, and outside of it
    because of its age. The server signs each attempt to deliver a wake anew, so its own retries
    pass; `wake_id` is the same for all of them. Each process remembers for itself.
    """

    def __init__(self, client: AsyncClient, *, window_seconds: float = WINDOW_SECONDS) -> None:
        require(window_seconds > 0, "window_seconds is greater than 0")
        self._client = client
        self._driver = client._driver
        self._window_seconds = window_seconds
        self._keys: dict[str, Any] = {}
        self._fetched_ms: int | None = None
        self._seen: OrderedDict[str, float] = OrderedDict()

    async def verify(self, signature: str | None, body: bytes) -> AsyncWake:
        """The wake that a request brings; raises `WebhookSignatureError` unless it is genuine.

        `signature` is the value of the header `Webhook-Signature`, `body` the body byte for byte.
        """
        now = self._driver.settings.clock.now_ms() / 1000
        window = self._window_seconds
        try:
            delivery = verify_webhook(body, signature, self._keys, window_seconds=window, now=now)
        except UnknownKeyError:
            if not await self._fetch_keys():
                raise
            delivery = verify_webhook(body, signature, self._keys, window_seconds=window, now=now)
        assert signature is not None
        self._remember(signature, now)
        return self._client.subscription(delivery.subscription_id).wake(delivery)

    def forget(self, signature: str | None) -> None:
        """Take the request again if it comes again: it was not handled."""
        self._seen.pop(signature or "", None)

    def _remember(self, signature: str, now: float) -> None:
        # A signature may be ahead by a window, and is good for one behind that.
        while self._seen and (
            len(self._seen) >= SEEN_MAX
            or next(iter(self._seen.values())) < now - 2 * self._window_seconds
        ):
            self._seen.popitem(last=False)
        if signature in self._seen:
            raise WebhookReplayedError("this very request came before")
        self._seen[signature] = now

    async def _fetch_keys(self) -> bool:
        """Ask the server for its keys; false when that was done just before."""
        now_ms = self._driver.settings.clock.monotonic_ms()
        if self._fetched_ms is not None and now_ms - self._fetched_ms < KEYS_MS_MIN:
            return False
        self._fetched_ms = now_ms
        self._keys = await self._driver.run(subscriptions.webhook_keys(self._driver.settings))
        return True
