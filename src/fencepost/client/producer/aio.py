"""The async producer: a transport and its callbacks around the state machine of `machine.py`.

Acknowledgements are taken as they arrive. Connecting is the one thing that waits, in a task which
the producer owns and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.errors import (
    ConnectionFailedError,
    DeliveryTimeoutError,
    FencepostError,
    ProducerClosedError,
    ProtocolError,
)
from fencepost.client.http import ResponseParser
from fencepost.client.producer.deliveries import AsyncDelivery
from fencepost.client.producer.session import (
    OPEN,
    POLL_SECONDS,
    Content,
    Counts,
    OnAck,
    OnError,
    Session,
)
from fencepost.client.settings import ClientSettings, ProducerSettings
from fencepost.client.wires import async_target, unreachable

YIELD_MESSAGES = 256
"""How many appends may go without giving the event loop a turn."""


class AsyncIdempotentProducer(Counts[AsyncDelivery]):
    """Appends exactly once, in order, pipelined, through lost answers and restarts of the server.

    Made by `AsyncStream.producer`. Belongs to one event loop.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        path: str,
        content_type: str | None,
        producer_id: str,
        tuning: ProducerSettings,
        *,
        epoch: int | None = None,
        seq: int | None = None,
        on_ack: OnAck | None = None,
        on_error: OnError | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        content = Content(content_type)
        self._driver = driver
        self._session: Session[AsyncDelivery] = Session(
            settings or driver.settings,
            path,
            content,
            producer_id,
            tuning,
            lambda now: AsyncDelivery(json=content.json, now=now, known=content.is_known),
            epoch=epoch,
            seq=seq,
            on_ack=on_ack,
            on_error=on_error,
        )
        self._machine = self._session.machine
        self._clock_ns = driver.settings.clock.monotonic_ns
        self._link: _AsyncLink | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._moved = asyncio.Event()
        self._since_yield = 0
        self._pid = os.getpid()
        self._closed = False
        OPEN.add(self)

    async def append(self, data: Any) -> AsyncDelivery:
        """Queue a message and return the batch it is in; waits only when the queue is full."""
        machine = self._machine
        now = self._clock_ns() / 1e9
        batch = machine.append(data, now)
        if self._link is None or machine.can_send(now):
            self._step()
        self._since_yield += 1
        if machine.pending_bytes > self._session.tuning.pending_bytes_max:
            await self._wait_for_room()
        elif self._since_yield >= YIELD_MESSAGES:
            # A loop that only appends would otherwise never let an acknowledgement in.
            self._since_yield = 0
            await asyncio.sleep(0)
        return batch

    async def flush(self, timeout: float | None = None) -> None:
        """Return once everything appended so far is stored; raise if something cannot be."""
        waited = self._machine.flush()
        self._step()
        try:
            async with asyncio.timeout(timeout):
                while not all(batch.settled for batch in waited):
                    await self._change()
        except TimeoutError:
            raise DeliveryTimeoutError("not everything is acknowledged yet") from None
        self._session.raise_failure()

    async def close(self, timeout: float | None = None, *, stream: bool = False) -> None:
        """Flush, and take no more messages; with `stream`, close the stream with the last one.

        The stream is closed by the append of the last batch, in one step with it, or by a request
        of its own if everything was sent before.
        """
        if self._closed:
            if stream:
                await self._driver.run(self._session.close_stream())
            return
        self._closed = True
        self._machine.close(self._session.now(), stream=stream)
        try:
            self._step()
            async with asyncio.timeout(timeout):
                while self._machine.busy:
                    await self._change()
        except TimeoutError:
            pass
        finally:
            # Cancelled or out of time: what is not known is reported as such.
            if self._machine.busy:
                self._machine.abandon(ProducerClosedError("closed before it was acknowledged"))
            self._report()
            await self._end()
        self._session.raise_news()
        if stream:
            await self._driver.run(self._session.close_stream())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        # A program that cancels does not want to wait for the server. After any other exception the
        # messages before it are still delivered, but a failure of theirs must not hide it.
        cancelled = isinstance(error, asyncio.CancelledError)
        with contextlib.suppress(FencepostError):
            await self.close(timeout=0 if cancelled else None)

    async def _wait_for_room(self) -> None:
        limit = self._session.tuning.pending_bytes_max
        while self._machine.pending_bytes > limit:
            await self._change()

    async def _change(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _step(self) -> None:
        """Everything that can be done without waiting."""
        now = self._session.now()
        machine = self._machine
        machine.tick(now)
        if machine.drop:
            self._lose(ConnectionFailedError("the connection was given up", sent=True))
        link = self._link
        if link is not None:
            while not link.full:
                batch = machine.next_send(now)
                if batch is None:
                    break
                link.write(*self._session.render(batch))
        elif self._connecting is None and machine.wants_connection(now):
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        if self._connecting is not None and machine.failure is not None:
            self._connecting.cancel()
        self._report()
        self._set_timer(now)

    def _report(self) -> None:
        if self._machine.settled:
            for batch in self._session.report():
                batch.wake()
            self._moved.set()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        machine = self._machine
        # While a connection is being made only the deadline counts: there is nothing to send on.
        at = machine.wake_at() if self._connecting is None else machine.gives_up_at()
        if at is not None:
            # Past times are met by an event that is on its way; asking again at once would spin.
            delay = max(at - now, POLL_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._guarded, self._step)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call what the event loop asks for; an unexpected exception ends the producer with it.

        The loop would only log it, and a program that waits for `flush` would wait for ever.
        """
        try:
            act()
        except Exception as error:
            self._machine.abandon(error)
            if self._link is not None:
                self._link.abort()
                self._link = None
            self._report()

    async def _connect(self) -> None:
        address, timeouts = self._session.settings.address, self._session.settings.timeouts
        link: _AsyncLink | None = None
        try:
            await self._driver.run(self._session.dress())
            async with asyncio.timeout(timeouts.connect):
                target = await async_target(address)
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: _AsyncLink(self), **target, ssl=address.ssl
                )
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            self._machine.lost(unreachable(address, error), self._session.now())
        except ConnectionFailedError as failure:
            self._machine.lost(failure, self._session.now())
        except Exception as error:  # a token function of the user's may raise anything
            self._machine.abandon(error)
        finally:
            self._connecting = None
        if link is not None and self._machine.failure is None:
            self._link = link
            self._machine.connected(self._session.now())
        elif link is not None:
            link.abort()
        self._guarded(self._step)

    def _answered(self, link: _AsyncLink) -> None:
        done, link.parser.done = link.parser.done, []
        now = self._session.now()
        for response in done:
            self._machine.answered(response, now)
        if link.parser.closing:
            self._lose(ConnectionFailedError("the server closed the connection", sent=True))
        self._step()

    def _broken(self, link: _AsyncLink, failure: Exception) -> None:
        if link is self._link:
            self._lose(failure)
            self._step()

    def _lose(self, failure: Exception) -> None:
        if self._link is not None:
            self._link.abort()
            self._link = None
        self._machine.lost(failure, self._session.now())

    async def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._link is not None:
            link, self._link = self._link, None
            link.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.gone.wait()


class _AsyncLink(asyncio.Protocol):
    """One pipelined connection on asyncio."""

    def __init__(self, producer: AsyncIdempotentProducer) -> None:
        self._producer = producer
        self.parser = ResponseParser()
        self.full = False
        self.gone = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of other loops (uvloop's) have its methods, but are not of its class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 20)

    def write(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._transport.writelines((head, body))

    def abort(self) -> None:
        """Close the connection, and drop what was not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection once everything was sent."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._producer._guarded(lambda: self._take(data))

    def _take(self, data: bytes) -> None:
        try:
            self.parser.feed(data)
        except ProtocolError as error:
            self._producer._broken(self, error)
            return
        if self.parser.done:
            self._producer._answered(self)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._producer._guarded(self._producer._step)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        failure = ConnectionFailedError(str(exc or "the server closed the connection"), sent=True)
        self._producer._guarded(lambda: self._producer._broken(self, failure))
