"""Security of subscriptions: where webhooks may go, how they are signed, and the tokens of wakes.

A webhook's URL comes from a client and is called from inside our network, so `Guard` checks it
twice. `check_url` looks at the URL alone: https, a plain host, no disguised number. `addresses`
resolves the host and refuses it when any of its addresses is not on the public internet; the
delivery then connects to exactly the addresses that were checked, so that a second answer of the
name server, a moment later, cannot lead elsewhere. Development is the one exception: http and
loopback, for `localhost` and 127.0.0.x, where the settings allow it.

`SigningKey` is the Ed25519 key that webhook requests are signed with. It is made once and kept in
the store. Its `kid` is the thumbprint of the key (RFC 7638), so it stays the same over restarts and
cannot name two keys. `Tokens` makes and reads the token of a wake: an HS256 JWT that names the
subscription, its incarnation, the generation, and when it expires. Whether that generation is still
current is decided by the fence, not by the token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses, as text."""

_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*\.?")
_DEVELOPMENT = re.compile(r"localhost|127\.0\.0\.(0|[1-9][0-9]{0,2})")
_NOT_IN_URLS = '\\"<>^`{|}\x7f'
_LOCAL_NAMES = ("localhost", "local", "internal", "localdomain", "home.arpa")

# Python's own idea of a global address has changed between its patch releases, so ours is written
# out: everything in the IANA special-purpose registries, and for IPv6 everything outside 2000::/3.
_REFUSED_V4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_REFUSED_V6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # Teredo and other protocol assignments
        "2001:db8::/32",
        "2002::/16",  # 6to4: holds an IPv4 address, which could be any
        "2620:4f:8000::/48",
        "3fff::/20",
    )
]


class UnsafeTargetError(Exception):
    """The webhook must not be called there; the message says why. Give it another URL."""


class Target(NamedTuple):
    """The host that a URL names, once the form of the URL has been checked."""

    host: str
    port: int
    development: bool  # the localhost exception: it may reach loopback, and nothing else


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _REFUSED_V6)


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def resolve(host: str, port: int) -> Sequence[str]:
    """The operating system's answer."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class Guard:
    """Decides for each URL and each address; `allow_localhost` is the development exception."""

    def __init__(self, *, allow_localhost: bool, resolver: Resolver = resolve) -> None:
        self._allow_localhost = allow_localhost
        self._resolver = resolver

    def check_url(self, url: str) -> Target:
        """The target that `url` names; raises when its form alone is reason to refuse it."""
        parts = _split(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = self._target(parts.hostname or "", port)
        host, _, development = target
        if parts.scheme != "https" and not (parts.scheme == "http" and development):
            raise UnsafeTargetError("a webhook URL begins with https://")
        if not host:
            raise UnsafeTargetError("a webhook URL names a host")
        if not development:
            _check_host(host)
        return target

    def _target(self, host: str, port: int) -> Target:
        host = host.lower().rstrip(".")
        development = self._allow_localhost and _DEVELOPMENT.fullmatch(host) is not None
        return Target(host, port, development)

    async def reach(self, host: str, port: int) -> list[str]:
        """The addresses to connect to for a host of which only the name is known."""
        return await self.addresses(self._target(host, port))

    async def addresses(self, target: Target) -> list[str]:
        """The addresses to connect to; raises unless all of them may be reached."""
        found = await self._resolver(target.host, target.port)
        if not found:
            raise OSError(f"{target.host} has no address")
        for text in found:
            self._check_address(target, text)
        return list(found)

    def _check_address(self, target: Target, text: str) -> None:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            raise UnsafeTargetError(f"{target.host} has the address {text!r}") from None
        allowed = address.is_loopback if target.development else is_public(address)
        if not allowed:
            raise UnsafeTargetError(
                f"{target.host} has the address {address}, which is not on the public internet"
            )


def _split(url: str) -> SplitResult:
    # What parsers read differently (backslashes, blanks, a second @) is refused.
    if not url.isascii() or any(mark <= " " or mark in _NOT_IN_URLS for mark in url):
        raise UnsafeTargetError("a webhook URL has only the characters of a URL: escape the others")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UnsafeTargetError(f"the webhook URL is malformed: {error}") from None
    if parts.port == 0:
        raise UnsafeTargetError("a webhook URL has a port from 1 to 65535")
    if "@" in parts.netloc:
        raise UnsafeTargetError("a webhook URL has no user name or password")
    if "#" in url:
        raise UnsafeTargetError("a webhook URL has no fragment")
    return parts


def _check_host(host: str) -> None:
    try:
        address: Address | None = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None:
        if not is_public(address):
            raise UnsafeTargetError(f"{address} is not on the public internet")
        return
    if not _HOST.fullmatch(host):
        raise UnsafeTargetError(f"{host!r} is no host name")
    # 2130706433, 0x7f.1, 0177.0.0.1: resolvers read these as addresses, so a name that ends in a
    # number is taken for an address, and it is not one in its plain form.
    last = host.rpartition(".")[2]
    if last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last):
        raise UnsafeTargetError(f"{host!r} is a number in disguise, not a host name")
    if any(host == name or host.endswith(f".{name}") for name in _LOCAL_NAMES):
        raise UnsafeTargetError(f"{host} is a name of a local network")


SIGNING_SECRET = "webhook-signing-key"
KEY_BYTES = 32


class SigningKey:
    """Signs webhook requests; `secret` is the 32 bytes of an Ed25519 private key."""

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        x = _text(self._key.public_key().public_bytes_raw())
        public = {"crv": "Ed25519", "kty": "OKP", "x": x}
        canonical = json.dumps(public, sort_keys=True, separators=(",", ":")).encode()
        self.kid = "ds_" + _text(hashlib.sha256(canonical).digest())
        self.jwk = {**public, "kid": self.kid, "use": "sig", "alg": "EdDSA"}

    def signature(self, body: bytes, *, now_ms: int) -> bytes:
        """The value of Webhook-Signature for `body` sent now."""
        seconds = now_ms // 1000
        signed = _text(self._key.sign(b"%d.%b" % (seconds, body)))
        return f"t={seconds},kid={self.kid},ed25519={signed}".encode()

    def jwks(self) -> bytes:
        """The public half, as a JSON Web Key Set."""
        return json.dumps({"keys": [self.jwk]}).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


TOKEN_SECRET = "subscription-token-key"
KEY_BYTES = 32
_ALGORITHM = "HS256"


class Token(NamedTuple):
    """What a valid token says."""

    name: str
    incarnation: int
    generation: int


class BadToken(NamedTuple):
    """Not a token of ours, or one whose time is over."""

    detail: str


class Tokens:
    """Makes and reads tokens with one key."""

    def __init__(self, key: bytes, *, ttl_ms: int) -> None:
        self._key = key
        self._ttl_ms = ttl_ms

    def make(self, token: Token, *, now_ms: int) -> str:
        """A token that is good from now on."""
        return jwt.encode(
            {
                "sub": token.name,
                "inc": token.incarnation,
                "gen": token.generation,
                "exp": (now_ms + self._ttl_ms) // 1000,
            },
            self._key,
            algorithm=_ALGORITHM,
        )

    def read(self, text: str, *, now_ms: int) -> Token | BadToken:
        """What `text` says, once its signature is checked (in constant time) and its time."""
        try:
            claims = jwt.decode(
                text,
                self._key,
                algorithms=[_ALGORITHM],
                options={
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                    "require": ["sub", "inc", "gen", "exp"],
                },
            )
        except jwt.InvalidTokenError:
            return BadToken("the token is not one of this server's")
        if claims["exp"] * 1000 <= now_ms:
            return BadToken("the token has expired: claim again, or wait for the next wake")
        return Token(claims["sub"], claims["inc"], claims["gen"])
