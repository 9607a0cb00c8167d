"""The client against servers that end, refuse, redirect and answer what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from typing import Any

import pytest

import fencepost
from tests.odd_server import Asked, OddServer, response, tail
from tests.twins import Connect
from tests.twins import connect as connect

EMPTY_EVENTS = response(200, content_type="text/event-stream", connection="close")


async def follow_for(reading: Any, seconds: float) -> list[Any]:
    """The messages that come within some seconds."""
    seen: list[Any] = []

    async def take() -> None:
        async for message in reading:
            seen.append(message)  # noqa: PERF401  (what came before the time was up counts)

    taking = asyncio.create_task(take())
    await asyncio.wait([taking], timeout=seconds)
    taking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await taking
    return seen


async def test_events_that_end_at_once_are_asked_for_less_and_less_often(connect: Connect) -> None:
    with OddServer(lambda asked: EMPTY_EVENTS if asked.live else tail()) as server:
        async with connect(server.url) as client:
            await follow_for(client.stream("s").follow(live="sse"), 1)

        assert 2 < server.count("sse") < 40


async def test_long_polls_that_end_at_once_are_asked_for_less_and_less_often(
    connect: Connect,
) -> None:
    nothing = response(204, stream_next_offset="1", stream_up_to_date="true", content_type=None)

    with OddServer(lambda asked: nothing if asked.live else tail()) as server:
        async with connect(server.url) as client:
            await follow_for(client.stream("s").follow(live="long-poll"), 1)

        assert 2 < server.count("long-poll") < 40


async def test_a_log_that_answers_at_once_is_asked_for_less_and_less_often(
    connect: Connect,
) -> None:
    page = response(200, log_next="1", log_head="1", log_up_to_date="true")

    with OddServer(lambda _: page) as server:
        async with connect(server.url) as client:
            await follow_for(client.log(follow=True), 1)

        assert 2 < server.count("long-poll") < 40


async def test_news_are_asked_for_at_once_after_progress(connect: Connect) -> None:
    """Each connection brings one message and ends: nothing keeps the next one waiting."""

    def answer(asked: Asked) -> bytes:
        if asked.live is None:
            return tail(offset="100")
        number = int(asked.target.partition("offset=")[2].partition("&")[0])
        control = b'{"streamNextOffset":"%d","streamClosed":%s}' % (
            number + 1,
            b"true" if number == 299 else b"false",
        )
        events = b"event: data\ndata: [%d]\n\nevent: control\ndata: %b\n\n" % (number, control)
        return response(200, events, content_type="text/event-stream", connection="close")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            seen = await follow_for(client.stream("s").follow(), 30)

        assert seen == list(range(100, 300))


@pytest.mark.parametrize("status", [200, 400, 405, 406, 501])
async def test_a_server_without_events_is_followed_by_long_polls(
    connect: Connect, status: int
) -> None:
    def answer(asked: Asked) -> bytes:
        if asked.live == "sse":
            return response(status, b"[]", stream_next_offset="1")
        if asked.live == "long-poll":
            return tail(b"[1,2]", "3", stream_closed="true")
        return tail()

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            assert await follow_for(client.stream("s").follow(), 30) == [1, 2]

        assert (server.count("sse"), server.count("long-poll")) == (1, 1)


async def test_events_that_were_asked_for_by_name_are_not_replaced(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        return response(406) if asked.live else tail()

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.BadRequestError):
                async for _ in client.stream("s").follow(live="sse"):
                    pass


async def test_a_read_that_leads_nowhere_ends(connect: Connect) -> None:
    """An answer without Stream-Up-To-Date and without data would be asked for again for ever."""
    with OddServer(lambda _: response(200, b"[]", stream_next_offset="1")) as server:
        async with connect(server.url) as client:
            assert await client.stream("s").read(offset="1").messages() == []

        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry_after": "2"}, 2.0),
        (
            {
                "date": "Wed, 21 Oct 2015 07:28:00 GMT",
                "retry_after": "Wed, 21 Oct 2015 07:28:03 GMT",
            },
            3.0,
        ),
        ({"retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry_after": "soon"}, None),
        ({}, None),
    ],
)
async def test_retry_after_is_understood_in_seconds_and_as_a_date(
    connect: Connect, headers: dict[str, str], seconds: float | None
) -> None:
    with OddServer(lambda _: response(429, headers=headers)) as server:
        async with connect(server.url, retries=fencepost.NO_RETRIES) as client:
            with pytest.raises(fencepost.RateLimitedError) as refused:
                await client.stream("s").head()

        assert refused.value.retry_after == seconds


# Redirects


async def test_a_write_that_is_redirected_is_an_error_that_names_the_target(
    connect: Connect,
) -> None:
    with OddServer(lambda _: response(302, location="/elsewhere")) as server:
        async with connect(server.url) as client:
            stream = client.stream("s")
            for write in (stream.delete, lambda: stream.append(1), lambda: client.create("s")):
                with pytest.raises(fencepost.RedirectedError, match="/elsewhere") as refused:
                    await write()
                assert (refused.value.status, refused.value.location) == (302, "/elsewhere")

        assert len(server.asked) == 3


async def test_a_producer_that_is_redirected_stops_with_the_target(connect: Connect) -> None:
    with OddServer(lambda _: response(307, location="/elsewhere")) as server:
        async with connect(server.url) as client:
            producer = client.stream("s").producer("p")
            await producer.append(1)
            with pytest.raises(fencepost.ProducerFailedError) as failed:
                await producer.close()

        assert isinstance(failed.value.cause, fencepost.RedirectedError)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
async def test_reads_follow_redirects_on_the_same_server(connect: Connect, live: Any) -> None:
    def answer(asked: Asked) -> bytes:
        if asked.path == "/v1/stream/old":
            return response(308, location="/v1/stream/new?" + asked.target.partition("?")[2])
        if asked.live == "sse":
            events = b'event: control\ndata: {"streamNextOffset":"2","streamClosed":true}\n\n'
            return response(200, events, content_type="text/event-stream")
        if asked.live:
            return tail(b"[]", "2", stream_closed="true")
        return tail(b"[1]", "1")

    with OddServer(answer) as server:
        async with connect(server.url, token="secret") as client:
            assert (await client.stream("old").head()).next_offset == "1"
            assert await client.stream("old").follow(live=live).messages() == [1]

        assert all(asked.headers["authorization"] == "Bearer secret" for asked in server.asked)


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:{}/v1/stream/s", "https://localhost/s", "//localhost:{}/s", "http://[x/s"],
)
async def test_a_redirect_to_another_origin_is_refused_and_gets_no_token(
    connect: Connect, target: str
) -> None:
    with (
        OddServer(lambda _: tail()) as other,
        OddServer(
            lambda _: response(302, location=target.format(other.url.rpartition(":")[2]))
        ) as server,
    ):
        async with connect(server.url, token="secret") as client:
            with pytest.raises(fencepost.RedirectedError):
                await client.stream("s").head()
            with pytest.raises(fencepost.RedirectedError):
                await client.stream("s").read().messages()

        assert not other.asked
        assert len(server.asked) == 2  # nor is the path of the other one asked for here


async def test_redirects_in_a_circle_end(connect: Connect) -> None:
    with OddServer(lambda asked: response(302, location=asked.target)) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.RedirectedError):
                await client.stream("s").head()

        assert len(server.asked) < 10


# One tree of errors


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"a":1}', fencepost.ProtocolError),
        (b"1", fencepost.ProtocolError),
        (b"[1,", fencepost.UnreadableError),
        (b"not JSON", fencepost.UnreadableError),
        (b"\xff\xfe", fencepost.UnreadableError),
    ],
)
async def test_a_body_that_is_no_array_of_messages(
    connect: Connect, body: bytes, error: type[Exception]
) -> None:
    with OddServer(lambda _: tail(body)) as server:
        async with connect(server.url) as client:
            with pytest.raises(error):
                await client.stream("s").read().messages()
            with pytest.raises(fencepost.FencepostError):
                await client.stream("s").read(type=int).messages()


async def test_bytes_of_what_is_no_array_are_not_cut(connect: Connect) -> None:
    with OddServer(lambda _: tail(b'{"a":1}')) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError):
                await client.stream("s").read().bytes()


@pytest.mark.parametrize(
    "events",
    [
        b"event: control\ndata: {oops\n\n",
        b"event: control\ndata: [1]\n\n",
        b'event: control\ndata: {"streamNextOffset":7}\n\n',
        b'event: data\ndata: *\n\nevent: control\ndata: {"streamNextOffset":"2"}\n\n',
        b'event: data\ndata: {"a":1}\n\nevent: control\ndata: {"streamNextOffset":"2"}\n\n',
    ],
)
@pytest.mark.parametrize("encoding", ["base64", "none"])
async def test_events_that_cannot_be_read(connect: Connect, events: bytes, encoding: str) -> None:
    def answer(asked: Asked) -> bytes:
        if not asked.live:
            return tail()
        return response(
            200, events, content_type="text/event-stream", stream_sse_data_encoding=encoding
        )

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.FencepostError) as failed:
                await asyncio.wait_for(client.stream("s").follow().messages(), 30)

        assert failed.value.path == "/v1/stream/s"


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("head", {"stream_next_offset": "1", "stream_expires_at": "whenever"}),
        ("head", {"stream_next_offset": "1", "stream_ttl": "\xb2"}),
        ("head", {}),
    ],
)
async def test_headers_that_cannot_be_read(
    connect: Connect, method: str, headers: dict[str, str]
) -> None:
    with OddServer(lambda _: response(200, headers=headers)) as server:
        async with connect(server.url) as client:
            with contextlib.suppress(fencepost.ProtocolError):
                assert (await client.stream("s").head()).ttl_seconds is None


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate"])
async def test_an_answer_that_is_compressed_all_the_same_is_read(
    connect: Connect, encoding: str
) -> None:
    body = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "raw deflate": lambda data: zlib.compress(data)[2:-4],
    }[encoding](b"[1,2,3]")

    with OddServer(lambda _: tail(body, content_encoding=encoding.split()[-1])) as server:
        async with connect(server.url) as client:
            assert await client.stream("s").read().messages() == [1, 2, 3]

        assert server.asked[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_an_answer_that_is_not_compressed_as_it_says(connect: Connect, encoding: str) -> None:
    with OddServer(lambda _: tail(b"[1,2,3]", content_encoding=encoding)) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError):
                await client.stream("s").read().messages()


async def test_every_error_names_its_request(connect: Connect) -> None:
    refusal = response(
        409, b'{"code":"stream_closed","detail":"closed"}', headers={"X-Request-Id": "abc"}
    )

    with OddServer(lambda _: refusal) as server:
        async with connect(server.url + "/below", params={"key": "secret"}) as client:
            with pytest.raises(fencepost.StreamClosedError) as refused:
                await client.stream("orders/7").append(1)
    async with connect(server.url, retries=fencepost.NO_RETRIES) as client:
        with pytest.raises(fencepost.ConnectionFailedError) as away:
            await client.stream("s").head()

    error = refused.value
    assert (error.method, error.path) == ("POST", "/below/v1/stream/orders/7")
    assert (error.status, error.code, error.request_id) == (409, "stream_closed", "abc")
    assert str(error) == ("409 stream_closed: closed (POST /below/v1/stream/orders/7, request abc)")
    assert str(away.value).endswith("(HEAD /v1/stream/s)")


async def test_an_error_of_what_a_server_says_names_the_answer(connect: Connect) -> None:
    strange = response(200, b'{"a":1}', headers={"X-Request-Id": "abc"}, stream_next_offset="1")

    with OddServer(lambda _: strange) as server:
        async with connect(server.url) as client:
            with pytest.raises(fencepost.ProtocolError) as caught:
                await client.stream("s").read().messages()

    error = caught.value
    assert (error.method, error.path, error.status) == ("GET", "/v1/stream/s", 200)
    assert error.request_id == "abc"
    assert str(error).endswith("(GET /v1/stream/s, status 200, request abc)")


async def test_errors_about_lost_writes_and_producers_name_the_request_of_their_cause(
    connect: Connect,
) -> None:
    refusal = response(
        503, b'{"code":"commit_unknown","detail":"unknown"}', headers={"X-Request-Id": "abc"}
    )

    with OddServer(lambda _: refusal) as server:
        async with connect(server.url, retries=fencepost.NO_RETRIES) as client:
            with pytest.raises(fencepost.OutcomeUnknownError) as unknown:
                await client.stream("s").append(1)
            producer = client.stream("s").producer("p", delivery_seconds_max=0.05)
            await producer.append(1)
            with pytest.raises(fencepost.ProducerFailedError) as failed:
                await producer.close()

    for error in (unknown.value, failed.value):
        assert (error.method, error.path) == ("POST", "/v1/stream/s")
        assert str(error).count("POST /v1/stream/s") == 1
    lost = unknown.value
    assert (lost.status, lost.code, lost.request_id) == (503, "commit_unknown", "abc")


async def test_a_flush_that_takes_too_long_is_an_error_of_ours(connect: Connect) -> None:
    with OddServer(lambda _: None) as server:
        async with connect(server.url) as client:
            producer = client.stream("s").producer("p")
            await producer.append(1)
            with pytest.raises(fencepost.DeliveryTimeoutError) as late:
                await producer.flush(timeout=0.05)
            with pytest.raises(fencepost.ProducerFailedError):
                await producer.close(timeout=0)

        assert isinstance(late.value, TimeoutError)


@pytest.mark.parametrize("message", [object(), "\ud800", {1.5: {2j: 3}}, float])
async def test_a_message_that_cannot_be_encoded_is_an_error_of_ours(
    connect: Connect, message: object
) -> None:
    with OddServer(lambda _: None) as server:
        async with connect(server.url) as client:
            stream = client.stream("s")
            producer = stream.producer("p")
            with pytest.raises(fencepost.UnencodableError):
                await stream.append(message)
            with pytest.raises(fencepost.UnencodableError):
                await producer.append(message)
            await producer.close()

        assert not server.asked


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://[x", "ftp://h", "h:1", "http://h?x=1", "http://" + "x" * 99]
)
async def test_a_url_that_leads_nowhere_is_an_error_of_ours(connect: Connect, url: str) -> None:
    with pytest.raises(fencepost.FencepostError):
        async with connect(url, retries=fencepost.NO_RETRIES) as client:
            await client.stream("s").head()
