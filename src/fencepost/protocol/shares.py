"""Shares: how much of each thing one principal may hold at once.

A share stands below the limit that all principals have together (`writers_max`,
`subscriptions_max`, ...), so that one of them cannot take all there is. What a principal holds is
counted by the database or in memory (`store/write/usage.py`, `server/handlers/waiting.py`); here is
only the rule. A retry of a stored request takes nothing, and so it is never refused. Without
principals there are no shares.

A new kind of thing gets a setting here named `KIND_per_principal_max`, and, if it is kept on disk,
a trigger that counts its rows under KIND (`store/sqlite/migrations/0014_pre_usage.sql`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from fencepost.protocol.appends import Append, Appended, AppendOutcome
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.streams import Producer

STREAMS = "streams"
PRODUCERS = "producers"
KEYS = "keys"
PARTS = "parts"
STAGED_BYTES = "staged_bytes"
WRITERS = "writers"
SUBSCRIPTIONS = "subscriptions"
LINKS = "links"
GROUPS = "groups"
TARGETS = "targets"
PARKED_EVENTS = "parked_events"
TOLD_EVENTS = "told_events"
MESHES = "meshes"
WAITERS = "waiters"
CONNECTIONS = "connections"

Amounts = Mapping[str, int]
"""So many of each thing, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one principal may hold at once; 0 is no limit."""

    streams_per_principal_max: int = 1_000_000
    """Streams that it made and that were not deleted since."""
    producers_per_principal_max: int = 10_000_000
    """Producer ids that it sent with last, counted for each stream. Those of a deleted stream count
    until its rows are purged."""
    keys_per_principal_max: int = 10_000_000
    """Idempotency-Keys that are remembered."""
    parts_per_principal_max: int = 100_000
    """Staged parts that wait for their commit."""
    staged_bytes_per_principal_max: int = 64 << 30
    """Bytes of the staged parts that wait for their commit."""
    writers_per_principal_max: int = 5_000
    """Writers."""
    subscriptions_per_principal_max: int = 5_000
    """Subscriptions."""
    links_per_principal_max: int = 5_000_000
    """Streams that its subscriptions follow, counted for each subscription. Past it no subscription
    of it follows a new stream that its pattern takes."""
    groups_per_principal_max: int = 500
    """Groups that it made, without those of meshes."""
    targets_per_principal_max: int = 5_000_000
    """Targets of its groups."""
    parked_events_per_principal_max: int = 200_000
    """Events that its groups have set aside."""
    told_events_per_principal_max: int = 5_000_000
    """Events that computed targets of its groups were told of and have not got past."""
    meshes_per_principal_max: int = 500
    """Meshes that it made."""
    waiters_per_principal_max: int = 10_000
    """Long-polls, SSE readers and claims waiting at once, at one server; beyond it 503."""
    connections_per_principal_max: int = 5_000
    """Connections that it uses at once, at one server; beyond it 503."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} must not be negative")

    def share_of(self, resource: str) -> int:
        """How much of something a principal may hold; 0 is no limit."""
        value: int = getattr(self, limit_of(resource))
        return value


def limit_of(resource: str) -> str:
    """The name of the setting."""
    return f"{resource}_per_principal_max"


def decide_shares(shares: Shares, used: Amounts, more: Amounts) -> LimitExceeded | None:
    """Whether a principal that holds `used` may take `more`; the share that it would go past."""
    for resource, amount in more.items():
        share = shares.share_of(resource)
        if amount > 0 and share and used.get(resource, 0) + amount > share:
            return LimitExceeded(limit_of(resource), share)
    return None


def append_takes(
    request: Append, before: Producer | None, outcome: AppendOutcome
) -> dict[str, int]:
    """What an accepted append takes of its principal's shares, beside the stream it may make."""
    more: dict[str, int] = {}
    if not isinstance(outcome, Appended):
        return more
    producer, conditions = outcome.producer, request.conditions
    if producer is not None and (before is None or before.principal != producer.principal):
        more[PRODUCERS] = 1
    if conditions is not None and conditions.key is not None:
        more[KEYS] = 1
    return more
