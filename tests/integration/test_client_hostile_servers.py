"""Both clients against servers that mean harm: what they hold, wait for and ask is bounded.

Each answer here would cost an unguarded client all its memory, or never end. The limits of sizes
are lowered, so that a test shows within moments that they hold; `sent_bytes` says how much of an
endless answer the client took before it hung up.
"""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

import fencepost
from fencepost.client import http, reading, sse
from tests.odd_server import Asked, OddServer, response, tail
from tests.twins import Connect
from tests.twins import connect as connect

KIB = 1024
OK = b"HTTP/1.1 200 OK\r\n"
JSON = (
    OK + b"Content-Type: application/json\r\nStream-Next-Offset: 5\r\nStream-Up-To-Date: true\r\n"
)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\n" + CHUNKED
BUFFERS = 16 * KIB * KIB
"""What the kernel takes of an answer before the server notices that the client hung up."""


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RESPONSE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(reading, "EVENT_BYTES_MAX", 1 << 20)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def endless(head: bytes, piece: bytes, *, pause: float = 0) -> Iterator[bytes]:
    yield head
    while True:
        yield piece
        time.sleep(pause)


async def take(reading: Any) -> list[Any]:
    return await asyncio.wait_for(reading.messages(), 60)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (OK + b"X-Long: ", b"x" * 64 * KIB),
        (OK, b"x" * 64 * KIB),
        (b"HTTP/1.1 200 ", b"x" * 64 * KIB),
        (OK, b"X-Many: 1\r\n" * KIB),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * KIB),
        (JSON + CHUNKED + b"1;", b"x" * 64 * KIB),
        (JSON + CHUNKED + chunk(b"[]") + b"0\r\n", b"X-Many: 1\r\n" * KIB),
    ],
    ids=["value", "name", "status", "headers", "interim", "chunk", "trailers"],
)
async def test_lines_that_never_end(connect: Connect, head: bytes, piece: bytes) -> None:
    with OddServer(lambda _: endless(head, piece)) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError, match="no end"):
                await take(client.stream("s").read())

        assert server.sent_bytes < BUFFERS


@pytest.mark.parametrize("piece", [b"x" * 64 * KIB, b"xy"])
@pytest.mark.usefixtures("low_limits")
async def test_a_body_that_never_ends(connect: Connect, piece: bytes) -> None:
    body = chunk(piece) * max(1, 8 * KIB // len(piece))

    with OddServer(lambda _: endless(JSON + CHUNKED, body)) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError, match="too large to hold"):
                await take(client.stream("s").read())

        assert server.sent_bytes < BUFFERS


@pytest.mark.usefixtures("low_limits")
async def test_a_body_that_grows_when_it_is_decompressed(connect: Connect) -> None:
    bomb = gzip.compress(b" " * (64 << 20))

    with OddServer(lambda _: tail(bomb, content_encoding="gzip")) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError, match="too large to hold"):
                await take(client.stream("s").read())


@pytest.mark.parametrize(
    "event",
    [b"data: " + b"x" * 64 * KIB, b"event: data\ndata: [1]\n\n" * KIB],
    ids=["line", "events"],
)
@pytest.mark.usefixtures("low_limits")
async def test_events_that_never_end(connect: Connect, event: bytes) -> None:
    """One endless line; or events that are never followed by one that says where they lead."""

    def answer(asked: Asked) -> bytes | Iterator[bytes]:
        return endless(EVENTS, chunk(event)) if asked.live else tail()

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError):
                await take(client.stream("s").follow(live="sse"))

        assert server.sent_bytes < BUFFERS


@pytest.mark.parametrize(
    ("head", "piece"),
    [(OK + b"X-Slow: ", b"x"), (JSON + CHUNKED, chunk(b"x"))],
    ids=["head", "body"],
)
async def test_an_answer_that_drips_is_given_up(
    connect: Connect, head: bytes, piece: bytes
) -> None:
    timeouts = fencepost.Timeouts(answer=0.5)

    with OddServer(lambda _: endless(head, piece, pause=0.05)) as server:
        async with connect(server.url, timeouts=timeouts, retries=fencepost.NO_RETRIES) as client:
            with pytest.raises(fencepost.RequestTimeoutError):
                await take(client.stream("s").read())
            with pytest.raises(fencepost.OutcomeUnknownError):
                await asyncio.wait_for(client.stream("s").append(1), 60)


async def test_an_answer_that_keeps_coming_may_take_longer_than_its_timeout(
    connect: Connect,
) -> None:
    """A slow network is no attack: more than a KiB a second is enough."""

    def slowly() -> Iterator[bytes]:
        yield JSON + CHUNKED + chunk(b"[1")
        for _ in range(10):
            time.sleep(0.1)
            yield chunk(b" " * KIB)
        yield chunk(b"]") + b"0\r\n\r\n"

    with OddServer(lambda _: slowly()) as server:
        async with connect(server.url, timeouts=fencepost.Timeouts(answer=0.5)) as client:
            assert await take(client.stream("s").read()) == [1]


async def test_trailers_say_nothing(connect: Connect) -> None:
    """Not how large the headers are, and not where the stream goes on."""
    body = b"[1" + b" " * 100 * KIB + b"]"

    def answer(_: Asked) -> bytes:
        trailers = b"0\r\nStream-Next-Offset: 4\r\n\r\n"
        return JSON + CHUNKED + chunk(body) + trailers

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            reading = client.stream("s").read()
            assert await take(reading) == [1]
            assert reading.offset == "5"


@pytest.mark.parametrize("cut", [1, 9, 30])
async def test_a_compressed_body_that_was_cut_is_not_taken_for_whole(
    connect: Connect, cut: int
) -> None:
    body = gzip.compress(bytes(range(256)))[:-cut]
    answer = tail(body, content_type="application/octet-stream", content_encoding="gzip")

    with OddServer(lambda _: answer) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError, match="middle of its gzip"):
                await client.stream("s").read().bytes()


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("encoding", ["gzip", "two gzips", "deflate", "raw deflate"])
async def test_a_compressed_body_may_come_in_pieces_of_any_size(
    connect: Connect, encoding: str, size: int
) -> None:
    body = {
        "gzip": gzip.compress(b"[1,2,3]"),
        "two gzips": gzip.compress(b"[1,2") + gzip.compress(b",3]"),
        "deflate": zlib.compress(b"[1,2,3]"),
        "raw deflate": zlib.compress(b"[1,2,3]")[2:-4],
    }[encoding]
    name = b"Content-Encoding: gzip\r\n" if "gzip" in encoding else b"Content-Encoding: deflate\r\n"
    pieces = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size))

    with OddServer(lambda _: JSON + name + CHUNKED + pieces + b"0\r\n\r\n") as server:
        async with connect(server.url) as client:
            assert await take(client.stream("s").read()) == [1, 2, 3]


@pytest.mark.parametrize("following", ["", "now", "-1", "1", "0"])
@pytest.mark.parametrize("live", [None, "sse", "long-poll"])
async def test_messages_that_lead_nowhere_are_given_out_once_at_most(
    connect: Connect, following: str, live: Any
) -> None:
    """From offset 1 on a server gives messages, and an offset that would bring them again."""

    def answer(asked: Asked) -> bytes:
        if asked.live == "sse":
            control = b'event: control\ndata: {"streamNextOffset":"%b"}\n\n' % following.encode()
            events = b"event: data\ndata: [1]\n\n" + control
            return response(200, events, content_type="text/event-stream", connection="close")
        if live is not None and asked.live is None:
            return tail()
        return response(200, b"[1]", stream_next_offset=following)

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            stream = client.stream("s")
            read = stream.read(offset="1") if live is None else stream.follow(offset="1", live=live)
            with pytest.raises(fencepost.ProtocolError, match="what follows '1'"):
                await take(read)

        assert len(server.asked) <= 2


@pytest.mark.parametrize("follow", [False, True])
async def test_offsets_that_move_without_a_message_are_asked_for_less_and_less_often(
    connect: Connect, follow: bool
) -> None:
    def answer(_: Asked) -> bytes:
        return response(200, b"[]", stream_next_offset=f"{len(server.asked):09}")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            stream = client.stream("s")
            read = stream.follow() if follow else stream.read()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read.messages(), 1)
            await read.close()

            assert 2 < len(server.asked) < 40


@pytest.mark.parametrize(
    ("status", "messages"), [(203, [1]), (204, []), (206, None), (201, None), (304, None)]
)
async def test_a_read_is_answered_with_a_whole_or_with_nothing(
    connect: Connect, status: int, messages: list[int] | None
) -> None:
    with OddServer(
        lambda _: response(
            status,
            b"" if status in (204, 304) else b"[1]",
            headers={"Stream-Next-Offset": "2", "Stream-Up-To-Date": "true"},
        )
    ) as server:
        async with connect(server.url) as client:
            if messages is not None:
                assert await take(client.stream("s").read()) == messages
                return
            with pytest.raises(fencepost.FencepostError):
                await take(client.stream("s").read())


async def test_an_upgrade_that_was_not_asked_for(connect: Connect) -> None:
    upgrade = b"HTTP/1.1 101 Go\r\nUpgrade: chat\r\nConnection: upgrade\r\n\r\nhello"

    with OddServer(lambda _: iter([upgrade])) as server:
        async with connect(server.url, retries=fencepost.NO_RETRIES) as client:
            with pytest.raises(fencepost.FencepostError):
                await take(client.stream("s").read())


@pytest.mark.parametrize(
    "body", [b'{"streams":[],"next":"a"}', b'{"streams":[{"path":"x"}],"next":"a"}']
)
async def test_a_list_that_goes_on_for_ever(connect: Connect, body: bytes) -> None:
    async def listed(client: Any) -> None:
        async for _ in client.streams():
            pass

    with OddServer(lambda _: response(200, body)) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError):
                await asyncio.wait_for(listed(client), 60)

        assert len(server.asked) <= 2


@pytest.mark.parametrize("following", ["-5", "-1"])
async def test_a_log_that_leads_nowhere(connect: Connect, following: str) -> None:
    async def entries(client: Any) -> None:
        async for _ in client.log():
            pass

    with OddServer(lambda _: response(200, log_next=following, log_head="9")) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError, match="in the log"):
                await asyncio.wait_for(entries(client), 60)

        assert len(server.asked) == 1


async def test_what_a_server_says_of_a_refusal_is_shown_in_short(connect: Connect) -> None:
    refusal = b'{"code":"%b","detail":"%b"}' % (b"c" * 100_000, b"d" * 100_000)

    with OddServer(lambda _: response(400, refusal)) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.BadRequestError) as refused:
                await client.stream("s").append(1)

        assert refused.value.code == "http_400"
        assert len(str(refused.value)) < 5_000


@pytest.mark.parametrize(
    ("after", "date"),
    [
        ("1000000000", None),
        ("9" * 5_000, None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 -9959", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 +2359"),
        ("Mon, 01 Jan 0001 00:00:00 +9959", None),
        ("Fri, 99 Dec 2026 23:59:59 GMT", None),
        ("nan", None),
        ("inf", None),
        ("-1", None),
        ("1e9", None),
        ("\xb2", None),
        (", , ,", None),
    ],
)
async def test_any_retry_after_is_waited_for_within_reason(
    connect: Connect, after: str, date: str | None
) -> None:
    """Past `seconds_max` nothing is waited for: the refusal is raised at once."""
    headers = {"Retry-After": after} | ({} if date is None else {"Date": date})

    with OddServer(lambda _: response(503, headers=headers)) as server:
        retries = fencepost.Retries(seconds_max=0.2, delay_seconds_max=0.1)
        async with connect(server.url, retries=retries) as client:
            with pytest.raises(fencepost.UnavailableError) as away:
                await asyncio.wait_for(client.stream("s").head(), 60)
            with pytest.raises(fencepost.OutcomeUnknownError):
                await asyncio.wait_for(client.stream("s").append(1), 60)

        assert (away.value.retry_after or 0) >= 0
        assert len(server.asked) < 40


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: endless(OK + b"X-Long: ", b"x" * 64 * KIB),
        lambda _: endless(OK + b"X-Slow: ", b"x", pause=0.05),
        lambda _: response(503, retry_after="1000000000"),
        lambda _: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"]),
        lambda _: iter([b"HTTP/1.1 101 Go\r\nUpgrade: chat\r\nConnection: upgrade\r\n\r\nhello"]),
    ],
    ids=["line", "drip", "later", "cut", "upgrade"],
)
async def test_a_producer_ends_in_time_whatever_it_is_answered(
    connect: Connect, answer: Any
) -> None:
    with OddServer(answer) as server:
        async with connect(server.url) as client:
            producer = client.stream("s").producer("p", delivery_seconds_max=0.5)
            await producer.append(1)
            with pytest.raises(fencepost.ProducerFailedError):
                await asyncio.wait_for(producer.close(), 60)

        assert len(server.asked) < 60


@pytest.mark.parametrize("status", [200, 204])
async def test_a_page_of_a_proxy_is_no_acknowledgement(connect: Connect, status: int) -> None:
    """A network that asks for a login answers everything with 200."""
    page = b"" if status == 204 else b"<html>Please log in</html>"

    with OddServer(lambda _: response(status, page, content_type="text/html")) as server:
        async with connect(server.url) as client:
            producer = client.stream("s").producer("p")
            delivery = await producer.append(1)
            with pytest.raises(fencepost.ProducerFailedError) as failed:
                await asyncio.wait_for(producer.close(), 60)

    assert isinstance(failed.value.cause, fencepost.ProtocolError)
    assert delivery.maybe_stored
    assert len(server.asked) == 1
