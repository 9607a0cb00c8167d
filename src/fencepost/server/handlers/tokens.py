"""`POST /v1/tokens`: short-lived tokens with which a page reads one stream.

A browser's EventSource cannot send an Authorization header. A program that has the verb read on a
stream asks for a read token here and hands it to the page, which puts it into the URL:
`GET /v1/stream/{path}?live=sse&offset=-1&token=...`. The token is a statement signed with a key of
the store: which principal asked, which stream, and when it ends. It counts on GET of that stream
and nowhere else (`access.Gate`), and no longer than the principal itself may read the stream.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

import jwt
import msgspec

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol.limits import Limits
from fencepost.server import access
from fencepost.server.handlers import fields
from fencepost.server.handlers.fields import bad, rfc3339
from fencepost.server.handlers.rendering import BROWSER
from fencepost.server.settings import ServerSettings

TOKEN_SECRET = "read-token-key"
KEY_BYTES = 32
TTL_S_DEFAULT = 300

_ALGORITHM = "HS256"
_PATH_SAFE = "/:@!$&'()*+,;=-._~"


class ReadGrant(NamedTuple):
    """What a valid read token says: this principal let its bearer read this stream."""

    principal: str
    stream: str
    has_ended: bool = False


class ReadTokens:
    """Makes and reads read tokens with one key."""

    def __init__(self, key: bytes, clock: Clock) -> None:
        self._key = key
        self._clock = clock

    def make(self, grant: ReadGrant, ttl_s: int) -> tuple[str, int]:
        """A token that is good from now on, and when it ends in milliseconds."""
        ends_s = self._clock.wall_ms() // 1000 + ttl_s
        claims = {"sub": grant.principal, "stream": grant.stream, "exp": ends_s}
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM), ends_s * 1000

    def read(self, text: str) -> ReadGrant | None:
        """What a token says; None for one that is not ours."""
        try:
            claims = jwt.decode(
                text,
                self._key,
                algorithms=[_ALGORITHM],
                options={
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                    "require": ["sub", "stream", "exp"],
                },
            )
        except jwt.InvalidTokenError:
            return None
        has_ended = claims["exp"] * 1000 <= self._clock.wall_ms()
        return ReadGrant(claims["sub"], claims["stream"], has_ended)


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    stream: str
    ttl_s: int = TTL_S_DEFAULT


_DECODER = msgspec.json.Decoder(_Body)


class Tokens:
    """The handler that makes read tokens."""

    def __init__(self, tokens: ReadTokens, settings: ServerSettings) -> None:
        self._tokens = tokens
        self._limits: Limits = settings.limits
        self._ttl_s_max = settings.auth.read_token_s_max

    async def make(self, request: Request) -> Answer:
        try:
            body = _DECODER.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad("token_request_invalid", f"the body asks for no token: {error}") from None
        if not 1 <= body.ttl_s <= self._ttl_s_max:
            raise bad(
                "token_request_invalid",
                f"ttl_s is a whole number from 1 to {self._ttl_s_max} (read_token_s_max)",
            )
        path = fields.check_path(body.stream)
        if len(path.encode()) > self._limits.path_bytes_max:
            raise bad(
                "path_too_long",
                f"a stream path has at most {self._limits.path_bytes_max} bytes (path_bytes_max)",
            )
        access.read_allowed(request, path)
        grant = ReadGrant(access.name_of(request.principal), path)
        token, ends_ms = self._tokens.make(grant, body.ttl_s)
        url = f"{request.base_url().decode('latin-1')}/v1/stream/{quote(path, safe=_PATH_SAFE)}"
        shown = {
            "token": token,
            "stream": path,
            "expires": rfc3339(ends_ms),
            "url": f"{url}?token={token}",
        }
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Cache-Control", b"no-store"),
            *BROWSER,
        ]
        return Response(200, headers, msgspec.json.encode(shown))
