"""Every setting and limit of the daemon, by name, with its unit and its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

FOLDER = "outbox"
SOCKET = "outbox.sock"
TOKEN = "token"
DAY_MS = 86_400_000

Answers = Literal["reply", "topic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """A command that runs for each event of a kind."""

    name: str
    on: tuple[str, ...]
    """Kinds of events: message, dead, connected, disconnected, requeued, dropped."""
    command: tuple[str, ...]
    """The program and its arguments; no shell is involved."""
    mesh: str = ""
    """Only events of this mesh; empty is every mesh."""
    may: tuple[Answers, ...] = ()
    """To whom an answer on stdout may go: the sender of the message, or its topic."""
    timeout_ms: int = 30_000
    """After this long the process group is killed."""
    attempts_max: int = 3
    """How often a run is tried that does not end with exit code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """What one daemon is, and what it may take."""

    folder: Path
    """Where outbox.db, inbox.db, the lock, the socket and the token lie."""
    meshes: tuple[str, ...] = ()
    """The meshes that it serves."""
    member: str = ""
    """The member whose inbox it keeps; without one there is no inbox."""
    socket: Path | None = None
    """The unix socket; else `outbox.sock` in the folder."""
    port: int = 0
    """A port on 127.0.0.1, with the token file; 0 opens none."""
    public_health: bool = False
    """Whether health, metrics and version answer on that port without the token."""
    max_age_hours_override: int = 0
    """After how many hours a row dies; 0 follows from what the mesh remembers."""
    body_bytes_max: int = 1024 * 1024
    """The largest send."""
    answer_bytes_max: int = 10 * 1024 * 1024
    """The largest page of a list."""
    in_flight_max: int = 64
    """Requests of one token, or of the socket, that wait for their answer."""
    requests_per_s: int = 100
    """Requests a second of one token."""
    event_streams_max: int = 32
    """Readers of `/v1/events`."""
    disk_percent_max: float = 95.0
    """How full the disk may be for a send to be accepted."""
    deliveries_max: int = 64
    """Sends under way to the servers."""
    destination_deliveries_max: int = 3
    """Sends under way to one destination, each of another priority."""
    inbox_days: int = 30
    """How long messages and events are kept."""
    done_days: int = 30
    """How long delivered rows are kept. Dead and aborted rows are kept for ever."""
    token_grace_ms: int = 60_000
    """How long a token that was replaced is still taken."""
    drain_ms: int = 5_000
    """How long a stop waits for requests under way."""
    require: Mapping[str, object] = field(default_factory=dict)
    """Features beyond `client_message_id_dedupe` that a mesh must have."""
    optional: Mapping[str, object] = field(default_factory=dict)
    """Features that are asked for and not needed."""
    hooks: tuple[HookSettings, ...] = ()
    vfs: str | None = None
    """A file system of SQLite, for tests."""

    @property
    def socket_path(self) -> Path:
        return self.socket or self.folder / SOCKET
