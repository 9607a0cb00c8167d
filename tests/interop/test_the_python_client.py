"""The public Python client (`durable-streams` on PyPI) against a real server.

Its release 0.1.0 is older than closing: its own `close` only releases the handle. The closing
append is therefore sent through the client with the protocol's header, and that the stream is
closed is seen in what the client does next.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from durable_streams import (
    AsyncDurableStream,
    DurableStream,
    DurableStreamError,
    HeadersLike,
    stream,
)

from tests.serving import ServerProcess

CLOSING: HeadersLike = {"Stream-Closed": "true"}


def test_it_creates_appends_reads_and_closes_a_json_stream(server_process: ServerProcess) -> None:
    url = f"{server_process.url}/v1/stream/interop/python-sync"

    with DurableStream.create(url, content_type="application/json") as handle:
        handle.append({"event": "click"})
        after_first = handle.append({"event": "scroll"}).next_offset
    with DurableStream(url, content_type="application/json", headers=CLOSING) as closing:
        tail = closing.append({"event": "leave"}).next_offset

    with stream(url, live=False) as everything:
        assert everything.read_json() == [
            {"event": "click"},
            {"event": "scroll"},
            {"event": "leave"},
        ]
    with stream(url, offset=after_first, live=False) as rest:
        assert rest.read_json() == [{"event": "leave"}]
    with DurableStream(url, content_type="application/json") as late:
        assert late.head().offset == tail
        with pytest.raises(DurableStreamError):
            late.append({"event": "too late"})


def test_it_appends_and_reads_bytes_as_they_were_sent(server_process: ServerProcess) -> None:
    url = f"{server_process.url}/v1/stream/interop/python-bytes"
    every_byte = bytes(range(256))

    with DurableStream.create(url, content_type="application/octet-stream") as handle:
        handle.append(every_byte)
        handle.append(every_byte[::-1])

    with stream(url, live=False) as everything:
        assert everything.read_bytes() == every_byte + every_byte[::-1]


@pytest.mark.parametrize("live", ["long-poll", "sse"])
async def test_it_reads_live_what_is_appended_while_it_waits(
    server_process: ServerProcess, live: Literal["long-poll", "sse"]
) -> None:
    url = f"{server_process.url}/v1/stream/interop/python-{live}"
    writer = await AsyncDurableStream.create(url, content_type="application/json")
    reader = AsyncDurableStream(url)
    async with writer, reader:
        await writer.append({"number": 0})

        async with reader.stream(offset="-1", live=live) as response:
            items: AsyncIterator[object] = aiter(response.iter_json())
            seen = [await anext(items)]
            for number in (1, 2, 3):
                coming, _ = await asyncio.gather(anext(items), writer.append({"number": number}))
                seen.append(coming)

    assert seen == [{"number": number} for number in range(4)]


async def test_appends_it_batches_on_its_own_arrive_once_each(
    server_process: ServerProcess,
) -> None:
    url = f"{server_process.url}/v1/stream/interop/python-batches"
    writer = await AsyncDurableStream.create(url, content_type="application/json")
    async with writer:
        await asyncio.gather(*(writer.append(number) for number in range(50)))

        async with writer.stream(live=False) as response:
            numbers = await response.read_json()

    assert sorted(numbers) == list(range(50))
