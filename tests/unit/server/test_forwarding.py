"""Passing a request on: what arrives at the other node, and what comes back."""

import asyncio
import socket

import pytest

from fencepost.http.listener import serve
from fencepost.http.messages import Answer, Request, Response
from fencepost.server.forwarding import (
    FORWARDED,
    Forwarding,
    UnansweredError,
    UnreachableError,
    restore,
    was_forwarded,
)


class Echo:
    """An application that keeps what it is asked and answers as it was told."""

    def __init__(self, answer: Response) -> None:
        self._answer = answer
        self.asked: list[Request] = []

    def handle(self, request: Request, answer: object) -> None:
        self.asked.append(request)
        assert callable(answer)
        answer(self._answer)


def request(**headers: bytes) -> Request:
    sent = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return Request(
        "POST",
        b"/v1/stream/__ds/subscriptions/a%2Fb/ack",
        b"after=x%20y",
        {b"host": b"streams.example", **sent},
        b'{"done": true}',
        scheme="https",
        root=b"/mounted",
    )


async def forwarded(asked: Request, answer: Response) -> tuple[Request, Answer]:
    """What another node gets, and what comes back from it."""
    other = Echo(answer)
    listening = await serve(other)
    forwarding = Forwarding()
    try:
        got = await forwarding.forward(asked, f"http://127.0.0.1:{listening.port}")
    finally:
        await forwarding.close()
        await listening.drain(5)
    [arrived] = other.asked
    return arrived, got


async def test_a_request_arrives_as_its_client_sent_it_and_so_does_the_answer() -> None:
    asked = request(authorization=b"Bearer t", content_type=b"application/json")
    answer = Response(409, [(b"Retry-After", b"1")], b"fenced")

    arrived, got = await forwarded(asked, answer)
    restore(arrived)

    assert (arrived.method, arrived.path, arrived.query) == (asked.method, asked.path, asked.query)
    assert arrived.body == asked.body
    assert arrived.headers[b"authorization"] == b"Bearer t"
    assert was_forwarded(arrived)
    assert arrived.base_url() == asked.base_url() == b"https://streams.example/mounted"
    assert isinstance(got, Response)
    assert (got.status, got.body) == (409, b"fenced")
    assert (b"Retry-After", b"1") in got.headers
    assert not {b"content-length", b"date"} & {name.lower() for name, _ in got.headers}


async def test_a_header_that_came_twice_arrives_twice() -> None:
    asked = request(authorization=b"Bearer t")
    asked.repeated = frozenset((b"authorization",))

    arrived, _ = await forwarded(asked, Response(204, []))

    assert b"authorization" in arrived.repeated


async def test_what_belongs_to_one_connection_stays_there() -> None:
    asked = request(connection=b"keep-alive", expect=b"100-continue", te=b"trailers")

    arrived, _ = await forwarded(asked, Response(204, []))

    assert not {b"expect", b"te"} & arrived.headers.keys()


async def test_a_node_that_is_not_there_has_not_got_the_request() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        forwarding = Forwarding()

        with pytest.raises(UnreachableError):
            await forwarding.forward(request(), f"http://127.0.0.1:{taken.getsockname()[1]}")

        await forwarding.close()


async def test_a_node_that_hangs_up_may_have_got_the_request() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    forwarding = Forwarding()
    async with server:
        with pytest.raises(UnansweredError):
            await forwarding.forward(
                request(), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            )
    await forwarding.close()


@pytest.mark.parametrize("value", [b"", b"ftp:/x", b"http", b"https:x", b"http:/a b"])
def test_an_origin_that_is_none_is_passed_over(value: bytes) -> None:
    asked = request()
    asked.headers[FORWARDED] = value

    restore(asked)

    assert asked.base_url() == b"https://streams.example/mounted"
