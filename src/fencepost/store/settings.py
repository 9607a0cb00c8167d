"""Settings of a store: those that every store has, those of SQLite, and those of PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fencepost.protocol.groups import GroupLimits
from fencepost.protocol.retention import Policy
from fencepost.protocol.sends import MeshLimits
from fencepost.protocol.shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a store may use, and how long it keeps what."""

    streams_cached_max: int = 32_768
    """Streams whose state is kept in memory; others are loaded when they are used."""
    producers_cached_max: int = 10_000
    """Producers kept in memory for each stream in use."""
    reader_threads: int = 2
    """Threads that read messages from disk."""
    chunk_cache_bytes: int = 32 << 20
    """Memory for chunks of streams that were read more than once: they are answered without a look
    at the disk. 0: none are kept, and readers of the same chunk each read it."""
    scan_threads: int = 2
    """Threads on which one principal may read the global log at once. There is one more, so that
    another principal finds a thread that is free, and the principals take turns on all of them."""
    log_retention_ms: int = 7 * 86_400_000
    """How long the rows of a deleted stream stay readable in the global log."""
    key_retention_s: int = 7 * 86_400
    """How long an Idempotency-Key is remembered; 0 keeps keys for ever.

    That a part was committed is remembered as long, after `staging_ttl_s`, and as long as its data
    is there.
    """
    staging_ttl_s: int = 86_400
    """How long a staged part waits for its commit."""
    staged_parts_max: int = 200_000
    """Parts that may wait for their commit at once."""
    commit_slice_appends: int = 128
    """Appends of one commit that are carried out at once: a larger one is carried out in slices of
    so many, with other requests in between."""
    writers_max: int = 10_000
    """Writers that are kept at once; each of them stays until it is forgotten."""
    writer_history_max: int = 10_000
    """Published batches that the history of a writer holds at least; the newest always stays."""
    retention: tuple[Policy, ...] = ()
    """What streams without a retention of their own may hold: the first pattern that fits counts.
    In a file these are [[retention]] tables."""
    retention_interval_ms: int = 60_000
    """How often all streams are looked at for what their retention lets go."""
    producer_retention_s: int = 0
    """How long a producer that sends nothing is remembered; 0: as long as its stream."""
    kept_producer_globs: tuple[str, ...] = ("task:*", "tool:*", "row:*")
    """Producer ids that are never forgotten: forgetting a claim would reopen a finished task. A
    server adds those that it takes for claims."""
    sweep_interval_ms: int = 1_000
    """How often expired streams are looked for."""
    groups: GroupLimits = field(default_factory=GroupLimits)
    """Bounds on groups, their targets and leases. In a file this is the table [groups]."""
    mesh: MeshLimits = field(default_factory=MeshLimits)
    """Bounds on meshes and sends, and the switch for dedupe. In a file this is the table [mesh]."""
    shares: Shares = field(default_factory=Shares)
    """What one principal may hold. In a file this is the table [shares]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteSettings(StoreSettings):
    """Where the embedded store lives and what it may use."""

    folder: Path
    """The data folder; made when it is not there."""
    synchronous: str = "FULL"
    """SQLite's synchronous level. Anything but FULL breaks the promise that an answer is durable;
    the fault tests set it to see that they notice."""
    vfs: str | None = None
    """The SQLite VFS to use; the fault tests bring one that loses what was not synced."""
    loop_commit_us_max: int = 1_000
    """A disk that commits faster than this is waited for on the event loop, which saves handing the
    work to a thread and back; after a slower commit the thread takes over. 0: always the thread."""
    checkpoint_wal_bytes: int = 8 << 20
    """Fold the write-ahead log into the database when it has grown past this."""
    key_index_keys: int = 4_096
    """Keys that are put into their index at once, when so many have come; writers wait meanwhile,
    for some milliseconds."""
    rows_behind_max: int = 2_048
    """Rows of the log after which the rows of their streams and producers are written, a piece with
    each commit. Until then they are known from the log."""
    wal_bytes_max: int = 64 << 20
    """Hold writers up and shrink the write-ahead log when it has grown past this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings(StoreSettings):
    """Which database the store shares with the others, and how long it waits for what."""

    url: str = field(repr=False)
    """The database, as libpq takes it: postgresql://user:password@host/name."""
    connect_timeout_s: int = 5
    """How long a connection may take to be made."""
    start_wait_ms: int = 60_000
    """How long a start waits for a database that is shutting down or starting up; 0: not at all."""
    turn_wait_ms: int = 10_000
    """How long a node waits for its turn to write before it says that the store is away."""
    turn_idle_ms: int = 10_000
    """How long the database lets a node that has stopped answering keep its turn."""
    read_timeout_ms: int = 30_000
    """How long one question of a reader may take."""
    lookup_wait_ms: int = 3_000
    """How long one question of a decision may take, for which the server stands still; beyond it
    the requests of the turn are told that the store is away."""
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
