"""WebSockets: the frames, and a connection that is bounded in every direction."""

import struct
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from fencepost.http.settings import WebSocketSettings
from fencepost.http.websocket import (
    Closed,
    Frames,
    WebSocket,
)

SMALL = WebSocketSettings(message_bytes_max=200, fragments_max=4, outgoing_bytes_max=1000)

# The frames.


def frame(data: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    """A frame as a client sends it."""
    return Frame(opcode, data, fin).serialize(mask=True)


def client() -> Protocol:
    """The other end, to read what ours writes."""
    return Protocol(Side.CLIENT, state=State.OPEN)


def read(data: bytes) -> list[Frame]:
    protocol = client()
    protocol.receive_data(data)
    return [event for event in protocol.events_received() if isinstance(event, Frame)]


def close_of(frames: Frames) -> tuple[int, bool]:
    """The code of the close frame that was sent, and whether the connection ends behind it."""
    pieces, ends = frames.outgoing()
    last = read(b"".join(pieces))[-1]
    assert last.opcode is Opcode.CLOSE
    return Close.parse(bytes(last.data)).code, ends


def test_a_whole_message_and_one_in_fragments_arrive() -> None:
    frames = Frames()

    whole = frames.receive(frame(b"hello"))
    pieces = frames.receive(
        frame("gr\u00fc".encode()[:3], fin=False)
        + frame(b"in between", Opcode.PING)
        + frame(b"", Opcode.CONT, fin=False)
        + frame("gr\u00fc\u00dfe".encode()[3:], Opcode.CONT)
    )

    assert whole == [b"hello"]
    assert pieces == ["gr\u00fc\u00dfe".encode()]
    written, ends = frames.outgoing()
    assert [(pong.opcode, bytes(pong.data)) for pong in read(b"".join(written))] == [
        (Opcode.PONG, b"in between")
    ]
    assert not ends


@given(
    st.lists(st.lists(st.text(max_size=20), min_size=1, max_size=4), max_size=6),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_messages_arrive_however_they_are_cut_into_frames_and_pieces(
    messages: list[list[str]], cuts: list[int]
) -> None:
    """Fragments and the segments of TCP leave no trace in what arrives."""
    sent = b"".join(
        frame(
            part.encode(),
            Opcode.TEXT if number == 0 else Opcode.CONT,
            fin=number == len(parts) - 1,
        )
        for parts in messages
        for number, part in enumerate(parts)
    )
    frames = Frames()
    arrived: list[bytes] = []
    at = 0
    while at < len(sent):
        size = cuts[at % len(cuts)]
        arrived += frames.receive(sent[at : at + size])
        at += size

    assert arrived == ["".join(parts).encode() for parts in messages]
    assert frames.is_open


def unmasked(data: bytes) -> bytes:
    return Frame(Opcode.TEXT, data).serialize(mask=False)


def raw(first: int, data: bytes) -> bytes:
    return bytes([first, 0x80 | len(data)]) + b"\0\0\0\0" + data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (unmasked(b"hello"), 1002),
        (raw(0b1100_0001, b"compressed"), 1002),
        (raw(0b1000_0011, b"unknown opcode"), 1002),
        (raw(0b1000_1011, b"unknown control"), 1002),
        (raw(0b0000_1001, b"fragmented ping"), 1002),
        (bytes([0b1000_1001, 0x80 | 126]) + struct.pack("!H", 126) + b"\0" * 130, 1002),
        (frame(b"lost", Opcode.CONT), 1002),
        (frame(b"one", fin=False) + frame(b"two"), 1002),
        (frame(b"x", Opcode.CLOSE), 1002),
        (frame(struct.pack("!H", 1005), Opcode.CLOSE), 1002),
        (frame(struct.pack("!H", 999), Opcode.CLOSE), 1002),
        (frame(struct.pack("!H", 1000) + b"\xff", Opcode.CLOSE), 1007),
        (frame(b"\xff"), 1007),
        (frame(b"\xed\xa0\x80"), 1007),
        (frame("\u00fc".encode()[:1]), 1007),
        (frame(b"ok\xc3", fin=False) + frame(b"\x28", Opcode.CONT), 1007),
        (frame(b"data", Opcode.BINARY), 1003),
        (frame(b"x" * 201), 1009),
        (frame(b"x" * 120, fin=False) + frame(b"x" * 81, Opcode.CONT), 1009),
        (frame(b"", fin=False) + frame(b"", Opcode.CONT, fin=False) * 4, 1008),
        # The size is refused with the head of the frame: none of the data has come.
        (bytes([0x81, 0xFF]) + struct.pack("!Q", 1 << 40) + b"\0\0\0\0", 1009),
    ],
    # The masks of the frames are random, and the names of tests are not.
    ids=count(),
)
def test_what_breaks_the_rules_closes_the_connection_with_its_code(data: bytes, code: int) -> None:
    frames = Frames(SMALL)

    arrived = frames.receive(frame(b"before") + data)

    assert arrived == [b"before"]
    assert close_of(frames) == (code, True)
    assert frames.closed is not None
    assert frames.receive(frame(b"later")) == []


def test_a_message_may_be_as_large_as_the_bound() -> None:
    frames = Frames(SMALL)

    assert frames.receive(frame(b"x" * 120, fin=False) + frame(b"x" * 80, Opcode.CONT)) == [
        b"x" * 200
    ]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8))
def test_no_bytes_make_the_parser_fail(pieces: list[bytes]) -> None:
    """Whatever comes, there are messages or there is a close; never an exception."""
    frames = Frames(SMALL)

    for piece in pieces:
        frames.receive(piece)
        frames.outgoing()

    frames.receive_eof()
    assert frames.closed is not None


def test_a_close_of_the_client_is_answered_and_known() -> None:
    frames = Frames()

    frames.receive(frame(Close(4000, "enough").serialize(), Opcode.CLOSE))

    assert frames.closed == Closed(4000, "enough")
    assert close_of(frames) == (4000, True)


def test_a_close_of_ours_waits_for_the_answer() -> None:
    frames = Frames()

    frames.close(4010, b"feature_unavailable")

    assert close_of(frames) == (4010, False)
    frames.receive(frame(Close(4010, "").serialize(), Opcode.CLOSE))
    assert frames.outgoing() == ([], True)
    assert frames.closed == Closed(4010, "feature_unavailable")


def test_a_long_reason_is_cut_between_two_characters() -> None:
    frames = Frames()

    frames.close(1008, "\u00fc".encode() * 100)

    assert frames.closed == Closed(1008, "\u00fc" * 61)


def test_an_end_without_a_close_is_1006() -> None:
    frames = Frames()

    frames.receive_eof()

    assert frames.closed == Closed(1006, "")


# The connection.


class FakeTransport:
    """Keeps what is written, and says how much of it waits."""

    def __init__(self) -> None:
        self.written = b""
        self.waiting_bytes = 0
        self.reading = True
        self.half_closed = False
        self.aborted = False

    def writelines(self, pieces: list[bytes], /) -> None:
        assert not self.half_closed
        self.written += b"".join(pieces)

    def write_eof(self) -> None:
        self.half_closed = True

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


class Client:
    """A WebSocket with both of its sides in the hands of a test."""

    def __init__(self, settings: WebSocketSettings = SMALL) -> None:
        self.transport = FakeTransport()
        self.soon: list[Callable[[], None]] = []
        self.socket = WebSocket(self.transport, self.soon.append, settings)
        self.messages: list[bytes] = []
        self.ends: list[Closed] = []
        self.writables = 0
        self.drains = 0
        self.on_message: Callable[[], object] = lambda: None
        self.socket.open(self)

    def received(self, message: bytes) -> None:
        self.messages.append(message)
        self.on_message()

    def writable(self) -> None:
        self.writables += 1

    def draining(self) -> None:
        self.drains += 1

    def closed(self, closed: Closed) -> None:
        self.ends.append(closed)

    def turn(self) -> None:
        waiting, self.soon[:] = list(self.soon), []
        for call in waiting:
            call()

    def sent(self) -> list[bytes]:
        return [bytes(one.data) for one in read(self.transport.written)]


def test_messages_go_both_ways() -> None:
    client = Client()

    client.socket.data_received(frame(b"one") + frame(b"two"))
    client.socket.send(b"three")

    assert client.messages == [b"one", b"two"]
    assert client.sent() == [b"three"]


def test_what_came_behind_the_request_is_not_lost() -> None:
    client = Client()
    other = WebSocket(client.transport, client.soon.append)

    other.open(client, frame(b"early"))

    assert client.messages == [b"early"]


def test_a_receiver_that_pauses_gets_the_next_message_when_it_resumes() -> None:
    client = Client()
    client.on_message = client.socket.pause

    client.socket.data_received(frame(b"one") + frame(b"two") + frame(b"three"))

    assert client.messages == [b"one"]
    assert not client.transport.reading
    client.socket.resume()
    assert client.messages == [b"one", b"two"]
    client.on_message = lambda: None
    client.socket.resume()
    assert client.messages == [b"one", b"two", b"three"]
    assert client.transport.reading


def test_a_client_that_does_not_read_is_not_read() -> None:
    client = Client()

    client.socket.pause_writing()
    client.socket.data_received(frame(b"more"))

    assert (client.transport.reading, client.messages) == (False, [])
    client.socket.resume_writing()
    assert (client.transport.reading, client.messages) == (True, [b"more"])
    assert client.writables == 1


def test_a_client_for_which_too_much_waits_is_cut_off() -> None:
    client = Client()
    client.transport.waiting_bytes = 1001

    assert not client.socket.send(b"one more")

    assert client.transport.aborted
    client.socket.connection_lost()
    assert client.ends == [Closed(1006, "")]


def test_many_small_messages_leave_turns_to_other_connections() -> None:
    client = Client()

    client.socket.data_received(frame(b"x") * 1000)

    turns = 1
    while client.soon:
        assert len(client.messages) <= 256 * turns
        assert not client.transport.reading
        client.turn()
        turns += 1
    assert len(client.messages) == 1000
    assert turns >= 4
    assert client.transport.reading


def test_many_pings_leave_turns_to_other_connections_too() -> None:
    client = Client()

    client.socket.data_received(frame(b"", Opcode.PING) * 5000)

    assert client.soon
    while client.soon:
        client.turn()
    assert len(client.sent()) == 5000


def test_after_a_close_of_ours_no_message_is_handed_over() -> None:
    client = Client()
    client.on_message = lambda: client.socket.close(1008, b"too_many_in_flight")

    client.socket.data_received(frame(b"one") + frame(b"two"))

    assert client.messages == [b"one"]
    assert client.ends == [Closed(1008, "too_many_in_flight")]
    assert not client.socket.send(b"late")
    client.socket.data_received(frame(Close(1008, "").serialize(), Opcode.CLOSE))
    assert client.transport.half_closed
    client.socket.connection_lost()
    assert len(client.ends) == 1


def test_what_came_before_the_close_of_a_client_is_handed_over_before_it() -> None:
    client = Client()
    client.on_message = client.socket.pause

    client.socket.data_received(
        frame(b"one") + frame(b"two") + frame(Close(1000, "").serialize(), Opcode.CLOSE)
    )

    assert (client.messages, client.ends) == ([b"one"], [])
    client.on_message = lambda: None
    client.socket.resume()
    assert (client.messages, client.ends) == ([b"one", b"two"], [Closed(1000, "")])


def test_a_broken_frame_ends_the_connection_and_what_follows_is_dropped() -> None:
    client = Client()

    client.socket.data_received(frame(b"one") + unmasked(b"two"))
    client.socket.data_received(b"\0" * 100_000)

    assert client.messages == [b"one"]
    assert [closed.code for closed in client.ends] == [1002]
    assert client.transport.half_closed
    assert client.transport.reading


@pytest.mark.parametrize("paused", [False, True])
def test_a_close_that_is_not_answered_ends_after_a_while(paused: bool) -> None:
    client = Client(WebSocketSettings(close_seconds=5))
    if paused:
        client.socket.pause()
    client.socket.sweep(99.0)
    client.socket.close(1001, b"server_stopping")

    client.socket.sweep(100.0)
    client.socket.sweep(104.9)

    assert client.transport.reading
    assert not client.transport.aborted
    client.socket.sweep(105.0)
    assert client.transport.aborted


def test_a_client_that_just_leaves_is_noticed_once() -> None:
    client = Client()

    client.socket.eof_received()
    client.socket.connection_lost()

    assert client.ends == [Closed(1006, "")]


def test_a_receiver_is_told_that_the_server_stops() -> None:
    client = Client()

    client.socket.begin_drain()

    assert client.drains == 1


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=30),
            st.sampled_from(
                [
                    frame(b"a"),
                    frame(b"b") * 300,
                    frame(b"", Opcode.PING),
                    frame(b"\x03\xe8", Opcode.CLOSE),
                ]
            ),
            st.sampled_from(
                [
                    "pause",
                    "resume",
                    "pause_writing",
                    "resume_writing",
                    "turn",
                    "send",
                    "close",
                    "eof",
                    "lost",
                    "sweep",
                ]
            ),
        ),
        max_size=25,
    )
)
def test_in_any_order_of_events_the_end_is_told_once_and_last(
    events: list[bytes | str],
) -> None:
    """No event at any time raises, and nothing is handed over after the end."""
    client = Client()
    seen_at_end = None
    done: set[str] = set()
    for event in events:
        socket = client.socket
        if isinstance(event, bytes):
            if not done & {"eof", "lost"}:
                socket.data_received(event)
        elif event == "send":
            socket.send(b"x")
        elif event == "close":
            socket.close(1000)
        elif event == "sweep":
            socket.sweep(1.0)
        elif event == "turn":
            client.turn()
        elif event == "eof":
            if not done & {"eof", "lost"}:
                socket.eof_received()
        elif event == "lost":
            if "lost" not in done:
                socket.connection_lost()
        else:
            getattr(socket, event)()
        done.add(event if isinstance(event, str) else "data")
        if client.ends and seen_at_end is None:
            seen_at_end = len(client.messages)
    assert len(client.ends) <= 1
    if "lost" in done:
        assert len(client.ends) == 1
    assert seen_at_end in (None, len(client.messages))
