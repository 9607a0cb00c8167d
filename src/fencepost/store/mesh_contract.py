"""What a store does for meshes: requests that change them, sends, and reading what there is.

A topic, an inbox and a queue are streams below `__mesh`, so a store keeps no second list of them:
the stream exists exactly as long as its topic, member or queue does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fencepost.protocol.commits import Part, PartRefusal
from fencepost.protocol.envelopes import Send
from fencepost.protocol.fingerprints import Kind
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.meshes import (
    Mesh,
    MeshCreated,
    MeshDiffers,
    MeshSame,
    MeshSettings,
    destination_path,
)
from fencepost.protocol.offsets import Offset
from fencepost.protocol.sends import DedupeRow, MeshNotFound, SendTooLarge


class MakeMesh(NamedTuple):
    """Make a mesh, or find the one that is there."""

    mesh: str
    settings: MeshSettings
    owner: str = ""
    """The principal that asks for it; empty without authorization."""


class EndMesh(NamedTuple):
    """Begin to delete a mesh: from here on no request finds it."""

    mesh: str


class DropMesh(NamedTuple):
    """Delete a piece of a mesh whose deletion has begun: these streams; with the last, the mesh."""

    mesh: str
    paths: Sequence[str]
    is_last: bool


class MakeName(NamedTuple):
    """Make a topic, a member (`dm`) or a queue."""

    mesh: str
    kind: Kind
    name: str
    owner: str = ""
    """The principal that asks for it; empty without authorization."""

    @property
    def path(self) -> str:
        return destination_path(self.mesh, self.kind, self.name)


class DropName(NamedTuple):
    """Delete a topic, a member or a queue with its stream."""

    mesh: str
    kind: Kind
    name: str

    @property
    def path(self) -> str:
        return destination_path(self.mesh, self.kind, self.name)


class JoinTopic(NamedTuple):
    """Let a member get what is sent to a topic, or let it get that no more."""

    mesh: str
    topic: str
    member: str
    leaves: bool = False


class KeepRow(NamedTuple):
    """Write a dedupe row that is missing, from what its message says."""

    row: DedupeRow


class SendRequest(NamedTuple):
    """A send to decide."""

    mesh: str
    send: Send


MeshRequest = MakeMesh | EndMesh | DropMesh | MakeName | DropName | JoinTopic | KeepRow


class NameMade(NamedTuple):
    """The topic, member or queue exists now; `fresh` when this request made it."""

    created_ms: int
    fresh: bool


class NameHeld(NamedTuple):
    """A stream of that name was deleted, and forks of it still read its messages."""


class NameMissing(NamedTuple):
    """The mesh has no such topic, member or queue."""

    kind: Kind
    name: str


class MeshEnding(NamedTuple):
    """A mesh of this name is being deleted."""


class Done(NamedTuple):
    """It is so now. `changed`: it was not so before."""

    changed: bool = True


MeshOutcome = (
    MeshCreated
    | MeshSame
    | MeshDiffers
    | MeshEnding
    | MeshNotFound
    | NameMade
    | NameHeld
    | NameMissing
    | LimitExceeded
    | Done
)


class NameRow(NamedTuple):
    """A topic, member or queue in a list."""

    name: str
    created_ms: int
    stream_id: int
    tail: Offset
    first: Offset


class Finding(NamedTuple):
    """Something that the orphan check found."""

    code: str
    detail: str
    row: DedupeRow | None = None
    """The dedupe row that a rebuild would write."""


class CheckPage(NamedTuple):
    """A piece of the orphan check: how much was looked at, what was found, and where to go on."""

    rows: int
    messages: int
    findings: Sequence[Finding]
    next: str | None


class StagedBody(NamedTuple):
    """What lies in staged parts: its length, its hash, and the digests of the chunks."""

    size: int
    sha256: bytes
    chunks: tuple[bytes, ...]


class MeshReads(Protocol):
    """Meshes, their names and their dedupe rows, as committed."""

    async def staged_body(
        self, parts: Sequence[Part], bytes_max: int
    ) -> StagedBody | SendTooLarge | PartRefusal:
        """Read the parts of a body, also of one that was sent before; nothing beyond `bytes_max`.

        More may be uploaded to the parts before the send is decided: it is held against `chunks`.
        """
        ...

    async def find(self, name: str) -> Mesh | None:
        """A mesh that is not being deleted."""
        ...

    async def meshes(self, after: str, limit: int) -> list[Mesh]:
        """A page of meshes, by their names."""
        ...

    async def name(self, mesh: str, kind: Kind, name: str) -> NameRow | None:
        """A topic, member or queue."""
        ...

    async def names(self, mesh: str, kind: Kind, after: str, limit: int) -> list[NameRow]:
        """A page of topics, members or queues, by their names."""
        ...

    async def topic_members(
        self, mesh: Mesh, topic: str, after: str, limit: int
    ) -> list[tuple[str, int]]:
        """A page of the members of a topic, each with the time at which it joined."""
        ...

    async def joined_ms(self, mesh: Mesh, topic: str, member: str) -> int | None:
        """When a member joined a topic; None when it is not in the topic."""
        ...

    async def rows(self, mesh: Mesh, after: tuple[str, str], limit: int) -> list[DedupeRow]:
        """A page of dedupe rows, by sender and id."""
        ...

    async def check(self, mesh: Mesh, after: str, limit: int, now_ms: int) -> CheckPage | None:
        """A piece of the orphan check, behind what an earlier piece said; None: it is no place."""
        ...

    async def paths(self, mesh: str, limit: int) -> list[str]:
        """Some streams of a mesh, for its deletion."""
        ...
