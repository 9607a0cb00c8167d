"""What comes of asking the engine, beside the outcomes of the rules themselves."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.protocol.subscriptions import Subscription


class Made(NamedTuple):
    """The subscription exists as asked; `created` when it did not before."""

    subscription: Subscription
    created: bool


class ConfigConflict(NamedTuple):
    """The name is taken by a subscription with another configuration."""


class TooMany(NamedTuple):
    """A limit is reached; `limit` is its name, `allowed` its value."""

    limit: str
    allowed: int


class Acked(NamedTuple):
    """The acks are applied; `next_wake` when there is more to do."""

    next_wake: bool


class WakeName(NamedTuple):
    """Which wake a worker speaks about: as its token says, and as its request says."""

    token_generation: int
    generation: int
    wake_id: str


class Counts:
    """What happened since the start, for the metrics."""

    __slots__ = ("acks", "claims", "delivered", "expired", "fenced", "undelivered", "wakes")

    def __init__(self) -> None:
        self.wakes = self.delivered = self.undelivered = 0
        self.claims = self.acks = self.fenced = self.expired = 0
