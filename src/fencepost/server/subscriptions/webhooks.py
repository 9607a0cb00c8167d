"""Delivering wakes to webhooks: one signed POST for each wake, a bounded number at once.

`Deliveries` starts a delivery once its wake is on disk and reports the result to the engine, which
decides what follows. `Webhooks` is the HTTP client: it connects only to addresses that the guard
has checked, stays within its limits, and follows no redirect. The name in the URL stays what TLS
verifies. `Crew` runs a bounded number of deliveries at a time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import httpcore
import msgspec

from fencepost.clock import Clock
from fencepost.protocol.subscriptions import Link, Seen, Subscription, Wake
from fencepost.server.subscriptions.registry import Registry
from fencepost.server.subscriptions.security import Guard, SigningKey, UnsafeTargetError
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.contract import Failure, SubscriptionStore

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The engine, as its deliveries see it."""

    @property
    def registry(self) -> Registry: ...

    def now_ms(self) -> int: ...

    def token(self, subscription: Subscription) -> str: ...

    def delivered(
        self, subscription: Subscription, wake: Wake, delivery: Delivery, started_ms: int
    ) -> None:
        """Note the result of a delivery."""
        ...

    def schedule(self, subscription: Subscription) -> None:
        """Look when there is something to do next."""
        ...


class Deliveries:
    """Webhook requests of one engine."""

    def __init__(
        self,
        owner: Owner,
        store: SubscriptionStore,
        clock: Clock,
        settings: SubscriptionSettings,
        *,
        webhooks: Webhooks,
        signing: SigningKey,
    ) -> None:
        self._owner = owner
        self._store = store
        self._clock = clock
        self._settings = settings
        self._webhooks = webhooks
        self._signing = signing
        self._crew = Crew(
            settings.deliveries_max,
            per_principal=settings.deliveries_per_principal_max,
            per_host=settings.deliveries_per_host_max,
        )
        self._under_way: dict[int, tuple[int, int]] = {}
        self._attempts = 0

    @property
    def count(self) -> int:
        """Requests that wait for an answer."""
        return self._crew.working_count

    def has(self, subscription: Subscription) -> bool:
        """Whether the current wake of a subscription is being delivered."""
        attempt = self._under_way.get(subscription.id)
        return attempt is not None and attempt[0] == subscription.wake.generation

    def forget(self) -> None:
        """Drop those that have not begun, and ignore the results of the others."""
        self._crew.forget()
        self._under_way.clear()

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Deliver until `meanwhile` ends or is cancelled."""
        await self._crew.run(meanwhile)

    async def drain(self, seconds_max: float) -> None:
        """Start no more, and wait for those under way."""
        await self._crew.drain(seconds_max)

    def begin(self, subscription: Subscription) -> None:
        """Deliver the current wake once it is on disk."""
        self._attempts += 1
        attempt = (subscription.wake.generation, self._attempts)
        self._under_way[subscription.id] = attempt
        self._store.after(partial(self._deliverable, subscription, attempt))

    def _deliverable(
        self, subscription: Subscription, attempt: tuple[int, int], failure: Failure | None
    ) -> None:
        """The wake is on disk: send it."""
        if failure is None:
            url = subscription.config.webhook_url
            host = "" if url is None else urlsplit(url).netloc
            self._crew.add(partial(self._deliver, subscription, attempt), subscription.owner, host)

    async def _deliver(self, subscription: Subscription, attempt: tuple[int, int]) -> None:
        owner, wake = self._owner, subscription.wake
        current = owner.registry.holds(subscription) and wake.generation == attempt[0]
        try:
            # A callback may have come for an earlier attempt while this one waited its turn.
            if current and wake.next_attempt_ms is not None:
                started_ms = owner.now_ms()
                delivery = await self._post(subscription)
                owner.delivered(subscription, wake, delivery, started_ms)
        except Exception:
            log.exception("a delivery failed in an unexpected way")
            owner.delivered(subscription, wake, Undelivered("internal error"), started_ms=0)
        finally:
            if self._under_way.get(subscription.id) == attempt:
                del self._under_way[subscription.id]
            if owner.registry.holds(subscription):
                owner.schedule(subscription)

    async def _post(self, subscription: Subscription) -> Delivery:
        config, wake = subscription.config, subscription.wake
        assert config.webhook_url is not None
        body = msgspec.json.encode(
            {
                "subscription_id": subscription.name,
                "wake_id": wake.wake_id,
                "generation": wake.generation,
                "streams": show_wake(subscription),
                "callback_url": callback_url(subscription),
                "callback_token": self._owner.token(subscription),
            }
        )
        headers = [
            (b"Content-Type", b"application/json"),
            (b"User-Agent", b"fencepost"),
            (b"Webhook-Signature", self._signing.signature(body, now_ms=self._clock.wall_ms())),
        ]
        timeout_ms = min(self._settings.delivery_timeout_ms, config.lease_ttl_ms)
        return await self._webhooks.post(config.webhook_url, body, headers, timeout_ms=timeout_ms)


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


Job = Callable[[], Coroutine[Any, Any, None]]


class Crew:
    """Runs jobs, at most `size` at a time, inside the task group of `run`.

    Principals take turns, and no principal and no host has more than its share, so that targets
    which never answer delay their own principal's jobs only.
    """

    def __init__(self, size: int, *, per_principal: int, per_host: int) -> None:
        self._size = size
        self._per_principal = per_principal
        self._per_host = per_host
        # The principals that wait, the next one first; each with its jobs by host.
        self._waiting: dict[str, dict[str, deque[Job]]] = {}
        self._principals: Counter[str] = Counter()
        self._hosts: Counter[str] = Counter()
        self._working: set[asyncio.Task[None]] = set()
        self._parent: asyncio.TaskGroup | None = None
        self._stopping = False

    @property
    def working_count(self) -> int:
        return len(self._working)

    def add(self, job: Job, principal: str = "", host: str = "") -> None:
        """Do `job` when it is its turn. It must not raise."""
        self._waiting.setdefault(principal, {}).setdefault(host, deque()).append(job)
        self._start()

    def forget(self) -> None:
        """Drop the jobs that have not begun."""
        self._waiting.clear()

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Work until `meanwhile` ends or is cancelled; jobs under way are then cancelled too."""
        async with asyncio.TaskGroup() as parent:
            self._parent = parent
            self._start()
            try:
                await meanwhile()
            finally:
                self._parent = None

    async def drain(self, seconds_max: float) -> None:
        """Begin no more jobs, and wait for those under way."""
        self._stopping = True
        if self._working:
            await asyncio.wait(self._working, timeout=seconds_max)

    def _start(self) -> None:
        while self._parent is not None and not self._stopping and len(self._working) < self._size:
            found = self._next()
            if found is None:
                return
            principal, host, job = found
            self._principals[principal] += 1
            self._hosts[host] += 1
            task = self._parent.create_task(job())
            self._working.add(task)
            task.add_done_callback(partial(self._ended, principal, host))

    def _next(self) -> tuple[str, str, Job] | None:
        """The job whose turn it is, of those whose principal and host have room."""
        for principal, hosts in self._waiting.items():
            if self._principals[principal] >= self._per_principal:
                continue
            host = next((name for name in hosts if self._hosts[name] < self._per_host), None)
            if host is None:
                continue
            jobs = hosts.pop(host)
            job = jobs.popleft()
            if jobs:
                hosts[host] = jobs  # at the end: the other hosts come first
            del self._waiting[principal]
            if hosts:
                self._waiting[principal] = hosts
            return principal, host, job
        return None

    def _ended(self, principal: str, host: str, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        for counter, name in ((self._principals, principal), (self._hosts, host)):
            counter[name] -= 1
            if not counter[name]:
                del counter[name]
        self._start()


def shown_streams(subscription: Subscription) -> list[tuple[Link, Seen]]:
    """The streams of the current wake that are still what they were and not done with."""
    return [
        (link, seen)
        for seen in subscription.wake.snapshot
        if (link := subscription.links.get(seen.path)) is not None
        and link.stream_id == seen.stream_id
        and link.is_pending
    ]


def show_wake(subscription: Subscription) -> list[dict[str, object]]:
    """The streams of the current wake, as a worker is told about them."""
    return [
        {
            "path": link.path,
            "link_type": link.type,
            "acked_offset": str(link.acked),
            "tail_offset": str(seen.tail),
            "has_pending": seen.tail.bytes > link.acked.bytes,
        }
        for link, seen in shown_streams(subscription)
    ]


def callback_url(subscription: Subscription) -> str:
    """Where a webhook's worker reports back."""
    return f"{subscription.base_url}/subscriptions/{quote(subscription.name, safe='')}/callback"
