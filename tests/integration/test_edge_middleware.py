"""The idempotency middleware around a Starlette application, on each of its backends.

Memory, streams of a real Fencepost server and a real Redis have to do the same.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import fencepost
from fencepost.events.edge import (
    Backend,
    BackendUnavailableError,
    IdempotencyMiddleware,
    IdempotencySettings,
    MemoryBackend,
    RedisBackend,
    StreamBackend,
    by_header,
    claims,
    effect_key,
)
from fencepost.events.edge.rules import Record, Seen
from tests.redis_support import RedisServer
from tests.redis_support import redis_server as redis_server
from tests.serving import ServerProcess

Handler = Callable[[Request], Awaitable[Response]]


@pytest.fixture(params=["memory", "streams", "redis"])
async def backend(
    request: pytest.FixtureRequest, server_process: ServerProcess, redis_server: RedisServer
) -> AsyncIterator[Backend]:
    # Every test has keys of its own.
    prefix = f"idempotency/{request.node.name}"
    if request.param == "streams":
        async with fencepost.connect_async(server_process.url) as client:
            yield StreamBackend(client, prefix=prefix.translate({ord("["): "-", ord("]"): "-"}))
    elif request.param == "redis":
        async with redis_server.client() as redis:
            yield RedisBackend(redis, prefix=prefix)
    else:
        yield MemoryBackend()


class Shop:
    """An application with one route whose handler a test gives, and a count of its runs."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.runs = 0

    async def run(self, request: Request) -> Response:
        self.runs += 1
        return await self._handler(request)


@asynccontextmanager
async def serving(
    shop: Shop, backend: Backend, settings: IdempotencySettings | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(
        routes=[
            Route("/orders", shop.run, methods=["GET", "POST", "PATCH"]),
            Route("/returns", shop.run, methods=["POST"]),
        ]
    )
    app.add_middleware(
        IdempotencyMiddleware,
        backend=backend,
        principal=by_header("authorization"),
        settings=settings,
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client


async def echo(request: Request) -> Response:
    """The body again, with what a replay has and what it does not."""
    headers = {"location": "/orders/7", "x-trace": "one", "set-cookie": "session=secret"}
    return Response(await request.body(), status_code=201, media_type="text/plain", headers=headers)


def keyed(key: str, **headers: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **headers}


async def test_a_repeated_request_gets_the_first_answer_and_runs_once(backend: Backend) -> None:
    shop = Shop(echo)
    async with serving(shop, backend) as client:
        first = await client.post("/orders", content=b"tea", headers=keyed("k"))
        again = await client.post("/orders", content=b"tea", headers=keyed("k"))

    assert shop.runs == 1
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.status_code, again.content) == (first.status_code, first.content)


async def test_only_chosen_headers_are_replayed(backend: Backend) -> None:
    async with serving(Shop(echo), backend) as client:
        first = await client.post("/orders", content=b"tea", headers=keyed("k"))
        again = await client.post("/orders", content=b"tea", headers=keyed("k"))

    assert first.headers["set-cookie"] == "session=secret"
    assert again.headers["location"] == "/orders/7"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert "set-cookie" not in again.headers
    assert "x-trace" not in again.headers


async def test_another_body_or_query_with_the_same_key_is_422(backend: Backend) -> None:
    shop = Shop(echo)
    async with serving(shop, backend) as client:
        await client.post("/orders", content=b"tea", headers=keyed("k"))
        body = await client.post("/orders", content=b"coffee", headers=keyed("k"))
        query = await client.post("/orders?gift=1", content=b"tea", headers=keyed("k"))

    assert (body.status_code, body.json()["code"]) == (422, "idempotency_key_reused")
    assert query.status_code == 422
    assert shop.runs == 1


async def test_another_principal_method_or_path_has_another_key(backend: Backend) -> None:
    shop = Shop(echo)
    async with serving(shop, backend) as client:
        await client.post("/orders", content=b"tea", headers=keyed("k", authorization="ann"))
        await client.post("/orders", content=b"tea", headers=keyed("k", authorization="bob"))
        await client.patch("/orders", content=b"tea", headers=keyed("k", authorization="ann"))
        await client.post("/returns", content=b"tea", headers=keyed("k", authorization="ann"))

    assert shop.runs == 4


async def test_requests_without_a_key_and_other_methods_pass(backend: Backend) -> None:
    shop = Shop(echo)
    async with serving(shop, backend) as client:
        await client.post("/orders", content=b"tea")
        await client.post("/orders", content=b"tea")
        await client.get("/orders", headers=keyed("k"))
        await client.get("/orders", headers=keyed("k"))

    assert shop.runs == 4


async def test_a_failure_releases_the_key(backend: Backend) -> None:
    answers: list[Response | Exception] = [
        PlainTextResponse("busy", 503),
        PlainTextResponse("slow down", 429),
        RuntimeError("broken"),
        PlainTextResponse("done"),
    ]

    async def answer(request: Request) -> Response:
        now = answers.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    async with serving(Shop(answer), backend) as client:
        statuses = [
            (await client.post("/orders", headers=keyed("k"))).status_code for _ in range(5)
        ]

    assert statuses == [503, 429, 500, 200, 200]


async def test_a_cancelled_request_releases_the_key(backend: Backend) -> None:
    started = asyncio.Event()

    async def answer(request: Request) -> Response:
        if not started.is_set():
            started.set()
            await asyncio.Event().wait()
        return PlainTextResponse("done")

    async with serving(Shop(answer), backend) as client:
        first = asyncio.create_task(client.post("/orders", headers=keyed("k")))
        await started.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = await client.post("/orders", headers=keyed("k"))

    assert again.text == "done"


async def test_a_duplicate_of_a_running_request_is_refused_with_retry_after(
    backend: Backend,
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async with serving(Shop(answer), backend) as client:
        first = asyncio.create_task(client.post("/orders", headers=keyed("k")))
        await started.wait()
        refused = await client.post("/orders", headers=keyed("k"))
        other = await client.post("/orders", content=b"other", headers=keyed("k"))
        go_on.set()
        done = await first

    assert (refused.status_code, refused.json()["code"]) == (409, "idempotency_running")
    assert 1 <= int(refused.headers["retry-after"]) <= 15
    assert other.status_code == 422
    assert done.text == "done"


async def test_fifty_posts_with_one_key_run_the_handler_once_and_get_one_answer(
    backend: Backend,
) -> None:
    async def answer(request: Request) -> Response:
        await asyncio.sleep(0)
        return PlainTextResponse(f"run {shop.runs}")

    shop = Shop(answer)
    settings = IdempotencySettings(on_running="wait")
    async with serving(shop, backend, settings) as client:
        posts = [client.post("/orders", headers=keyed("k")) for _ in range(50)]
        answers = await asyncio.gather(*posts)

    assert shop.runs == 1
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, "run 1")}
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 49


async def test_a_waiting_duplicate_is_refused_when_its_time_is_over(backend: Backend) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    settings = IdempotencySettings(on_running="wait", wait_s_max=0.1)
    async with serving(Shop(answer), backend, settings) as client:
        first = asyncio.create_task(client.post("/orders", headers=keyed("k")))
        await started.wait()
        refused = await client.post("/orders", headers=keyed("k"))
        go_on.set()
        await first

    assert refused.status_code == 409


class Counting:
    """A backend that tells when a record was replaced so many times."""

    def __init__(self, backend: Backend, replacements: int) -> None:
        self._backend = backend
        self._left = replacements
        self.enough = asyncio.Event()

    async def load(self, record_id: str) -> Seen | None:
        return await self._backend.load(record_id)

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        replaced = await self._backend.replace(
            record_id, version, record, stamp=stamp, ttl_ms=ttl_ms
        )
        self._left -= 1
        if self._left == 0:
            self.enough.set()
        return replaced


async def test_a_long_request_renews_its_claim_while_it_runs(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A claim is renewed soon and lasts long, so that a slow machine does not lose it.
    monkeypatch.setattr(claims, "RENEWALS_PER_LEASE", 150)
    counting = Counting(backend, replacements=4)

    async def answer(request: Request) -> Response:
        await counting.enough.wait()
        return PlainTextResponse("done")

    shop = Shop(answer)
    async with serving(shop, counting, IdempotencySettings(lease_s=30.0)) as client:
        done = await client.post("/orders", headers=keyed("k"))
        again = await client.post("/orders", headers=keyed("k"))

    assert (done.text, again.text, shop.runs) == ("done", "done", 1)


async def test_a_large_answer_is_sent_and_not_kept_and_says_so(backend: Backend) -> None:
    async def answer(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 100

        return StreamingResponse(pieces(), media_type="text/plain")

    shop = Shop(answer)
    settings = IdempotencySettings(answer_bytes_max=500)
    async with serving(shop, backend, settings) as client:
        first = await client.post("/orders", headers=keyed("k"))
        again = await client.post("/orders", headers=keyed("k"))

    assert first.content == b"x" * 1_000
    assert first.headers["idempotency-kept"] == "false"
    assert (again.status_code, again.json()["code"]) == (409, "idempotency_answer_not_kept")
    assert "200" in again.json()["detail"]
    assert shop.runs == 1


async def test_a_streamed_answer_within_the_bound_is_kept(backend: Backend) -> None:
    async def answer(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one "
            yield b"two"

        return StreamingResponse(pieces())

    async with serving(Shop(answer), backend) as client:
        await client.post("/orders", headers=keyed("k"))
        again = await client.post("/orders", headers=keyed("k"))

    assert (again.content, again.headers["idempotency-replayed"]) == (b"one two", "true")


async def test_a_stream_of_events_passes_as_it_comes(backend: Backend) -> None:
    async def answer(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async with serving(Shop(answer), backend) as client:
        first = await client.post("/orders", headers=keyed("k"))

    assert first.headers["idempotency-kept"] == "false"
    assert first.content == b"data: 1\n\ndata: 2\n\n"


async def test_a_body_above_the_bound_is_413_and_the_handler_does_not_run(
    backend: Backend,
) -> None:
    shop = Shop(echo)
    async with serving(shop, backend, IdempotencySettings(request_bytes_max=4)) as client:
        fits = await client.post("/orders", content=b"1234", headers=keyed("k"))
        refused = await client.post("/orders", content=b"12345", headers=keyed("l"))

    assert fits.status_code == 201
    assert (refused.status_code, refused.json()["code"]) == (413, "idempotency_body_too_large")
    assert shop.runs == 1


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "idempotency_key_missing"),
        ([("Idempotency-Key", "a"), ("Idempotency-Key", "b")], "idempotency_key_repeated"),
        ([("Idempotency-Key", "a b")], "idempotency_key_invalid"),
    ],
)
async def test_a_required_key_that_is_absent_or_wrong_is_400(
    backend: Backend, headers: list[tuple[str, str]], code: str
) -> None:
    async with serving(Shop(echo), backend, IdempotencySettings(required=True)) as client:
        refused = await client.post("/orders", headers=headers)

    assert (refused.status_code, refused.json()["code"]) == (400, code)
    assert refused.headers["content-type"] == "application/problem+json"


async def test_an_answer_without_a_body_is_replayed(backend: Backend) -> None:
    async def answer(request: Request) -> Response:
        return Response(status_code=204)

    async with serving(Shop(answer), backend) as client:
        await client.post("/orders", headers=keyed("k"))
        again = await client.post("/orders", headers=keyed("k"))

    assert (again.status_code, again.headers["idempotency-replayed"]) == (204, "true")


async def test_a_background_task_that_fails_leaves_the_answer_kept(backend: Backend) -> None:
    async def fail() -> None:
        raise RuntimeError("later")

    async def answer(request: Request) -> Response:
        return JSONResponse({"run": shop.runs}, background=BackgroundTask(fail))

    shop = Shop(answer)
    async with serving(shop, backend) as client:
        await client.post("/orders", headers=keyed("k"))
        again = await client.post("/orders", headers=keyed("k"))

    assert again.json() == {"run": 1}


async def test_a_key_can_be_used_again_after_its_time(backend: Backend) -> None:
    async def until_it_runs_again() -> None:
        while shop.runs == 1:
            await client.post("/orders", headers=keyed("k"))

    shop = Shop(echo)
    async with serving(shop, backend, IdempotencySettings(ttl_s=1, lease_s=1.0)) as client:
        await client.post("/orders", headers=keyed("k"))
        async with asyncio.timeout(60):
            await until_it_runs_again()

    assert shop.runs == 2


async def test_the_effect_key_is_the_same_each_time_the_request_runs(backend: Backend) -> None:
    keys: list[str | None] = []

    async def answer(request: Request) -> Response:
        keys.append(effect_key(request.scope))
        return PlainTextResponse("", 500 if len(keys) == 1 else 200)

    async with serving(Shop(answer), backend) as client:
        await client.post("/orders", headers=keyed("k"))
        await client.post("/orders", headers=keyed("k"))
        await client.post("/orders", headers=keyed("l"))
        await client.post("/orders")

    assert keys[0] == keys[1] != keys[2]
    assert keys[0] is not None
    assert keys[3] is None


async def test_a_redis_that_may_evict_keys_is_refused() -> None:
    shop = Shop(echo)
    with RedisServer("--maxmemory-policy", "allkeys-lru") as server:
        async with server.client() as redis, serving(shop, RedisBackend(redis)) as client:
            refused = await client.post("/orders", headers=keyed("k"))
            with pytest.raises(BackendUnavailableError, match="noeviction"):
                await RedisBackend(redis).load("k")

    assert (refused.status_code, refused.json()["code"]) == (503, "idempotency_unavailable")
    assert "noeviction" in refused.json()["detail"]
    assert shop.runs == 0
