"""A web application with durable streams inside it.

    pip install starlette uvicorn
    uvicorn examples.embedded:app

Streams are then at /fencepost/v1/stream/..., beside the application's own pages. One process may
open a data folder at a time, so run it with one worker. The application decides who may come here:
`embedded` itself checks no tokens.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from fencepost.server.embedding import embedded

DATA = Path("data")


@asynccontextmanager
async def lifespan(application: Starlette) -> AsyncIterator[None]:
    async with embedded(DATA) as streams:
        application.mount("/fencepost", streams)
        yield


async def home(_: Request) -> PlainTextResponse:
    return PlainTextResponse("streams are below /fencepost/v1/stream/\n")


app = Starlette(routes=[Route("/", home)], lifespan=lifespan)
