"""Receiving webhooks: signatures, the replay window, and the ASGI application under uvicorn."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import fencepost
from tests.integration.subscriptions_support import DONE, Receiver
from tests.odd_server import OddServer, response
from tests.serving import ServerProcess
from tests.twins import Connect
from tests.twins import connect as connect

WAIT_SECONDS_MAX = 60
NOW = 1_800_000_000
WAKE = {
    "subscription_id": "s",
    "wake_id": "w",
    "generation": 7,
    "streams": [],
    "callback_url": "http://x/callback",
    "callback_token": "t",
}
BODY = json.dumps(WAKE).encode()


def text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Signer:
    """A server's key."""

    def __init__(self, kid: str = "k") -> None:
        self._key = Ed25519PrivateKey.generate()
        self.kid = kid
        x = text(self._key.public_key().public_bytes_raw())
        self.keys = {"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x}]}

    def sign(self, body: bytes = BODY, seconds: int = NOW) -> str:
        signed = text(self._key.sign(b"%d.%b" % (seconds, body)))
        return f"t={seconds},kid={self.kid},ed25519={signed}"


def test_a_request_that_the_server_signed_is_taken() -> None:
    signer = Signer()

    found = fencepost.verify_webhook(BODY, signer.sign(), signer.keys, now=NOW + 299.0)

    assert (found.subscription_id, found.generation) == ("s", 7)


@pytest.mark.parametrize("off", [-301, 301])
def test_a_request_outside_the_window_is_refused(off: int) -> None:
    signer = Signer()

    with pytest.raises(fencepost.WebhookSignatureError, match="signed"):
        fencepost.verify_webhook(BODY, signer.sign(), signer.keys, now=NOW + off)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        lambda _: "",
        lambda _: "nonsense",
        lambda given: given.replace("t=", "t=-"),
        lambda given: given.replace(f"t={NOW}", f"t={NOW + 1}"),
        lambda given: given.replace("kid=k", "kid=other"),
        lambda given: given + ",kid=k",
        lambda given: given[:-4],
        lambda given: given.replace("ed25519=", "ed25519=!"),
        lambda given: given.replace("ed25519=", "sha256="),
        lambda _: Signer().sign(),
        lambda given: given.replace("t=", "t=\u0661"),
        lambda given: given + "\udc80",
    ],
)
def test_a_signature_that_does_not_fit_is_refused(change: Callable[[str], str | None]) -> None:
    signer = Signer()

    with pytest.raises(fencepost.WebhookSignatureError):
        fencepost.verify_webhook(BODY, change(signer.sign()), signer.keys, now=NOW)


@pytest.mark.parametrize("body", [BODY + b" ", BODY.replace(b"7", b"8"), b""])
def test_a_body_that_was_changed_is_refused(body: bytes) -> None:
    signer = Signer()

    with pytest.raises(fencepost.WebhookSignatureError, match="does not fit"):
        fencepost.verify_webhook(body, signer.sign(), signer.keys, now=NOW)


@pytest.mark.parametrize(
    "keys",
    [{}, {"keys": None}, {"keys": [7]}, {"keys": [{"kid": "k", "kty": "RSA"}]}],
)
def test_keys_that_are_none_refuse_everything(keys: dict[str, Any]) -> None:
    with pytest.raises(fencepost.WebhookSignatureError):
        fencepost.verify_webhook(BODY, Signer().sign(), keys, now=NOW)


def test_what_is_signed_but_is_no_wake_is_refused() -> None:
    signer = Signer()

    with pytest.raises(fencepost.WebhookSignatureError, match="no wake"):
        fencepost.verify_webhook(b"[]", signer.sign(b"[]"), signer.keys, now=NOW)


def verifier(client: Any, **given: Any) -> Any:
    """The verifier of either client."""
    wrapped = getattr(client, "_wrapped", None)
    if wrapped is None:
        return fencepost.AsyncWebhookVerifier(client, **given)
    from tests.twins import Threaded

    return Threaded(fencepost.WebhookVerifier(wrapped, **given))


async def test_a_verifier_takes_each_request_once_and_fetches_the_keys_once(
    connect: Connect,
) -> None:
    signer, stranger = Signer(), Signer("other")
    now = int(time.time())
    with OddServer(lambda _: response(200, json.dumps(signer.keys).encode())) as server:
        async with connect(server.url) as client:
            checking = verifier(client)
            first = signer.sign(seconds=now)

            wake = await checking.verify(first, BODY)
            assert (wake.wake_id, wake.generation, wake.token) == ("w", 7, "t")
            for _ in range(2):
                with pytest.raises(fencepost.WebhookReplayedError):
                    await checking.verify(first, BODY)
            await checking.verify(signer.sign(seconds=now - 1), BODY)  # a retry is signed anew
            checking.forget(first)
            await checking.verify(first, BODY)
            for _ in range(5):
                with pytest.raises(fencepost.WebhookSignatureError, match="no key"):
                    await checking.verify(stranger.sign(seconds=now), BODY)

        assert [one.path for one in server.asked] == ["/v1/stream/__ds/jwks.json"]


async def test_a_real_delivery_is_verified_and_called_back(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        with Receiver() as receiver:
            subscription = client.subscription(path)
            await subscription.create(pattern=f"{path}/*", webhook=receiver.url)
            await client.stream(f"{path}/a").append(1, auto_create=True)
            got = await asyncio.to_thread(receiver.next)
            checking = verifier(client)

            async with await checking.verify(got.headers["webhook-signature"], got.body) as wake:
                assert await wake.read(f"{path}/a").messages() == [1]
            assert (await subscription.info()).pending_streams == 0
            with pytest.raises(fencepost.WebhookReplayedError):
                await checking.verify(got.headers["webhook-signature"], got.body)
            with pytest.raises(fencepost.WakeFencedError):
                await wake.heartbeat()
            keys = await client.webhook_keys()
            header = got.headers["webhook-signature"]
            assert fencepost.verify_webhook(got.body, header, keys).subscription_id == path
            await subscription.delete()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The application under uvicorn, and where it listens."""
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@pytest.mark.parametrize("how", ["done", "read", "later"])
async def test_the_application_hands_wakes_to_its_handler(
    server_process: ServerProcess, path: str, how: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        woken: asyncio.Queue[fencepost.AsyncWake] = asyncio.Queue()
        failures = iter([RuntimeError("boom"), None, None])

        async def handle(wake: fencepost.AsyncWake) -> bool | None:
            failure = next(failures)
            if failure is not None:
                raise failure
            if how == "read":
                assert await wake.read(f"{path}/a").messages() == [1]
            await woken.put(wake)
            return False if how == "later" else None

        async with served(fencepost.WebhookApp(client, handle)) as url, asyncio.timeout(60):
            subscription = client.subscription(path)
            await subscription.create(pattern=f"{path}/*", webhook=f"{url}/hook")
            await client.stream(f"{path}/a").append(1, auto_create=True)

            wake = await woken.get()
            if how == "later":
                assert (await subscription.info()).pending_streams == 1
                await wake.done()
            # The server acks once it has the answer, which comes after the handler's return.
            for _ in range(WAIT_SECONDS_MAX * 50):
                if not (await subscription.info()).pending_streams:
                    break
                await asyncio.sleep(0.02)
            assert not (await subscription.info()).pending_streams
            await subscription.delete()


async def test_the_application_refuses_what_is_not_from_the_server(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        handled: list[str] = []

        async def handle(wake: fencepost.AsyncWake) -> None:
            handled.append(wake.wake_id)

        with Receiver(DONE) as receiver:
            await client.subscription(path).create(pattern=f"{path}/*", webhook=receiver.url)
            await client.stream(f"{path}/a").append(1, auto_create=True)
            got = await asyncio.to_thread(receiver.next)
        await client.subscription(path).delete()
        signed = {"Webhook-Signature": got.headers["webhook-signature"]}
        async with served(fencepost.WebhookApp(client, handle)) as url, httpx.AsyncClient() as web:
            assert (await web.get(url)).status_code == 405
            assert (await web.post(url, content=got.body)).status_code == 401
            forged = got.body.replace(b"w_", b"x_")
            assert (await web.post(url, content=forged, headers=signed)).status_code == 401
            twice = [("Webhook-Signature", signed["Webhook-Signature"])] * 2
            assert (await web.post(url, content=got.body, headers=twice)).status_code == 401
            large = b" " * (9 << 20)
            assert (await web.post(url, content=large, headers=signed)).status_code == 413
            assert handled == []

            good = await web.post(url, content=got.body, headers=signed)
            assert (good.status_code, good.json()) == (200, {"done": True})
            assert (await web.post(url, content=got.body, headers=signed)).status_code == 409
            assert handled == [got.wake["wake_id"]]


async def test_the_application_says_so_when_it_cannot_fetch_the_keys() -> None:
    with OddServer(lambda _: response(403)) as server:
        async with fencepost.connect_async(server.url) as client:

            async def handle(wake: fencepost.AsyncWake) -> None:
                raise AssertionError

            app = fencepost.WebhookApp(client, handle)
            signed = {"Webhook-Signature": Signer().sign(seconds=int(time.time()))}
            async with served(app) as url, httpx.AsyncClient() as web:
                answer = await web.post(url, content=BODY, headers=signed)

    assert answer.status_code == 503
