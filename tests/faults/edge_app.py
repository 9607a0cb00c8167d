"""An application behind the idempotency middleware, run by uvicorn in a process of its own.

Its handler has an effect (a line in a file), then waits until the test opens a gate (another file).
The environment says where the keys are kept and where the files are.
"""

import asyncio
import os
from pathlib import Path

from redis.asyncio import Redis
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

FOLDER = Path(os.environ["EDGE_FOLDER"])
NAME = os.environ["EDGE_NAME"]
LEASE_S = float(os.environ["EDGE_LEASE_S"])
SETTINGS = IdempotencySettings(
    on_running="wait", wait_s_max=120, backend_s_max=120, lease_s=LEASE_S
)


def backend() -> Backend:
    kind, _, address = os.environ["EDGE_BACKEND"].partition("=")
    if kind == "redis":
        return RedisBackend(Redis(unix_socket_path=address))
    return StreamBackend(fencepost.connect_async(address))


async def order(request: Request) -> Response:
    effects = os.open(FOLDER / "effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(effects, f"{NAME}\n".encode())
    os.close(effects)
    while not (FOLDER / "gate").exists():  # noqa: ASYNC110  # another process makes the file
        await asyncio.sleep(0.01)
    return PlainTextResponse(f"done by {NAME}")


app = Starlette(routes=[Route("/orders", order, methods=["POST"])])
app.add_middleware(
    IdempotencyMiddleware,
    backend=backend(),
    principal=by_header("authorization"),
    settings=SETTINGS,
)
