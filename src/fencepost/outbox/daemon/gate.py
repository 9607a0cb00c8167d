"""Check a request to the daemon before its endpoint sees it: host, origin, token, and rate.

A page in a browser can send requests to this machine, under a name that it has made to point here,
or from another origin. So a Host that is not local and every Origin are refused, on the socket as
well. On the port each request carries the token of a file that only the user can read; the socket
is such a file itself.
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path
from urllib.parse import parse_qsl

from fencepost.clock import Clock
from fencepost.http.messages import Request, Response
from fencepost.http.problems import problem
from fencepost.outbox.daemon.database import PRIVATE
from fencepost.outbox.daemon.settings import OutboxSettings

log = logging.getLogger(__name__)

HOSTS = frozenset((b"localhost", b"127.0.0.1", b"[::1]"))
PUBLIC = frozenset((b"/v1/health", b"/v1/metrics", b"/v1/version"))
TOKEN_NAMES = frozenset(("token", "access_token", "auth", "authorization", "api_key", "bearer"))
TOKEN_BYTES = 32
TOKEN_BYTES_MIN = 16
LOOK_MS = 200
"""How often the token file is looked at."""


class TokenRefusedError(Exception):
    """The token file cannot be used: the message says why."""


class TokenFile:
    """The token of the port, in a file. To rotate it, write another one into the file.

    The one before is taken for as long as `grace_ms` after that.
    """

    def __init__(self, path: Path, clock: Clock, grace_ms: int) -> None:
        self._path = path
        self._clock = clock
        self._grace_ms = grace_ms
        self._before = b""
        self._before_until_ms = 0
        self._told = b""
        """A token of a file that others can read, which was complained of."""
        if not path.exists():
            made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE)
            with open(made, "wb") as file:
                file.write(clock.token(TOKEN_BYTES).hex().encode() + b"\n")
        if path.stat().st_mode & 0o077:
            raise TokenRefusedError(f"{path} can be read by others: chmod 600 it")
        self._token = self._read()
        if len(self._token) < TOKEN_BYTES_MIN:
            raise TokenRefusedError(
                f"{path} holds less than {TOKEN_BYTES_MIN} bytes: delete it, and it is made anew"
            )
        self._looked_ms = clock.monotonic_ms()

    def knows(self, given: bytes) -> bool:
        """Whether this is the token, or the one before within its grace."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._looked_ms >= LOOK_MS:
            self._looked_ms = now_ms
            self._look(now_ms)
        if hmac.compare_digest(given, self._token):
            return True
        return now_ms < self._before_until_ms and hmac.compare_digest(given, self._before)

    def _look(self, now_ms: int) -> None:
        try:
            is_private = not self._path.stat().st_mode & 0o077
            found = self._read()
        except OSError:
            return  # being replaced: the one in memory stays good
        if found != self._token and not is_private:
            if self._told != found:
                log.error("%s can be read by others: its new token is not taken", self._path)
                self._told = found
            return
        if found != self._token and len(found) >= TOKEN_BYTES_MIN:
            self._before, self._before_until_ms = self._token, now_ms + self._grace_ms
            self._token = found

    def _read(self) -> bytes:
        return self._path.read_bytes().strip()


class Gate:
    """The checks of one way in: the socket, or the port with its token."""

    def __init__(self, settings: OutboxSettings, clock: Clock, token: TokenFile | None) -> None:
        self._settings = settings
        self._clock = clock
        self._token = token
        self.in_flight = 0
        self._tokens = float(settings.requests_per_s)
        self._filled_ms = clock.monotonic_ms()

    def refuse(self, request: Request) -> Response | None:
        """Why a request is not answered; None when it may go on."""
        headers = request.headers
        host = headers.get(b"host", b"").lower()
        name = host.rpartition(b":")[0] if not host.endswith(b"]") and b":" in host else host
        if name not in HOSTS:
            detail = "the Host header is localhost, 127.0.0.1 or [::1]"
            return problem(403, "host_not_allowed", "Host not allowed", detail)
        if b"origin" in headers:
            detail = "pages in browsers may not talk to an outbox"
            return problem(403, "origin_not_allowed", "Origin not allowed", detail)
        if request.query and _names_token(request.query):
            detail = "a token in a URL ends up in logs: send it as Authorization: Bearer"
            return problem(400, "token_in_url", "Token in the URL", detail)
        if self._token is None:
            return None
        if self._settings.public_health and request.path in PUBLIC:
            return None
        given = headers.get(b"authorization", b"")
        scheme, _, value = given.partition(b" ")
        if scheme.lower() != b"bearer" or not self._token.knows(value.strip()):
            detail = "the port needs Authorization: Bearer with the token of the token file"
            challenge = [(b"WWW-Authenticate", b'Bearer realm="fencepost-outbox"')]
            return problem(401, "unauthorized", "Unauthorized", detail, challenge)
        return self._refuse_pace()

    def enter(self) -> Response | None:
        """Count a request in; the refusal if too many wait already. `leave` counts it out."""
        if self.in_flight >= self._settings.in_flight_max:
            return _too_many(f"{self._settings.in_flight_max} requests are in flight", 1)
        self.in_flight += 1
        return None

    def leave(self) -> None:
        self.in_flight -= 1

    def _refuse_pace(self) -> Response | None:
        pace = self._settings.requests_per_s
        now_ms = self._clock.monotonic_ms()
        self._tokens = min(pace, self._tokens + (now_ms - self._filled_ms) * pace / 1000)
        self._filled_ms = now_ms
        if self._tokens < 1.0:
            return _too_many(f"a token has {pace} requests a second", 1)
        self._tokens -= 1.0
        return None


def _names_token(query: bytes) -> bool:
    text = query.decode("latin-1").lower()
    if "%" not in text and not any(name in text for name in TOKEN_NAMES):
        return False  # which it is nearly always, and cheap to see
    return not TOKEN_NAMES.isdisjoint(name.lower() for name, _ in parse_qsl(text))


def _too_many(detail: str, seconds: int) -> Response:
    retry = [(b"Retry-After", b"%d" % seconds)]
    return problem(429, "too_many_requests", "Too many requests", f"{detail}: retry later", retry)
