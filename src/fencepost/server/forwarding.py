"""Passing a request on to the node that leads, and its answer back.

The request arrives there as its client sent it: method, path, query, body and headers, with those
that say who it is and how it found us. It is authenticated where it is answered. One that came
from another node goes no further: two nodes that take each other for the leader must not send it
back and forth.
"""

from __future__ import annotations

import asyncio
import logging
import re

import httpcore

from fencepost.http.messages import Request, Response

log = logging.getLogger(__name__)

FORWARDED = b"fencepost-forwarded"
"""The header of a request that was passed on: scheme and root, as its client knows them."""

CONNECT_S_MAX = 2.0
ANSWER_S_MAX = 30.0
"""How long the leader may take: as long as it may wait for its turn to write, and more."""
CONNECTIONS_MAX = 64
KEEPALIVE_S = 10.0
ANSWER_BYTES_MAX = 64 << 20

_OF_ONE_CONNECTION = frozenset(
    (
        b"connection",
        b"content-length",
        b"date",
        b"expect",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        FORWARDED,
    )
)
_ORIGIN = re.compile(rb"(https?):((?:/[!-~]*)?)")


class UnreachableError(Exception):
    """The leader did not get the request: nothing has happened, try again."""


class UnansweredError(Exception):
    """The leader may have got the request and carried it out, or not."""


class Forwarding:
    """The client for other nodes. `close` ends its connections."""

    def __init__(self) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=CONNECTIONS_MAX, keepalive_expiry=KEEPALIVE_S
        )

    async def forward(self, request: Request, url: str) -> Response:
        """Have a request answered by the node at `url`."""
        target = url.encode().rstrip(b"/") + request.path
        if request.query:
            target += b"?" + request.query
        timeouts = {"connect": CONNECT_S_MAX, "pool": CONNECT_S_MAX}
        try:
            async with (
                asyncio.timeout(ANSWER_S_MAX),
                self._pool.stream(
                    request.method,
                    target,
                    headers=_headers(request),
                    content=request.body,
                    extensions={"timeout": timeouts},
                ) as answer,
            ):
                return Response(
                    answer.status,
                    [pair for pair in answer.headers if pair[0].lower() not in _OF_ONE_CONNECTION],
                    await _body(answer),
                )
        except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout) as error:
            raise UnreachableError(str(error)) from error
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
            TimeoutError,
        ) as error:
            raise UnansweredError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._pool.aclose()


def was_forwarded(request: Request) -> bool:
    """Whether another node has passed a request on."""
    return FORWARDED in request.headers


def restore(request: Request) -> None:
    """Let a request that was passed on say what its client asked of the node before.

    Any client can send the header. It decides how that client's own callbacks look, as Host does.
    """
    found = _ORIGIN.fullmatch(request.headers.get(FORWARDED, b""))
    if found is not None:
        request.scheme, request.root = found[1].decode(), found[2]


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in request.headers.items() if _travels(name)]
    # Of a header that came more than once one value is known. Those who mind must see that it did.
    headers += [(name, request.headers[name]) for name in request.repeated if _travels(name)]
    return [*headers, (FORWARDED, b"%b:%b" % (request.scheme.encode(), request.root))]


def _travels(name: bytes) -> bool:
    return name not in _OF_ONE_CONNECTION


async def _body(answer: httpcore.Response) -> bytes:
    read = bytearray()
    async for chunk in answer.aiter_stream():
        read += chunk
        if len(read) > ANSWER_BYTES_MAX:
            raise httpcore.RemoteProtocolError("the answer is too long")
    return bytes(read)
