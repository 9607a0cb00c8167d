"""Putting subscriptions together: keys from the store, guard, client, engine and handlers."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.protocol.limits import Limits
from fencepost.server.subscriptions import keys, tokens
from fencepost.server.subscriptions.engine import Engine, Readers
from fencepost.server.subscriptions.guard import Guard
from fencepost.server.subscriptions.handlers import SubscriptionHandlers
from fencepost.server.subscriptions.keys import SigningKey
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.tokens import Tokens
from fencepost.server.subscriptions.webhooks import Webhooks
from fencepost.store.contract import SubscriptionStore


class Subscriptions(NamedTuple):
    """The parts that a server runs."""

    engine: Engine
    handlers: SubscriptionHandlers
    webhooks: Webhooks


async def open_subscriptions(
    store: SubscriptionStore,
    clock: Clock,
    settings: SubscriptionSettings,
    limits: Limits,
    *,
    on_loopback: bool,
    readers: Readers | None = None,
) -> Subscriptions:
    """Subscriptions of one server; `on_loopback` when it listens on this machine only."""
    choice = settings.webhook_allow_localhost
    guard = Guard(allow_localhost=on_loopback if choice == "auto" else choice == "allow")
    signing = SigningKey(await store.secret(keys.SIGNING_SECRET, clock.token(keys.KEY_BYTES)))
    token_key = await store.secret(tokens.TOKEN_SECRET, clock.token(tokens.KEY_BYTES))
    read = Tokens(token_key, ttl_ms=settings.token_ttl_ms)
    webhooks = Webhooks(
        guard,
        connections_max=settings.deliveries_max,
        response_bytes_max=settings.response_bytes_max,
    )
    engine = Engine(
        store, clock, settings, webhooks=webhooks, signing=signing, tokens=read, readers=readers
    )
    handlers = SubscriptionHandlers(engine, guard, read, settings, limits)
    return Subscriptions(engine, handlers, webhooks)
