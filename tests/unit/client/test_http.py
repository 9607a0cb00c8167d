"""Rendering requests and parsing answers, in pieces of any size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.client.errors import (
    FencepostError,
    ProtocolError,
    StaleEpochError,
    StreamClosedError,
    UnavailableError,
)
from fencepost.client.errors.answers import error_of
from fencepost.client.http import Request, ResponseParser, parse_url, render_head, target_of
from fencepost.client.settings import Retries
from fencepost.client.sse import Event, EventParser

ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nStream-Next-Offset: 7\r\n\r\nhello"
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 204 No Content\r\n\r\n"
    b"HTTP/1.1 409 Conflict\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
)


@given(cuts=st.lists(st.integers(0, len(ANSWERS)), max_size=8))
def test_pipelined_answers_come_out_in_order_however_they_arrive(cuts: list[int]) -> None:
    """Where the bytes are cut on their way does not change what was answered."""
    parser = ResponseParser()
    edges = [0, *sorted(cuts), len(ANSWERS)]
    for start, end in itertools.pairwise(edges):
        if start < end:
            parser.feed(ANSWERS[start:end])

    assert [(one.status, one.body) for one in parser.done] == [
        (200, b"hello"),
        (204, b""),
        (409, b"abcde"),
    ]
    assert parser.done[0].headers["stream-next-offset"] == "7"
    assert not parser.closing


def test_an_answer_to_head_ends_with_its_headers() -> None:
    parser = ResponseParser()
    parser.without_body = True
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
    assert parser.done.pop().status == 200

    parser.without_body = False
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert parser.done.pop().body == b"ok"


@pytest.mark.parametrize(
    ("head", "closing"),
    [
        (b"HTTP/1.1 200 OK\r\nLog-Head: 7\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nLog-Head: 7\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
def test_a_connection_outlives_an_answer_to_head(head: bytes, closing: bool) -> None:
    """Each HEAD cost a connection: one without a length was taken to end with it."""
    parser = ResponseParser()
    parser.without_body = True

    parser.feed(head)

    assert parser.closing is closing
    assert parser.done.pop().status == 200
    parser.without_body = False
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert parser.done.pop().body == b"ok"


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of ")
    parser.feed(b"it")

    assert parser.end()
    assert parser.done.pop().body == b"all of it"
    assert parser.closing

    cut = ResponseParser()
    cut.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    assert not cut.end()


def test_what_is_not_http_is_refused() -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(b"SSH-2.0-OpenSSH_9.6\r\n")
    with pytest.raises(ProtocolError):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"y" * 1000) * 100)


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://localhost:4437", "localhost:4437", ""),
        ("http://example.org/base/", "example.org", "/base"),
        ("http://[::1]:99", "[::1]:99", ""),
        ("https://example.org", "example.org", ""),
    ],
)
def test_urls_are_understood(url: str, authority: str, prefix: str) -> None:
    address = parse_url(url)
    assert (address.authority, address.prefix) == (authority, prefix)


@pytest.mark.parametrize("url", ["localhost:4437", "ftp://x", "http://", "http://x/?a=b"])
def test_what_is_not_such_a_url_is_refused(url: str) -> None:
    with pytest.raises(ProtocolError):
        parse_url(url)


def test_a_value_cannot_leave_its_line() -> None:
    request = Request("GET", "/", (("X", "a\r\nY: b"),))
    with pytest.raises(FencepostError):
        render_head(parse_url("http://x"), request, 0)


def test_targets_are_escaped() -> None:
    assert target_of("/v1/stream/a b/ü?", (("offset", "a&b"),)) == (
        "/v1/stream/a%20b/%C3%BC%3F?offset=a%26b"
    )


def test_servers_without_codes_are_understood_by_their_headers() -> None:
    assert isinstance(error_of(403, {"producer-epoch": "4"}, b""), StaleEpochError)
    closed = error_of(409, {"stream-closed": "true", "stream-next-offset": "9"}, b"no")
    assert isinstance(closed, StreamClosedError)
    assert closed.next_offset == "9"
    busy = error_of(503, {"retry-after": "7", "content-type": "application/json"}, b"{broken")
    assert isinstance(busy, UnavailableError)
    assert busy.retry_after == 7.0


EVENTS = b'event: data\ndata:[1,\ndata: 2]\n\nevent: control\r\ndata:{"a":1}\r\n\r\n: quiet\n\n'


@given(cuts=st.lists(st.integers(0, len(EVENTS)), max_size=6))
def test_events_come_out_whole_however_they_arrive(cuts: list[int]) -> None:
    """Where the bytes are cut on their way does not change the events."""
    parser = EventParser()
    edges = [0, *sorted(cuts), len(EVENTS)]
    events = []
    for start, end in itertools.pairwise(edges):
        events += parser.feed(EVENTS[start:end])

    assert events == [Event("data", b"[1,\n2]"), Event("control", b'{"a":1}')]


@given(attempt=st.integers(0, 100), dice=st.floats(0, 1, exclude_max=True))
def test_delays_grow_to_a_bound_and_never_undercut_the_server(attempt: int, dice: float) -> None:
    """A delay is positive, bounded, and not before Retry-After."""
    retries = Retries()
    assert 0 < retries.delay(attempt, dice) <= retries.delay_seconds_max
    assert retries.delay(attempt, dice, 60.0) == 60.0
