"""The client against servers that end, refuse, redirect and answer what they should not."""

from __future__ import annotations

import asyncio
import contextlib
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
            return tail(offset="0")
        number = int(asked.target.partition("offset=")[2].partition("&")[0])
        control = b'{"streamNextOffset":"%d","streamClosed":%s}' % (
            number + 1,
            b"true" if number == 199 else b"false",
        )
        events = b"event: data\ndata: [%d]\n\nevent: control\ndata: %b\n\n" % (number, control)
        return response(200, events, content_type="text/event-stream", connection="close")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            seen = await follow_for(client.stream("s").follow(), 30)

        assert seen == list(range(200))


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
