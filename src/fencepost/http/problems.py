"""The one shape of an error: problem+json (RFC 9457) with a stable `code`.

Clients decide by `code`, people read `title` and `detail`. A problem is never cached and is safe to
show in a browser, so it always carries the same three headers.
"""

from __future__ import annotations

import msgspec

from fencepost.http.messages import Headers, Response

_HEADERS: Headers = [
    (b"Content-Type", b"application/problem+json"),
    (b"Cache-Control", b"no-store"),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Cross-Origin-Resource-Policy", b"cross-origin"),
]


def problem(
    status: int, code: str, title: str, detail: str, headers: Headers | None = None
) -> Response:
    """An error answer; `headers` are added to the ones every problem has."""
    body = msgspec.json.encode(
        {"type": "about:blank", "title": title, "status": status, "code": code, "detail": detail}
    )
    return Response(status, _HEADERS + headers if headers else list(_HEADERS), body)


def failure() -> Response:
    """The answer to a request that the server failed on."""
    detail = "the server failed on this request"
    return problem(500, "internal_error", "Internal Server Error", detail)
