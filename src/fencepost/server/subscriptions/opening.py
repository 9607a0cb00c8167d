"""Putting subscriptions together: keys from the store, guard, client, engine and handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.protocol.limits import Limits
from fencepost.server.subscriptions import keys, tokens
from fencepost.server.subscriptions.engine import Engine, Readers
from fencepost.server.subscriptions.guard import Guard
from fencepost.server.subscriptions.handlers import SubscriptionHandlers
from fencepost.server.subscriptions.keys import SigningKey
from fencepost.server.subscriptions.outcomes import Counts
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.tokens import Tokens
from fencepost.server.subscriptions.webhooks import Webhooks
from fencepost.store.contract import SubscriptionStore

Secret = Callable[[str, bytes], Awaitable[bytes]]
"""What finds a secret in the store, or stores it: `SubscriptionStore.secret`."""


class Subscriptions(NamedTuple):
    """The parts that a server runs."""

    engine: Engine
    handlers: SubscriptionHandlers
    webhooks: Webhooks


class Parts(NamedTuple):
    """What subscriptions are made of, whichever store they are in."""

    clock: Clock
    settings: SubscriptionSettings
    limits: Limits
    guard: Guard
    signing: SigningKey
    tokens: Tokens
    webhooks: Webhooks
    readers: Readers | None

    def make(self, store: SubscriptionStore, counts: Counts | None = None) -> Subscriptions:
        """An engine over what the store holds now, and what asks it."""
        engine = Engine(
            store,
            self.clock,
            self.settings,
            webhooks=self.webhooks,
            signing=self.signing,
            tokens=self.tokens,
            readers=self.readers,
            counts=counts,
        )
        handlers = SubscriptionHandlers(engine, self.guard, self.tokens, self.settings, self.limits)
        return Subscriptions(engine, handlers, self.webhooks)


async def open_parts(
    secret: Secret,
    clock: Clock,
    settings: SubscriptionSettings,
    limits: Limits,
    *,
    on_loopback: bool,
    readers: Readers | None = None,
) -> Parts:
    """What does not depend on who has the engine; `on_loopback` when the server listens on this
    machine only."""
    choice = settings.webhook_allow_localhost
    guard = Guard(allow_localhost=on_loopback if choice == "auto" else choice == "allow")
    signing = SigningKey(await secret(keys.SIGNING_SECRET, clock.token(keys.KEY_BYTES)))
    token_key = await secret(tokens.TOKEN_SECRET, clock.token(tokens.KEY_BYTES))
    webhooks = Webhooks(
        guard,
        connections_max=settings.deliveries_max,
        response_bytes_max=settings.response_bytes_max,
    )
    read = Tokens(token_key, ttl_ms=settings.token_ttl_ms)
    return Parts(clock, settings, limits, guard, signing, read, webhooks, readers)


async def open_subscriptions(
    store: SubscriptionStore,
    clock: Clock,
    settings: SubscriptionSettings,
    limits: Limits,
    *,
    on_loopback: bool,
    readers: Readers | None = None,
) -> Subscriptions:
    """Subscriptions of one server that has the store to itself."""
    parts = await open_parts(
        store.secret, clock, settings, limits, on_loopback=on_loopback, readers=readers
    )
    return parts.make(store)
