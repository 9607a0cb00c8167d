"""What the tests of subscriptions share: a webhook receiver, a clock to move, a client, an engine.

The receiver is a real HTTP server on loopback. It keeps every request it gets and answers as told;
a test waits for requests, never for time.
"""

import base64
import json
import queue
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fencepost.protocol.appends import Append
from fencepost.protocol.batches import Malformed, json_batch
from fencepost.protocol.creates import Create
from fencepost.protocol.limits import Limits
from fencepost.protocol.subscriptions import Config, normalised
from fencepost.server.subscriptions.cluster import Subscriptions, open_subscriptions
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.subscriptions import SqliteSubscriptions

WAIT_SECONDS_MAX = 20.0
JSON = {"Content-Type": "application/json"}


@dataclass
class Got:
    """A request that the receiver got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def wake(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Reply:
    """How the receiver answers; `hold` makes it wait first."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None


DONE = Reply(body=b'{"done": true}')


class Receiver:
    """A webhook endpoint. `answer` decides how each request is answered."""

    def __init__(
        self,
        answer: Callable[[], Reply] | Reply | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answer = answer or Reply()
        self._got: queue.Queue[Got] = queue.Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                got = Got(self.path, headers, body)
                reply = receiver.answer() if callable(receiver.answer) else receiver.answer
                receiver._got.put(got)
                if reply.hold is not None:
                    reply.hold.wait(WAIT_SECONDS_MAX)
                try:
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(reply.body)))
                    self.end_headers()
                    self.wfile.write(reply.body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                """Be silent."""

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        scheme = "http"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def next(self) -> Got:
        """The next request, when it comes."""
        return self._got.get(timeout=WAIT_SECONDS_MAX)

    @property
    def is_empty(self) -> bool:
        """Whether there is no request that was not asked for yet."""
        return self._got.empty()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A server that was killed leaves broken connections behind; that is no news here."""


def verifies(got: Got, jwks: dict[str, Any]) -> bool:
    """What a receiver does: check the signature with the key that its `kid` names."""
    parts = dict(part.split("=", 1) for part in got.headers["webhook-signature"].split(","))
    [key] = [key for key in jwks["keys"] if key["kid"] == parts["kid"]]
    public = Ed25519PublicKey.from_public_bytes(_unpadded(key["x"]))
    public.verify(_unpadded(parts["ed25519"]), parts["t"].encode() + b"." + got.body)
    return True


def _unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Client:
    """The few requests that the tests make, against a real server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=f"{url}/v1/stream/", timeout=WAIT_SECONDS_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def create(self, path: str, *values: object) -> str:
        answer = self.http.put(path, headers=JSON, content=json.dumps(values))
        assert answer.status_code == 201, answer.text
        return answer.headers["stream-next-offset"]

    def append(self, path: str, value: object) -> str:
        answer = self.http.post(path, headers=JSON, content=json.dumps(value))
        assert answer.status_code == 204, answer.text
        return answer.headers["stream-next-offset"]

    def read(self, path: str) -> list[Any]:
        found: list[Any] = self.http.get(path).raise_for_status().json()
        return found

    def subscribe(self, name: str, **config: object) -> httpx.Response:
        return self.http.put(f"__ds/subscriptions/{name}", json=config)

    def webhook(self, name: str, url: str, **config: object) -> dict[str, Any]:
        asked: dict[str, object] = {"pattern": "events/*", "lease_ttl_ms": 30_000, **config}
        answer = self.subscribe(name, type="webhook", webhook={"url": url}, **asked)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def pull(self, name: str, **config: object) -> dict[str, Any]:
        asked: dict[str, object] = {"pattern": "events/*", "wake_stream": "wake/pool", **config}
        answer = self.subscribe(name, type="pull-wake", **asked)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def look(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"__ds/subscriptions/{name}").json()
        return found

    def cursors(self, name: str) -> dict[str, str]:
        return {link["path"]: link["acked_offset"] for link in self.look(name)["streams"]}

    def claim(self, name: str, worker: str = "worker-1") -> httpx.Response:
        return self.http.post(f"__ds/subscriptions/{name}/claim", json={"worker": worker})

    def say(
        self,
        action: str,
        name: str,
        wake: dict[str, Any],
        *,
        acks: dict[str, str] | None = None,
        done: bool = False,
    ) -> httpx.Response:
        """Callback, ack or release, with what the worker was given."""
        body: dict[str, Any] = {"wake_id": wake["wake_id"], "generation": wake["generation"]}
        if action != "release":
            body["acks"] = [
                {"stream": path, "offset": offset} for path, offset in (acks or {}).items()
            ]
            body["done"] = done
        token = wake.get("callback_token") or wake["token"]
        return self.http.post(
            f"__ds/subscriptions/{name}/{action}",
            json=body,
            headers={"Authorization": f"Bearer {token}"},
        )


def tails(wake: dict[str, Any]) -> dict[str, str]:
    """What a worker that has done everything acks."""
    return {stream["path"]: stream["tail_offset"] for stream in wake["streams"]}


def code(answer: httpx.Response) -> str:
    """The code of a refusal in the protocol's shape."""
    found: str = answer.json()["error"]["code"]
    return found


class SimClock:
    """A clock that moves when told."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self.ms = now_ms
        self._tokens = 0

    def now_ms(self) -> int:
        return self.ms

    def wall_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms

    def monotonic_ns(self) -> int:
        return self.ms * 1_000_000

    def random(self) -> float:
        return 0.5

    def token(self, bytes_count: int) -> bytes:
        self._tokens += 1
        return self._tokens.to_bytes(bytes_count, "big")


@dataclass
class Opened:
    """A store with its subscriptions, in this process."""

    store: SqliteStore
    subscriptions: Subscriptions

    async def create(self, path: str, *values: object) -> None:
        batch = json_batch(json.dumps(values).encode())
        assert not isinstance(batch, Malformed)
        self.store.create(Create(path, content_type="application/json", batch=batch), _ignore)
        assert await self.store.durable() is None

    async def append(self, path: str, value: object) -> None:
        batch = json_batch(json.dumps([value]).encode())
        assert not isinstance(batch, Malformed)
        self.store.append(Append(path, batch, "application/json"), _ignore)
        assert await self.store.durable() is None

    async def settle(self) -> None:
        """Let commits finish, those that they cause included."""
        assert await self.store.durable() is None
        await self.store.commits.settled()


def _ignore(outcome: object) -> None:
    """The test looks at the state instead."""


@asynccontextmanager
async def opened(
    folder: Path,
    clock: SimClock,
    settings: SubscriptionSettings | None = None,
    *,
    synchronous: str = "FULL",
) -> AsyncIterator[Opened]:
    """Open the store in `folder` and load its subscriptions."""
    store = SqliteStore(SqliteSettings(folder=folder, synchronous=synchronous), clock)
    try:
        subscriptions = await open_subscriptions(
            SqliteSubscriptions(store),
            clock,
            settings or SubscriptionSettings(),
            Limits(),
            on_loopback=True,
        )
        try:
            yield Opened(store, subscriptions)
        finally:
            await subscriptions.webhooks.close()
    finally:
        await store.close()


def pull_config(pattern: str = "events/*", lease_ttl_ms: int = 30_000) -> Config:
    """A pull-wake subscription."""
    return normalised(
        "pull-wake",
        pattern=pattern,
        streams=(),
        webhook_url=None,
        wake_stream="wake/pool",
        lease_ttl_ms=lease_ttl_ms,
        description=None,
    )


def webhook_config(url: str, pattern: str = "events/*", lease_ttl_ms: int = 30_000) -> Config:
    """A webhook subscription."""
    return normalised(
        "webhook",
        pattern=pattern,
        streams=(),
        webhook_url=url,
        wake_stream=None,
        lease_ttl_ms=lease_ttl_ms,
        description=None,
    )


def polled(look: Callable[[], Any]) -> Iterator[Any]:
    """Ask again and again; each answer comes over the wire, so this does not spin for nothing."""
    for _ in range(20_000):
        yield look()
    raise AssertionError("the condition never came true")
