"""Settings of the embedded store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fencepost.store.settings import StoreSettings


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
    wal_bytes_max: int = 64 << 20
    """Hold writers up and shrink the write-ahead log when it has grown past this."""
