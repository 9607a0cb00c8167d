"""Proxies: which one a server is reached through, as the environment says, and how it is asked.

`HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` name a proxy (`http://user:password@host:3128`), and
`NO_PROXY` the hosts that are reached without one. A server on this machine is never reached through
a proxy of the environment. No sockets here: `wires.py` connects, and for https asks the proxy for
a tunnel with what this module renders.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fencepost.client.errors import ConnectionFailedError, InvalidArgumentError

HEAD_BYTES_MAX = 64 * 1024
"""The answer of a proxy to the request for a tunnel."""
END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where a proxy is, and the credentials that it is given."""

    host: str
    port: int
    authorization: str | None = None
    """The value of Proxy-Authorization."""


def parse_proxy(url: str, *, source: str = "proxy") -> Proxy:
    """The proxy that a URL names; `source` is what an error calls the setting."""
    shown = f"{source} is not a proxy like http://host:3128"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise InvalidArgumentError(f"{shown}: {error}") from None
    if parts.scheme != "http":
        raise InvalidArgumentError(f"{shown}: {parts.scheme}:// proxies are not supported")
    if not parts.hostname or port == 0:
        raise InvalidArgumentError(f"{shown}: it names no host and port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise InvalidArgumentError(f"{shown}: it has a path")
    authorization = None
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(user.encode()).decode()
    return Proxy(parts.hostname, port or 80, authorization)


def proxy_of(host: str, port: int, *, secure: bool, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy of the environment for a server; None when it is reached directly."""
    if _is_here(host) or _is_excluded(host, port, _lookup(environment, "NO_PROXY")[1]):
        return None
    names = ("HTTPS_PROXY" if secure else "HTTP_PROXY", "ALL_PROXY")
    for name in names:
        found, url = _lookup(environment, name)
        # A web server hands the header `Proxy` of a request to CGI programs as HTTP_PROXY.
        if url and not (found == "HTTP_PROXY" and "REQUEST_METHOD" in environment):
            return parse_proxy(url, source=found)
    return None


def _lookup(environment: Mapping[str, str], name: str) -> tuple[str, str]:
    """A variable and its value; the name in lower case comes first, as with other programs."""
    for written in (name.lower(), name):
        if written in environment:
            return written, environment[written].strip()
    return name, ""


def _is_here(host: str) -> bool:
    if host.lower().rstrip(".") in ("localhost", "localhost.localdomain"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _is_excluded(host: str, port: int, listed: str) -> bool:
    return any(_fits(host.lower().rstrip("."), port, entry) for entry in listed.split(","))


def _fits(host: str, port: int, entry: str) -> bool:
    """Whether an entry of NO_PROXY is about a host: a name, its parent, an address, a network."""
    entry = entry.strip().lower()
    if entry in ("", "*"):
        return entry == "*"
    address = _address(host)
    if address is not None:
        try:
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
        except ValueError:
            pass
    name, _, wanted = entry.rpartition(":")
    if name and wanted.isdecimal():
        if int(wanted) != port:
            return False
        entry = name
    entry = entry.strip("[]").removeprefix("*").strip(".")
    return host == entry or (address is None and host.endswith(f".{entry}"))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def tunnel_request(proxy: Proxy, host: str, port: int) -> bytes:
    """What asks a proxy to connect to a server and then to pass every byte on."""
    name = f"[{host}]" if ":" in host else host
    lines = [f"CONNECT {name}:{port} HTTP/1.1", f"Host: {name}:{port}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    return "\r\n".join([*lines, "", ""]).encode()


def tunnel_made(proxy: Proxy, received: bytes) -> bool:
    """Whether the tunnel is there; false while more of the answer has to come."""
    where = f"the proxy {proxy.host}:{proxy.port}"
    if END not in received:
        if len(received) > HEAD_BYTES_MAX:
            raise ConnectionFailedError(f"{where} did not answer with HTTP")
        return False
    first = received.partition(b"\r\n")[0].decode("latin-1")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ConnectionFailedError(f"{where} did not answer with HTTP")
    if not status.startswith("2"):
        raise ConnectionFailedError(f"{where} refused the connection: {status.strip()}")
    return True
