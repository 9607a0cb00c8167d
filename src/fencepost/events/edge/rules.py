"""The rules of idempotency at the edge, without I/O.

For every key a backend keeps one record: claimed by a request that runs, finished with its answer,
or released. `decide_claim` says what a request with that key has to do. Every change of a record
replaces one version of it by the next (compare and set), so of two requests that decide at the
same time one changes the record, and the other one decides again.

How old a record is comes from the backend as `idle_ms`: for how long it is known to be unchanged.
No rule compares the clocks of two machines to end a lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

Headers = tuple[tuple[str, str], ...]
KEY_CHARACTERS_MAX = 255
BODY_HEADERS = frozenset({"content-type", "content-encoding"})
"""Headers without which the body of an answer cannot be read."""


class Answer(msgspec.Struct, frozen=True):
    """A response as a replay sends it."""

    status: int
    headers: Headers
    body: bytes


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """A request runs under this key; it renews its claim before `lease_ms` have passed."""

    fingerprint: str
    owner: str
    lease_ms: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The request ended. Without `answer`, its response was too large to keep."""

    fingerprint: str
    status: int
    expires_ms: int
    answer: Answer | None = None


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The request failed or was cancelled: the key is free."""


Record = Claimed | Finished | Released


class Seen(NamedTuple):
    """A record as a backend found it."""

    record: Record
    version: str
    """Names this state of the record: a change is accepted only if it still is the current one."""
    idle_ms: int
    """For how long the record is known to be unchanged; its true age may be more, never less."""


class Take(NamedTuple):
    """The key is free: claim it by replacing this version (None: there is no record)."""

    version: str | None


class Running(NamedTuple):
    """The first request still runs; its claim ends after this time unless it is renewed."""

    left_ms: int


class Replay(NamedTuple):
    """The request was answered before: send this again."""

    answer: Answer


class NotKept(NamedTuple):
    """The request was answered before with this status, and its response was not kept."""

    status: int


class OtherRequest(NamedTuple):
    """The key was used with another body or query."""


Decision = Take | Running | Replay | NotKept | OtherRequest


def decide_claim(seen: Seen | None, fingerprint: str, *, now_ms: int) -> Decision:
    """What a request with this fingerprint has to do, given the record of its key."""
    if seen is None:
        return Take(None)
    match seen.record:
        case Released():
            return Take(seen.version)
        case Claimed(lease_ms=lease_ms) if seen.idle_ms >= lease_ms:
            # Its owner did not renew in time: it crashed, or is cut off from the backend. If it
            # lives all the same, it finds another version and can neither renew nor finish.
            return Take(seen.version)
        case Claimed() as claimed:
            if claimed.fingerprint != fingerprint:
                return OtherRequest()
            return Running(claimed.lease_ms - seen.idle_ms)
        case Finished() as finished:
            if now_ms >= finished.expires_ms:
                return Take(seen.version)
            if finished.fingerprint != fingerprint:
                return OtherRequest()
            if finished.answer is None:
                return NotKept(finished.status)
            return Replay(finished.answer)


def is_released_by(status: int, released: frozenset[int]) -> bool:
    """Whether an answer frees the key, so that the next request with it runs again."""
    return status >= 500 or status in released


def decide_key(values: list[bytes], *, required: bool) -> str | KeyInvalid | None:
    """The key of a request from its header fields; None for a request that runs without one."""
    if not values:
        return KeyInvalid("missing") if required else None
    if len(values) > 1:
        return KeyInvalid("repeated")
    key = values[0].decode("latin-1").strip()
    if not 0 < len(key) <= KEY_CHARACTERS_MAX or not all("!" <= char <= "~" for char in key):
        return KeyInvalid("malformed")
    return key


class KeyInvalid(NamedTuple):
    """The request has no key that can be used: `missing`, `repeated` or `malformed`."""

    reason: str


def record_id(principal: str, method: str, path: bytes, key: str) -> str:
    """The name under which a backend keeps the record: the key in its scope.

    Another principal, method or path has another record, so no caller meets the key of another.
    """
    return _hashed(principal.encode(), method.encode(), path, key.encode())


def fingerprint_of(query: bytes, body: bytes) -> str:
    """What a repeated request must share with the first one beside its scope."""
    return _hashed(query, body)


def _hashed(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # The length keeps ("ab", "c") apart from ("a", "bc").
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def chosen_headers(headers: Iterable[tuple[bytes, bytes]], chosen: frozenset[str]) -> Headers:
    """The headers of a response that its replay has as well."""
    texts = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers)
    return tuple((name, value) for name, value in texts if name in chosen or name in BODY_HEADERS)
