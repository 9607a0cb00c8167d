"""A claimed key: taking it, renewing it while the handler runs, finishing and releasing it.

A change whose outcome is not known (the backend went away in the middle) is sent again with the
same stamp before any other change, so the claim always knows which version of the record it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.events.edge.backends import Backend, BackendUnavailableError
from fencepost.events.edge.rules import (
    Answer,
    Claimed,
    Decision,
    Finished,
    Record,
    Released,
    Running,
    Take,
    decide_claim,
)
from fencepost.events.edge.settings import IdempotencySettings

logger = logging.getLogger("fencepost.events.edge")

RENEWALS_PER_LEASE = 3
RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0
TAKES_MAX = 100


class ClaimLostError(Exception):
    """Another request may hold the key now. Stop, and change nothing more."""


class _Change(NamedTuple):
    record: Record
    stamp: str


class Claim:
    """The claim of one request on one key."""

    def __init__(
        self,
        backend: Backend,
        record_id: str,
        fingerprint: str,
        settings: IdempotencySettings,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._fingerprint = fingerprint
        self._owner = clock.token(16).hex()
        self._changes = 0
        self._version: str | None = None
        self._unknown: _Change | None = None
        """A change whose outcome is not known yet."""
        self._changing = asyncio.Lock()
        self._renewed_ms = clock.monotonic_ms()
        self._is_held = False
        self._is_ending = False
        self.record_id = record_id

    async def take(self) -> Decision:
        """Claim the key: `Take` when it is ours; else what the record of the key says.

        Raises `BackendUnavailableError` when that cannot be found out in time.
        """
        try:
            async with self._bounded():
                return await self._take()
        except BackendUnavailableError:
            await self._give_back()
            raise

    async def take_or_wait(self) -> Decision:
        """The same, but wait for a first request that runs."""
        until_ms = self._clock.monotonic_ms() + int(self._settings.wait_s_max * 1000)
        delay_s = RETRY_S_MIN
        while True:
            decision = await self.take()
            left_ms = until_ms - self._clock.monotonic_ms()
            if not isinstance(decision, Running) or left_ms <= 0:
                return decision
            await asyncio.sleep(min(delay_s, decision.left_ms / 1000, left_ms / 1000))
            delay_s = min(delay_s * 2, RETRY_S_MAX)

    async def keep(self) -> None:
        """Renew until cancelled; raises `ClaimLostError` when the key may be another request's."""
        pause_s = self._settings.lease_s / RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(pause_s)
            if self._is_ending:
                return
            try:
                async with asyncio.timeout(pause_s):
                    await self.renew()
            except (BackendUnavailableError, TimeoutError):
                if self._clock.monotonic_ms() - self._renewed_ms >= self._settings.lease_ms:
                    raise ClaimLostError("the backend was away for longer than a lease") from None

    async def finish(self, status: int, answer: Answer | None) -> bool:
        """Store the answer, or only its status; False if the backend did not take it in time.

        Raises `ClaimLostError` when another request holds the key.
        """
        self._is_ending = True
        expires_ms = self._clock.now_ms() + self._settings.ttl_ms
        record = Finished(self._fingerprint, status, expires_ms, answer)
        try:
            async with self._bounded():
                await self._insist(record)
        except BackendUnavailableError as error:
            logger.warning("an answer could not be kept, its key will be free again: %s", error)
            return False
        return True

    async def release(self) -> None:
        """Free the key. If the backend does not answer, the key is free after its lease."""
        self._is_ending = True
        if not self._is_held and self._unknown is None:
            return
        try:
            async with self._bounded():
                await self._insist(Released())
        except BackendUnavailableError as error:
            logger.warning("a key could not be released, it is free after its lease: %s", error)
        except ClaimLostError:
            return

    async def _take(self) -> Decision:
        # Nearly every key is new: try that first, and read the record only if it is not.
        decision: Decision = Take(None)
        for _ in range(TAKES_MAX):
            if isinstance(decision, Take) and await self._taken(decision.version):
                return decision
            seen = await self._backend.load(self.record_id)
            decision = decide_claim(seen, self._fingerprint, now_ms=self._clock.now_ms())
            if not isinstance(decision, Take):
                return decision
        raise BackendUnavailableError("other requests changed the record of this key all the time")

    async def _taken(self, version: str | None) -> bool:
        self._version = version
        self._renewed_ms = self._clock.monotonic_ms()
        try:
            await self._carry_out(self._change_to(self._claimed()))
        except ClaimLostError:
            return False
        self._is_held = True
        return True

    async def _give_back(self) -> None:
        """The claim may be stored although its answer was lost: do not hold the key for a lease."""
        with contextlib.suppress(BackendUnavailableError, ClaimLostError, TimeoutError):
            if self._unknown is not None:
                async with asyncio.timeout(RETRY_S_MAX):
                    await self._replace(Released())

    async def renew(self) -> None:
        """Start the lease anew; raises `ClaimLostError` when another request holds the key."""
        began_ms = self._clock.monotonic_ms()
        await self._replace(self._claimed())
        self._renewed_ms = began_ms

    async def _insist(self, record: Record) -> None:
        """Replace the record; while the backend is away try again, until the caller's timeout."""
        delay_s = RETRY_S_MIN
        while True:
            try:
                return await self._replace(record)
            except BackendUnavailableError as error:
                logger.info("the backend is away, trying again: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_S_MAX)

    async def _replace(self, record: Record) -> None:
        if self._clock.monotonic_ms() - self._renewed_ms >= self._settings.ttl_ms:
            # The record itself may have expired, and another one may have the same version.
            raise ClaimLostError("the request slept for longer than the record lives")
        async with self._changing:
            if self._unknown is not None:
                await self._carry_out(self._unknown)
            await self._carry_out(self._change_to(record))

    async def _carry_out(self, change: _Change) -> None:
        self._unknown = change
        version = await self._backend.replace(
            self.record_id,
            self._version,
            change.record,
            stamp=change.stamp,
            ttl_ms=self._settings.ttl_ms,
        )
        self._unknown = None
        if version is None:
            raise ClaimLostError("another request holds the key")
        self._version = version

    def _change_to(self, record: Record) -> _Change:
        self._changes += 1
        return _Change(record, f"{self._owner}-{self._changes}")

    def _claimed(self) -> Claimed:
        return Claimed(self._fingerprint, self._owner, self._settings.lease_ms)

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        seconds = self._settings.backend_s_max
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise BackendUnavailableError(f"no answer within {seconds} s") from None
