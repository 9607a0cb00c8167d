"""The sync producer: a socket that never blocks around the state machine of `machine.py`.

It has no thread. It writes when it may and takes acknowledgements whenever it is called; `flush`,
`close` and a full queue wait for them. Threads that share it take turns: while one of them waits
for an acknowledgement, the others wait for their turn.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from fencepost.client.errors import (
    ConnectionFailedError,
    DeliveryTimeoutError,
    FencepostError,
    ProducerClosedError,
    ProtocolError,
)
from fencepost.client.http import ResponseParser
from fencepost.client.producer.deliveries import Delivery
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
from fencepost.client.sync.connections import Driver
from fencepost.client.wires import READ_BYTES, dial, ready


class IdempotentProducer(Counts[Delivery]):
    """Appends exactly once, in order, pipelined, through lost answers and restarts of the server.

    Made by `Stream.producer`. Threads may share it and take turns then. After a fork only the
    process that opened it may go on with it.
    """

    def __init__(
        self,
        driver: Driver,
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
        drive = self._drive
        self._driver = driver
        self._session: Session[Delivery] = Session(
            settings or driver.settings,
            path,
            content,
            producer_id,
            tuning,
            lambda now: Delivery(drive, json=content.json, now=now, known=content.is_known),
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
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        OPEN.add(self)

    def append(self, data: Any) -> Delivery:
        """Queue a message and return the batch it is in; waits only when the queue is full."""
        machine, turn = self._machine, self._turn
        turn.acquire()  # as `with` does, in half the time
        try:
            now = self._clock_ns() / 1e9
            batch = machine.append(data, now)
            if machine.pending_bytes > self._pending_bytes_max:
                self._drive(self._has_room, None)
            elif now >= self._next_poll or machine.can_send(now):
                self._step(now)
                self._next_poll = now + POLL_SECONDS
            return batch
        finally:
            turn.release()

    def flush(self, timeout: float | None = None) -> None:
        """Return once everything appended so far is stored; raise if something cannot be."""
        with self._turn:
            waited = self._machine.flush()
            if not self._drive(lambda: all(batch.settled for batch in waited), timeout):
                raise DeliveryTimeoutError("not everything is acknowledged yet")
            self._session.raise_failure()

    def close(self, timeout: float | None = None, *, stream: bool = False) -> None:
        """Flush, and take no more messages; with `stream`, close the stream with the last one.

        The stream is closed by the append of the last batch, in one step with it, or by a request
        of its own if everything was sent before.
        """
        with self._turn:
            self._close(timeout, stream=stream)

    def _close(self, timeout: float | None, *, stream: bool) -> None:
        if self._closed:
            if stream:
                self._driver.run(self._session.close_stream())
            return
        self._closed = True
        self._machine.close(self._session.now(), stream=stream)
        try:
            if not self._drive(lambda: not self._machine.busy, timeout):
                self._machine.abandon(ProducerClosedError("closed before it was acknowledged"))
                self._session.report()
        finally:
            self._hang_up()
        self._session.raise_news()
        if stream:
            self._driver.run(self._session.close_stream())

    def _leave(self, seconds: float) -> None:
        # A thread that was left behind may be in the middle of a wait.
        if self._turn.acquire(timeout=seconds):
            with contextlib.suppress(Exception):
                self.close(timeout=seconds)
            self._turn.release()

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
        # The messages before the exception are still delivered, but a failure of theirs must not
        # hide it.
        with contextlib.suppress(FencepostError):
            self.close()

    def _has_room(self) -> bool:
        return self._machine.pending_bytes <= self._pending_bytes_max

    def _drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Send and receive until `done`; false when time is up first."""
        ends = None if timeout is None else self._session.now() + timeout
        with self._turn:
            return self._driven(done, ends)

    def _driven(self, done: Callable[[], bool], ends: float | None) -> bool:
        now = self._session.now()
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
            except Exception as error:  # as in the async producer, a defect ends the session
                self._hang_up()
                machine.abandon(error)
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
            self._link = _Link(self._session.settings)
        except ConnectionFailedError as failure:
            self._machine.lost(failure, now)
            return
        except Exception as error:  # a token function of the user's may raise anything
            self._machine.abandon(error)
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


def _take_turns_anew() -> None:
    """A forked child has none of the threads that may have had their turn."""
    for producer in list(OPEN):
        if isinstance(producer, IdempotentProducer):
            producer._turn = threading.RLock()


os.register_at_fork(after_in_child=_take_turns_anew)


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
