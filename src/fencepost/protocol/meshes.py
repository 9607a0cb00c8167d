"""Meshes: the names of members, topics and queues, the streams they stand for, the settings.

A topic, an inbox and a queue are ordinary JSON streams below the reserved segment `__mesh`. They
are read, kept and granted as any other stream; only sends write to them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from fencepost.protocol.fingerprints import NAME, Kind, Priority
from fencepost.protocol.strict_json import BadJson, parse

ROOT = "__mesh"
"""The first segment of every stream that belongs to a mesh."""
BODIES = "body"
"""The folder of a mesh with the streams of staged bodies, one for each destination."""
RETENTION_DAYS_MIN = 7
RETENTION_DAYS_DEFAULT = 365
RETENTION_DAYS_MAX = 36_500
DAY_MS = 86_400_000

DedupeMode = Literal["retention_scoped", "permanent"]
Policy = Literal["prefer_newest", "prefer_oldest", "allow_concurrent"]
DEDUPE_MODES: tuple[DedupeMode, ...] = ("retention_scoped", "permanent")
POLICIES: tuple[Policy, ...] = ("prefer_newest", "prefer_oldest", "allow_concurrent")

LEASE_PRIORITIES: dict[Priority, int] = {"now": 1, "next": 0, "low": -1}
"""The priority of a queue's message as the priority of its lease: the higher goes first."""


class MeshSettings(msgspec.Struct, frozen=True, gc=False):
    """What the maker of a mesh decides once."""

    dedupe_mode: DedupeMode = "retention_scoped"
    dedupe_retention_days: int = RETENTION_DAYS_DEFAULT
    default_policy: Policy = "prefer_newest"


class Mesh(msgspec.Struct, frozen=True, gc=False):
    """A mesh as the store keeps it. `id` is never used again, also when the name is."""

    id: int
    name: str
    settings: MeshSettings
    created_ms: int

    def expires_ms(self, now_ms: int) -> int | None:
        """When a dedupe row that is written now may be swept; None: never."""
        if self.settings.dedupe_mode == "permanent":
            return None
        return now_ms + self.settings.dedupe_retention_days * DAY_MS


class Member(NamedTuple):
    """Someone with an inbox. `group` is the group through which the inbox is consumed."""

    mesh: str
    name: str
    created_ms: int

    @property
    def path(self) -> str:
        return inbox_path(self.mesh, self.name)

    @property
    def group(self) -> str:
        return f"mesh:{self.mesh}:inbox:{self.name}"


class Topic(NamedTuple):
    """A name to which many listen: each member of the topic gets a copy into its inbox."""

    mesh: str
    name: str
    created_ms: int

    @property
    def path(self) -> str:
        return topic_path(self.mesh, self.name)


class Queue(NamedTuple):
    """A name whose messages each go to one worker, through `group`."""

    mesh: str
    name: str
    created_ms: int

    @property
    def path(self) -> str:
        return queue_path(self.mesh, self.name)

    @property
    def group(self) -> str:
        return f"mesh:{self.mesh}:queue:{self.name}"


class BadMesh(NamedTuple):
    """The name or the settings are refused; `field` is the one that is wrong."""

    field: str
    detail: str


class MeshCreated(NamedTuple):
    """There was no such mesh; now there is."""

    mesh: Mesh


class MeshSame(NamedTuple):
    """The mesh exists with the same settings."""

    mesh: Mesh


class MeshDiffers(NamedTuple):
    """The mesh exists with other settings."""

    mesh: Mesh


def decide_mesh(
    existing: Mesh | None, name: str, settings: MeshSettings, *, mesh_id: int, now_ms: int
) -> MeshCreated | MeshSame | MeshDiffers:
    """What a PUT of a mesh does. `mesh_id` is the one that a new mesh gets."""
    if existing is None:
        return MeshCreated(Mesh(mesh_id, name, settings, now_ms))
    return MeshSame(existing) if existing.settings == settings else MeshDiffers(existing)


def parse_settings(data: bytes) -> MeshSettings | BadMesh:
    """The settings in the body of a PUT; an empty body stands for the defaults."""
    if not data:
        return MeshSettings()
    value = parse(data)
    if isinstance(value, BadJson):
        return BadMesh("", value.detail)
    try:
        settings = msgspec.convert(value, _SentSettings)
    except msgspec.ValidationError as error:
        return BadMesh("", f"the settings of a mesh: {error}")
    days = settings.dedupe_retention_days
    if not RETENTION_DAYS_MIN <= days <= RETENTION_DAYS_MAX:
        return BadMesh(
            "dedupe_retention_days",
            f"dedupe_retention_days is {RETENTION_DAYS_MIN} to {RETENTION_DAYS_MAX}, not {days}",
        )
    return MeshSettings(settings.dedupe_mode, days, settings.default_policy)


class _SentSettings(MeshSettings, frozen=True, gc=False, forbid_unknown_fields=True):
    pass


def refuse_name(what: str, name: str) -> BadMesh | None:
    """Why a mesh, member, topic or queue cannot have this name; None when it can."""
    if NAME.fullmatch(name) is not None:
        return None
    return BadMesh(
        what, f"the name of a {what} has 1 to 64 letters, digits, dots, hyphens or underscores"
    )


def is_managed(path: str) -> bool:
    """Whether only sends may write to this path, whether there is a stream or not."""
    return path == ROOT or path.startswith(f"{ROOT}/")


def names_root(mesh: str) -> str:
    """What the paths of all streams of a mesh begin with."""
    return f"{ROOT}/{mesh}/"


def topic_path(mesh: str, topic: str) -> str:
    """The stream that holds the messages of a topic."""
    return f"{ROOT}/{mesh}/topic/{topic}"


def inbox_path(mesh: str, member: str) -> str:
    """The stream that holds what a member is to read."""
    return f"{ROOT}/{mesh}/inbox/{member}"


def queue_path(mesh: str, queue: str) -> str:
    """The stream that holds the messages of a queue."""
    return f"{ROOT}/{mesh}/queue/{queue}"


def destination_path(mesh: str, kind: Kind, ref: str) -> str:
    """The stream to which a send with this kind and ref goes."""
    match kind:
        case "topic":
            return topic_path(mesh, ref)
        case "dm":
            return inbox_path(mesh, ref)
        case "queue":
            return queue_path(mesh, ref)


def bodies_path(mesh: str, kind: Kind, ref: str) -> str:
    """The byte stream that holds the staged bodies of the messages of a destination."""
    root = names_root(mesh)
    return f"{root}{BODIES}/{destination_path(mesh, kind, ref).removeprefix(root)}"
