"""Subscriptions of a server that has its store to itself: the engine is here, and stays."""

from __future__ import annotations

from collections.abc import Awaitable

from fencepost.http.messages import Answer, Request
from fencepost.server.subscriptions.opening import Subscriptions
from fencepost.server.subscriptions.outcomes import Counts
from fencepost.server.subscriptions.registry import Registry


class OwnSubscriptions:
    """Takes every request below the reserved prefix, and answers it. `run` it beside that."""

    def __init__(self, parts: Subscriptions) -> None:
        self._parts = parts

    async def run(self) -> None:
        """Wake and deliver until cancelled."""
        await self._parts.engine.run()

    def handle(self, request: Request) -> Awaitable[Answer] | None:
        return self._parts.handlers.handle(request)

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
