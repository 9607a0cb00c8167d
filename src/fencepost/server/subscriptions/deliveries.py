"""Deliveries: the webhook requests under way, a bounded number at once, one for each wake.

What a delivery comes to is for the engine to take down; here it is only carried out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec

from fencepost.clock import Clock
from fencepost.protocol.subscriptions import Subscription, Wake
from fencepost.server.subscriptions.crew import Crew
from fencepost.server.subscriptions.keys import SigningKey
from fencepost.server.subscriptions.registry import Registry
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.showing import callback_url, show_wake
from fencepost.server.subscriptions.webhooks import Delivery, Undelivered, Webhooks
from fencepost.store.contract import Failure, SubscriptionStore

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The engine, as its deliveries see it."""

    @property
    def registry(self) -> Registry: ...

    def now_ms(self) -> int: ...

    def token(self, subscription: Subscription) -> str: ...

    def delivered(
        self, subscription: Subscription, wake: Wake, delivery: Delivery, started_ms: int
    ) -> None:
        """Take down what came of a delivery."""
        ...

    def schedule(self, subscription: Subscription) -> None:
        """Look when there is something to do next."""
        ...


class Deliveries:
    """Webhook requests of one engine."""

    def __init__(
        self,
        owner: Owner,
        store: SubscriptionStore,
        clock: Clock,
        settings: SubscriptionSettings,
        *,
        webhooks: Webhooks,
        signing: SigningKey,
    ) -> None:
        self._owner = owner
        self._store = store
        self._clock = clock
        self._settings = settings
        self._webhooks = webhooks
        self._signing = signing
        self._crew = Crew(settings.deliveries_max)
        self._under_way: dict[int, tuple[int, int]] = {}
        self._attempts = 0

    @property
    def count(self) -> int:
        """Requests that wait for an answer."""
        return self._crew.working_count

    def has(self, subscription: Subscription) -> bool:
        """Whether the current wake of a subscription is being delivered."""
        attempt = self._under_way.get(subscription.id)
        return attempt is not None and attempt[0] == subscription.wake.generation

    def forget(self) -> None:
        """Drop those that have not begun, and take no heed of the others."""
        self._crew.forget()
        self._under_way.clear()

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Deliver until `meanwhile` ends or is cancelled."""
        await self._crew.run(meanwhile)

    async def drain(self, seconds_max: float) -> None:
        """Start no more, and wait for those under way."""
        await self._crew.drain(seconds_max)

    def begin(self, subscription: Subscription) -> None:
        """Deliver the current wake once it is on disk."""
        self._attempts += 1
        attempt = (subscription.wake.generation, self._attempts)
        self._under_way[subscription.id] = attempt
        self._store.after(partial(self._deliverable, subscription, attempt))

    def _deliverable(
        self, subscription: Subscription, attempt: tuple[int, int], failure: Failure | None
    ) -> None:
        """The wake is on disk: it may leave the house."""
        if failure is None:
            self._crew.add(partial(self._deliver, subscription, attempt))

    async def _deliver(self, subscription: Subscription, attempt: tuple[int, int]) -> None:
        owner, wake = self._owner, subscription.wake
        current = owner.registry.holds(subscription) and wake.generation == attempt[0]
        try:
            # A callback may have come for an earlier attempt while this one waited its turn.
            if current and wake.next_attempt_ms is not None:
                started_ms = owner.now_ms()
                delivery = await self._post(subscription)
                owner.delivered(subscription, wake, delivery, started_ms)
        except Exception:
            log.exception("a delivery failed in an unexpected way")
            owner.delivered(subscription, wake, Undelivered("internal error"), started_ms=0)
        finally:
            if self._under_way.get(subscription.id) == attempt:
                del self._under_way[subscription.id]
            if owner.registry.holds(subscription):
                owner.schedule(subscription)

    async def _post(self, subscription: Subscription) -> Delivery:
        config, wake = subscription.config, subscription.wake
        assert config.webhook_url is not None
        body = msgspec.json.encode(
            {
                "subscription_id": subscription.name,
                "wake_id": wake.wake_id,
                "generation": wake.generation,
                "streams": show_wake(subscription),
                "callback_url": callback_url(subscription),
                "callback_token": self._owner.token(subscription),
            }
        )
        headers = [
            (b"Content-Type", b"application/json"),
            (b"User-Agent", b"fencepost"),
            (b"Webhook-Signature", self._signing.signature(body, now_ms=self._clock.now_ms())),
        ]
        timeout_ms = min(self._settings.delivery_timeout_ms, config.lease_ttl_ms)
        return await self._webhooks.post(config.webhook_url, body, headers, timeout_ms=timeout_ms)
