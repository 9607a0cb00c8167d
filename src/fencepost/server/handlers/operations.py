"""What an operator or an orchestrator asks: is it alive, can it write, how is it doing."""

from __future__ import annotations

from collections.abc import Awaitable

from fencepost.http.messages import Answer, Request, Response
from fencepost.server.handlers.rendering import BROWSER, refused
from fencepost.server.metrics import CONTENT_TYPE, Metrics
from fencepost.store.contract import Store

_NO_STORE = (b"Cache-Control", b"no-store")


class Operations:
    """`/healthz`, `/readyz` and `/metrics`."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def handle(self, request: Request) -> Awaitable[Answer] | None:
        known = {b"/healthz": self._alive, b"/readyz": self._ready, b"/metrics": self._show}
        handler = known.get(request.path)
        if handler is None:
            return None
        return handler() if request.method in ("GET", "HEAD") else _no_method()

    async def _alive(self) -> Answer:
        return _text(b"ok\n")

    async def _ready(self) -> Answer:
        failure = await self._store.probe()
        if failure is None:
            return _text(b"ready\n")
        return refused(
            503,
            "not_ready",
            "Not ready",
            "the store cannot write",
            (b"Retry-After", b"1"),
        )

    async def _show(self) -> Answer:
        return Response(
            200, [(b"Content-Type", CONTENT_TYPE), _NO_STORE, *BROWSER], self._metrics.render()
        )


def _text(body: bytes) -> Response:
    return Response(
        200, [(b"Content-Type", b"text/plain; charset=utf-8"), _NO_STORE, *BROWSER], body
    )


async def _no_method() -> Answer:
    return refused(
        405, "method_not_allowed", "Method not allowed", "use GET", (b"Allow", b"GET, HEAD")
    )
