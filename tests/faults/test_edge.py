"""Idempotency at the edge when processes of the application, Redis or the server die or sleep.

Real processes: applications under uvicorn on both loops, Redis with its append-only file, and
`fencepost serve`. Nothing is timed: a test waits for what it wants to see.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import fencepost
from fencepost.events.edge import (
    Backend,
    IdempotencyMiddleware,
    IdempotencySettings,
    RedisBackend,
    StreamBackend,
    by_header,
)
from tests.redis_support import RedisServer
from tests.serving import ServerProcess

KEY = {"Idempotency-Key": "k"}


@pytest.fixture(params=["streams", "redis"])
def backend_address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where the applications of a test keep their keys."""
    if request.param == "redis":
        with RedisServer() as redis:
            yield f"redis={redis.socket}"
    else:
        with ServerProcess(tmp_path / "data") as server:
            yield f"streams={server.url}"


class AppProcess:
    """The application of `edge_app` in a process, on a socket of its own."""

    def __init__(self, name: str, folder: Path, backend: str, loop: str, lease_s: float) -> None:
        self.socket = str(folder / f"{name}.sock")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "tests.faults.edge_app:app"),
                *("--uds", self.socket, "--loop", loop),
            ],
            env={
                **os.environ,
                "EDGE_FOLDER": str(folder),
                "EDGE_NAME": name,
                "EDGE_BACKEND": backend,
                "EDGE_LEASE_S": str(lease_s),
            },
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if "Uvicorn running" in line:
                return
        raise AssertionError(f"the application did not start; it said:\n{''.join(said)}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.AsyncHTTPTransport(uds=self.socket)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://shop", timeout=120
        ) as client:
            yield client


class Shop:
    """Two processes of one application that share their keys.

    The second one has a lease that no slow machine outlasts; the first one is what a test kills.
    """

    def __init__(self, folder: Path, backend: str, lease_s: float) -> None:
        self._folder = folder
        self.one = AppProcess("one", folder, backend, "asyncio", lease_s)
        self.two = AppProcess("two", folder, backend, "uvloop", 600)

    @property
    def effects(self) -> list[str]:
        file = self._folder / "effects"
        return file.read_text().split() if file.exists() else []

    async def until_effects(self, count: int) -> None:
        async with asyncio.timeout(120):
            while len(self.effects) < count:  # noqa: ASYNC110  # other processes write them
                await asyncio.sleep(0.01)

    def open_gate(self) -> None:
        (self._folder / "gate").touch()


@contextlib.contextmanager
def shop_on(backend: str, *, lease_s: float = 1.0) -> Iterator[Shop]:
    with tempfile.TemporaryDirectory(prefix="fp-edge-") as folder:
        shop = Shop(Path(folder), backend, lease_s)
        try:
            yield shop
        finally:
            shop.one.end()
            shop.two.end()


async def test_a_process_that_is_killed_in_a_request_frees_its_key(backend_address: str) -> None:
    with shop_on(backend_address) as shop:
        async with shop.one.client() as one, shop.two.client() as two:
            first = asyncio.create_task(one.post("/orders", headers=KEY))
            await shop.until_effects(1)
            shop.one.signal(signal.SIGKILL)
            with contextlib.suppress(httpx.TransportError):
                await first
            shop.open_gate()
            taken_over = await two.post("/orders", headers=KEY)
            again = await two.post("/orders", headers=KEY)

        assert (taken_over.status_code, taken_over.text) == (200, "done by two")
        assert (again.text, again.headers["idempotency-replayed"]) == ("done by two", "true")
        assert shop.effects == ["one", "two"]


async def test_a_process_that_slept_through_its_lease_keeps_no_answer(
    backend_address: str,
) -> None:
    with shop_on(backend_address) as shop:
        async with shop.one.client() as one, shop.two.client() as two:
            zombie = asyncio.create_task(one.post("/orders", headers=KEY))
            await shop.until_effects(1)
            shop.one.signal(signal.SIGSTOP)
            taking_over = asyncio.create_task(two.post("/orders", headers=KEY))
            await shop.until_effects(2)
            shop.open_gate()
            taken_over = await taking_over
            shop.one.signal(signal.SIGCONT)
            lost = await zombie
            again = await one.post("/orders", headers=KEY)

        assert taken_over.text == "done by two"
        assert (lost.status_code, lost.json()["code"]) == (503, "idempotency_claim_lost")
        assert (again.text, again.headers["idempotency-replayed"]) == ("done by two", "true")


async def test_fifty_posts_to_two_processes_have_one_effect(backend_address: str) -> None:
    with shop_on(backend_address, lease_s=600) as shop:
        shop.open_gate()
        async with shop.one.client() as one, shop.two.client() as two:
            posts = [
                client.post("/orders", headers=KEY) for client in (one, two) for _ in range(25)
            ]
            answers = await asyncio.gather(*posts)

        (winner,) = shop.effects
        assert {answer.text for answer in answers} == {f"done by {winner}"}
        assert sum("idempotency-replayed" in answer.headers for answer in answers) == 49


class GatedShop:
    """An application in this process whose handler waits until the test lets it go on."""

    def __init__(self) -> None:
        self.runs = 0
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def order(self, request: Request) -> Response:
        self.runs += 1
        self.started.set()
        await self.go_on.wait()
        return PlainTextResponse("done")

    @contextlib.asynccontextmanager
    async def serving(
        self, backend: Backend, *, backend_s_max: float
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = Starlette(routes=[Route("/orders", self.order, methods=["POST"])])
        app.add_middleware(
            IdempotencyMiddleware,
            backend=backend,
            principal=by_header("authorization"),
            settings=IdempotencySettings(lease_s=600.0, backend_s_max=backend_s_max),
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            yield client


async def test_an_answer_is_kept_although_redis_was_killed_in_the_request() -> None:
    shop = GatedShop()
    with RedisServer() as redis:
        async with (
            redis.client() as connection,
            shop.serving(RedisBackend(connection), backend_s_max=120) as client,
        ):
            first = asyncio.create_task(client.post("/orders", headers=KEY))
            await shop.started.wait()
            redis.kill()
            shop.go_on.set()
            redis.start()
            done = await first
            again = await client.post("/orders", headers=KEY)

    assert (done.text, shop.runs) == ("done", 1)
    assert "idempotency-kept" not in done.headers
    assert again.headers["idempotency-replayed"] == "true"


async def test_an_answer_that_a_dead_redis_does_not_keep_says_so_and_nothing_new_runs() -> None:
    shop = GatedShop()
    with RedisServer() as redis:
        async with (
            redis.client() as connection,
            shop.serving(RedisBackend(connection), backend_s_max=0.5) as client,
        ):
            first = asyncio.create_task(client.post("/orders", headers=KEY))
            await shop.started.wait()
            redis.kill()
            shop.go_on.set()
            done = await first
            refused = await client.post("/orders", headers={"Idempotency-Key": "other"})

    assert (done.text, done.headers["idempotency-kept"]) == ("done", "false")
    assert (refused.status_code, refused.json()["code"]) == (503, "idempotency_unavailable")
    assert shop.runs == 1


async def test_an_answer_is_kept_although_the_server_was_killed_in_the_request(
    tmp_path: Path,
) -> None:
    shop = GatedShop()
    with ServerProcess(tmp_path) as server:
        async with (
            fencepost.connect_async(server.url) as connection,
            shop.serving(StreamBackend(connection), backend_s_max=120) as client,
        ):
            first = asyncio.create_task(client.post("/orders", headers=KEY))
            await shop.started.wait()
            server.kill()
            shop.go_on.set()
            server.restart()
            done = await first
            again = await client.post("/orders", headers=KEY)

    assert (done.text, shop.runs) == ("done", 1)
    assert again.headers["idempotency-replayed"] == "true"
