# Generated from src/fencepost/client/aio/sessions.py by `just twins`: change that file.
"""A session with a mesh: sends pipelined over one connection, and deliveries of an inbox.

One task (in the sync client one thread) reads what the server says, and connects again when the
connection is lost. What the program sends and acknowledges is written by the program itself.

`import fencepost` does not load this module: the first session does.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from fencepost.client import meshes, sessions
from fencepost.client.background import Background
from fencepost.client.errors import (
    ClientClosedError,
    ConnectionFailedError,
    FencepostError,
    SessionClosedError,
)
from fencepost.client.groups import GroupEvent
from fencepost.client.http import render_head
from fencepost.client.meshes import SendOutcome, SendReceipt, mesh_target
from fencepost.client.operations import encode_json
from fencepost.client.retry import REPEATED, dressed, retry_after
from fencepost.client.sync.connections import Driver, Stop
from fencepost.client.websocket import Handshake, Incoming, text, upgrade_request
from fencepost.client.wires import Wire
from fencepost.protocol.sessions import (
    Answered,
    Deliver,
    Hello,
    Ping,
    Refused,
    Welcome,
    ack_frame,
    hello_frame,
    pong_frame,
)


class PendingSend:
    """A send on its way. Await its `receipt`, or its `outcome` to see every answer."""

    def __init__(self, session: MeshSession, number: int, frame: bytes) -> None:
        self._session = session
        self._answered = threading.Event()
        self._outcome: SendOutcome | None = None
        self._failure: Exception | None = None
        self._number = number
        self.frame = frame

    @property
    def is_done(self) -> bool:
        """Whether its outcome is known."""
        return self._answered.is_set()

    def outcome(self) -> SendOutcome:
        """The status and the body that answer it; raises when the session ends before."""
        self._answered.wait()
        if self._failure is not None:
            raise self._failure
        assert self._outcome is not None
        return self._outcome

    def receipt(self) -> SendReceipt:
        """Where it is stored; raises what the server refused it with.

        What the server cannot do now is sent again, as `retries` of the client say.
        """
        attempt = 0
        while True:
            outcome = self.outcome()
            if outcome.status < 300:
                return msgspec.convert(outcome.body, SendReceipt)
            error = sessions.refusal(outcome)
            if outcome.status not in REPEATED or not self._session.again(
                self, attempt, retry_after(error)
            ):
                raise error
            attempt += 1

    def settle(self, outcome: SendOutcome | None, failure: Exception | None = None) -> None:
        """The outcome is known, or that there will be none; for the session."""
        self._outcome, self._failure = outcome, failure
        self._answered.set()

    def reopen(self) -> None:
        """It is sent again; for the session."""
        self._answered.clear()

    @property
    def number(self) -> int:
        """The id of its frame."""
        return self._number


class InboxDelivery:
    """Entries of an inbox. Those that are not acknowledged come again, in another session."""

    def __init__(
        self, session: MeshSession, link: Link, token: str, entries: list[GroupEvent]
    ) -> None:
        self._session = session
        self._link = link
        self._token = token
        self.entries = entries

    def ack(self, at: int | None = None) -> bool:
        """Acknowledge everything up to the position `at`, or all of it and what came before.

        False: the connection was lost, or another session has the inbox; the entries may come
        again, there or here.
        """
        position = self.entries[-1].position if at is None else at
        return self._session.acknowledge(self._link, self._token, position)


class Link:
    """One connection of a session."""

    def __init__(self, wire: Wire, seconds: float, silence_seconds: float) -> None:
        self._wire = wire
        self._incoming = Incoming()
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._writing = threading.Lock()
        self._later: deque[bytes] = deque()
        self._messages: deque[bytes] = deque()
        self._refused: Refused | None = None
        self.is_lost = False

    def feed(self, data: bytes) -> None:
        """Take bytes that arrived."""
        self._messages.extend(self._incoming.feed(data))

    def send(self, message: bytes) -> None:
        """Send a frame."""
        with self._writing:
            self._wire.send(text(message), b"", self._seconds)
            while self._later:
                self._wire.send(self._later.popleft(), b"", self._seconds)

    def answer(self, message: bytes) -> None:
        """Send a frame in answer to one of the server's, without waiting for a busy connection."""
        self._later.append(text(message))
        self._flush()

    def _flush(self) -> None:
        # The reader must not wait for a writer: that one may wait for what only the reader can do.
        while self._later and not self._writing.locked():
            with self._writing:
                while self._later:
                    self._wire.send(self._later.popleft(), b"", self._seconds)

    def receive(self) -> bytes:
        """The next message; raises when the session or the connection has ended."""
        while not self._messages:
            closed = self._incoming.closed
            if closed is not None:
                self._flush()
                self.is_lost = True
                if closed[0] == 1006:
                    raise ConnectionFailedError("the server closed the connection", sent=True)
                raise sessions.ended(*closed, self._refused).error()
            data = self._wire.receive(self._silence_seconds)
            self._messages.extend(self._incoming.feed(data))
            if outgoing := self._incoming.outgoing():
                self._later.append(outgoing)
                self._flush()
        return self._messages.popleft()

    def refused(self, frame: Refused) -> None:
        """Note what the server said before it closes."""
        self._refused = frame

    def interrupt(self) -> None:
        """End a wait for this connection."""
        self._wire.interrupt()

    def hang_up(self) -> None:
        """Say that the client is done."""
        self._incoming.close()
        if outgoing := self._incoming.outgoing():
            self._later.append(outgoing)
            self._flush()

    def close(self) -> None:
        """Close the connection."""
        self.is_lost = True
        self._wire.close()


class MeshSession:
    """A session with a mesh, made by `client.mesh(name).session()`; a context manager.

    Iterate over it for deliveries of the member's inbox, each to be acknowledged.
    """

    def __init__(
        self,
        driver: Driver,
        mesh: str,
        hello: Hello,
        *,
        in_flight_max: int,
        reconnect: bool = True,
    ) -> None:
        self._driver = driver
        self._mesh = mesh
        self._hello = hello
        self._in_flight_max = in_flight_max
        self._reconnects = reconnect
        self._settings = driver.settings
        self._numbers = itertools.count(1)
        self._open: dict[int, PendingSend] = {}
        """What was sent and has no outcome yet, in the order of the sends."""
        self._acks: dict[int, PendingSend] = {}
        """The same of acks, which are not sent again: what they are about is delivered again."""
        self._deliveries: deque[InboxDelivery] = deque()
        self._moved = threading.Condition()
        """Guards what is open and delivered; told of every change of it."""
        self._link: Link | None = None
        self._failure: Exception | None = None
        self._stop: Stop = driver.stop_of(None)
        self._background = Background(self._run)
        self.supported: dict[str, Any] = {}
        """What the mesh offers: the params of each feature."""
        self.reconnects = 0
        """How often the connection was lost and made again."""

    def open(self) -> Self:
        """Connect and negotiate. Raises what the server refuses it with."""
        link = self._connect_within_retries()
        self._adopt(link)
        self._background.start()
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._failure is None:
                self.flush()
        finally:
            self.close()

    # Sending

    def send(
        self,
        to: str,
        body: Any,
        *,
        id: str | None = None,
        sender: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> PendingSend:
        """Send a message as `mesh.send` does, without waiting for its receipt.

        It waits only while as many sends are open as may be. When the connection is lost it is
        sent again, under the same id.
        """
        more = {"sender": sender, "priority": priority, "reply_to": reply_to, "meta": meta}
        return self.send_fields(meshes.envelope(self._settings, to, body, id, more))

    def send_fields(self, fields: Mapping[str, Any]) -> PendingSend:
        """Send a message given as the fields of a send; it must have a client_message_id."""
        return self.send_encoded(bytes(encode_json(fields)))

    def send_encoded(self, data: bytes) -> PendingSend:
        """Send a message that is the JSON of a send already, with its id in it."""
        number = next(self._numbers)
        pending = PendingSend(self, number, sessions.rendered(number, data))
        self._post(pending)
        return pending

    def _post(self, pending: PendingSend) -> None:
        with self._moved:
            self._moved.wait_for(self._has_room)
            self._raise_failure()
            self._open[pending.number] = pending
            link = self._link
        if link is not None:
            self._write(link, pending.frame)

    def _has_room(self) -> bool:
        return len(self._open) < self._in_flight_max or self._failure is not None

    def _write(self, link: Link, frame: bytes) -> bool:
        try:
            link.send(frame)
        except ConnectionFailedError:
            # What reads from the connection notices too, connects again and sends what is open.
            link.interrupt()
            return False
        return True

    def again(self, pending: PendingSend, attempt: int, after_seconds: float | None) -> bool:
        """Send once more what the server could not take, later; false when retries are over."""
        retries = self._settings.retries
        if attempt + 1 >= retries.attempts_max:
            return False
        delay = retries.delay(attempt, self._settings.clock.random(), after_seconds)
        self._stop.sleep(delay)
        pending.reopen()
        self._post(pending)
        return True

    def flush(self) -> None:
        """Return once every send has its outcome."""
        with self._moved:
            self._moved.wait_for(lambda: not self._open or self._failure is not None)
            self._raise_failure()

    # Deliveries

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InboxDelivery:
        with self._moved:
            self._moved.wait_for(lambda: self._deliveries or self._failure is not None)
            if self._deliveries:
                return self._deliveries.popleft()
            if isinstance(self._failure, ClientClosedError):
                raise StopIteration
            assert self._failure is not None
            raise self._failure

    def acknowledge(self, link: Link, token: str, at: int) -> bool:
        """Acknowledge entries of a delivery; `InboxDelivery.ack` calls it."""
        number = next(self._numbers)
        pending = PendingSend(self, number, ack_frame(number, token, at))
        with self._moved:
            if link is not self._link:
                return False
            self._acks[number] = pending
        self._write(link, pending.frame)
        try:
            outcome = pending.outcome()
        except (ConnectionFailedError, SessionClosedError, ClientClosedError):
            return False
        if outcome.status == 200:
            self._hello = self._hello._replace(after=_later(self._hello.after, at))
            return True
        if outcome.status in (409, 503):
            return False
        raise sessions.refusal(outcome)

    @property
    def position(self) -> int | None:
        """The position up to which the inbox is acknowledged in this session; None: none yet."""
        return self._hello.after

    # The connection

    def _run(self) -> None:
        """Read until the session is over; connect again whenever the connection is lost."""
        link = self._link
        try:
            while link is not None:
                try:
                    self._read(link)
                except FencepostError as error:
                    self._lose(link)
                    if self._stop.is_over():
                        break
                    if not self._reconnects or not sessions.is_passing(error):
                        raise
                    link = self._reconnect()
        except Exception as error:
            self._end(error)
        else:
            self._end(ClientClosedError("the session was closed"))
        finally:
            if link is not None:
                link.close()

    def _read(self, link: Link) -> None:
        while True:
            frame = sessions.read_frame(link.receive())
            match frame:
                case Answered(number, status, body):
                    outcome = SendOutcome(status=status, body=body or {})
                    with self._moved:
                        pending = self._open.pop(number, None) or self._acks.pop(number, None)
                        self._moved.notify_all()
                    if pending is not None:
                        pending.settle(outcome)
                case Deliver(token, entries):
                    found = sessions.entries_of(entries)
                    with self._moved:
                        self._deliveries.append(InboxDelivery(self, link, token, found))
                        self._moved.notify_all()
                case Ping():
                    link.answer(pong_frame(frame))
                case Refused():
                    link.refused(frame)
                case _:
                    pass  # a pong, or a second welcome: nothing to do

    def _lose(self, link: Link) -> None:
        """The connection is gone, and with it what was delivered and not acknowledged."""
        with self._moved:
            self._link = None
            self._deliveries.clear()
            lost, self._acks = self._acks, {}
        for pending in lost.values():
            pending.settle(None, ConnectionFailedError("the connection was lost", sent=True))
        link.close()

    def _reconnect(self) -> Link | None:
        """A new connection, however long it takes; None: the session was closed meanwhile."""
        attempt = 0
        while True:
            delay = self._settings.retries.delay(attempt, self._settings.clock.random())
            self._stop.sleep(delay)
            if self._stop.is_over():
                return None
            try:
                link = self._connect()
            except FencepostError as error:
                if self._stop.is_over():
                    return None
                if not sessions.is_passing(error):
                    raise
                attempt += 1
            else:
                self.reconnects += 1
                self._adopt(link)
                return link

    def _adopt(self, link: Link) -> None:
        """Use a connection, and send what has no outcome yet."""
        with self._moved:
            self._link = link
            waiting = list(self._open.values())
        for pending in waiting:
            if not self._write(link, pending.frame):
                return

    def _connect_within_retries(self) -> Link:
        retries, clock = self._settings.retries, self._settings.clock
        ends_ms = clock.monotonic_ms() + retries.seconds_max * 1000
        attempt = 0
        while True:
            try:
                return self._connect()
            except FencepostError as error:
                delay = retries.delay(attempt, clock.random(), retry_after(error))
                attempt += 1
                late = clock.monotonic_ms() + delay * 1000 > ends_ms
                if not sessions.is_passing(error) or attempt >= retries.attempts_max or late:
                    raise
            self._stop.sleep(delay)

    def _connect(self) -> Link:
        """A connection on which the server has said welcome."""
        settings = self._settings
        key = base64.b64encode(settings.clock.token(16)).decode()
        asked = upgrade_request(mesh_target(self._mesh, "session"), key)
        request = self._driver.run(dressed(settings, asked))
        wire = Wire.dial(settings.address, settings.timeouts)
        try:
            seconds = settings.timeouts.answer
            wire.send(render_head(settings.address, request, 0), b"", seconds)
            handshake = Handshake(key)
            answer = None
            while answer is None:
                answer = handshake.feed(wire.receive(seconds))
            if not isinstance(answer, bytes):
                outcome = sessions.answer_error(answer)
                raise outcome.locate("GET", request.target, outcome.status, answer.headers)
            link = Link(wire, seconds, settings.timeouts.live)
            self._stop.waits_for(link)
            if self._stop.is_over():
                raise ConnectionFailedError("the session was closed", final=True)
            if answer:
                link.feed(answer)
            link.send(hello_frame(self._hello))
            self._welcomed(link)
        except BaseException:
            wire.abort()
            raise
        return link

    def _welcomed(self, link: Link) -> None:
        while True:
            frame = sessions.read_frame(link.receive())
            match frame:
                case Welcome():
                    self.supported = sessions.check_welcome(frame, self._hello.wishes)
                    return
                case Refused():
                    link.refused(frame)
                case Ping():
                    link.answer(pong_frame(frame))
                case _:
                    pass

    # The end

    def close(self) -> None:
        """End the session. Sends without an outcome raise `ClientClosedError`."""
        link = self._link
        if link is not None and not link.is_lost:
            with contextlib.suppress(ConnectionFailedError):
                link.hang_up()
        self._stop.set()
        self._background.join()
        self._end(ClientClosedError("the session was closed"))

    def _end(self, failure: Exception) -> None:
        with self._moved:
            if self._failure is None:
                self._failure = failure
            left = [*self._open.values(), *self._acks.values()]
            self._open.clear()
            self._acks.clear()
            self._moved.notify_all()
        for pending in left:
            pending.settle(None, self._failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _later(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)
