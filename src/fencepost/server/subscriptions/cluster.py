"""Where the subscription engine runs, and how a request reaches it.

Leases, retries and webhooks need one owner at a time. With SQLite the server has its store to
itself, so the engine is always here (`OwnSubscriptions`). On PostgreSQL several nodes share a store
and the engine runs on the node that leads, from the moment it has loaded what is stored until it
no longer leads (`LedSubscriptions`). Every node takes requests: a node that does not lead forwards
them to the leader. While no node leads, which lasts about as long as it takes to notice, requests
wait for a moment and are then answered with 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol.limits import Limits
from fencepost.protocol.shares import Shares
from fencepost.server.forwarding import (
    Forwarding,
    UnansweredError,
    UnreachableError,
    restore,
    was_forwarded,
)
from fencepost.server.handlers.rendering import failed
from fencepost.server.subscriptions.bodies import error
from fencepost.server.subscriptions.engine import Engine
from fencepost.server.subscriptions.http import SubscriptionHandler, SubscriptionHandlers, show_keys
from fencepost.server.subscriptions.links import Readers
from fencepost.server.subscriptions.registry import Counts, Registry
from fencepost.server.subscriptions.security import (
    KEY_BYTES,
    SIGNING_SECRET,
    TOKEN_SECRET,
    Guard,
    SigningKey,
    Tokens,
)
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.webhooks import Webhooks
from fencepost.store.contract import (
    Leader,
    Leadership,
    SharedSubscriptionStore,
    SubscriptionStore,
    Unknown,
)

log = logging.getLogger(__name__)

LEADER_MS_MAX = 3_000
"""How long a request waits for a node to lead."""
LOOK_S = 0.05
"""How often it looks meanwhile."""
RETRY_AFTER_S = 1
SAFE = ("GET", "HEAD")
"""Methods that change nothing: they may be asked again elsewhere."""


class _Led(NamedTuple):
    """What the leader has for one term."""

    store: SharedSubscriptionStore
    parts: Subscriptions


class LedSubscriptions:
    """Subscriptions of one node of several: handlers run on the leader."""

    def __init__(self, leading: Leadership, parts: Parts) -> None:
        self._leading = leading
        self._parts = parts
        self._forwarding = Forwarding()
        self._led: _Led | None = None
        self.counts = Counts()
        self.background: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
        """Background tasks besides leading: none."""
        leading.subscribe = self.lead

    # The leader's part

    async def lead(self, store: SharedSubscriptionStore) -> None:
        """Have the engine until cancelled."""
        await store.prepare()
        made = self._parts.make(store, self.counts)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(store.follow())
                group.create_task(made.engine.run())
                self._led = _Led(store, made)
                self._leading.first_look.set()
        finally:
            self._led = None

    @property
    def registry(self) -> Registry:
        """All subscriptions on the leader; none elsewhere."""
        return Registry() if self._led is None else self._led.parts.engine.registry

    @property
    def deliveries_count(self) -> int:
        """Webhook requests under way from here."""
        return 0 if self._led is None else self._led.parts.engine.deliveries_count

    async def drain(self, seconds_max: float) -> None:
        """Start no more deliveries, and wait for those under way."""
        if self._led is not None:
            await self._led.parts.engine.drain(seconds_max)

    async def close(self) -> None:
        await self._forwarding.close()
        await self._parts.webhooks.close()

    # Requests

    async def show_keys(self, _request: Request) -> Answer:
        return show_keys(self._parts.signing)

    def run_handler(self, handler: SubscriptionHandler) -> Callable[..., Awaitable[Answer]]:
        """The handler as a route: called on this node, or on the one that leads."""

        async def run(request: Request, *parts: bytes) -> Answer:
            return await self._answer(handler, request, parts)

        return run

    async def _answer(
        self, handler: SubscriptionHandler, request: Request, parts: tuple[bytes, ...]
    ) -> Answer:
        clock = self._parts.clock
        until_ms = clock.monotonic_ms() + LEADER_MS_MAX
        while True:
            if self._led is not None:
                return await self._answer_here(handler, request, parts, self._led)
            leader = self._leader()
            if leader is not None:
                if was_forwarded(request):
                    return _no_leader()
                try:
                    return await self._forward(request, leader)
                except UnreachableError as problem:
                    log.info("the node that leads is not reached: %s", problem)
                except UnansweredError as problem:
                    log.warning("the node that leads did not answer: %s", problem)
                    if request.method not in SAFE:
                        return failed(Unknown())
                    if self._leading.leader not in (None, leader):
                        # It took long to find out, and the next one has not been asked yet.
                        until_ms = clock.monotonic_ms() + LEADER_MS_MAX
            if clock.monotonic_ms() >= until_ms:
                return _no_leader()
            self._leading.poke()
            await asyncio.sleep(LOOK_S)

    def _leader(self) -> Leader | None:
        """Another node that leads and can be reached."""
        leader = self._leading.leader
        if leader is None or leader.node == self._leading.node or not leader.url:
            return None
        return leader

    async def _forward(self, request: Request, leader: Leader) -> Response:
        """Have a request answered by the leader, as long as it is the leader.

        One that hangs takes connections and answers none; it is over when another takes its place.
        """
        answer = asyncio.create_task(self._forwarding.forward(request, leader.url))
        try:
            while True:
                changed = asyncio.create_task(self._leading.changed())
                await asyncio.wait((answer, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if answer.done():
                    return answer.result()
                if self._leading.leader not in (None, leader):
                    raise UnansweredError("another node leads by now")
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _answer_here(
        self, handler: SubscriptionHandler, request: Request, parts: tuple[bytes, ...], led: _Led
    ) -> Answer:
        restore(request)
        behind = await led.store.caught_up()
        if behind is not None:
            return failed(behind)
        return await led.parts.handlers.run(handler, request, *parts)


def _no_leader() -> Response:
    answer = error(
        503,
        "NO_LEADER",
        "no node leads at the moment, or the one that does cannot be reached from here:"
        " nothing was changed, retry the same request",
    )
    answer.headers.append((b"Retry-After", b"%d" % RETRY_AFTER_S))
    return answer


class OwnSubscriptions:
    """Subscriptions of a server that has its store to itself. `run` is its background work."""

    def __init__(self, parts: Subscriptions) -> None:
        self._parts = parts

    async def run(self) -> None:
        """Wake and deliver until cancelled."""
        await self._parts.engine.run()

    async def show_keys(self, _request: Request) -> Answer:
        return show_keys(self._parts.engine.signing)

    def run_handler(self, handler: SubscriptionHandler) -> Callable[..., Awaitable[Answer]]:
        """The handler as a route."""

        async def run(request: Request, *parts: bytes) -> Answer:
            return await self._parts.handlers.run(handler, request, *parts)

        return run

    @property
    def registry(self) -> Registry:
        return self._parts.engine.registry

    @property
    def counts(self) -> Counts:
        return self._parts.engine.counts

    @property
    def deliveries_count(self) -> int:
        return self._parts.engine.deliveries_count

    async def drain(self, seconds_max: float) -> None:
        """Start no more deliveries, and wait for those under way."""
        await self._parts.engine.drain(seconds_max)

    async def close(self) -> None:
        await self._parts.webhooks.close()


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
    shares: Shares

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
            shares=self.shares,
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
    shares: Shares | None = None,
) -> Parts:
    """The parts that do not depend on which node runs the engine.

    `on_loopback` says that the server listens on this machine only.
    """
    choice = settings.webhook_allow_localhost
    # A server with principals on loopback has a proxy in front: its clients are elsewhere, and what
    # listens on this machine is not theirs to call.
    is_development = on_loopback and readers is None
    guard = Guard(allow_localhost=is_development if choice == "auto" else choice == "allow")
    signing = SigningKey(await secret(SIGNING_SECRET, clock.token(KEY_BYTES)))
    token_key = await secret(TOKEN_SECRET, clock.token(KEY_BYTES))
    webhooks = Webhooks(
        guard,
        connections_max=settings.deliveries_max,
        response_bytes_max=settings.response_bytes_max,
    )
    read = Tokens(token_key, ttl_ms=settings.token_ttl_ms)
    shares = shares or Shares()
    return Parts(clock, settings, limits, guard, signing, read, webhooks, readers, shares)


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
