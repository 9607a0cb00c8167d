"""A session with a mesh: sends pipelined over one connection, and deliveries of an inbox.

One task (in the sync client one thread) reads what the server says, and connects again when the
connection is lost. What the program sends and acknowledges is written by the program itself.

`import fencepost` does not load this module: the first session does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from fencepost.client import meshes, sessions
from fencepost.client.aio.connections import AsyncDriver, AsyncStop
from fencepost.client.background import AsyncBackground
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
from fencepost.client.websocket import Handshake, Incoming, text, upgrade_request
from fencepost.client.wires import AsyncWire
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


class AsyncPendingSend:
    """A send on its way. Await its `receipt`, or its `outcome` to see every answer."""

    def __init__(self, session: AsyncMeshSession, number: int, frame: bytes) -> None:
        self._session = session
        self._answered = asyncio.Event()
        self._outcome: SendOutcome | None = None
        self._failure: Exception | None = None
        self._number = number
        self.frame = frame

    @property
    def is_done(self) -> bool:
        """Whether its outcome is known."""
        return self._answered.is_set()

    async def outcome(self) -> SendOutcome:
        """The status and the body that answer it; raises when the session ends before."""
        await self._answered.wait()
        if self._failure is not None:
            raise self._failure
        assert self._outcome is not None
        return self._outcome

    async def receipt(self) -> SendReceipt:
        """Where it is stored; raises what the server refused it with.

        What the server cannot do now is sent again, as `retries` of the client say.
        """
        attempt = 0
        while True:
            outcome = await self.outcome()
            if outcome.status < 300:
                return msgspec.convert(outcome.body, SendReceipt)
            error = sessions.refusal(outcome)
            if outcome.status not in REPEATED or not await self._session.again(
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


class AsyncInboxDelivery:
    """Entries of an inbox. Those that are not acknowledged come again, in another session."""

    def __init__(
        self, session: AsyncMeshSession, link: AsyncLink, token: str, entries: list[GroupEvent]
    ) -> None:
        self._session = session
        self._link = link
        self._token = token
        self.entries = entries

    async def ack(self, at: int | None = None) -> bool:
        """Acknowledge everything up to the position `at`, or all of it and what came before.

        False: the connection was lost, or another session has the inbox; the entries may come
        again, there or here.
        """
        position = self.entries[-1].position if at is None else at
        return await self._session.acknowledge(self._link, self._token, position)


class AsyncLink:
    """One connection of a session."""

    def __init__(self, wire: AsyncWire, seconds: float, silence_seconds: float) -> None:
        self._wire = wire
        self._incoming = Incoming()
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._writing = asyncio.Lock()
        self._later: deque[bytes] = deque()
        self._messages: deque[bytes] = deque()
        self._refused: Refused | None = None
        self.is_lost = False

    def feed(self, data: bytes) -> None:
        """Take bytes that arrived."""
        self._messages.extend(self._incoming.feed(data))

    async def send(self, message: bytes) -> None:
        """Send a frame."""
        async with self._writing:
            await self._wire.send(text(message), b"", self._seconds)
            while self._later:
                await self._wire.send(self._later.popleft(), b"", self._seconds)

    async def answer(self, message: bytes) -> None:
        """Send a frame in answer to one of the server's, without waiting for a busy connection."""
        self._later.append(text(message))
        await self._flush()

    async def _flush(self) -> None:
        # The reader must not wait for a writer: that one may wait for what only the reader can do.
        while self._later and not self._writing.locked():
            async with self._writing:
                while self._later:
                    await self._wire.send(self._later.popleft(), b"", self._seconds)

    async def receive(self) -> bytes:
        """The next message; raises when the session or the connection has ended."""
        while not self._messages:
            closed = self._incoming.closed
            if closed is not None:
                await self._flush()
                self.is_lost = True
                if closed[0] == 1006:
                    raise ConnectionFailedError("the server closed the connection", sent=True)
                raise sessions.ended(*closed, self._refused).error()
            data = await self._wire.receive(self._silence_seconds)
            self._messages.extend(self._incoming.feed(data))
            if outgoing := self._incoming.outgoing():
                self._later.append(outgoing)
                await self._flush()
        return self._messages.popleft()

    def refused(self, frame: Refused) -> None:
        """Note what the server said before it closes."""
        self._refused = frame

    def interrupt(self) -> None:
        """End a wait for this connection."""
        self._wire.interrupt()

    async def hang_up(self) -> None:
        """Say that the client is done."""
        self._incoming.close()
        if outgoing := self._incoming.outgoing():
            self._later.append(outgoing)
            await self._flush()

    async def close(self) -> None:
        """Close the connection."""
        self.is_lost = True
        await self._wire.close()


class AsyncMeshSession:
    """A session with a mesh, made by `client.mesh(name).session()`; a context manager.

    Iterate over it for deliveries of the member's inbox, each to be acknowledged.
    """

    def __init__(
        self,
        driver: AsyncDriver,
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
        self._open: dict[int, AsyncPendingSend] = {}
        """What was sent and has no outcome yet, in the order of the sends."""
        self._acks: dict[int, AsyncPendingSend] = {}
        """The same of acks, which are not sent again: what they are about is delivered again."""
        self._deliveries: deque[AsyncInboxDelivery] = deque()
        self._moved = asyncio.Condition()
        """Guards what is open and delivered; told of every change of it."""
        self._link: AsyncLink | None = None
        self._failure: Exception | None = None
        self._stop: AsyncStop = driver.stop_of(None)
        self._background = AsyncBackground(self._run)
        self.supported: dict[str, Any] = {}
        """What the mesh offers: the params of each feature."""
        self.reconnects = 0
        """How often the connection was lost and made again."""

    async def open(self) -> Self:
        """Connect and negotiate. Raises what the server refuses it with."""
        link = await self._connect_within_retries()
        await self._adopt(link)
        await self._background.start()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._failure is None:
                await self.flush()
        finally:
            await self.close()

    # Sending

    async def send(
        self,
        to: str,
        body: Any,
        *,
        id: str | None = None,
        sender: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> AsyncPendingSend:
        """Send a message as `mesh.send` does, without waiting for its receipt.

        It waits only while as many sends are open as may be. When the connection is lost it is
        sent again, under the same id.
        """
        more = {"sender": sender, "priority": priority, "reply_to": reply_to, "meta": meta}
        return await self.send_fields(meshes.envelope(self._settings, to, body, id, more))

    async def send_fields(self, fields: Mapping[str, Any]) -> AsyncPendingSend:
        """Send a message given as the fields of a send; it must have a client_message_id."""
        return await self.send_encoded(bytes(encode_json(fields)))

    async def send_encoded(self, data: bytes) -> AsyncPendingSend:
        """Send a message that is the JSON of a send already, with its id in it."""
        number = next(self._numbers)
        pending = AsyncPendingSend(self, number, sessions.rendered(number, data))
        await self._post(pending)
        return pending

    async def _post(self, pending: AsyncPendingSend) -> None:
        async with self._moved:
            await self._moved.wait_for(self._has_room)
            self._raise_failure()
            self._open[pending.number] = pending
            link = self._link
        if link is not None:
            await self._write(link, pending.frame)

    def _has_room(self) -> bool:
        return len(self._open) < self._in_flight_max or self._failure is not None

    async def _write(self, link: AsyncLink, frame: bytes) -> bool:
        try:
            await link.send(frame)
        except ConnectionFailedError:
            # What reads from the connection notices too, connects again and sends what is open.
            link.interrupt()
            return False
        return True

    async def again(
        self, pending: AsyncPendingSend, attempt: int, after_seconds: float | None
    ) -> bool:
        """Send once more what the server could not take, later; false when retries are over."""
        retries = self._settings.retries
        if attempt + 1 >= retries.attempts_max:
            return False
        delay = retries.delay(attempt, self._settings.clock.random(), after_seconds)
        await self._stop.sleep(delay)
        pending.reopen()
        await self._post(pending)
        return True

    async def flush(self) -> None:
        """Return once every send has its outcome."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self._open or self._failure is not None)
            self._raise_failure()

    # Deliveries

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncInboxDelivery:
        async with self._moved:
            await self._moved.wait_for(lambda: self._deliveries or self._failure is not None)
            if self._deliveries:
                return self._deliveries.popleft()
            if isinstance(self._failure, ClientClosedError):
                raise StopAsyncIteration
            assert self._failure is not None
            raise self._failure

    async def acknowledge(self, link: AsyncLink, token: str, at: int) -> bool:
        """Acknowledge entries of a delivery; `AsyncInboxDelivery.ack` calls it."""
        number = next(self._numbers)
        pending = AsyncPendingSend(self, number, ack_frame(number, token, at))
        async with self._moved:
            if link is not self._link:
                return False
            self._acks[number] = pending
        await self._write(link, pending.frame)
        try:
            outcome = await pending.outcome()
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

    async def _run(self) -> None:
        """Read until the session is over; connect again whenever the connection is lost."""
        link = self._link
        try:
            while link is not None:
                try:
                    await self._read(link)
                except FencepostError as error:
                    await self._lose(link)
                    if self._stop.is_over():
                        break
                    if not self._reconnects or not sessions.is_passing(error):
                        raise
                    link = await self._reconnect()
        except Exception as error:
            await self._end(error)
        else:
            await self._end(ClientClosedError("the session was closed"))
        finally:
            if link is not None:
                await link.close()

    async def _read(self, link: AsyncLink) -> None:
        while True:
            frame = sessions.read_frame(await link.receive())
            match frame:
                case Answered(number, status, body):
                    outcome = SendOutcome(status=status, body=body or {})
                    async with self._moved:
                        pending = self._open.pop(number, None) or self._acks.pop(number, None)
                        self._moved.notify_all()
                    if pending is not None:
                        pending.settle(outcome)
                case Deliver(token, entries):
                    found = sessions.entries_of(entries)
                    async with self._moved:
                        self._deliveries.append(AsyncInboxDelivery(self, link, token, found))
                        self._moved.notify_all()
                case Ping():
                    await link.answer(pong_frame(frame))
                case Refused():
                    link.refused(frame)
                case _:
                    pass  # a pong, or a second welcome: nothing to do

    async def _lose(self, link: AsyncLink) -> None:
        """The connection is gone, and with it what was delivered and not acknowledged."""
        async with self._moved:
            self._link = None
            self._deliveries.clear()
            lost, self._acks = self._acks, {}
        for pending in lost.values():
            pending.settle(None, ConnectionFailedError("the connection was lost", sent=True))
        await link.close()

    async def _reconnect(self) -> AsyncLink | None:
        """A new connection, however long it takes; None: the session was closed meanwhile."""
        attempt = 0
        while True:
            delay = self._settings.retries.delay(attempt, self._settings.clock.random())
            await self._stop.sleep(delay)
            if self._stop.is_over():
                return None
            try:
                link = await self._connect()
            except FencepostError as error:
                if self._stop.is_over():
                    return None
                if not sessions.is_passing(error):
                    raise
                attempt += 1
            else:
                self.reconnects += 1
                await self._adopt(link)
                return link

    async def _adopt(self, link: AsyncLink) -> None:
        """Use a connection, and send what has no outcome yet."""
        async with self._moved:
            self._link = link
            waiting = list(self._open.values())
        for pending in waiting:
            if not await self._write(link, pending.frame):
                return

    async def _connect_within_retries(self) -> AsyncLink:
        retries, clock = self._settings.retries, self._settings.clock
        ends_ms = clock.monotonic_ms() + retries.seconds_max * 1000
        attempt = 0
        while True:
            try:
                return await self._connect()
            except FencepostError as error:
                delay = retries.delay(attempt, clock.random(), retry_after(error))
                attempt += 1
                late = clock.monotonic_ms() + delay * 1000 > ends_ms
                if not sessions.is_passing(error) or attempt >= retries.attempts_max or late:
                    raise
            await self._stop.sleep(delay)

    async def _connect(self) -> AsyncLink:
        """A connection on which the server has said welcome."""
        settings = self._settings
        key = base64.b64encode(settings.clock.token(16)).decode()
        asked = upgrade_request(mesh_target(self._mesh, "session"), key)
        request = await self._driver.run(dressed(settings, asked))
        wire = await AsyncWire.dial(settings.address, settings.timeouts)
        try:
            seconds = settings.timeouts.answer
            await wire.send(render_head(settings.address, request, 0), b"", seconds)
            handshake = Handshake(key)
            answer = None
            while answer is None:
                answer = handshake.feed(await wire.receive(seconds))
            if not isinstance(answer, bytes):
                outcome = sessions.answer_error(answer)
                raise outcome.locate("GET", request.target, outcome.status, answer.headers)
            link = AsyncLink(wire, seconds, settings.timeouts.live)
            self._stop.waits_for(link)
            if self._stop.is_over():
                raise ConnectionFailedError("the session was closed", final=True)
            if answer:
                link.feed(answer)
            await link.send(hello_frame(self._hello))
            await self._welcomed(link)
        except BaseException:
            wire.abort()
            raise
        return link

    async def _welcomed(self, link: AsyncLink) -> None:
        while True:
            frame = sessions.read_frame(await link.receive())
            match frame:
                case Welcome():
                    self.supported = sessions.check_welcome(frame, self._hello.wishes)
                    return
                case Refused():
                    link.refused(frame)
                case Ping():
                    await link.answer(pong_frame(frame))
                case _:
                    pass

    # The end

    async def close(self) -> None:
        """End the session. Sends without an outcome raise `ClientClosedError`."""
        link = self._link
        if link is not None and not link.is_lost:
            with contextlib.suppress(ConnectionFailedError):
                await link.hang_up()
        self._stop.set()
        await self._background.join()
        await self._end(ClientClosedError("the session was closed"))

    async def _end(self, failure: Exception) -> None:
        async with self._moved:
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
