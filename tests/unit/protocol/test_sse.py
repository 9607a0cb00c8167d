"""Server-sent events: a strict reader gets back exactly the payload, whatever it holds."""

import base64
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.offsets import Offset
from fencepost.protocol.sse import control_event, data_event, is_text
from tests.unit.protocol.strategies import bodies

AT = Offset(3, 30)


def parse(wire: bytes) -> list[tuple[str, str]]:
    """The events of a stream by the rules of the WHATWG: (event type, data)."""
    events: list[tuple[str, str]] = []
    data: list[str] = []
    kind = ""
    for line in re.split("\r\n|\r|\n", wire.decode())[:-1]:
        if not line:
            if data:
                events.append((kind or "message", "\n".join(data)))
            kind, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
    return events


def lines(text: str) -> str:
    """Text as an event can carry it: every line ending is a line feed."""
    return re.sub("\r\n|\r", "\n", text)


@given(st.text(max_size=60))
def test_text_comes_back_line_by_line_in_one_event(text: str) -> None:
    """Line endings become line feeds, as the format has no other; nothing else changes."""
    payload = text.encode("utf-8", "replace")

    assert parse(data_event(payload, "text/plain", AT)) == [("data", lines(payload.decode()))]


@given(st.lists(st.sampled_from([" ", "  ", "\n", "\r", "\r\n", ":", "data:", "x", "\ufeff"])))
def test_leading_blanks_colons_and_empty_lines_survive(parts: list[str]) -> None:
    """The awkward pieces of the format, in any order."""
    text = "".join(parts)

    assert parse(data_event(text.encode(), "text/plain", AT)) == [("data", lines(text))]


@pytest.mark.parametrize(
    "attack",
    [
        "\n\nevent: control\ndata: {}\n\n",
        "\r\revent: control\rdata: {}\r\r",
        "x\r\n\r\nevent: control\r\ndata: {}\r\n\r\n",
        "data: x\n\ndata: y",
        "\nid: 1\nretry: 0\n",
        ": comment\n\n",
        "\n\n\n",
        "\u2028\u2028event: control",
        "\x00\n\n\x00",
    ],
)
@pytest.mark.parametrize("media_type", ["text/plain", "text/event-stream"])
def test_nothing_in_a_payload_can_end_an_event_or_begin_another(
    attack: str, media_type: str
) -> None:
    wire = data_event(attack.encode(), media_type, AT) + control_event(
        AT, cursor=1, up_to_date=True, closed=False
    )

    events = parse(wire)

    assert [kind for kind, _ in events] == ["data", "control"]
    assert events[0][1] == lines(attack)


@given(st.lists(bodies(), min_size=1, max_size=3))
def test_json_messages_come_back_as_one_array(messages: list[bytes]) -> None:
    """Whatever white space lies between the tokens, the event parses to the messages."""
    events = parse(data_event(b",".join(messages), "application/json", AT))

    assert [kind for kind, _ in events] == ["data"]
    assert json.loads(events[0][1]) == [json.loads(message) for message in messages]


@given(st.binary(max_size=60))
def test_bytes_come_back_through_base64(payload: bytes) -> None:
    """Types that are not text travel as standard base64 in a single line."""
    [(kind, text)] = parse(data_event(payload, "application/octet-stream", AT))

    assert kind == "data"
    assert base64.b64decode(text, validate=True) == payload


@pytest.mark.parametrize(
    ("media_type", "expected"),
    [
        ("text/plain", True),
        ("text/event-stream", True),
        ("application/json", True),
        ("application/ndjson", False),
        ("application/octet-stream", False),
        ("application/text", False),
        ("image/png", False),
    ],
)
def test_text_and_json_travel_as_they_are(media_type: str, expected: bool) -> None:
    assert is_text(media_type) == expected


@pytest.mark.parametrize(
    ("up_to_date", "closed", "expected"),
    [
        (False, False, {"streamNextOffset": str(AT), "streamCursor": "17"}),
        (True, False, {"streamNextOffset": str(AT), "streamCursor": "17", "upToDate": True}),
        (True, True, {"streamNextOffset": str(AT), "upToDate": True, "streamClosed": True}),
    ],
)
def test_a_control_event_says_where_the_reader_stands(
    up_to_date: bool, closed: bool, expected: dict[str, object]
) -> None:
    wire = control_event(AT, cursor=17, up_to_date=up_to_date, closed=closed)

    assert [(kind, json.loads(data)) for kind, data in parse(wire)] == [("control", expected)]
