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

        assert len(server.asked) <= fencepost.Retries().attempts_max + 1


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


async def test_a_producer_closes_the_stream_with_its_last_batch(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        return response(200, stream_next_offset="2", stream_closed="true")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            producer = client.stream("s", content_type="text/plain").producer("p", linger=60)
            await producer.append("last")
            await producer.close(stream=True)

        assert [(one.headers.get("stream-closed"), one.body) for one in server.asked] == [
            ("true", b"last")
        ]


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_a_producer_closes_the_stream_behind_what_it_sent(
    connect: Connect, server_process: ServerProcess, path: str, sent: int
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        receipts: list[fencepost.Receipt] = []
        producer = stream.producer("p", on_ack=receipts.append)
        for number in range(sent):
            await producer.append(number)
            await producer.flush()

        await producer.close(stream=True)
        await producer.close(stream=True)

        assert await stream.follow().messages() == list(range(sent))
        assert (await stream.head()).closed
        assert [receipt.messages for receipt in receipts] == [1] * sent
        with pytest.raises(fencepost.ProducerClosedError):
            await producer.append("more")


async def test_a_producer_that_was_closed_closes_the_stream_later(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        async with stream.producer("p") as producer:
            await producer.append(1)

        assert not (await stream.head()).closed
        await producer.close(stream=True)
        assert (await stream.head()).closed


async def test_closing_a_stream_that_another_program_closed_is_fine(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        producer = stream.producer("p")
        await producer.append(1)
        await producer.flush()
        await stream.close()

        await producer.close(stream=True)

        assert await stream.follow().messages() == [1]


async def test_a_fenced_producer_does_not_close_the_stream(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        old, new = stream.producer("p"), stream.producer("p")
        for producer in (old, new):
            await producer.append(1)
            await producer.flush()

        with pytest.raises(fencepost.ProducerFailedError) as failed:
            await old.close(stream=True)
        assert isinstance(failed.value.cause, fencepost.StaleEpochError)
        await old.close(stream=True)
        assert not (await stream.head()).closed
        await new.close()


async def test_a_close_whose_answer_is_lost_is_sent_again(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes | None:
        if len(server.asked) == 1:
            return b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
        return response(204, stream_next_offset="2", stream_closed="true", stream_version="0")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            stream = client.stream("s", content_type="text/plain")
            producer = stream.producer("p", epoch=3, seq=4, linger=60)
            await producer.append("last")
            await producer.close(stream=True)

        assert producer.last_acked.duplicate
        sent = {
            (one.body, one.headers["producer-seq"], one.headers["stream-closed"])
            for one in server.asked
        }
        assert (sent, len(server.asked)) == ({(b"last", "5", "true")}, 2)


async def test_a_server_that_ignores_the_close_of_a_batch_is_asked_for_it(connect: Connect) -> None:
    with OddServer(lambda _: response(200, stream_next_offset="2")) as server:
        async with connect(server.url) as client:
            producer = client.stream("s", content_type="text/plain").producer("p", linger=60)
            await producer.append("last")
            await producer.close(stream=True)

        assert [one.body for one in server.asked] == [b"last", b""]
        assert server.asked[1].headers["stream-closed"] == "true"


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_producer_learns_the_type_of_a_stream_that_is_not_json(
    connect: Connect, server_process: ServerProcess, path: str, resumed: bool
) -> None:
    async with connect(server_process.url) as client:
        made = await client.create(path, content_type="text/plain")
        given = {}
        if resumed:
            async with made.producer("p") as first:
                await first.append("before ")
                await first.flush()
                given = {"epoch": first.last_acked.epoch, "seq": first.last_acked.seq}
        async with client.stream(path).producer("p", **given) as producer:
            for text in ("one ", b"two ", bytearray(b"three")):
                await producer.append(text)

        expected = "before one two three" if resumed else "one two three"
        assert await made.read().text() == expected


async def test_a_producer_of_values_fails_on_a_stream_that_is_not_json(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        await client.create(path, content_type="text/plain")
        producer = client.stream(path).producer("p")
        await producer.append("text")
        await producer.append({"a": 1})

        with pytest.raises(fencepost.ProducerFailedError) as failed:
            await producer.close()

        assert isinstance(failed.value.cause, fencepost.ContentTypeMismatchError)


async def test_a_producer_asks_a_plain_server_for_the_type(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        if asked.method == "HEAD":
            return response(200, content_type="text/plain", stream_next_offset="0")
        if asked.headers["content-type"] != "text/plain":
            return response(409, b"Content-type mismatch", content_type="text/plain")
        return response(200, stream_next_offset="2")

    with OddServer(answer) as server:
        async with connect(server.url) as client, client.stream("s").producer("p") as producer:
            await producer.append("text")

        assert [asked.method for asked in server.asked] == ["POST", "HEAD", "POST"]
        assert server.asked[-1].body == b"text"


async def test_headers_and_params_go_with_one_call(connect: Connect) -> None:
    given = {"headers": {"X-Trace": lambda: "b", "authorization": "Basic x"}, "params": {"p": "2"}}

    def answer(asked: Asked) -> bytes:
        if asked.live == "sse":
            return response(400)
        if asked.method == "POST":
            return response(200, stream_next_offset="2", stream_closed="true")
        closed = {"stream_closed": "true"} if asked.live else {}
        return tail(b"[]", "2", stream_first_offset="0", **closed)

    with OddServer(answer) as server:
        async with connect(
            server.url, token="all", headers={"x-trace": "a"}, params={"p": "1", "q": "3"}
        ) as client:
            stream = client.stream("s", content_type="application/json")
            await stream.append(1, **given)
            await stream.append_many([1], **given)
            await stream.read(**given).messages()
            await stream.follow(**given).messages()
            await stream.head(**given)
            await stream.truncate(before="now", **given)
            await stream.fork("f", **given)
            await stream.close(**given)
            await stream.delete(**given)
            async with stream.producer("p", **given) as producer:
                await producer.append(1)
            await (await client.create("c", **given)).head()
            await client.stream("c", **given).head()
            count = len(server.asked)
            await stream.head()

        for asked in server.asked[:count]:
            assert (asked.headers["x-trace"], asked.headers["authorization"]) == ("b", "Basic x")
            assert asked.target.endswith("p=2&q=3")
        last = server.asked[-1]
        assert (last.headers["x-trace"], last.headers["authorization"]) == ("a", "Bearer all")
        assert last.target.endswith("p=1&q=3")


async def test_functions_for_values_are_awaited_by_the_async_client() -> None:
    async def trace() -> str:
        return "awaited"

    with OddServer(lambda _: tail()) as server:
        async with fencepost.connect_async(server.url) as client:
            await client.stream("s").head(headers={"X-Trace": trace})
        with (
            fencepost.connect(server.url) as sync,
            pytest.raises(fencepost.FencepostError, match="cannot await"),
        ):
            sync.stream("s").head(headers={"X-Trace": trace})

        assert server.asked[0].headers["x-trace"] == "awaited"


@pytest.mark.parametrize(
    "given",
    [
        {"headers": {"X": 7}},
        {"params": {"X": None, "Y": 7}},
        {"headers": {"X\r\nY": "z"}},
        {"headers": {"X": "z\r\nY: z"}},
    ],
)
async def test_values_that_cannot_be_sent_are_refused_where_they_are_given(
    connect: Connect, given: Any
) -> None:
    with pytest.raises(fencepost.InvalidArgumentError):
        connect("http://localhost:1", **given)
    async with connect("http://localhost:1") as client:
        with pytest.raises(fencepost.InvalidArgumentError):
            client.stream("s", **given)
        with pytest.raises(fencepost.InvalidArgumentError):
            await client.stream("s").append(1, **given)


LOST = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


async def test_the_error_function_is_told_of_lost_connections(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        return tail() if asked.headers.get("x-route") == "b" else LOST

    seen: list[fencepost.FencepostError] = []

    def on_error(error: fencepost.FencepostError) -> fencepost.RetryWith:
        seen.append(error)
        return fencepost.RetryWith(headers={"X-Route": "b"})

    with OddServer(answer) as server:
        async with connect(server.url, on_error=on_error) as client:
            await client.stream("s").head()

        assert len(server.asked) == 2
    assert isinstance(seen[0], fencepost.ConnectionFailedError)
    assert (seen[0].method, seen[0].path) == ("HEAD", "/v1/stream/s")


@pytest.mark.parametrize("answer", [LOST, response(503)], ids=["lost", "503"])
@pytest.mark.parametrize("live", ["sse", "long-poll", "log", None])
async def test_the_error_function_gives_up_wherever_it_is_asked(
    connect: Connect, answer: bytes, live: Any
) -> None:
    def answered(asked: Asked) -> bytes:
        if asked.live or live in (None, "log"):
            return answer
        return tail()

    with OddServer(answered) as server:
        async with connect(server.url, on_error=lambda _: False) as client:
            stream = client.stream("s")
            if live == "log":
                asking = anext(aiter(client.log(follow=True)))
            else:
                asking = stream.head() if live is None else stream.follow(live=live).messages()
            with pytest.raises((fencepost.ConnectionFailedError, fencepost.UnavailableError)):
                await asking

        assert len(server.asked) == (1 if live in (None, "log") else 2)


async def test_giving_up_a_write_that_may_have_arrived_says_so(connect: Connect) -> None:
    with OddServer(lambda _: LOST) as server:
        async with connect(server.url, on_error=lambda _: False) as client:
            with pytest.raises(fencepost.OutcomeUnknownError):
                await client.stream("s").append(1)
            assert len(server.asked) == 1

        async with connect(server.url, on_error=lambda _: fencepost.RetryWith()) as client:
            with pytest.raises(fencepost.OutcomeUnknownError):
                await client.stream("s").append(1, retry=False)
            assert len(server.asked) == 2, "what must not happen twice was sent again"


@pytest.mark.parametrize("first", [LOST, response(403)], ids=["lost", "403"])
async def test_the_error_function_opens_events_again_with_other_headers(
    connect: Connect, first: bytes
) -> None:
    events = b'event: control\ndata: {"streamNextOffset":"2","streamClosed":true}\n\n'

    def answer(asked: Asked) -> bytes:
        if asked.live is None:
            return tail(b"[1]")
        assert asked.live == "sse"
        if asked.headers.get("authorization") != "Bearer new":
            return first
        return response(200, events, content_type="text/event-stream")

    def on_error(error: fencepost.FencepostError) -> fencepost.RetryWith:
        return fencepost.RetryWith(headers={"Authorization": "Bearer new"})

    with OddServer(answer) as server:
        async with connect(server.url, token="old", on_error=on_error) as client:
            reading = client.stream("s").follow(live="sse")
            assert await asyncio.wait_for(reading.messages(), 30) == [1]

        assert server.count("sse") == 2


async def test_an_error_function_that_always_opens_events_again_ends_all_the_same(
    connect: Connect,
) -> None:
    retries = fencepost.Retries(attempts_max=3, delay_seconds_max=0.01)
    with OddServer(lambda asked: response(403) if asked.live else tail()) as server:
        async with connect(
            server.url, retries=retries, on_error=lambda _: fencepost.RetryWith()
        ) as client:
            with pytest.raises(fencepost.ForbiddenError):
                await client.stream("s").follow(live="sse").messages()

        assert server.count("sse") == 4


async def test_an_error_function_of_the_async_client_may_be_async() -> None:
    async def on_error(error: fencepost.FencepostError) -> bool:
        return False

    with OddServer(lambda _: response(503)) as server:
        async with fencepost.connect_async(server.url, on_error=on_error) as client:
            with pytest.raises(fencepost.UnavailableError):
                await client.stream("s").head()

        assert len(server.asked) == 1
