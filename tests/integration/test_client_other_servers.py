"""What lets the client work with any Durable Streams server, and with tokens that change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import fencepost
from tests.odd_server import Asked, OddServer, response, tail
from tests.serving import ServerProcess
from tests.twins import Connect
from tests.twins import connect as connect


async def test_a_stream_is_found_by_its_full_url(connect: Connect) -> None:
    with OddServer(lambda _: tail(b"[1]")) as server:
        async with connect(server.url + "/api") as client:
            stream = client.stream(server.url + "/any/where%20else?shard=1")

            assert await stream.read().messages() == [1]
            await stream.head()

        assert [asked.target for asked in server.asked] == [
            "/any/where%20else?shard=1&offset=-1",
            "/any/where%20else?shard=1",
        ]


async def test_a_stream_of_another_server_is_refused(connect: Connect) -> None:
    async with connect("http://localhost:4437", token="secret") as client:
        for url in ("http://localhost:1/s", "https://localhost:4437/s", "http://other:4437/s"):
            with pytest.raises(fencepost.InvalidArgumentError, match="connect to that one"):
                client.stream(url)


async def test_our_own_server_is_used_by_full_urls(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    url = f"{server_process.url}/v1/stream/{path}"
    async with connect(server_process.url) as client:
        made = await client.create(url)
        async with made.producer("p") as producer:
            await producer.append(1)
        await made.append(2)

        assert await client.stream(path).read().messages() == [1, 2]
        assert (made.is_new, (await client.create(path)).is_new) == (True, False)


@pytest.mark.parametrize("live", ["sse", "long-poll"])
async def test_a_token_that_ends_while_following_is_asked_for_again(
    connect: Connect, live: Any
) -> None:
    tokens = iter(("first", "first", "second", "second", "second"))

    def answer(asked: Asked) -> bytes:
        if asked.live and asked.headers["authorization"] != "Bearer second":
            return response(401)
        if asked.live == "sse":
            events = b'event: control\ndata: {"streamNextOffset":"2","streamClosed":true}\n\n'
            return response(200, events, content_type="text/event-stream")
        return tail(b"[]", "2", stream_closed="true") if asked.live else tail(b"[1]")

    with OddServer(answer) as server:
        async with connect(server.url, token=lambda: next(tokens)) as client:
            reading = client.stream("s").follow(live=live)
            assert await asyncio.wait_for(reading.messages(), 30) == [1]


async def test_a_token_that_stays_wrong_is_refused(connect: Connect) -> None:
    with OddServer(lambda _: response(401)) as server:
        async with connect(server.url, token=lambda: "wrong") as client:
            with pytest.raises(fencepost.UnauthorizedError):
                await client.stream("s").head()

        assert len(server.asked) == 2


async def test_the_error_function_sends_it_again_with_other_headers(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        return tail() if asked.headers.get("authorization") == "Bearer new" else response(403)

    seen: list[fencepost.FencepostError] = []

    def on_error(error: fencepost.FencepostError) -> fencepost.RetryWith:
        seen.append(error)
        return fencepost.RetryWith(headers={"Authorization": "Bearer new"}, params={"again": "1"})

    with OddServer(answer) as server:
        async with connect(server.url, token="old", on_error=on_error) as client:
            await client.stream("s").head()

        assert isinstance(seen[0], fencepost.ForbiddenError)
        assert len(server.asked) == 2
        assert server.asked[1].target.endswith("?again=1")


async def test_the_error_function_gives_up(connect: Connect) -> None:
    with OddServer(lambda _: response(503)) as server:
        async with connect(server.url, on_error=lambda _: False) as client:
            with pytest.raises(fencepost.UnavailableError):
                await client.stream("s").head()

        assert len(server.asked) == 1


async def test_an_error_function_that_always_retries_ends_all_the_same(connect: Connect) -> None:
    with OddServer(lambda _: response(403)) as server:
        async with connect(server.url, on_error=lambda _: fencepost.RetryWith()) as client:
            with pytest.raises(fencepost.ForbiddenError):
                await client.stream("s").head()

        assert len(server.asked) < 20


async def test_a_stream_seq_that_a_plain_server_refuses(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        text = b"Content-type mismatch" if b"typed" in asked.body else b"Sequence conflict"
        return response(409, text, content_type="text/plain")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            stream = client.stream("s", content_type="application/json")
            with pytest.raises(fencepost.StreamSeqError):
                await stream.append(1, stream_seq="a")
            for append in ({"stream_seq": "a"}, {}):
                with pytest.raises(fencepost.ConflictError) as refused:
                    await stream.append("typed", **append)
                assert not isinstance(refused.value, fencepost.StreamSeqError)


async def test_the_type_of_a_stream_is_learnt_when_it_is_not_json(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        await client.create(path, content_type="application/octet-stream")
        stream = client.stream(path)

        await stream.append(b"\x00\x01")
        await stream.append_many([b"\x02", b"\x03"])

        assert await stream.read().bytes() == b"\x00\x01\x02\x03"
        assert stream.content_type == "application/octet-stream"


async def test_a_producer_closes_the_stream_behind_its_last_message(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        producer = stream.producer("p")
        await producer.append(1)

        await producer.close(stream=True)

        assert await stream.follow().messages() == [1]
        assert (await stream.head()).closed
