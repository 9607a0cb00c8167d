"""Calling webhooks: one signed POST, to a checked address, within limits, and no redirect followed.

The connection is made by a network backend of our own, which asks the guard for the addresses of
the host and connects to one of exactly those. The name stays what TLS verifies.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpcore
import msgspec

from fencepost.server.subscriptions.guard import Guard, UnsafeTargetError

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 10.0


class Delivered(NamedTuple):
    """The webhook took it; `done` when it says that all the work is finished."""

    done: bool


class Undelivered(NamedTuple):
    """The webhook did not take it, as far as we know."""

    reason: str


Delivery = Delivered | Undelivered


class _Answer(msgspec.Struct):
    done: bool = False


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects only where the guard lets it, to the addresses that the guard has seen."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await self._guard.reach(host, port)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from error
        failure: Exception | None = None
        for address in addresses:
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class Webhooks:
    """The client that calls webhooks. `close` ends its connections."""

    def __init__(
        self,
        guard: Guard,
        *,
        connections_max: int,
        response_bytes_max: int,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.guard = guard
        self._response_bytes_max = response_bytes_max
        self._connections_max = connections_max
        self._ssl_context = ssl_context
        self._pool: httpcore.AsyncConnectionPool | None = None

    async def post(
        self, url: str, body: bytes, headers: list[tuple[bytes, bytes]], *, timeout_ms: int
    ) -> Delivery:
        """Send `body` and wait for the answer, at most `timeout_ms`."""
        try:
            self.guard.check_url(url)
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._post(url, body, headers)
        except TimeoutError:
            return Undelivered(f"no answer within {timeout_ms} ms")
        except UnsafeTargetError as error:
            return Undelivered(f"refused: {error}")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            return Undelivered(str(error) or type(error).__name__)
        except OSError as error:
            return Undelivered(f"{type(error).__name__}: {error}")

    async def _post(self, url: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> Delivery:
        async with self._connections().stream(
            "POST", url, headers=headers, content=body
        ) as response:
            if not 200 <= response.status < 300:
                return Undelivered(f"answered {response.status}")
            read = bytearray()
            async for chunk in response.aiter_stream():
                read += chunk
                if len(read) > self._response_bytes_max:
                    # It took the wake; an answer this long is no {"done": true}.
                    return Delivered(done=False)
        return Delivered(done=_is_done(bytes(read)))

    def _connections(self) -> httpcore.AsyncConnectionPool:
        if self._pool is None:
            # Made on first use: reading the system's certificates takes a while.
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=self._ssl_context or httpcore.default_ssl_context(),
                max_connections=self._connections_max,
                keepalive_expiry=KEEPALIVE_SECONDS,
                network_backend=GuardedBackend(self.guard),
            )
        return self._pool

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()
            self._pool = None


def _is_done(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Answer).done
    except (msgspec.DecodeError, RecursionError):
        return False
