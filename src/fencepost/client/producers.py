"""The idempotent producers: sockets around the state machine of `producing.py`.

The sync one has no thread. It writes when it may, without blocking, and takes acknowledgements
whenever it is called; `flush`, `close` and a full queue wait for them. The async one is driven by
its transport's callbacks and has one task of its own, which connects. Both send on one connection
and pipeline: the server answers in order and shares a commit among the requests it finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from fencepost.client.async_sockets import AsyncDriver
from fencepost.client.effects import Operation
from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    ProducerClosedError,
    ProtocolError,
)
from fencepost.client.handles import AsyncDelivery, Delivery
from fencepost.client.http import Address, Request, ResponseParser, render_head
from fencepost.client.operations import is_json, new_key, stream_target
from fencepost.client.producing import Machine, PendingBatch, ProducerSettings
from fencepost.client.results import Receipt
from fencepost.client.retry import dressed
from fencepost.client.settings import ClientSettings
from fencepost.client.sockets import READ_BYTES, SyncDriver, dial, ready

log = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
"""How often a producer that is called all the time looks for acknowledgements."""
YIELD_MESSAGES = 256
"""How many appends may go without giving the event loop a turn."""

OnAck = Callable[[Receipt], None]
OnError = Callable[[Exception, PendingBatch], None]
B = TypeVar("B", bound=PendingBatch)


class _Session(Generic[B]):
    """What both producers are made of: the machine, and how its batches look on the wire."""

    def __init__(
        self,
        settings: ClientSettings,
        path: str,
        content_type: str,
        producer_id: str,
        tuning: ProducerSettings,
        make_batch: Callable[[float], B],
        *,
        epoch: int | None,
        seq: int | None,
        on_ack: OnAck | None,
        on_error: OnError | None,
    ) -> None:
        clock = settings.clock
        self.settings = settings
        self.tuning = tuning
        self._request = Request(
            "POST",
            stream_target(path),
            (("Content-Type", content_type), ("Producer-Id", producer_id)),
        )
        self._template = b""
        self._on_ack = on_ack
        self._on_error = on_error
        self._raised = False
        self.machine: Machine[B] = Machine(
            tuning,
            make_batch,
            lambda: new_key(settings),
            clock.random,
            epoch=epoch,
            seq=seq,
        )

    def now(self) -> float:
        return self.settings.clock.monotonic_ns() / 1e9

    def dress(self) -> Operation[None]:
        """Ask for what every request carries, once for each connection."""
        request = yield from dressed(self.settings, self._request)
        # All but the lines that differ from batch to batch.
        self._template = render_head(self.settings.address, request, 0).partition(
            b"Content-Length:"
        )[0]

    def render(self, batch: PendingBatch) -> tuple[bytes, bytes]:
        """A batch as it goes on the wire: head and body."""
        assert batch.epoch is not None
        assert batch.seq is not None
        body = batch.body
        key = b"" if batch.key is None else b"Idempotency-Key: %b\r\n" % batch.key.encode()
        head = b"%bProducer-Epoch: %d\r\nProducer-Seq: %d\r\n%bContent-Length: %d\r\n\r\n" % (
            self._template,
            batch.epoch,
            batch.seq,
            key,
            len(body),
        )
        return head, body

    def report(self) -> list[B]:
        """Tell the user what was settled."""
        settled, self.machine.settled = self.machine.settled, []
        for batch in settled:
            try:
                if batch.receipt is not None:
                    if self._on_ack is not None:
                        self._on_ack(batch.receipt)
                elif self._on_error is not None:
                    assert batch.error is not None
                    self._on_error(batch.error, batch)
            except Exception:
                # A callback's failure must not lose the news of the batches after it.
                log.exception("a callback of the producer failed")
        return settled

    def raise_failure(self) -> None:
        """Say once that the session has ended."""
        if self.machine.failure is not None and not self._raised:
            self._raised = True
            raise self.machine.failure


class _Counts(Generic[B]):
    """What a producer shows of its session."""

    _session: _Session[B]

    @property
    def pending_count(self) -> int:
        """Messages that are not settled yet."""
        return self._session.machine.pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of them."""
        return self._session.machine.pending_bytes

    @property
    def in_flight_count(self) -> int:
        """Batches that were sent and are not settled."""
        return self._session.machine.in_flight

    @property
    def last_acked(self) -> Receipt | None:
        """The newest acknowledged batch: save its `epoch` and `seq` to go on from there."""
        return self._session.machine.last_acked


class IdempotentProducer(_Counts[Delivery]):
    """Appends exactly once, in order, pipelined, through lost answers and restarts of the server.

    Made by `Stream.producer`. Belongs to one thread at a time. After a fork only the process that
    opened it may go on with it.
    """

    def __init__(
        self,
        driver: SyncDriver,
        path: str,
        content_type: str,
        producer_id: str,
        tuning: ProducerSettings,
        *,
        epoch: int | None = None,
        seq: int | None = None,
        on_ack: OnAck | None = None,
        on_error: OnError | None = None,
    ) -> None:
        json = is_json(content_type)
        drive = self._drive
        self._driver = driver
        self._session: _Session[Delivery] = _Session(
            driver.settings,
            path,
            content_type,
            producer_id,
            tuning,
            lambda now: Delivery(drive, json=json, now=now),
            epoch=epoch,
            seq=seq,
            on_ack=on_ack,
            on_error=on_error,
        )
        self._machine = self._session.machine
        self._clock_ns = driver.settings.clock.monotonic_ns
        self._pending_bytes_max = tuning.pending_bytes_max
        self._link: _Link | None = None
        self._next_poll = 0.0
        self._pid = os.getpid()
        self._closed = False

    def append(self, data: Any) -> Delivery:
        """Queue a message and return the batch it is in; waits only when the queue is full."""
        machine = self._machine
        now = self._clock_ns() / 1e9
        batch = machine.append(data, now)
        if machine.pending_bytes > self._pending_bytes_max:
            self._drive(self._has_room, None)
        elif now >= self._next_poll or machine.can_send(now):
            self._step(now)
            self._next_poll = now + POLL_SECONDS
        return batch

    def flush(self, timeout: float | None = None) -> None:
        """Return once everything appended so far is stored; raise if something cannot be."""
        waited = self._machine.flush()
        if not self._drive(lambda: all(batch.settled for batch in waited), timeout):
            raise TimeoutError("not everything is acknowledged yet")
        self._session.raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Flush, and take no more messages."""
        if self._closed:
            return
        self._closed = True
        self._machine.close()
        try:
            if not self._drive(lambda: not self._machine.busy, timeout):
                self._machine.abandon(ProducerClosedError("closed before it was acknowledged"))
                self._session.report()
        finally:
            self._hang_up()
        self._session.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # What was appended before the exception is still wanted, but must not hide it.
        with contextlib.suppress(FencepostError):
            self.close()

    def _has_room(self) -> bool:
        return self._machine.pending_bytes <= self._pending_bytes_max

    def _drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Send and receive until `done`; false when time is up first."""
        now = self._session.now()
        ends = None if timeout is None else now + timeout
        while True:
            self._step(now)
            if done():
                return True
            if ends is not None and now >= ends:
                return False
            wakes = [at for at in (self._machine.wake_at(), ends) if at is not None]
            seconds = max(0.0, min(wakes) - self._session.now()) if wakes else None
            self._sleep(seconds)
            now = self._session.now()

    def _step(self, now: float) -> None:
        """Everything that can be done without waiting; connecting alone may take its time."""
        if self._pid != os.getpid():
            raise FencepostError("the producer was opened before a fork: open another one here")
        machine = self._machine
        if machine.wants_connection(now):
            self._connect()
            now = self._session.now()
        link = self._link
        if link is not None:
            try:
                self._receive(link, now)
                self._transmit(link, now)
            except (ConnectionFailedError, ProtocolError) as failure:
                self._lose(failure, now)
        machine.tick(now)
        if machine.drop:
            self._lose(ConnectionFailedError("the connection was given up", sent=True), now)
        if machine.settled:
            self._session.report()
        if machine.failure is not None and not machine.busy:
            self._hang_up()

    def _transmit(self, link: _Link, now: float) -> None:
        machine = self._machine
        while not link.unsent:
            batch = machine.next_send(now)
            if batch is None:
                return
            link.write(*self._session.render(batch))
        link.flush()

    def _receive(self, link: _Link, now: float) -> None:
        machine = self._machine
        while machine.in_flight and link.receive():
            done, link.parser.done = link.parser.done, []
            for response in done:
                machine.answered(response, now)
            if link.parser.closing and not machine.drop:
                raise ConnectionFailedError("the server closed the connection", sent=True)

    def _connect(self) -> None:
        now = self._session.now()
        try:
            self._driver.run(self._session.dress())
            self._link = _Link(self._driver.settings)
        except ConnectionFailedError as failure:
            self._machine.lost(failure, now)
            return
        self._machine.connected(self._session.now())

    def _lose(self, failure: Exception, now: float) -> None:
        self._hang_up()
        self._machine.lost(failure, now)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _sleep(self, seconds: float | None) -> None:
        if self._link is not None:
            self._link.wait(seconds)
        elif seconds:
            time.sleep(seconds)


class _Link:
    """One pipelined connection that never blocks."""

    def __init__(self, settings: ClientSettings) -> None:
        self._sock: socket.socket = dial(settings.address, settings.timeouts)
        self._sock.setblocking(False)
        self._waits_to_write = False
        self.parser = ResponseParser()
        self.unsent: list[memoryview] = []

    def write(self, head: bytes, body: bytes) -> None:
        """Send what the kernel takes, and keep the rest."""
        if len(body) < READ_BYTES:
            self.unsent.append(memoryview(head + body))
        else:
            self.unsent += (memoryview(head), memoryview(body))
        self.flush()

    def flush(self) -> None:
        """Send more of what is left."""
        while self.unsent:
            try:
                sent = self._sock.send(self.unsent[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise ConnectionFailedError(f"the connection broke: {error}", sent=True) from error
            if sent == len(self.unsent[0]):
                del self.unsent[0]
            else:
                self.unsent[0] = self.unsent[0][sent:]

    def receive(self) -> bool:
        """Take what has arrived; whether there was anything."""
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise ConnectionFailedError(f"the connection broke: {error}", sent=True) from error
        if not data:
            raise ConnectionFailedError("the server closed the connection", sent=True)
        self.parser.feed(data)
        return True

    def wait(self, seconds: float | None) -> None:
        """Wait until something can be read, or written if something is left to write."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return
        ready(self._sock, seconds, to_write=bool(self.unsent))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def __del__(self) -> None:
        # A producer that was forgotten hangs up; what it had not sent is lost with it.
        if hasattr(self, "_sock"):
            self.close()


class AsyncIdempotentProducer(_Counts[AsyncDelivery]):
    """Appends exactly once, in order, pipelined, through lost answers and restarts of the server.

    Made by `AsyncStream.producer`. Belongs to one event loop.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        path: str,
        content_type: str,
        producer_id: str,
        tuning: ProducerSettings,
        *,
        epoch: int | None = None,
        seq: int | None = None,
        on_ack: OnAck | None = None,
        on_error: OnError | None = None,
    ) -> None:
        json = is_json(content_type)
        self._driver = driver
        self._session: _Session[AsyncDelivery] = _Session(
            driver.settings,
            path,
            content_type,
            producer_id,
            tuning,
            lambda now: AsyncDelivery(json=json, now=now),
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
        self._closed = False

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
        async with asyncio.timeout(timeout):
            while not all(batch.settled for batch in waited):
                await self._change()
        self._session.raise_failure()

    async def close(self, timeout: float | None = None) -> None:
        """Flush, and take no more messages."""
        if self._closed:
            return
        self._closed = True
        self._machine.close()
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
        self._session.raise_failure()

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
        # Whoever cancels does not want to wait for the server. After any other exception what was
        # appended before it is still wanted, but must not hide it.
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
        at = None if self._connecting is not None else self._machine.wake_at()
        if at is not None:
            # Past times are met by an event that is on its way; asking again at once would spin.
            delay = max(at - now, POLL_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._step)

    async def _connect(self) -> None:
        address, timeouts = self._driver.settings.address, self._driver.settings.timeouts
        try:
            await self._driver.run(self._session.dress())
            async with asyncio.timeout(timeouts.connect):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: _AsyncLink(self, address),
                    address.host,
                    address.port,
                    ssl=address.ssl,
                )
        except OSError as error:  # TimeoutError is one of them
            self._machine.lost(
                ConnectionFailedError(f"cannot connect to {address.host}: {error}"),
                self._session.now(),
            )
        except FencepostError as error:
            self._machine.abandon(error)
        else:
            self._link = link
            self._machine.connected(self._session.now())
        self._connecting = None
        self._step()

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
            self._link.transport.abort()
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
            link.transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.gone.wait()


class _AsyncLink(asyncio.Protocol):
    """One pipelined connection on asyncio."""

    transport: asyncio.Transport

    def __init__(self, producer: AsyncIdempotentProducer, address: Address) -> None:
        self._producer = producer
        self._address = address
        self.parser = ResponseParser()
        self.full = False
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 20)

    def write(self, head: bytes, body: bytes) -> None:
        self.transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
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
        self._producer._step()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        reason = exc or "the server closed the connection"
        self._producer._broken(self, ConnectionFailedError(str(reason), sent=True))
