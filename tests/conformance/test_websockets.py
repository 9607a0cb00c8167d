"""Sessions as WebSockets: two other implementations of RFC 6455, and frames that break its rules.

The Autobahn suite is written for Python 2.7 and does not run here. What its cases are about is held
against a real server instead: fragments, control frames between them, masks, sizes, UTF-8, opcodes,
close codes. The first half is spoken by the client of `wsproto`, the second by hand.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    Pong,
    Request,
    TextMessage,
)

from tests.integration.mesh_support import Shop
from tests.serving import ServerProcess

SECONDS_MAX = 30.0


@pytest.fixture(scope="module")
def shop(server_process: ServerProcess) -> Iterator[Shop]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield Shop(client, "conform")


class Client:
    """A WebSocket to the session of a mesh: the bytes are made by `wsproto`, or given by hand."""

    def __init__(self, shop: Shop) -> None:
        url = shop.http.base_url
        self._socket = socket.create_connection((url.host, url.port), SECONDS_MAX)
        self._parser = WSConnection(ConnectionType.CLIENT)
        target = f"{shop.root}/session"
        self.say(Request(host=f"{url.host}:{url.port}", target=target))
        assert isinstance(self.hear(), AcceptConnection)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def say(self, event: Any) -> None:
        self._socket.sendall(self._parser.send(event))

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def hear(self) -> Any:
        """The next event; a text message is whole."""
        text = ""
        while True:
            for event in self._events:
                if isinstance(event, TextMessage):
                    text += event.data
                    if event.message_finished:
                        return text
                else:
                    return event
            self._parser.receive_data(self._socket.recv(1 << 16) or None)

    @property
    def _events(self) -> Iterator[Any]:
        return self._parser.events()

    def ended(self) -> int:
        """The code of the server's close."""
        while True:
            event = self.hear()
            if isinstance(event, CloseConnection):
                return int(event.code)

    def hello(self) -> None:
        self.write(frame(b'{"hello":{}}'))
        assert "welcome" in self.hear()


def frame(
    data: bytes,
    opcode: Opcode | int = Opcode.TEXT,
    *,
    fin: bool = True,
    mask: bool = True,
    flags: int = 0,
    length: int | None = None,
) -> bytes:
    """The bytes of one frame, also of one that may not be."""
    size = len(data) if length is None else length
    head = bytes([(0x80 if fin else 0) | flags | int(opcode)])
    masked = 0x80 if mask else 0
    if size < 126:
        head += bytes([masked | size])
    elif size < 1 << 16:
        head += bytes([masked | 126]) + struct.pack("!H", size)
    else:
        head += bytes([masked | 127]) + struct.pack("!Q", size)
    if not mask:
        return head + data
    key = b"\x11\x22\x33\x44"
    return head + key + bytes(byte ^ key[n % 4] for n, byte in enumerate(data))


# Another implementation


def test_the_client_of_wsproto_talks_in_whole_messages_and_in_fragments(shop: Shop) -> None:
    with Client(shop) as client:
        client.say(TextMessage('{"hello":{}}'))
        assert "welcome" in client.hear()
        client.say(
            TextMessage('{"id":1,"send":{"kind":"queue","ref":"jobs",', message_finished=False)
        )
        client.say(Ping(b"between"))
        client.say(TextMessage('"sender":"bob","body":"gr\u00fc\u00dfe"}}'))
        pong = client.hear()
        answer = json.loads(client.hear())
        client.say(CloseConnection(code=1000, reason="done"))
        code = client.ended()

    assert isinstance(pong, Pong)
    assert pong.payload == b"between"
    assert answer["status"] == 201
    assert shop.held("queue/jobs")[-1]["body"] == "gr\u00fc\u00dfe"
    assert code == 1000


def test_a_binary_message_is_not_taken(shop: Shop) -> None:
    with Client(shop) as client:
        client.say(BytesMessage(b'{"hello":{}}'))
        assert client.ended() == 1003


# Frames by hand


TEXT = b'{"ping":"gr\xc3\xbc\xc3\x9fe"}'


@given(
    st.lists(st.integers(0, len(TEXT)), max_size=6), st.lists(st.binary(max_size=125), max_size=6)
)
@settings(max_examples=30)
def test_a_message_arrives_however_it_is_cut(
    shop: Shop, cuts: list[int], pings: list[bytes]
) -> None:
    """Fragments of any size, empty ones too, with pings between them."""
    places = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in itertools.pairwise(places)]
    data = b""
    for number, piece in enumerate(pieces):
        opcode = Opcode.CONT if number else Opcode.TEXT
        data += frame(piece, opcode, fin=number == len(pieces) - 1)
        if number < len(pieces) - 1 and number < len(pings):
            data += frame(pings[number], Opcode.PING)
    with Client(shop) as client:
        client.write(data)
        heard: list[bytes] = []
        while not isinstance(event := client.hear(), str):
            heard.append(event.payload)

    assert json.loads(event) == {"pong": "gr\u00fc\u00dfe"}
    assert heard == pings[: len(pieces) - 1]


@pytest.mark.parametrize("size", [0, 1, 125])
def test_a_ping_is_answered_with_its_bytes(shop: Shop, size: int) -> None:
    with Client(shop) as client:
        client.write(frame(b"x" * size, Opcode.PING))
        pong = client.hear()

    assert isinstance(pong, Pong)
    assert len(pong.payload) == size


BROKEN = {
    "not masked": (frame(b"{}", mask=False), 1002),
    "reserved bit": (frame(b"{}", flags=0x40), 1002),
    "all reserved bits": (frame(b"{}", flags=0x70), 1002),
    "reserved opcode": (frame(b"", 0x3), 1002),
    "reserved control opcode": (frame(b"", 0xB), 1002),
    "fragmented ping": (frame(b"", Opcode.PING, fin=False), 1002),
    "long ping": (frame(b"x" * 126, Opcode.PING), 1002),
    "long close": (frame(struct.pack("!H", 1000) + b"x" * 124, Opcode.CLOSE), 1002),
    "continuation of nothing": (frame(b"x", Opcode.CONT), 1002),
    "new message inside of one": (frame(b"x", fin=False) + frame(b"y"), 1002),
    "close of one byte": (frame(b"\x03", Opcode.CLOSE), 1002),
    "close with a code that is none": (frame(struct.pack("!H", 1005), Opcode.CLOSE), 1002),
    "close with a reason that is no UTF-8": (
        frame(struct.pack("!H", 1000) + b"\xff", Opcode.CLOSE),
        1007,
    ),
    "text that is no UTF-8": (frame(b'{"ping":"\xff"}'), 1007),
    "a surrogate": (frame(b'{"ping":"\xed\xa0\x80"}'), 1007),
    "UTF-8 that ends too soon": (frame(b'{"ping":"\xc3'), 1007),
    "UTF-8 that is broken over fragments": (
        frame(b'{"ping":"\xc3', fin=False) + frame(b'("}', Opcode.CONT),
        1007,
    ),
    "a frame that says it is too large": (frame(b"", length=3 << 20)[:14], 1009),
    "a length of 2^63": (b"\x81\xff" + b"\xff" * 8 + b"mask", 1009),
    "fragments that are too large together": (
        frame(b"x" * (1 << 20), fin=False) + frame(b"x" * ((1 << 20) + 1), Opcode.CONT),
        1009,
    ),
    "a message of too many fragments": (
        frame(b"x", fin=False) + frame(b"x", Opcode.CONT, fin=False) * 1_100,
        1008,
    ),
    "not JSON": (frame(b"hello"), 1007),
    "JSON that is no frame": (frame(b"[1,2]"), 1007),
    "a send before the hello": (frame(b'{"id":1,"send":{}}'), 1002),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_rules_is_closed_with_its_code(shop: Shop, name: str) -> None:
    data, code = BROKEN[name]
    with Client(shop) as client:
        client.write(data)
        assert client.ended() == code


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=40)
def test_no_bytes_harm_the_server(shop: Shop, data: bytes) -> None:
    """Whatever comes behind the upgrade, the server closes or waits, and goes on with others."""
    with Client(shop) as client:
        client.write(data)
    with Client(shop) as client:
        client.hello()


def test_the_library_on_our_own_side_agrees_with_the_frames_by_hand() -> None:
    assert Frame(Opcode.TEXT, b"x" * 300).serialize(mask=False) == frame(b"x" * 300, mask=False)
