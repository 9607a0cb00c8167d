"""Settings of the idempotency middleware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fencepost.client.errors import require

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencySettings:
    """How requests with an Idempotency-Key are handled; every size and wait has a bound."""

    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    """Methods that the middleware looks at; others pass."""
    required: bool = False
    """Refuse a request of these methods that has no key (400)."""
    ttl_s: int = 24 * 60 * 60
    """How long an answer is replayed."""
    lease_s: float = 15.0
    """How long a claim holds without being renewed: a crashed request frees its key after it."""
    on_running: Literal["refuse", "wait"] = "refuse"
    """A duplicate while the first request runs: 409 with Retry-After, or wait for its answer."""
    wait_s_max: float = 30.0
    """How long such a duplicate waits before it is refused all the same."""
    backend_s_max: float = 10.0
    """How long claiming a key or storing an answer may take when the backend does not answer."""
    request_bytes_max: int = MEBIBYTE
    """A larger request body is refused (413): the whole body is read before the handler runs."""
    answer_bytes_max: int = MEBIBYTE
    """A larger answer is sent and not kept; its duplicate is told so."""
    replayed_headers: frozenset[str] = frozenset(
        {"content-language", "content-location", "etag", "last-modified", "location"}
    )
    """Headers of an answer that its replay has, beside Content-Type and Content-Encoding."""
    released_statuses: frozenset[int] = frozenset({408, 425, 429})
    """Answers that free the key beside those from 500 on: they ask the client to try again."""

    def __post_init__(self) -> None:
        require(self.ttl_s > 0, "ttl_s is greater than zero")
        require(0 < self.lease_s <= self.ttl_s, "lease_s is greater than zero, at most ttl_s")
        require(self.wait_s_max >= 0, "wait_s_max is not negative")
        require(self.backend_s_max > 0, "backend_s_max is greater than zero")
        require(self.request_bytes_max >= 0, "request_bytes_max is not negative")
        require(self.answer_bytes_max >= 0, "answer_bytes_max is not negative")
        require(self.on_running in ("refuse", "wait"), "on_running is 'refuse' or 'wait'")

    @property
    def lease_ms(self) -> int:
        return max(1, int(self.lease_s * 1000))

    @property
    def ttl_ms(self) -> int:
        return self.ttl_s * 1000
