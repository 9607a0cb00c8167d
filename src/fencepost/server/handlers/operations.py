"""Endpoints for operators and tools: health, readiness, metrics, and the OpenAPI document.

The OpenAPI document is written by hand in server/openapi.json. tests/integration/test_openapi.py
checks it against the server: every route and every error code is in it, and what the server answers
fits it.
"""

from __future__ import annotations

from importlib.resources import files

from fencepost.http.messages import Answer, Request, Response
from fencepost.server.handlers.rendering import BROWSER, refused
from fencepost.server.metrics import CONTENT_TYPE, Metrics
from fencepost.store.contract import Store

_NO_STORE = (b"Cache-Control", b"no-store")


class Operations:
    """`/healthz`, `/readyz`, `/metrics` and `/v1/openapi.json`."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._document = files("fencepost.server").joinpath("openapi.json").read_bytes()

    async def healthz(self, _request: Request) -> Answer:
        return _text(b"ok\n")

    async def readyz(self, _request: Request) -> Answer:
        failure = await self._store.probe()
        if failure is None:
            return _text(b"ready\n")
        return refused(
            503,
            "not_ready",
            "Not ready",
            "the store cannot write at the moment: ask again",
            (b"Retry-After", b"1"),
        )

    async def metrics(self, _request: Request) -> Answer:
        shown = await self._metrics.render()
        return Response(200, [(b"Content-Type", CONTENT_TYPE), _NO_STORE, *BROWSER], shown)

    async def openapi(self, _request: Request) -> Answer:
        # A newer server may describe more, so a cache has to ask again.
        headers = [(b"Content-Type", b"application/json"), (b"Cache-Control", b"no-cache")]
        return Response(200, [*headers, *BROWSER], self._document)


def _text(body: bytes) -> Response:
    return Response(
        200, [(b"Content-Type", b"text/plain; charset=utf-8"), _NO_STORE, *BROWSER], body
    )
