"""Leases and backoffs in time: rules that subscriptions and groups share.

A lease has an end, but passing it takes nothing away by itself: it lets another worker claim. What
ends a lease is a number that grew, the fence. A fence needs no clock, so a worker that slept, or
whose clock is wrong, is refused all the same.

Times are milliseconds of the store's decision clock, which never runs backwards (ADR 0004). These
functions take the time and the random numbers that they need; they read neither.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LEASE_MS_MIN = 1_000
LEASE_MS_MAX = 600_000

BackoffKind = Literal["fixed", "linear", "exponential"]

_DOUBLINGS_MAX = 40  # 2**40 ms is longer than any cap; more would only make large numbers.


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to wait after failures in a row.

    `jitter` is a fraction: 0.2 spreads a wait of 10 s over 8 to 12 s. A wait is never longer than
    `cap_ms`.
    """

    kind: BackoffKind = "exponential"
    base_ms: int = 1_000
    cap_ms: int = 60_000
    jitter: float = 0.2


def delay_ms(backoff: Backoff, failures: int, random: float, *, floor_ms: int = 0) -> int:
    """The wait after so many failures in a row; `random` lies between 0 and 1."""
    assert failures > 0, "there is nothing to wait for without a failure"
    wait_ms = backoff.base_ms
    if backoff.kind == "linear":
        wait_ms *= failures
    elif backoff.kind == "exponential":
        wait_ms *= 2 ** min(failures - 1, _DOUBLINGS_MAX)
    jittered_ms = min(wait_ms, backoff.cap_ms) * (1 + backoff.jitter * (2 * random - 1))
    return int(min(max(jittered_ms, floor_ms), backoff.cap_ms))


def has_passed(until_ms: int | None, now_ms: int) -> bool:
    """Whether a lease, or any other wait with an end, is over. None has no end."""
    return until_ms is not None and until_ms <= now_ms


def fence_fits(current: int, *presented: int) -> bool:
    """Whether every number that a worker presents is the current one."""
    return all(number == current for number in presented)
