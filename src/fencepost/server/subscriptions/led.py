"""Subscriptions of a node among several: the leader has the engine, the others pass requests on.

Leases, retries and webhooks have one owner at a time, so the engine lives on the node that leads,
from the moment that it has loaded what is stored until it leads no more. Every node takes requests.
One that does not lead hands them to the one that does; while nobody does, which lasts about as long
as it takes to notice, they wait for a moment, and are then told to come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from fencepost.http.messages import Answer, Request, Response
from fencepost.server.forwarding import (
    Forwarding,
    UnansweredError,
    UnreachableError,
    restore,
    was_forwarded,
)
from fencepost.server.handlers.rendering import failed
from fencepost.server.subscriptions.bodies import error
from fencepost.server.subscriptions.handlers import JWKS, ROOT, SUBSCRIPTIONS, show_keys
from fencepost.server.subscriptions.opening import Parts, Subscriptions
from fencepost.server.subscriptions.outcomes import Counts
from fencepost.server.subscriptions.registry import Registry
from fencepost.store.contract import Leader, Leadership, SharedSubscriptionStore, Unknown

log = logging.getLogger(__name__)

LEADER_MS_MAX = 3_000
"""How long a request waits for somebody to lead."""
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
    """Takes every request below the reserved prefix, on whichever node it arrives."""

    def __init__(self, leading: Leadership, parts: Parts) -> None:
        self._leading = leading
        self._parts = parts
        self._forwarding = Forwarding()
        self._led: _Led | None = None
        self.counts = Counts()
        self.background: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
        """What runs besides leading: nothing."""
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

    def handle(self, request: Request) -> Awaitable[Answer] | None:
        if not request.path.startswith(ROOT):
            return None
        path = request.path[len(ROOT) :]
        if path == JWKS:
            return show_keys(request, self._parts.signing)
        return self._answer(request) if path.startswith(SUBSCRIPTIONS) else None

    async def _answer(self, request: Request) -> Answer:
        clock = self._parts.clock
        until_ms = clock.monotonic_ms() + LEADER_MS_MAX
        while True:
            if self._led is not None:
                return await self._answer_here(request, self._led)
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

    async def _answer_here(self, request: Request, led: _Led) -> Answer:
        restore(request)
        behind = await led.store.caught_up()
        if behind is not None:
            return failed(behind)
        work = led.parts.handlers.handle(request)
        assert work is not None, "the path was looked at before"
        return await work


def _no_leader() -> Response:
    answer = error(
        503,
        "NO_LEADER",
        "no node leads at the moment, or the one that does cannot be reached from here:"
        " nothing was changed, retry the same request",
    )
    answer.headers.append((b"Retry-After", b"%d" % RETRY_AFTER_S))
    return answer
