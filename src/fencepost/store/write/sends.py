"""Dedupe rows and meshes, as they stand after all decisions made so far.

`Sends` finds the row of a send. Rows lie on disk as keys do, in the order of their use, and the
filter, the memory of what is not indexed yet and the index are those of keys (`keys.py`).

`Meshes` finds a mesh by its name, and the members of a topic. Both are few and change rarely, so
what was asked for once stays in memory. What open groups of the commit change lies on top; on a
shared store a change makes the other nodes forget everything (`postgres/cache.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from fencepost.protocol.meshes import Mesh, MeshSettings
from fencepost.protocol.offsets import Offset
from fencepost.protocol.sends import DedupeRow, broker_message_id
from fencepost.store.sql import Connection, Row
from fencepost.store.write.keys import KeyFilter, KeyPlace, KeyTable

LIVE, ENDING, GONE = range(3)
"""States of a mesh. The name of one that is gone is free; its dedupe rows are still to go."""
MESHES_CACHED_MAX = 10_000
"""Names of meshes that are kept in memory."""
MEMBERS_CACHED_MAX = 1_000_000
"""Members of topics that are kept in memory, all topics together."""

SENDS = KeyTable(
    "count_sends",
    "unindexed_sends",
    "find_send_by_id",
    "find_unindexed_send",
    "send_places_after",
    "last_send_to_index",
    "index_sends",
    "mark_sends_indexed",
)

_SETTINGS = msgspec.json.Decoder(MeshSettings)

Topic = tuple[int, str]
"""A topic by its mesh and its name."""


class SendChanges(Protocol):
    """An open group of the commit, as far as this module writes to it."""

    sends: dict[KeyPlace, Row]
    numbered_sends: list[tuple[Collection[KeyPlace], int]]
    meshes: dict[str, StoredMesh | None]
    topics: dict[Topic, tuple[str, ...]]
    statements: list[tuple[str, tuple[object, ...]]]


class StoredMesh(msgspec.Struct, frozen=True, gc=False):
    """A mesh and its state."""

    mesh: Mesh
    ending: bool = False


class SendLoader(Protocol):
    """Finds rows as they are on disk."""

    @property
    def connection(self) -> Connection: ...

    def send(self, place: KeyPlace) -> Row | None: ...


class Sends:
    """What a ledger knows of dedupe rows. `pending` are the groups that are not on disk yet."""

    def __init__(self, loader: SendLoader, pending: Sequence[SendChanges]) -> None:
        self._loader = loader
        self._pending = pending
        self.filter: KeyFilter | None = None
        """Tells most new ids from used ones without a look at the disk, where there is one."""

    def use_filter(self) -> KeyFilter:
        """Have a filter, which is to learn the rows on disk."""
        self.filter = KeyFilter(SENDS)
        self.reset()
        return self.filter

    def reset(self) -> None:
        """Load again which rows are not in the index: after a failed commit that is not known."""
        if self.filter is not None:
            self.filter.load(self._loader.connection.fetch(SENDS.unindexed))

    def committed(self, group: SendChanges) -> None:
        """The rows of a group are on disk."""
        if self.filter is not None:
            for places, last_id in group.numbered_sends:
                self.filter.recent.add(places, last_id)

    def find(self, mesh: Mesh, sender: str, client_message_id: str) -> DedupeRow | None:
        """The row of a send."""
        place = (mesh.id, sender, client_message_id)
        if self.filter is not None and self.filter.is_new(place):
            return None
        for group in self._pending:
            kept = group.sends.get(place)
            if kept is not None:
                return row_of(mesh.name, sender, client_message_id, kept[3:])
        rows: list[Row] = []
        if self.filter is not None:
            rows = self.filter.recent.find(self._loader.connection, place)
        found = rows[0] if rows else self._loader.send(place)
        return None if found is None else row_of(mesh.name, sender, client_message_id, found)

    def keep(self, group: SendChanges, mesh: Mesh, row: DedupeRow) -> None:
        """Remember a send, in the transaction that stores its message."""
        place = (mesh.id, row.sender, row.client_message_id)
        group.sends[place] = (
            *place,
            row.fingerprint,
            row.kind,
            row.ref,
            row.stream_id,
            row.offset.messages,
            row.offset.bytes,
            row.first_seen_ms,
            row.expires_ms,
        )
        if self.filter is not None:
            self.filter.add(place)

    def kept(self) -> list[KeyPlace]:
        """The sends whose rows are not on disk yet."""
        return [place for group in self._pending for place in group.sends]


def row_of(mesh: str, sender: str, client_message_id: str, columns: Row) -> DedupeRow:
    """A dedupe row from its columns behind the id."""
    fingerprint, kind, ref, stream_id, messages, size, first_seen_ms, expires_ms = columns
    offset = Offset(messages, size)
    return DedupeRow(
        mesh,
        sender,
        client_message_id,
        broker_message_id(stream_id, offset),
        bytes(fingerprint),
        kind,
        ref,
        stream_id,
        offset,
        first_seen_ms,
        expires_ms,
    )


class Meshes:
    """What a ledger knows of meshes and of the members of topics."""

    def __init__(self, connection: Connection, pending: Sequence[SendChanges]) -> None:
        self._connection = connection
        self._pending = pending
        self._meshes: dict[str, StoredMesh | None] = {}
        self._topics: dict[Topic, tuple[str, ...]] = {}
        self._members_count = 0

    def reset(self) -> None:
        """Forget what is in memory."""
        self._meshes.clear()
        self._topics.clear()
        self._members_count = 0

    def committed(self, group: SendChanges) -> None:
        """What a group changed is on disk."""
        self._meshes.update(group.meshes)
        for topic, members in group.topics.items():
            self._take_topic(topic, members)

    # Finding

    def find(self, name: str) -> Mesh | None:
        """A mesh that is not being deleted."""
        stored = self.stored(name)
        return None if stored is None or stored.ending else stored.mesh

    def stored(self, name: str) -> StoredMesh | None:
        """A mesh, also one that is being deleted."""
        for group in reversed(self._pending):
            if name in group.meshes:
                return group.meshes[name]
        if name not in self._meshes:
            self.take_meshes([name], self._connection.fetch("find_mesh", (name,)))
        return self._meshes[name]

    def members(self, topic: Topic) -> tuple[str, ...]:
        """The members of a topic, in the order of their names."""
        for group in reversed(self._pending):
            if topic in group.topics:
                return group.topics[topic]
        if topic not in self._topics:
            rows = self._connection.fetch("members_of_topic", topic)
            self._take_topic(topic, tuple(member for (member,) in rows))
        return self._topics[topic]

    def topics_of(self, mesh_id: int, member: str) -> list[str]:
        """The topics that a member listens to."""
        rows = self._connection.fetch("topics_of_member", (mesh_id, member))
        names = {topic for (topic,) in rows}
        for group in self._pending:
            names.update(topic for mesh, topic in group.topics if mesh == mesh_id)
        return sorted(name for name in names if member in self.members((mesh_id, name)))

    def count(self) -> int:
        """How many meshes there are, those that are being deleted included."""
        [(count,)] = self._connection.fetch("count_meshes")
        assert isinstance(count, int)
        return count + sum(len(group.meshes) for group in self._pending)

    # What a turn loads in bulk

    def unknown_meshes(self, names: Iterable[str]) -> list[str]:
        """Those names that nothing is known of."""
        return [name for name in names if name not in self._meshes]

    def unknown_topics(self, topics: Iterable[Topic]) -> list[Topic]:
        """Those topics whose members are not known."""
        return [topic for topic in topics if topic not in self._topics]

    def take_meshes(self, asked: Sequence[str], rows: Iterable[Row]) -> None:
        """Keep meshes as they are on disk; those that were asked for and have no row are none."""
        if len(self._meshes) + len(asked) > MESHES_CACHED_MAX:
            self._meshes.clear()
        self._meshes.update(dict.fromkeys(asked))
        for row in rows:
            self._meshes[row[1]] = StoredMesh(mesh_from_row(row), row[2] == ENDING)

    def take_topics(self, asked: Sequence[Topic], rows: Iterable[Row]) -> None:
        """Keep the members of topics as they are on disk: rows of mesh, topic and member."""
        found: dict[Topic, list[str]] = {topic: [] for topic in asked}
        for mesh_id, topic, member in rows:
            found[mesh_id, topic].append(member)
        for place, members in found.items():
            self._take_topic(place, tuple(members))

    def _take_topic(self, topic: Topic, members: tuple[str, ...]) -> None:
        self._members_count += 1 + len(members)
        if self._members_count > MEMBERS_CACHED_MAX:
            self._topics.clear()
            self._members_count = 1 + len(members)
        self._topics[topic] = members

    # Changing

    def save(self, group: SendChanges, mesh: Mesh, *, ending: bool = False) -> None:
        """A mesh is new, or its deletion begins."""
        group.meshes[mesh.name] = StoredMesh(mesh, ending)
        self._save(group, mesh, ENDING if ending else LIVE)

    @staticmethod
    def _save(group: SendChanges, mesh: Mesh, state: int) -> None:
        settings = msgspec.json.encode(mesh.settings).decode()
        values = (mesh.id, mesh.name, state, settings, mesh.created_ms)
        group.statements.append(("save_mesh", values))

    def drop(self, group: SendChanges, mesh: Mesh) -> None:
        """A mesh is gone, and its name is free."""
        group.meshes[mesh.name] = None
        self._save(group, mesh, GONE)

    def join(self, group: SendChanges, topic: Topic, member: str, now_ms: int) -> None:
        """A member listens to a topic."""
        group.topics[topic] = tuple(sorted({*self.members(topic), member}))
        group.statements.append(("save_topic_member", (*topic, member, now_ms)))

    def leave(self, group: SendChanges, topic: Topic, member: str) -> None:
        """A member listens to a topic no more."""
        group.topics[topic] = tuple(name for name in self.members(topic) if name != member)
        group.statements.append(("drop_topic_member", (*topic, member)))

    def drop_topic(self, group: SendChanges, topic: Topic) -> None:
        """A topic is gone."""
        group.topics[topic] = ()
        group.statements.append(("drop_topic_members", topic))


def mesh_from_row(row: Row) -> Mesh:
    """A mesh from its row on disk."""
    mesh_id, name, _, settings, created_ms = row
    return Mesh(mesh_id, name, _SETTINGS.decode(settings), created_ms)
