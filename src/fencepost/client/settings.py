"""How a client behaves: timeouts, retries, and what every request carries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from fencepost.client.errors import FencepostError, require
from fencepost.client.http import Address, check_headers
from fencepost.clock import Clock, SystemClock

Value = str | Callable[[], str] | Callable[[], Awaitable[str]]
"""A header or parameter: a text, or something that gives one for each request."""

JSON = "application/json"
DELAY_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that a wait for the outside may take."""

    connect: float = 5.0
    answer: float = 30.0
    """From a request to its answer, and for each wait for more of it; one that keeps coming may
    take a second more for every KiB of it."""
    live: float = 90.0
    """The same for reads that wait for news: longer than any server lets them wait."""

    def __post_init__(self) -> None:
        require(min(self.connect, self.answer, self.live) > 0, "timeouts are greater than zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and for how long a request that may be repeated is repeated."""

    attempts_max: int = 40
    """Enough for delays to fill `seconds_max`, and a bound for answers that ask for the next."""
    seconds_max: float = 60.0
    """After this much time no further attempt begins."""
    delay_seconds_min: float = DELAY_SECONDS
    """The bound of the first delay; by default not more than `delay_seconds_max`."""
    delay_seconds_max: float = 5.0
    """The bound of every delay, which doubles up to it."""

    def __post_init__(self) -> None:
        require(self.attempts_max >= 1, "attempts_max is at least 1: the first attempt counts")
        require(self.seconds_max >= 0, "seconds_max is not negative")
        if self.delay_seconds_min == DELAY_SECONDS > self.delay_seconds_max >= 0:
            object.__setattr__(self, "delay_seconds_min", self.delay_seconds_max)
        require(
            0 <= self.delay_seconds_min <= self.delay_seconds_max,
            "delay_seconds_min is not negative, and delay_seconds_max not less than it",
        )

    def delay(self, attempt: int, dice: float, retry_after: float | None = None) -> float:
        """Seconds before the next attempt, after `attempt` (from 0) has failed.

        Full jitter: anything up to a bound that doubles, so that clients which failed together do
        not come back together. Retry-After is a lower bound.
        """
        bound = min(self.delay_seconds_max, self.delay_seconds_min * 2.0 ** min(attempt, 30))
        return max(bound * (0.1 + 0.9 * dice), retry_after or 0.0)


NO_RETRIES = Retries(attempts_max=1)
WARNED_ATTEMPT = 3
"""The failure in a row that is logged as a warning: a program that waits says what for, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryWith:
    """The answer of an `on_error` function: send the request again, with these headers added."""

    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)


Decided = RetryWith | bool | None
OnFailure = Callable[[FencepostError], Decided] | Callable[[FencepostError], Awaitable[Decided]]
"""Told of a failed attempt: a `RetryWith` sends it again, False gives up, None does as usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Bounds and timing of a producer."""

    batch_bytes_max: int = 1 << 20
    linger: float = 0.0
    """Seconds a batch may wait for more messages."""
    max_in_flight: int = 5
    pending_bytes_max: int = 16 << 20
    """Bytes that may wait to be acknowledged before `append` waits."""
    delivery_seconds_max: float = 120.0
    """When nothing was acknowledged for this long the producer gives up."""
    answer_seconds_max: float = 30.0
    """A connection that answers nothing for this long is given up."""
    retries: Retries = field(default_factory=Retries)
    renewable: bool = False
    """Whether a 401 may pass when the headers are asked for again."""

    def __post_init__(self) -> None:
        require(self.max_in_flight >= 1, "max_in_flight is at least 1")
        require(self.batch_bytes_max >= 1, "batch_bytes_max is at least 1")
        require(self.pending_bytes_max >= 1, "pending_bytes_max is at least 1")
        require(self.linger >= 0, "linger is not negative")
        require(self.delivery_seconds_max > 0, "delivery_seconds_max is greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Everything a client is made of that does no I/O."""

    address: Address
    token: Value | None = None
    headers: Mapping[str, Value] = field(default_factory=dict)
    params: Mapping[str, Value] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    on_error: OnFailure | None = None
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        for name, value in (("token", self.token), *self.headers.items(), *self.params.items()):
            fits = value is None or isinstance(value, str) or callable(value)
            require(fits, f"{name} is a text or a function that gives one, not {value!r}")
        doubled = isinstance(self.token, str) and self.token.lower().startswith("bearer ")
        require(not doubled, "token is given without the word Bearer, which is added")
        check_headers(
            {name: value if isinstance(value, str) else "" for name, value in self.headers.items()}
        )

    def carrying(
        self, headers: Mapping[str, Value] | None, params: Mapping[str, Value] | None
    ) -> ClientSettings:
        """These settings with what one call carries too, which comes before what all carry."""
        if not headers and not params:
            return self
        own = {name.lower() for name in headers or {}}
        kept = {name: value for name, value in self.headers.items() if name.lower() not in own}
        return replace(
            self, headers={**kept, **(headers or {})}, params={**self.params, **(params or {})}
        )

    @property
    def changes(self) -> bool:
        """Whether what a request carries may differ from the one before."""
        values = [self.token, *self.headers.values(), *self.params.values()]
        return any(callable(value) for value in values)
