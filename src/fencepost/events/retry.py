"""How often a reaction is tried again, how long it waits before, and what happens after the last.

`Retry(3, "exponential")` is four attempts: the first and three more. The rules are pure; the waits
are kept by the group, as the time when the target may be claimed again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fencepost.client.errors import require
from fencepost.client.group_worker import text_of
from fencepost.client.groups import EventFailure
from fencepost.events.errors import EventTooNewError, NonRetryableError, UnknownEventError
from fencepost.protocol.timing import Backoff, BackoffKind, delay_ms

NEWER_CODE = (EventTooNewError, UnknownEventError)
"""A worker of an old program is not to block what newer workers can handle: a deploy may roll."""
NEWER_CODE_BACKOFF = Backoff("exponential", base_ms=1_000, cap_ms=60_000, jitter=0.2)
OnExhausted = Literal["block", "park", "retry"]


class Retry(msgspec.Struct, frozen=True):
    """How a reaction that failed is tried again.

    `on_exhausted` says what happens when the retries are used up: `block` keeps the order and waits
    for an operator, `park` sets the event aside and goes on behind it, `retry` goes on trying with
    the longest wait.
    """

    retries: int = 3
    kind: BackoffKind = "exponential"
    base_ms: int = 200
    cap_ms: int = 60_000
    jitter: float = 0.2
    on_exhausted: OnExhausted = "block"

    def __post_init__(self) -> None:
        numbers = (self.retries, self.base_ms, self.cap_ms)
        require(
            all(isinstance(number, int) for number in numbers),
            "retries, base_ms and cap_ms are whole numbers",
        )
        require(self.retries >= 0, "the number of retries is not negative")
        require(
            self.kind in ("fixed", "linear", "exponential"), "kind is fixed, linear, exponential"
        )
        require(0 <= self.base_ms <= self.cap_ms, "base_ms is from 0 to cap_ms")
        require(0 <= self.jitter <= 1, "jitter is from 0 to 1")
        require(self.on_exhausted in ("block", "park", "retry"), "on_exhausted: block, park, retry")

    def failure(self, position: int, error: Exception, *, retry: int, dice: float) -> EventFailure:
        """What to report of an event that failed, after so many retries before this attempt."""
        text = text_of(error)
        if isinstance(error, NEWER_CODE):
            wait_ms = delay_ms(NEWER_CODE_BACKOFF, retry + 1, dice)
            return EventFailure(position=position, error=text, delay_ms=wait_ms)
        spent = retry >= self.retries
        if isinstance(error, NonRetryableError) or (spent and self.on_exhausted != "retry"):
            park = self.on_exhausted == "park"
            return EventFailure(position=position, error=text, permanent=not park, park=park)
        backoff = Backoff(self.kind, self.base_ms, self.cap_ms, self.jitter)
        return EventFailure(
            position=position,
            error=text,
            delay_ms=self.cap_ms if spent else delay_ms(backoff, retry + 1, dice),
        )
