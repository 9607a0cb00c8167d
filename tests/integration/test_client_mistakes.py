"""What users do wrong in their first hour: they are told, and nothing else is stored instead."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import Any

import pytest
import uvloop

import fencepost
from fencepost.client.operations import CommitAppend
from tests.odd_server import Asked, OddServer, response
from tests.serving import ServerProcess
from tests.twins import Connect
from tests.twins import connect as connect

BYTES = [b'{"n": 1}', bytearray(b"x"), memoryview(b"x")]


@pytest.mark.parametrize("data", BYTES, ids=["bytes", "bytearray", "memoryview"])
async def test_bytes_are_no_message_of_a_json_stream(
    connect: Connect, server_process: ServerProcess, path: str, data: Any
) -> None:
    """A JSON stream held their base64, which the next reader took for a text."""
    async with connect(server_process.url) as client:
        stream = await client.create(path)

        for untold in (stream, client.stream(path)):
            with pytest.raises(fencepost.UnencodableError, match="bytes are no JSON value"):
                await untold.append(data)
            with pytest.raises(fencepost.UnencodableError, match="content_type"):
                await untold.append_many([1, data])
        with pytest.raises(fencepost.UnencodableError):
            await client.create(f"{path}-new", messages=[data])
        with pytest.raises(fencepost.UnencodableError):
            await client.commit([CommitAppend(stream=path, messages=[data])])
        producer = stream.producer("p")
        with pytest.raises(fencepost.UnencodableError):
            await producer.append(data)
        await producer.append("good")
        await producer.close()

        assert await stream.read().messages() == ["good"]


async def test_bytes_of_a_producer_that_does_not_know_its_stream_end_it_if_that_is_json(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        made = await client.create(path)
        producer = client.stream(path).producer("p")
        await producer.append(b"{}")

        with pytest.raises(fencepost.ProducerFailedError) as failed:
            await producer.close()

        assert isinstance(failed.value.cause, fencepost.UnencodableError)
        assert await made.read().messages() == []


async def test_bytes_make_no_stream_by_chance(
    connect: Connect, server_process: ServerProcess
) -> None:
    async with connect(server_process.url) as client:
        with pytest.raises(fencepost.StreamNotFoundError):
            await client.stream("by-chance").append(b"x")
        with pytest.raises(fencepost.UnencodableError, match="content_type"):
            await client.stream("by-chance").append(b"x", auto_create=True)

        with pytest.raises(fencepost.StreamNotFoundError):
            await client.stream("by-chance").head()


@pytest.mark.parametrize("messages", ["abc", b"abc", {"a": 1}, 5, None], ids=repr)
async def test_one_message_is_not_several(
    connect: Connect, server_process: ServerProcess, path: str, messages: Any
) -> None:
    """Of a text the letters were stored, of an object its keys."""
    async with connect(server_process.url) as client:
        stream = await client.create(path)

        with pytest.raises(fencepost.InvalidArgumentError, match="store one message with append"):
            await stream.append_many(messages)
        with pytest.raises(fencepost.InvalidArgumentError, match="several messages are a list"):
            await client.create(f"{path}-new", messages=messages)

        assert await stream.read().messages() == []


def test_a_token_is_given_without_the_word_bearer() -> None:
    for connecting in (fencepost.connect, fencepost.connect_async):
        with pytest.raises(fencepost.InvalidArgumentError, match="without the word Bearer"):
            connecting("http://127.0.0.1:1", token="Bearer abc")


@pytest.mark.parametrize("value", ["token", "X-Team"])
async def test_a_function_that_gives_no_value_is_told_before_anything_is_sent(
    connect: Connect, value: str
) -> None:
    """As `os.environ.get` does: None was sent as the text None."""
    nothing: Any = lambda: None  # noqa: E731
    given = {"token": nothing} if value == "token" else {"headers": {value: nothing}}
    with OddServer(lambda _: response(200, stream_next_offset="2")) as server:
        async with connect(server.url, **given) as client:
            with pytest.raises(fencepost.InvalidArgumentError, match=f"for {value} gave None"):
                await client.stream("s").append(1)
            producer = client.stream("s").producer("p")
            await producer.append(1)
            with pytest.raises(fencepost.ProducerFailedError) as failed:
                await producer.close()
            assert isinstance(failed.value.cause, fencepost.InvalidArgumentError)

        assert not server.asked


@pytest.mark.parametrize("offset", [0, 7, b"now"], ids=repr)
async def test_an_offset_is_a_text_that_the_server_gave(
    connect: Connect, server_process: ServerProcess, offset: Any
) -> None:
    async with connect(server_process.url) as client:
        for read in ("read", "follow"):
            with pytest.raises(fencepost.InvalidArgumentError, match="offset is a text"):
                getattr(client.stream("s"), read)(offset=offset)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the first loop ends what was left open
@pytest.mark.parametrize("second", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("first", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_async_client_may_be_used_in_one_event_loop_after_the_other(
    server_process: ServerProcess, first: Any, second: Any
) -> None:
    """Scripts that call `asyncio.run` twice, and test suites with a loop for each test, do that."""
    client = fencepost.connect_async(server_process.url)
    path = f"loops-{first.__module__}-{second.__module__}"

    async def store(number: int) -> list[int]:
        stream = await client.create(path)
        await stream.append(number)
        return await stream.read().messages()

    with asyncio.Runner(loop_factory=first) as runner:
        assert runner.run(store(1)) == [1]
    with asyncio.Runner(loop_factory=second) as runner:
        assert runner.run(store(2)) == [1, 2]
        runner.run(client.close())
    gc.collect()  # while the warnings of what the first loop left open are ignored


async def test_a_program_that_waits_for_a_server_says_so_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """It was silent until it gave up, and looked as if it hung."""
    retries = fencepost.Retries(attempts_max=6, delay_seconds_max=0.01)
    async with connect("http://127.0.0.1:1", retries=retries) as client:
        with caplog.at_level(logging.WARNING), pytest.raises(fencepost.ConnectionFailedError):
            await client.stream("away").append(1, params={"secret": "s3cret"})

    (told,) = caplog.messages
    assert told.startswith("POST /v1/stream/away is not done yet, trying again for up to 60 s:")
    assert "cannot connect to 127.0.0.1:1" in told
    assert "s3cret" not in told


async def test_a_producer_that_waits_for_a_server_says_so_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([response(503)] * 5)

    def answer(asked: Asked) -> bytes:
        return next(failures, response(200, stream_next_offset="2"))

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            with caplog.at_level(logging.WARNING):
                async with client.stream("s").producer("p") as producer:
                    await producer.append(json.loads("1"))

    (told,) = caplog.messages
    assert told.startswith("the producer on /v1/stream/s cannot store its messages yet")
