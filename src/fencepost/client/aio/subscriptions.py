"""Subscriptions through the async client: make one, be woken, say how far the work is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from fencepost.client import subscriptions
from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.readings import AsyncReading
from fencepost.client.aio.streams import AsyncStream
from fencepost.client.errors import (
    AlreadyClaimedError,
    BadRequestError,
    ConnectionFailedError,
    FencepostError,
    InvalidArgumentError,
    NoPendingWorkError,
    RateLimitedError,
    UnavailableError,
    WakeFencedError,
    require,
)
from fencepost.client.heartbeats import AsyncHeartbeats
from fencepost.client.reading import SHORT_LIVED_MS, Reader
from fencepost.client.settings import NO_RETRIES, ClientSettings
from fencepost.client.subscriptions import (
    SubscriptionInfo,
    Ticket,
    WakeAcked,
    WakeStream,
    WebhookDelivery,
)
from fencepost.client.wires import async_call, async_wait

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""How long a worker trusts the wake stream alone, before it asks for work without a wake."""
LEASE_MS_DEFAULT = 30_000
"""The lease of a webhook delivery, which does not say how long its own is."""


class AsyncWake:
    """Work that this worker has: streams with messages that no worker acknowledged.

    `async with wake:` sends heartbeats in the background, ends the wake with `done()` when the
    block ends, and gives it back with `release()` when the block raises. When another worker got
    the work meanwhile, the block is cancelled and `WakeFencedError` raised.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        ticket: Ticket,
        streams: list[WakeStream],
        lease_ttl_ms: int = LEASE_MS_DEFAULT,
    ) -> None:
        self._driver = driver
        self._ticket = ticket
        self._readings: dict[str, AsyncReading[Any]] = {}
        self._beats: AsyncHeartbeats | None = None
        self._alive_ms = driver.settings.clock.monotonic_ms()
        self.streams = streams
        """The streams with work; read each after its `acked_offset`."""
        self.lease_ttl_ms = lease_ttl_ms
        self.is_over = False
        """Whether this worker ended it, by `done` or `release`."""

    def __repr__(self) -> str:
        ticket = self._ticket
        return f"<AsyncWake {ticket.wake_id} of {ticket.name!r}, generation {ticket.generation}>"

    @property
    def subscription_id(self) -> str:
        return self._ticket.name

    @property
    def wake_id(self) -> str:
        """The same for every attempt to deliver one wake."""
        return self._ticket.wake_id

    @property
    def generation(self) -> int:
        """Grows with every wake: what an older one does comes too late."""
        return self._ticket.generation

    @property
    def token(self) -> str:
        """The proof that this worker has the wake."""
        return self._ticket.token

    @property
    def was_read(self) -> bool:
        """Whether a stream was read through this wake."""
        return bool(self._readings)

    @overload
    def read(self, path: str) -> AsyncReading[Any]: ...

    @overload
    def read(self, path: str, *, type: type[T]) -> AsyncReading[T]: ...

    def read(self, path: str, *, type: Any = None) -> AsyncReading[Any]:
        """The messages of one of the streams that no worker acknowledged, up to its tail.

        `done` acknowledges as far as this was read.
        """
        found = [stream for stream in self.streams if stream.path == path]
        require(bool(found), f"the wake has no work in {path!r}")
        settings, offset = self._driver.settings, found[0].acked_offset
        reader: Reader[Any] = Reader(settings, path, offset, type)
        reading = AsyncReading(self._driver, reader)
        self._readings[path] = reading
        return reading

    async def ack(self, offsets: Mapping[str, str], *, done: bool = False) -> WakeAcked:
        """Acknowledge streams up to these offsets; the lease begins anew, or ends with `done`."""
        acked = await self._driver.run(
            subscriptions.ack(self._driver.settings, self._ticket, offsets, done=done)
        )
        self.is_over = self.is_over or done
        return acked

    async def heartbeat(self) -> None:
        """Keep the lease; raises `WakeFencedError` when another worker has the work."""
        await self.ack({})

    async def done(self) -> WakeAcked:
        """Acknowledge everything and end the wake.

        A stream that was read through this wake is acknowledged as far as it was read, and any
        other one up to its `tail_offset`.
        """
        tails = {stream.path: stream.tail_offset for stream in self.streams}
        read = {path: reading.offset for path, reading in self._readings.items()}
        try:
            return await self.ack({**tails, **read}, done=True)
        except BadRequestError as error:
            if error.code != "invalid_offset" or not read:
                raise
            # The messages behind the tail were read before the server's engine heard of them.
            return await self.ack(tails, done=True)

    async def release(self) -> None:
        """Give the work back without an ack: it is announced again."""
        await self._driver.run(subscriptions.release(self._driver.settings, self._ticket))
        self.is_over = True

    async def __aenter__(self) -> Self:
        self._beats = AsyncHeartbeats(self._beat, self.lease_ttl_ms / 3000)
        await self._beats.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._beats is not None
        lost = await self._beats.stop()
        if lost is not None:
            raise lost from error
        if self.is_over:
            return
        if error is None:
            await self.done()
        elif self._ticket.endpoint == "ack":
            # The work is free again at once, if the server hears of it; else after the lease.
            with contextlib.suppress(FencepostError):
                await self.release()

    async def _beat(self) -> None:
        """One heartbeat in the background; a server that is away is waited for, up to a point."""
        if self.is_over:
            return
        settings = self._driver.settings
        # One attempt, short of the next one: a server that is away must not hide that time is up.
        answer = min(settings.timeouts.answer, self.lease_ttl_ms / 3000)
        timeouts = replace(settings.timeouts, answer=answer)
        brief = replace(settings, timeouts=timeouts, retries=NO_RETRIES)
        try:
            await self._driver.run(subscriptions.ack(brief, self._ticket, {}, done=False))
            self._alive_ms = settings.clock.monotonic_ms()
        except (ConnectionFailedError, UnavailableError, RateLimitedError):
            if settings.clock.monotonic_ms() - self._alive_ms >= self.lease_ttl_ms:
                raise
        except WakeFencedError:
            if not self.is_over:  # else the block ended the wake while this heartbeat waited
                raise


Handler = Callable[[AsyncWake], Any] | Callable[[AsyncWake], Awaitable[Any]]


class AsyncSubscription:
    """A subscription by its id. `client.subscription(id)` makes this object, and asks nothing."""

    def __init__(self, driver: AsyncDriver, name: str) -> None:
        self._driver = driver
        self._stopped = asyncio.Event()
        self._waiting: AsyncReading[Any] | None = None
        self.id = subscriptions.check_id(name)

    @property
    def _settings(self) -> ClientSettings:
        return self._driver.settings

    def __repr__(self) -> str:
        return f"<AsyncSubscription {self.id!r}>"

    async def create(
        self,
        *,
        pattern: str | None = None,
        streams: Iterable[str] = (),
        webhook: str | None = None,
        wake_stream: str | None = None,
        lease_ttl_ms: int | None = None,
        description: str | None = None,
    ) -> SubscriptionInfo:
        """Make the subscription; fine if it exists with this configuration.

        Args:
            pattern: Watch the streams whose paths match: `orders/*`, `jobs/**`.
            streams: Watch these streams too, also those that do not exist yet.
            webhook: The URL that is called when there is work.
            wake_stream: The stream that wakes are announced in instead; create it first.
            lease_ttl_ms: How long a worker may be silent, 1,000 to 600,000; 30,000 by default.
            description: For people.
        """
        values = subscriptions.configuration(
            pattern=pattern,
            streams=streams,
            webhook=webhook,
            wake_stream=wake_stream,
            lease_ttl_ms=lease_ttl_ms,
            description=description,
        )
        return await self._driver.run(subscriptions.create(self._settings, self.id, values))

    async def info(self) -> SubscriptionInfo:
        """The subscription as it stands, with its first streams."""
        return await self._driver.run(subscriptions.show(self._settings, self.id))

    async def delete(self) -> None:
        """End the subscription; acks that are still on their way are refused."""
        await self._driver.run(subscriptions.delete(self._settings, self.id))

    async def add_streams(self, *paths: str) -> None:
        """Watch these streams as well, from their tails on."""
        await self._driver.run(subscriptions.link(self._settings, self.id, paths))

    async def remove_stream(self, path: str) -> None:
        """Watch a stream no longer by its name; the pattern may still take it in."""
        await self._driver.run(subscriptions.unlink(self._settings, self.id, path))

    async def claim(self, worker: str) -> AsyncWake:
        """Take the work there is.

        Raises `NoPendingWorkError` when there is none, and `AlreadyClaimedError` when another
        worker has it.
        """
        found = await self._driver.run(subscriptions.claim(self._settings, self.id, worker))
        ticket = Ticket(
            name=self.id,
            wake_id=found.wake_id,
            generation=found.generation,
            token=found.token,
            endpoint="ack",
        )
        return AsyncWake(self._driver, ticket, found.streams, found.lease_ttl_ms)

    def wake(self, delivery: WebhookDelivery) -> AsyncWake:
        """The wake that a webhook received, to read its streams and to call back."""
        require(delivery.subscription_id == self.id, "the delivery is of another subscription")
        return _delivered(self._driver, delivery)

    async def work(
        self,
        handler: Handler,
        *,
        worker: str,
        until_idle: bool = False,
        on_error: Callable[[Exception, AsyncWake], None] | None = None,
    ) -> None:
        """Claim the work of a pull-wake subscription and hand it to `handler`, wake after wake.

        `handler` gets each wake and has it while it runs: heartbeats go out in the background,
        and the wake is done when it returns. When it raises, the work is released and the exception
        goes through, or to `on_error`, and the worker goes on after a delay that grows. When
        another worker got the work meanwhile, this one goes on with the next wake. It ends when
        `stop` is called, or, with `until_idle`, when there is nothing to claim.
        """
        found = await self.info()
        if found.wake_stream is None:
            raise InvalidArgumentError(f"{self.id} calls a webhook: there is nothing to claim")
        announced = AsyncStream(self._driver, found.wake_stream)
        failures = 0
        short = 0
        clock, retries = self._settings.clock, self._settings.retries
        while not self._stopped.is_set():
            # Before the claim: a wake that comes after it is not missed.
            place = (await announced.head()).next_offset
            try:
                wake = await self.claim(worker)
            except (AlreadyClaimedError, NoPendingWorkError):
                if until_idle:
                    return
                began_ms = clock.monotonic_ms()
                is_announced = await self._next_event(announced, place)
                if is_announced or clock.monotonic_ms() - began_ms >= SHORT_LIVED_MS:
                    short = 0
                    continue
                # A wake stream that was closed, for example, brings nothing and ends at once.
                await async_wait(self._stopped, retries.delay(short, clock.random()))
                short += 1
                continue
            try:
                await self._handle(handler, wake)
                failures = 0
            except WakeFencedError as error:
                log.warning("%s was lost to another worker: %s", wake, error)
            except Exception as error:
                if on_error is None:
                    raise
                on_error(error, wake)
                await async_wait(self._stopped, retries.delay(failures, clock.random()))
                failures += 1

    async def stop(self) -> None:
        """Let `work` end, from another task: at once if it waits, else after its handler."""
        self._stopped.set()
        if self._waiting is not None:
            await self._waiting.close()

    async def _handle(self, handler: Handler, wake: AsyncWake) -> None:
        async with wake:
            await async_call(lambda: handler(wake))

    async def _next_event(self, announced: AsyncStream, place: str) -> bool:
        """Wait until a wake of this subscription is announced, or for a while; whether one was."""
        reading = announced.follow(offset=place, timeout=LOOK_SECONDS)
        self._waiting = reading
        try:
            # Looked at again: `stop` may have been called before it could find the reading.
            while not self._stopped.is_set():
                async for event in reading:
                    if isinstance(event, dict) and event.get("subscription_id") == self.id:
                        return True
                break
            return False
        finally:
            self._waiting = None
            await reading.close()


def _delivered(driver: AsyncDriver, delivery: WebhookDelivery) -> AsyncWake:
    ticket = Ticket(
        name=delivery.subscription_id,
        wake_id=delivery.wake_id,
        generation=delivery.generation,
        token=delivery.callback_token,
        endpoint="callback",
    )
    return AsyncWake(driver, ticket, delivery.streams)
