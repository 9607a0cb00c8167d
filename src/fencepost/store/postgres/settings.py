"""Settings of the store on PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass, field

from fencepost.store.settings import StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings(StoreSettings):
    """Which database the store shares with the others, and how long it waits for what."""

    url: str = field(repr=False)
    """The database, as libpq takes it: postgresql://user:password@host/name."""
    connect_timeout_s: int = 5
    """How long a connection may take to be made."""
    turn_wait_ms: int = 10_000
    """How long a node waits for its turn to write before it says that the store is away."""
    turn_idle_ms: int = 10_000
    """How long the database lets a node that has stopped answering keep its turn."""
    read_timeout_ms: int = 30_000
    """How long one question of a reader may take."""
    turn_requests_max: int = 1_000
    """Requests that are decided in one turn."""
    turn_bytes_max: int = 8 << 20
    """Payload after which a turn takes no more requests."""
    poll_interval_ms: int = 1_000
    """How often the turns of other nodes are looked for when no notification comes."""
    turns_kept_s: int = 3_600
    """How long a turn is remembered, for nodes that were away."""
    leader_silence_ms: int = 5_000
    """How long the node that leads may be silent before the database lets another take over."""
    node_silence_ms: int = 60_000
    """How long a node may be silent before its address is forgotten."""

    @property
    def silence_s_max(self) -> float:
        """How long a database that is waited for may say nothing: longer than it may take."""
        return max(self.read_timeout_ms, self.turn_wait_ms) / 1000 + self.connect_timeout_s
