"""Protect an open server from web pages: which origins may use it, and under which host names.

Without principals, every program that reaches the server may do everything. A browser is such a
program, and any page can make it send requests here. So a request that a page of another origin
sends is answered only for allowed origins, and may read and append, but neither create nor delete.
A page could also give its own host name our address (DNS rebinding) and so become our origin;
therefore a server on this machine answers to local names only, and to those in the settings.

With principals none of this applies: a page without a token gets nothing. The rules are pure
functions of the request; `Origins` remembers what was allowed.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl

from fencepost.http.messages import Request
from fencepost.server.handlers.fields import STREAM_ROOT, RefusedError

LOCALHOST = "localhost"
"""Stands in the settings for every origin on the machine of the browser."""
ALL = "*"
REMEMBERED_MAX = 256
"""Hosts and origins that are remembered as allowed."""

_ORIGIN = re.compile(r"https?://([^/?#@\\ ]+)")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::([0-9]*))?")
_APPENDING = (b"/v1/commit", b"/v1/staging/")


class Origins:
    """Decides for an open server which requests of pages it takes.

    `allowed` are origins (`https://app.example.com`), `localhost`, or `*`. `hosts` are names that
    the server answers to beside local ones; when it has none and listens beyond this machine
    (`on_loopback` is false), it answers to every name.
    """

    def __init__(
        self, allowed: tuple[str, ...], hosts: tuple[str, ...], *, on_loopback: bool
    ) -> None:
        self._allowed = frozenset(origin.lower().rstrip("/") for origin in allowed)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._checks_hosts = on_loopback or bool(hosts)
        self._known_hosts: set[bytes] = set()

    def check(self, request: Request) -> None:
        """Raise a 403 for a host that is not ours, or a page that may not do this."""
        headers = request.headers
        if self._checks_hosts and headers.get(b"host", b"") not in self._known_hosts:
            self._check_host(headers.get(b"host", b""))
        if b"origin" not in headers or request.method == "OPTIONS" or not self.is_cross(request):
            return
        if not self.allows(request):
            raise RefusedError(
                403,
                "origin_not_allowed",
                "Origin not allowed",
                f"pages of {_origin(request)!r} may not use this server: name the origin in"
                " [server] allowed_origins, or set up [[principals]]",
            )
        if not may_cross(request.method, request.path, request.query):
            raise RefusedError(
                403,
                "origin_may_not",
                "Not for other origins",
                "on a server without principals pages of other origins read and append only:"
                " do this from a program, or set up [[principals]]",
            )

    def is_cross(self, request: Request) -> bool:
        """Whether a request comes from a page of another origin than ours."""
        if b"origin" not in request.headers:
            return False  # of a program, or a read of our own page
        origin = _origin(request)
        found = _ORIGIN.fullmatch(origin)
        host = request.headers.get(b"host", b"").decode("latin-1").lower()
        return found is None or _port_named(found[1], origin) != _port_named(host, origin)

    def allows(self, request: Request) -> bool:
        """Whether pages of the request's origin may send requests at all."""
        return is_allowed(_origin(request), self._allowed)

    def _check_host(self, host: bytes) -> None:
        text = host.decode("latin-1").lower()
        if not is_local(text, self._hosts):
            raise RefusedError(
                403,
                "host_not_allowed",
                "Host not allowed",
                f"this server does not answer to the host {text!r}: name it in"
                " [server] allowed_hosts, or set up [[principals]]",
            )
        if len(self._known_hosts) < REMEMBERED_MAX:
            self._known_hosts.add(host)


def _origin(request: Request) -> str:
    return request.headers.get(b"origin", b"").decode("latin-1").lower()


def is_local(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header cannot be the name of a foreign page.

    An address is no name that a name server could answer for, so it cannot be rebound.
    """
    found = _AUTHORITY.fullmatch(host)
    if found is None:
        return False
    name = found[1].rstrip(".")
    return _is_localhost(name) or _is_address(name) or name in names or host in names


def is_allowed(origin: str, allowed: frozenset[str]) -> bool:
    """Whether pages of an origin may use the server."""
    if ALL in allowed or origin in allowed:
        return True
    found = _ORIGIN.fullmatch(origin)
    if found is None or LOCALHOST not in allowed:
        return False
    authority = _AUTHORITY.fullmatch(found[1])
    if authority is None:
        return False
    name = authority[1]
    return _is_localhost(name) or (_is_address(name) and _address(name).is_loopback)


def may_cross(method: str, path: bytes, query: bytes) -> bool:
    """Whether pages of other, allowed origins may do this: they read and append."""
    if method in ("GET", "HEAD"):
        return True
    if method != "POST":
        return False
    if path.startswith(_APPENDING):
        return True
    if not path.startswith(STREAM_ROOT) or path.startswith(b"/v1/stream/__ds/"):
        return False
    parameters = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return all(name != "truncate" for name, _ in parameters)


def _port_named(authority: str, origin: str) -> str:
    """An authority with its port, which the scheme says when it has none."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return authority
    return f"{found[1]}:{found[2] or ('443' if origin.startswith('https:') else '80')}"


def _is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        _address(name)
    except ValueError:
        return False
    return True


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
