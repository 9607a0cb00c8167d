"""WebSockets for the front end: the frames, and one upgraded connection.

The frames are those of `websockets`, whose protocol object does no I/O (ADR 0021). `Frames` puts
messages together and bounds them; `WebSocket` carries them between a transport and a receiver.
Text only, no compression, no subprotocols. `upgrade.py` has the request that begins one.

Every direction is bounded. A message has a largest size and a largest number of fragments. A
client that does not read what is sent to it is no longer read either, and is cut off when too
much waits for it. A receiver that is busy calls `pause`; what was read already waits here, and the
socket is left alone. A close that the client does not answer ends after a while.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol as SansIo
from websockets.protocol import Side, State

from fencepost.http.settings import WebSocketSettings

_SLICE_BYTES = 4 * 1024
"""Frames are parsed in slices. One of them holds some hundred frames at most: milliseconds."""
_TURN_FRAMES_MAX = 256
"""After so many frames of one connection the others have their turn."""
REASON_BYTES_MAX = 123

# The library tells of every connection that ends; the front end counts them.
_quiet = logging.getLogger("fencepost.http.websocket")
_quiet.setLevel(logging.WARNING)


DEFAULT_SETTINGS = WebSocketSettings()


# The frames.


class Closed(NamedTuple):
    """The connection is closing: which side began that, with which code; 1006: neither."""

    code: int
    reason: str


class Frames:
    """Messages out of bytes and bytes out of messages, for the server's side of a connection."""

    __slots__ = ("_closed", "_fragments", "_parts", "_protocol", "_settings", "count")

    def __init__(self, settings: WebSocketSettings = DEFAULT_SETTINGS) -> None:
        self._settings = settings
        self._protocol = SansIo(
            Side.SERVER, state=State.OPEN, max_size=settings.message_bytes_max, logger=_quiet
        )
        self._parts: list[bytes] = []
        self._fragments = 0
        self._closed: Closed | None = None
        self.count = 0
        """Frames that came, control frames included."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent: neither side has said that it closes."""
        return self._protocol.state is State.OPEN

    @property
    def closed(self) -> Closed | None:
        """Why the connection is closing; None while it is open."""
        if self._closed is None and self._protocol.state is not State.OPEN:
            protocol = self._protocol
            first = protocol.close_sent
            if first is None or (protocol.close_rcvd and protocol.close_rcvd_then_sent):
                first = protocol.close_rcvd
            self._closed = Closed(1006, "") if first is None else Closed(first.code, first.reason)
        return self._closed

    @property
    def held_bytes(self) -> int:
        """What is here of a message that is not whole yet."""
        return len(self._protocol.reader.buffer) + sum(map(len, self._parts))

    def receive(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that are complete with `data`; none after the connection began to close."""
        self._protocol.receive_data(bytes(data))
        messages: list[bytes] = []
        events = self._protocol.events_received()
        self.count += len(events)
        for event in events:
            assert isinstance(event, Frame), "the handshake is not the library's here"
            if not self._take(event, messages):
                break
        return messages

    def _take(self, frame: Frame, messages: list[bytes]) -> bool:
        opcode = frame.opcode
        if opcode is Opcode.BINARY:
            return self._fail(1003, "messages are text")
        if opcode is not Opcode.TEXT and opcode is not Opcode.CONT:
            return True  # pings were answered by the library
        if not frame.fin or self._fragments:
            self._fragments += 1
            if self._fragments > self._settings.fragments_max:
                return self._fail(1008, "a message has too many fragments")
            self._parts.append(bytes(frame.data))
            if not frame.fin:
                return True
            message = b"".join(self._parts)
            self._parts.clear()
            self._fragments = 0
        else:
            message = bytes(frame.data)
        # The library leaves this to its users.
        if not message.isascii():
            try:
                message.decode()
            except UnicodeDecodeError as error:
                return self._fail(1007, f"a message is not UTF-8: {error.reason}")
        messages.append(message)
        return True

    def _fail(self, code: int, reason: str) -> bool:
        # In one piece of data a close may have come behind what is wrong.
        if not self._protocol.eof_sent:
            self._protocol.fail(code, reason)
        return False

    def receive_eof(self) -> None:
        """The client will send nothing more."""
        self._protocol.receive_eof()

    def send(self, message: bytes) -> None:
        """Put a text message into the outgoing bytes."""
        self._protocol.send_text(message)

    def close(self, code: int, reason: bytes = b"") -> None:
        """Begin to close. A reason that is too long is cut between two characters."""
        if self.is_open:
            text = reason[:REASON_BYTES_MAX].decode(errors="ignore")
            self._protocol.send_close(code, text)

    def outgoing(self) -> tuple[list[bytes], bool]:
        """The bytes to write now, and whether to end the connection behind them."""
        pieces = self._protocol.data_to_send()
        ends = bool(pieces) and not pieces[-1]
        return pieces[:-1] if ends else pieces, ends


# The connection.


class Transport(Protocol):
    """What a WebSocket needs of a transport of asyncio."""

    def writelines(self, pieces: list[bytes], /) -> None: ...
    def write_eof(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class Receiver(Protocol):
    """The application's end of a WebSocket. None of these may raise."""

    def received(self, message: bytes) -> None:
        """A message came. `WebSocket.pause` keeps the next ones back."""
        ...

    def writable(self) -> None:
        """The client has read enough that more may be sent."""
        ...

    def draining(self) -> None:
        """The server stops: finish what is under way, then close."""
        ...

    def closed(self, closed: Closed) -> None:
        """The connection is over, or about to be; called once, and nothing comes after it."""
        ...


class WebSocket:
    """One upgraded connection: made when the 101 has been written.

    The methods in the first part are for the receiver, those in the second for the connection that
    owns the socket. `call_soon` is the event loop's.
    """

    __slots__ = (
        "_call_soon",
        "_close_until_seconds",
        "_feeding",
        "_frames",
        "_gone",
        "_half_closed",
        "_held",
        "_messages",
        "_paused",
        "_reading_paused",
        "_receiver",
        "_settings",
        "_silent",
        "_told",
        "_transport",
        "_turn_planned",
        "bytes_out",
        "writing_paused",
    )

    def __init__(
        self,
        transport: Transport,
        call_soon: Callable[[Callable[[], None]], object],
        settings: WebSocketSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._transport = transport
        self._call_soon = call_soon
        self._settings = settings
        self._frames = Frames(settings)
        self._receiver: Receiver | None = None
        self._held = b""  # came from the socket and is not parsed yet
        self._messages: deque[bytes] = deque()  # parsed and not handed over yet
        self._feeding = False
        self._turn_planned = False
        self._paused = False  # by the receiver
        self._reading_paused = False  # the socket
        self._silent = False  # the receiver closed: it gets no more messages
        self._half_closed = False  # we send nothing more
        self._gone = False
        self._told = False
        self._close_until_seconds: float | None = None
        self.writing_paused = False
        self.bytes_out = 0

    # For the receiver.

    def open(self, receiver: Receiver, data: bytes = b"") -> None:
        """Begin. `data` came behind the request for the upgrade."""
        assert self._receiver is None, "a connection has one receiver"
        self._receiver = receiver
        if data:
            self.data_received(data)

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._frames.is_open and not self._gone

    def send(self, message: bytes) -> bool:
        """Send a text message; False when the connection is closing and it was dropped."""
        if not self.is_open:
            return False
        self._frames.send(message)
        self._write()
        if self._transport.get_write_buffer_size() > self._settings.outgoing_bytes_max:
            self.abort()
            return False
        return True

    def close(self, code: int, reason: bytes = b"") -> None:
        """Begin to close: nothing is sent or handed over after this."""
        self._frames.close(code, reason)
        self._silent = True
        # The client's close must be read, whatever the receiver had to do before.
        self._paused = False
        self._write()
        self._go_on()

    def pause(self) -> None:
        """Keep messages back until `resume`."""
        self._paused = True
        self._follow()

    def resume(self) -> None:
        """Go on with messages, those that were kept back first."""
        self._paused = False
        self._go_on()

    # For the connection.

    def data_received(self, data: bytes) -> None:
        """Bytes came from the client."""
        if not self._gone:
            self._held = self._held + data if self._held else data
            self._go_on()

    def eof_received(self) -> None:
        """The client closed its side: the socket is closed by its transport after this."""
        self._held = b""
        self._frames.receive_eof()
        self._write()
        self._tell()

    def pause_writing(self) -> None:
        """The client does not read: it is no longer read either."""
        self.writing_paused = True
        self._follow()

    def resume_writing(self) -> None:
        """The client has read what waited for it."""
        self.writing_paused = False
        if self._receiver is not None and self.is_open:
            self._receiver.writable()
        self._go_on()

    @property
    def held_bytes(self) -> int:
        """What came and has not been handed over."""
        return len(self._held) + sum(map(len, self._messages)) + self._frames.held_bytes

    def begin_drain(self) -> None:
        """The server stops."""
        if self._receiver is not None and self.is_open:
            self._receiver.draining()

    def sweep(self, now_seconds: float) -> None:
        """End a close that the client does not answer; called a few times a second."""
        if self._frames.is_open or self._gone:
            return
        if self._close_until_seconds is None:
            self._close_until_seconds = now_seconds + self._settings.close_seconds
        elif now_seconds >= self._close_until_seconds:
            self.abort()

    def connection_lost(self) -> None:
        """The socket is gone."""
        self._gone = True
        self._held = b""
        self._messages.clear()
        self._tell()

    def abort(self) -> None:
        """Cut the connection now."""
        self._gone = True
        self._held = b""
        self._messages.clear()
        self._transport.abort()

    # Inside.

    def _go_on(self) -> None:
        """Parse and hand over what is here, as long as there is room for what comes of it."""
        if self._feeding or self._turn_planned:
            return
        self._feeding = True
        try:
            self._feed()
        finally:
            self._feeding = False
        self._follow()
        self._tell()

    def _feed(self) -> None:
        data, at = memoryview(self._held), 0
        last = self._frames.count + _TURN_FRAMES_MAX
        handed_over = 0
        while self._has_room():
            if self._frames.count >= last or handed_over >= _TURN_FRAMES_MAX:
                self._turn_planned = True
                self._call_soon(self._next_turn)
                break
            if self._messages:
                self._hand_over(self._messages.popleft())
                handed_over += 1
            elif at < len(data):
                self._messages.extend(self._frames.receive(data[at : at + _SLICE_BYTES]))
                at += _SLICE_BYTES
                self._write()
            else:
                break
        if not self._gone:
            self._held = bytes(data[at:])

    def _next_turn(self) -> None:
        self._turn_planned = False
        self._go_on()

    def _has_room(self) -> bool:
        return not (self._paused or self.writing_paused or self._gone)

    def _hand_over(self, message: bytes) -> None:
        assert self._receiver is not None, "bytes come after `open`"
        if not self._silent:
            self._receiver.received(message)

    def _follow(self) -> None:
        """Read from the socket exactly while there is room for what comes."""
        wanted = not self._has_room() or bool(self._held) or bool(self._messages)
        if self._gone or wanted == self._reading_paused:
            return
        self._reading_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _write(self) -> None:
        pieces, ends = self._frames.outgoing()
        if self._gone:
            return
        if pieces:
            self.bytes_out += sum(map(len, pieces))
            self._transport.writelines(pieces)
        if ends and not self._half_closed:
            # A socket that is closed with unread data resets the connection, and the client may
            # never see why. So its bytes are read and dropped until it closes, or for a while.
            self._half_closed = True
            self._transport.write_eof()

    def _tell(self) -> None:
        """Tell the receiver once that it is over, when it has all that came before."""
        closed = self._frames.closed
        if self._gone and closed is None:
            closed = Closed(1006, "")
        if closed is None or self._told or self._receiver is None:
            return
        if self._messages and not self._silent:
            return
        self._told = self._silent = True
        self._receiver.closed(closed)
