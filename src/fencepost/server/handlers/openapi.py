"""`GET /v1/openapi.json`: the whole surface for machines, as it is shipped with the server.

The document is written by hand in server/openapi.json. tests/integration/test_openapi.py holds it
to the server: every route and every error code is in it, and what the server answers fits it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from importlib.resources import files

from fencepost.http.messages import Answer, Request, Response
from fencepost.server.handlers.rendering import BROWSER, refused

PATH = b"/v1/openapi.json"


class OpenApi:
    """Hands the document out."""

    def __init__(self) -> None:
        self._document = files("fencepost.server").joinpath("openapi.json").read_bytes()

    def handle(self, request: Request) -> Awaitable[Answer] | None:
        return self._answer(request) if request.path == PATH else None

    async def _answer(self, request: Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return refused(
                405, "method_not_allowed", "Method not allowed", "use GET", (b"Allow", b"GET, HEAD")
            )
        # A newer server may describe more, so a cache has to ask again.
        headers = [(b"Content-Type", b"application/json"), (b"Cache-Control", b"no-cache")]
        return Response(200, [*headers, *BROWSER], self._document)
