"""Authenticate requests: tokens and JWTs become principals; any other is answered 401.

A token is known by its SHA-256 only; it is long and random, so a slow hash would add nothing. It is
looked up by the first bytes of its digest and compared as a whole in constant time. A JWT must be
signed by one of the configured public keys with one of the pinned algorithms, name the configured
issuer and audience, and be within its time; its subject must be one that a principal's `subjects`
take. What a principal may do is in `protocol.grants`, which request needs what in `access`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt.types import Options

from fencepost.clock import Clock
from fencepost.http.messages import Request
from fencepost.protocol.globs import BadGlob, Glob, parse_glob
from fencepost.protocol.grants import (
    VERBS,
    Grant,
    IdGlob,
    Principal,
    ProducerRule,
    ProducerRules,
    Raising,
)
from fencepost.protocol.rates import Pace, Rate
from fencepost.server.handlers.fields import RefusedError, bad
from fencepost.server.settings import (
    AuthSettings,
    GrantSettings,
    PrincipalSettings,
    ProducerRuleSettings,
)

ALGORITHMS = (
    "EdDSA",
    "ES256",
    "ES384",
    "ES512",
    "PS256",
    "PS384",
    "PS512",
    "RS256",
    "RS384",
    "RS512",
)
"""Signatures that can be pinned: all of them asymmetric, so that a public key cannot sign."""
NAME_BYTES_MAX = 128
TOKEN_PREFIX = "fp_"
VERIFIED_MAX = 4096
"""JWTs that are remembered as good until they end."""
RSA_BITS_MIN = 2048

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@|/+-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_UNCHECKED_TIMES: Options = {"verify_exp": False, "verify_nbf": False, "verify_iat": False}
_LOOKUP_BYTES = 8


class AuthConfigError(ValueError):
    """The settings of authorization do not make sense; the message says where."""


class PublicKey(NamedTuple):
    """A key that JWTs may be signed with, and the algorithms that fit it and are pinned."""

    id: str | None
    key: Any
    algorithms: tuple[str, ...]


class Auth:
    """Knows every principal. Made once, from settings that were checked."""

    def __init__(self, settings: AuthSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._tokens: dict[bytes, tuple[bytes, Principal]] = {}
        self._names: dict[str, Principal] = {}
        self._subjects: list[tuple[IdGlob, Principal]] = []
        self._keys = _load_keys(settings)
        self._verified: dict[bytes, tuple[Principal, int]] = {}
        self.rejected = 0
        """Requests without a good token, for the metrics."""
        claims = [_id_glob("claim_globs", text) for text in settings.claim_globs]
        rules = ProducerRules(_rules(settings, claims), claims)
        if not settings.principals:
            raise AuthConfigError(
                "[auth] needs [[principals]]: without any, every request would be refused"
            )
        for entry in settings.principals:
            self._add(entry, _principal(entry, settings, rules))
        if self._keys and not self._subjects:
            raise AuthConfigError("JWTs are set up, but no [[principals]] has subjects for them")
        if self._subjects and not self._keys:
            raise AuthConfigError("[[principals]] subjects need jwt_keys, jwt_issuer, jwt_audience")

    def _add(self, entry: PrincipalSettings, principal: Principal) -> None:
        if entry.name in self._names:
            raise AuthConfigError(f"[[principals]] has two called {entry.name!r}")
        self._names[entry.name] = principal
        for text in entry.token_sha256:
            if not _DIGEST.fullmatch(text):
                raise AuthConfigError(
                    f"principal {entry.name!r}: token_sha256 is 64 hexadecimal digits in small"
                    " letters: make one with `fencepost token new`"
                )
            digest = bytes.fromhex(text)
            if digest[:_LOOKUP_BYTES] in self._tokens:
                raise AuthConfigError(
                    f"principal {entry.name!r}: another principal has this token already"
                )
            self._tokens[digest[:_LOOKUP_BYTES]] = (digest, principal)
        self._subjects += [(IdGlob(text), principal) for text in entry.subjects]

    def named(self, name: str) -> Principal | None:
        """The principal of this name, if the settings or a JWT could still name it."""
        return self._names.get(name) or self._subject(name)

    def _subject(self, subject: str) -> Principal | None:
        """The principal that a JWT's subject stands for: itself, with the grants of its entry."""
        for glob, principal in self._subjects:
            if glob.matches(subject):
                if subject == principal.name:
                    return principal
                # Another entry's name is another one's identity: its claims and keys.
                return None if subject in self._names else principal.renamed(subject)
        return None

    # Recognising

    def recognise(self, request: Request) -> Principal:
        """Who sent a request; raises a 401."""
        if b"authorization" in request.repeated:
            raise bad("header_repeated", "the header authorization came more than once")
        value = request.headers.get(b"authorization")
        if value is None:
            raise self._rejected("send Authorization: Bearer and your token")
        scheme, _, text = value.partition(b" ")
        if scheme.lower() != b"bearer":
            raise self._rejected("the only scheme of Authorization here is Bearer")
        token = text.strip()
        digest = hashlib.sha256(token).digest()
        found = self._tokens.get(digest[:_LOOKUP_BYTES])
        if found is not None and hmac.compare_digest(found[0], digest):
            return found[1]
        if self._keys and token.count(b".") == 2:
            return self._recognise_jwt(token, digest)
        raise self._rejected("the token is not one of this server", invalid=True)

    def expires_ms(self, request: Request) -> int | None:
        """When the JWT of a request that was recognised ends; None for a token without an end."""
        token = request.headers.get(b"authorization", b"").partition(b" ")[2].strip()
        if not self._keys or token.count(b".") != 2:
            return None
        digest = hashlib.sha256(token).digest()
        self._recognise_jwt(token, digest)
        return self._verified[digest][1]

    def _recognise_jwt(self, token: bytes, digest: bytes) -> Principal:
        now_ms = self._clock.wall_ms()
        known = self._verified.get(digest)
        if known is None or known[1] <= now_ms:
            try:
                known = self._verify(token, now_ms)
            except _BadJwtError as error:
                raise self._rejected(str(error), invalid=True) from None
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified[digest] = known
        return known[0]

    def _verify(self, token: bytes, now_ms: int) -> tuple[Principal, int]:
        try:
            header = jwt.get_unverified_header(token)
            key = self._key_for(header)
            # The algorithm is the key's, never the token's own word for it.
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                audience=self.settings.jwt_audience,
                issuer=self.settings.jwt_issuer,
                options={**_UNCHECKED_TIMES, "require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise _BadJwtError(f"the JWT is not good: {error}") from None
        leeway_ms = self.settings.jwt_leeway_s * 1000
        expires_ms = _instant_ms(claims, "exp")
        if expires_ms is None or expires_ms + leeway_ms <= now_ms:
            raise _BadJwtError("the JWT has expired")
        begins_ms = _instant_ms(claims, "nbf")
        if begins_ms is not None and begins_ms - leeway_ms > now_ms:
            raise _BadJwtError("the JWT is not valid yet")
        subject = claims["sub"]
        if not is_name(subject):
            raise _BadJwtError("the JWT's subject cannot be a principal's name")
        principal = self._subject(subject)
        if principal is None:
            raise _BadJwtError("the JWT's subject is not a principal of this server")
        return principal, expires_ms + leeway_ms

    def _key_for(self, header: dict[str, Any]) -> PublicKey:
        key_id = header.get("kid")
        if key_id is None and len(self._keys) == 1:
            return self._keys[0]
        for key in self._keys:
            if key.id is not None and key.id == key_id:
                return key
        raise _BadJwtError("the JWT names no key of this server")

    def rejected_token(self, detail: str) -> RefusedError:
        """A 401 for a token that is not one of this server, or no longer."""
        return self._rejected(detail, invalid=True)

    def _rejected(self, detail: str, *, invalid: bool = False) -> RefusedError:
        self.rejected += 1
        error = RefusedError(401, "unauthorized", "Unauthorized", detail)
        challenge = b'Bearer realm="fencepost"' + (b', error="invalid_token"' if invalid else b"")
        error.response.headers.append((b"WWW-Authenticate", challenge))
        return error


class _BadJwtError(Exception):
    """A JWT that proves nothing."""


def _instant_ms(claims: dict[str, Any], name: str) -> int | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise _BadJwtError(f"the JWT's {name} is not a time")
    return int(value * 1000)


def is_name(text: object) -> bool:
    """Whether a principal may be called so."""
    return (
        isinstance(text, str)
        and len(text.encode()) <= NAME_BYTES_MAX
        and _NAME.fullmatch(text) is not None
    )


# Settings


def token_digest(token: str) -> str:
    """The digest of a token, which settings hold instead of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _principal(entry: PrincipalSettings, settings: AuthSettings, rules: ProducerRules) -> Principal:
    if not is_name(entry.name):
        raise AuthConfigError(
            f"[[principals]] name {entry.name!r} is not of letters, digits and . _ : @ | / + -,"
            f" at most {NAME_BYTES_MAX}"
        )
    if not entry.token_sha256 and not entry.subjects:
        raise AuthConfigError(f"principal {entry.name!r} needs token_sha256 or subjects")
    return Principal(
        entry.name,
        [_grant(entry.name, grant) for grant in entry.grants],
        producers=[_id_glob(entry.name, text) for text in entry.producers],
        rules=rules,
        pace=_pace(entry, settings),
    )


def _grant(name: str, grant: GrantSettings) -> Grant:
    globs: list[Glob] = []
    for text in grant.streams:
        glob = parse_glob(text)
        if isinstance(glob, BadGlob):
            raise AuthConfigError(f"principal {name!r}: streams {text!r}: {glob.detail}")
        globs.append(glob)
    verbs = 0
    for verb in grant.verbs:
        if verb not in VERBS:
            raise AuthConfigError(
                f"principal {name!r}: there is no verb {verb!r}; there are {', '.join(VERBS)}"
            )
        verbs |= VERBS[verb]
    if not globs or not verbs:
        raise AuthConfigError(f"principal {name!r}: a grant needs streams and verbs")
    return Grant(tuple(globs), verbs)


def _id_glob(name: str, text: str) -> IdGlob:
    if not text:
        raise AuthConfigError(f"principal {name!r}: a producer glob must not be empty")
    return IdGlob(text)


def _pace(entry: PrincipalSettings, settings: AuthSettings) -> Pace:
    def chosen(name: str) -> float:
        own = getattr(entry, name)
        value = getattr(settings, name) if own is None else own
        if not 0 <= value < float("inf"):
            raise AuthConfigError(f"principal {entry.name!r}: {name} must not be below zero")
        return float(value)

    def rate(name: str) -> Rate | None:
        per_s = chosen(name)
        return Rate(per_s, max(1.0, per_s * settings.burst_s)) if per_s else None

    ratio = chosen("abandon_ratio_max")
    if ratio > 1:
        raise AuthConfigError(f"principal {entry.name!r}: abandon_ratio_max is at most 1")
    return Pace(
        appends=rate("appends_per_s"),
        claims=rate("claims_per_s"),
        raises=rate("raises_per_s"),
        open_claims_max=int(chosen("open_claims_max")) or None,
        abandon_ratio_max=ratio or None,
    )


def _rules(settings: AuthSettings, claims: Iterable[IdGlob]) -> Iterable[ProducerRule]:
    stale_after_ms = settings.stale_after_s * 1000
    for rule in settings.producer_rules:
        yield _rule(rule, stale_after_ms)
    for glob in claims:
        yield ProducerRule(glob, True, False, "stale", stale_after_ms)


def _rule(rule: ProducerRuleSettings, stale_after_ms: int) -> ProducerRule:
    where = f"[[producer_rules]] match = {rule.match!r}"
    if not rule.match:
        raise AuthConfigError("[[producer_rules]] needs match, a glob of producer ids")
    if rule.going_on not in ("holder", "shared"):
        raise AuthConfigError(f"{where}: going_on is holder or shared, not {rule.going_on!r}")
    if rule.raising not in get_args(Raising):
        raise AuthConfigError(f"{where}: raising is never, stale or always, not {rule.raising!r}")
    if rule.stale_after_s is not None and not 0 < rule.stale_after_s < 10**9:
        raise AuthConfigError(f"{where}: stale_after_s must be greater than zero")
    return ProducerRule(
        IdGlob(rule.match),
        False,
        rule.going_on == "shared",
        cast(Raising, rule.raising),
        stale_after_ms if rule.stale_after_s is None else int(rule.stale_after_s * 1000),
    )


def _load_keys(settings: AuthSettings) -> tuple[PublicKey, ...]:
    named = (settings.jwt_keys, settings.jwt_issuer, settings.jwt_audience)
    if not any(named):
        return ()
    if not all(named):
        raise AuthConfigError("JWTs need all of jwt_keys, jwt_issuer and jwt_audience")
    for algorithm in settings.jwt_algorithms:
        if algorithm not in ALGORITHMS:
            raise AuthConfigError(
                f"jwt_algorithms has {algorithm!r}; it may have {', '.join(ALGORITHMS)}"
            )
    file = Path(settings.jwt_keys).expanduser()
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthConfigError(f"jwt_keys: {file} cannot be read: {error}") from None
    if "PRIVATE KEY" in text:
        raise AuthConfigError(f"jwt_keys: {file} holds a private key; give the public one only")
    keys = _jwks(text, settings) if text.lstrip().startswith("{") else _pem(text, settings)
    if not keys:
        raise AuthConfigError(f"jwt_keys: {file} has no key that fits jwt_algorithms")
    return keys


def _jwks(text: str, settings: AuthSettings) -> tuple[PublicKey, ...]:
    try:
        entries = json.loads(text)["keys"]
        keys = []
        for entry in entries:
            if entry.get("kty") == "oct" or "d" in entry:
                raise AuthConfigError("jwt_keys holds a secret; give public keys only")
            key = jwt.PyJWK.from_dict(entry).key
            keys.append(_public_key(entry.get("kid"), key, settings, entry.get("alg")))
    except AuthConfigError:
        raise
    except (jwt.PyJWTError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AuthConfigError(f"jwt_keys is not a JWKS of public keys: {error}") from None
    ids = [key.id for key in keys]
    if len(keys) > 1 and (None in ids or len(set(ids)) < len(ids)):
        raise AuthConfigError("jwt_keys: several keys need a kid each, all different")
    return tuple(key for key in keys if key.algorithms)


def _pem(text: str, settings: AuthSettings) -> tuple[PublicKey, ...]:
    try:
        key = load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise AuthConfigError(f"jwt_keys is neither a JWKS nor a PEM public key: {error}") from None
    found = _public_key(None, key, settings, None)
    return (found,) if found.algorithms else ()


def _public_key(
    key_id: str | None, key: Any, settings: AuthSettings, only: str | None
) -> PublicKey:
    """A key with the pinned algorithms that fit its kind."""
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < RSA_BITS_MIN:
            raise AuthConfigError(f"jwt_keys: an RSA key has at least {RSA_BITS_MIN} bits")
        fitting = [name for name in ALGORITHMS if name[:2] in ("RS", "PS")]
    elif isinstance(key, ec.EllipticCurvePublicKey):
        fitting = [_CURVES.get(key.curve.name, "")]
    elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        fitting = ["EdDSA"]
    else:
        raise AuthConfigError("jwt_keys holds a key of a kind that JWTs are not signed with")
    pinned = [name for name in fitting if name in settings.jwt_algorithms]
    return PublicKey(key_id, key, tuple(name for name in pinned if only in (None, name)))
