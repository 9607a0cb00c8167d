"""Meshes, the members of topics, and dedupe rows: what must hold in their tables.

A topic, an inbox and a queue are streams, and queues and inboxes have groups, so the rows of meshes
are held against these. Of a mesh that is being deleted the rows go in pieces, so they only have to
name it. Whether a dedupe row and its message say the same is for the orphan check, which reads the
messages; here a row must lie where a message can be. Dedupe rows pass by one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from fencepost.protocol.meshes import (
    BODIES,
    ROOT,
    Mesh,
    destination_path,
    inbox_path,
    refuse_name,
    topic_path,
)
from fencepost.store.check.report import Report, Rows, StreamState
from fencepost.store.read.meshes import FOLDERS, KIND_OF
from fencepost.store.records import DELETED
from fencepost.store.sql import Row
from fencepost.store.write.groups import MESH
from fencepost.store.write.sends import ENDING, GONE, LIVE, mesh_from_row

FINGERPRINT_BYTES = 32


class MeshCheck:
    """The meshes of one database. `counters` are its next position, next number and last time."""

    def __init__(
        self, report: Report, rows: Rows, streams: Mapping[int, StreamState], counters: Row
    ) -> None:
        self._report = report
        self._rows = rows
        self._streams = streams
        _, next_number, self._last_ms = counters
        self._next_number = max([next_number, *(number + 1 for number in streams)])
        self._meshes: dict[int, Mesh] = {}
        self._ended: set[int] = set()
        """Meshes whose rows say nothing: they are being deleted, or their own row is no good."""
        self._paths: dict[str, StreamState] = {}

    @property
    def newest(self) -> int:
        """The highest number that a mesh has; they are numbered with streams and groups."""
        return max([*self._meshes, *self._ended], default=0)

    def run(self) -> None:
        """Look at all of them."""
        self._load()
        self._check_streams()
        for row in self._rows("topic_members"):
            self._check_member(row)
        for row in self._rows("sends"):
            self._report.counts["sends"] += 1
            self._check_send(row)
        self._report.counts["meshes"] = len(self._meshes)

    def index(self) -> None:
        """In the embedded store: each dedupe row is found where it is looked for, and once."""
        for mesh, sender, client_id, count in self._rows("sends_used_twice"):
            where = _where(mesh, sender, client_id)
            self._report.add("send_used_twice", where, f"it has {count} rows")
        for mesh, sender, client_id in self._rows("sends_without_place"):
            where = _where(mesh, sender, client_id)
            self._report.add("send_not_indexed", where, "its index does not show it")
        for mesh, sender, client_id, number in self._rows("places_without_send"):
            detail = f"its index shows row {number}, which is not its own"
            self._report.add("send_index_wrong", _where(mesh, sender, client_id), detail)

    # Meshes and their streams

    def _load(self) -> None:
        names: set[str] = set()
        for row in self._rows("meshes"):
            mesh_id, name, state, _, created_ms = row
            where = f"mesh {mesh_id} ({name})"
            if state not in (LIVE, ENDING, GONE):
                self._report.add("mesh_wrong", where, f"state {state}")
            elif refuse_name("mesh", name) is not None:
                self._report.add("mesh_wrong", where, f"its name cannot be {name[:64]!r}")
            if created_ms > self._last_ms:
                detail = f"made {created_ms}, now {self._last_ms}"
                self._report.add("mesh_time_wrong", where, detail)
            if state != GONE and name in names:
                self._report.add("mesh_taken_twice", where, "another mesh has this name too")
            names.update([name] if state != GONE else [])
            if state != LIVE:
                self._ended.add(mesh_id)
                continue
            try:
                self._meshes[mesh_id] = mesh_from_row(row)
            except msgspec.DecodeError as error:
                self._report.add("mesh_unreadable", where, f"its row cannot be read: {error}")
                self._ended.add(mesh_id)

    def _check_streams(self) -> None:
        """The streams below `__mesh` are of meshes; queues and inboxes have their groups."""
        live = {mesh.name for mesh in self._meshes.values()}
        known = live | {name for (name,) in self._rows("ending_meshes")}
        wanted: dict[str, str] = {}
        for stream in self._streams.values():
            if stream.state == DELETED or not stream.path.startswith(f"{ROOT}/"):
                continue
            self._paths[stream.path] = stream
            _, mesh, folder, *rest = [*stream.path.split("/"), "", ""]
            if folder == BODIES:
                folder, *rest = [*rest, ""]
                if mesh in known and folder in KIND_OF and rest[0]:
                    continue
            if mesh not in known or folder not in KIND_OF or not rest[0]:
                self._report.add("mesh_stream_wrong", stream.name, "it belongs to no mesh")
            elif mesh in live and folder != FOLDERS["topic"]:
                wanted[f"{MESH}{mesh}:{folder}:{rest[0]}"] = stream.name
        for (name,) in self._rows("mesh_groups"):
            mesh = name.split(":")[1]
            if wanted.pop(name, None) is None and mesh not in known - live:
                detail = "there is no such queue or inbox"
                self._report.add("mesh_group_wrong", f"group {name}", detail)
        for name, stream_name in wanted.items():
            self._report.add("mesh_group_wrong", stream_name, f"there is no group {name}")

    def _owner(self, mesh_id: int, where: str) -> Mesh | None:
        mesh = self._meshes.get(mesh_id)
        if mesh is None and mesh_id not in self._ended:
            self._report.add("row_without_mesh", where, f"there is no mesh {mesh_id}")
        return mesh

    def _check_member(self, row: Row) -> None:
        mesh_id, topic, member, joined_ms = row
        where = f"member {member} of topic {topic} of mesh {mesh_id}"
        mesh = self._owner(mesh_id, where)
        if mesh is None:
            return
        for path in (topic_path(mesh.name, topic), inbox_path(mesh.name, member)):
            if path not in self._paths:
                self._report.add("topic_member_wrong", where, f"there is no stream at {path!r}")
        if joined_ms > self._last_ms:
            detail = f"joined {joined_ms}, now {self._last_ms}"
            self._report.add("mesh_time_wrong", where, detail)

    # Dedupe rows

    def _check_send(self, row: Row) -> None:
        mesh_id, sender, client_id = row[:3]
        where = _where(mesh_id, sender, client_id)
        mesh = self._owner(mesh_id, where)
        if mesh is None:
            return
        for code, detail in self._wrong_with(mesh, row[3:]):
            self._report.add(code, where, detail)

    def _wrong_with(self, mesh: Mesh, row: Row) -> Iterator[tuple[str, str]]:
        """What does not hold in a dedupe row, each with its code."""
        size, kind, ref, stream_id, messages, at_bytes, first_ms, expires_ms = row
        if size != FINGERPRINT_BYTES:
            yield "send_wrong", f"its fingerprint has {size} bytes"
        if kind not in FOLDERS:
            yield "send_wrong", f"its kind is {kind!r}"
            return
        if first_ms > self._last_ms:
            yield "mesh_time_wrong", f"first seen {first_ms}, now {self._last_ms}"
        if expires_ms != mesh.expires_ms(first_ms):
            detail = f"expires {expires_ms}, of its mesh follows {mesh.expires_ms(first_ms)}"
            yield "send_expiry_wrong", detail
        if not 0 < stream_id < self._next_number or messages < 0 or at_bytes < 0:
            yield "send_place_wrong", f"message {messages} at byte {at_bytes} of {stream_id}"
            return
        stream = self._streams.get(stream_id)
        if stream is None or stream.state == DELETED:
            return  # history is not available
        path = destination_path(mesh.name, kind, ref)
        if stream.path != path:
            yield "send_place_wrong", f"its message is in {stream.path!r}, and it went to {path!r}"
        elif messages >= stream.tail.messages or at_bytes >= stream.tail.bytes:
            yield (
                "send_place_wrong",
                f"message {messages} at byte {at_bytes}, the stream ends at {stream.tail}",
            )


def _where(mesh_id: int, sender: str, client_id: str) -> str:
    return f"send {client_id} of {sender!r} in mesh {mesh_id}"
