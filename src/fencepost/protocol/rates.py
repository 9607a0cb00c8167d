"""Rates of principals: token buckets, a count that decays, and the decision they lead to.

Everything here is a function of a state and a time, and returns the next state or how long to wait.
The states are small and live in memory only: a refusal costs nothing durable, and a restart
forgives. The one thing that is counted and not timed, open claims, is a matter of what is on disk.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

ABANDON_HALF_LIFE_MS = 600_000
"""Claims and abandoned claims count half after this long."""
ABANDON_CLAIMS_MIN = 10
"""So many claims, decayed, before their ratio says anything."""
OPEN_CLAIMS_RETRY_MS = 5_000
"""When a principal with too many open claims may look again; when one ends is not known."""


class Rate(NamedTuple):
    """So many in a second on average, `burst` of them at once."""

    per_s: float
    burst: float


class Bucket(NamedTuple):
    """A token bucket: how many tokens were left at a time."""

    tokens: float
    at_ms: int


class Wait(NamedTuple):
    """The bucket holds too few tokens; it will have enough in `ms` milliseconds."""

    ms: int


def take(bucket: Bucket | None, rate: Rate, now_ms: int, cost: float = 1) -> Bucket | Wait:
    """The bucket with `cost` tokens less, or how long until it has so many. None: it is full.

    What costs more than a full bucket holds costs a full bucket.
    """
    cost = min(cost, rate.burst)
    tokens = rate.burst
    if bucket is not None:
        # A clock that went back refills nothing, and takes nothing away.
        elapsed_ms = max(0, now_ms - bucket.at_ms)
        tokens = min(rate.burst, bucket.tokens + elapsed_ms * rate.per_s / 1000)
    if tokens < cost:
        return Wait(ceil((cost - tokens) * 1000 / rate.per_s))
    return Bucket(tokens - cost, now_ms)


class Tally(NamedTuple):
    """A count that halves with time."""

    amount: float = 0.0
    at_ms: int = 0

    def at(self, now_ms: int) -> float:
        """The count at a time, after it has decayed."""
        return float(self.amount * 0.5 ** (max(0, now_ms - self.at_ms) / ABANDON_HALF_LIFE_MS))

    def more(self, now_ms: int) -> Tally:
        """The tally with one more."""
        return Tally(self.at(now_ms) + 1, now_ms)


class Pace(NamedTuple):
    """The rates and bounds of a principal; None is no bound."""

    appends: Rate | None = None
    claims: Rate | None = None
    raises: Rate | None = None
    open_claims_max: int | None = None
    abandon_ratio_max: float | None = None


UNLIMITED = Pace()


class Standing(NamedTuple):
    """How much of its `Pace` a principal has used."""

    appends: Bucket | None = None
    claims: Bucket | None = None
    raises: Bucket | None = None
    open_claims: int = 0
    claimed: Tally = Tally()
    abandoned: Tally = Tally()

    def abandon_ratio(self, now_ms: int) -> float:
        """How many of its recent claims were taken from it; 0 while there are too few to tell."""
        claimed = self.claimed.at(now_ms)
        if claimed < ABANDON_CLAIMS_MIN:
            return 0.0
        return min(1.0, self.abandoned.at(now_ms) / claimed)


NEW = Standing()


class TooFast(NamedTuple):
    """The principal goes past one of its limits; `limit` is the setting that says so."""

    limit: str
    retry_after_ms: int


def decide_append_pace(
    standing: Standing, pace: Pace, now_ms: int, *, appends: int = 1
) -> Standing | TooFast:
    """Take appends from the rate of a principal, whether or not they will be accepted."""
    if pace.appends is None:
        return standing
    taken = take(standing.appends, pace.appends, now_ms, appends)
    if isinstance(taken, Wait):
        return TooFast("appends_per_s", taken.ms)
    return Standing(taken, *standing[1:])


def decide_claim_pace(
    standing: Standing, pace: Pace, *, claims: bool, raises: bool, now_ms: int
) -> Standing | TooFast:
    """An append that would be accepted, and that claims, or raises an epoch, or both.

    A retaken claim of one's own is open already; that it is not counted twice is for the caller.
    """
    if claims:
        refused = _claim_refused(standing, pace, now_ms)
        if refused is not None:
            return refused
    after = standing
    if claims and pace.claims is not None:
        taken = take(standing.claims, pace.claims, now_ms)
        if isinstance(taken, Wait):
            return TooFast("claims_per_s", taken.ms)
        after = after._replace(claims=taken)
    if raises and pace.raises is not None:
        taken = take(standing.raises, pace.raises, now_ms)
        if isinstance(taken, Wait):
            return TooFast("raises_per_s", taken.ms)
        after = after._replace(raises=taken)
    if claims:
        after = after._replace(
            open_claims=after.open_claims + 1, claimed=after.claimed.more(now_ms)
        )
    return after


def _claim_refused(standing: Standing, pace: Pace, now_ms: int) -> TooFast | None:
    if pace.open_claims_max is not None and standing.open_claims >= pace.open_claims_max:
        return TooFast("open_claims_max", OPEN_CLAIMS_RETRY_MS)
    ratio = pace.abandon_ratio_max
    if ratio is not None and standing.abandon_ratio(now_ms) > ratio:
        # Both tallies decay alike, so the ratio stays; what ends is that it says anything.
        halvings = log2(standing.claimed.at(now_ms) / ABANDON_CLAIMS_MIN)
        return TooFast("abandon_ratio_max", ceil(halvings * ABANDON_HALF_LIFE_MS) + 1)
    return None


def ended(standing: Standing, *, abandoned: bool, now_ms: int) -> Standing:
    """One open claim less: released, completed, or (`abandoned`) taken by another's raise."""
    after = standing._replace(open_claims=max(0, standing.open_claims - 1))
    return after._replace(abandoned=after.abandoned.more(now_ms)) if abandoned else after
