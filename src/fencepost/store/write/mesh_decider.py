"""Deciding requests about meshes, and sends, with the rules of `protocol` on the state as it is.

A send is decided as an append is: at once, in the one write path. Its dedupe row, its message and
one delivery for each recipient join the open group of the commit together, so a crash leaves all of
them or none. The appends that may still be refused are a draft, as those of a commit are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fencepost.protocol.appends import Append, Appended, Conditions, decide_append
from fencepost.protocol.batches import Batch
from fencepost.protocol.commits import CommitItem, PartIncomplete, PartRefusal
from fencepost.protocol.envelopes import Body, BodyPlace, Send
from fencepost.protocol.groups import GroupExists, GroupSettings, LimitExceeded
from fencepost.protocol.meshes import (
    BODIES,
    Member,
    Mesh,
    MeshCreated,
    MeshDiffers,
    MeshSame,
    Queue,
    bodies_path,
    decide_mesh,
    destination_path,
    inbox_path,
    names_root,
    topic_path,
)
from fencepost.protocol.offsets import START
from fencepost.protocol.rates import Bucket
from fencepost.protocol.sends import (
    BODY_TYPE,
    DedupeRow,
    Destination,
    MeshLimits,
    MeshNotFound,
    Origin,
    SendFacts,
    SendOutcome,
    Sent,
    decide_send,
)
from fencepost.protocol.shares import MESHES, STREAMS
from fencepost.protocol.streams import JSON, Stream
from fencepost.store.group_contract import DeleteGroup, MakeGroup
from fencepost.store.mesh_contract import (
    Done,
    DropMesh,
    DropName,
    EndMesh,
    JoinTopic,
    KeepRow,
    MakeMesh,
    MakeName,
    MeshEnding,
    MeshOutcome,
    MeshRequest,
    NameHeld,
    NameMade,
    NameMissing,
    SendRequest,
)
from fencepost.store.records import REMOVED
from fencepost.store.write.claims import Claims
from fencepost.store.write.drafts import Draft
from fencepost.store.write.group_decider import GroupDecider
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.ledger_group import Entry, LedgerGroup
from fencepost.store.write.staging import ROW_BYTES
from fencepost.store.write.stream_decider import Counts

SENDERS_MAX = 10_000
"""Senders whose rates are remembered; beyond them every sender begins with a full one."""

INBOX_LEASE_MS = 30_000
QUEUE_LEASE_MS = 30_000


class Deciding(Protocol):
    """The decider of streams, as far as meshes ask it."""

    ledger: Ledger
    claims: Claims
    groups: GroupDecider
    group: LedgerGroup
    counts: Counts

    def tick(self) -> int: ...

    def alive(self, path: str, now_ms: int) -> Entry | None: ...

    def make(self, stream: Stream) -> Entry: ...

    def remove(self, entry: Entry, kind: int) -> None: ...

    def carry_out(self, draft: Draft) -> None: ...

    def use_parts(self, draft: Draft) -> None: ...


class MeshDecider:
    """The decisions about meshes of one store."""

    def __init__(self, decider: Deciding, limits: MeshLimits) -> None:
        self._decider = decider
        self._limits = limits
        self._rate = limits.rate
        self._buckets: dict[str, Bucket] = {}

    def decide(self, request: MeshRequest) -> MeshOutcome:
        """Decide a request about a mesh."""
        match request:
            case MakeMesh():
                return self._make_mesh(request)
            case EndMesh():
                return self._end_mesh(request)
            case DropMesh():
                return self._drop_mesh(request)
            case _:
                self._decider.tick()
                mesh = self._decider.ledger.meshes.find(_mesh_of(request))
                return MeshNotFound() if mesh is None else self._within(mesh, request)

    def _within(
        self, mesh: Mesh, request: MakeName | DropName | JoinTopic | KeepRow
    ) -> MeshOutcome:
        match request:
            case MakeName():
                return self._make_name(mesh, request)
            case DropName():
                return self._drop_name(mesh, request)
            case JoinTopic():
                return self._join(mesh, request)
            case KeepRow(row):
                return self._keep_row(mesh, row)

    # Meshes

    def _make_mesh(
        self, request: MakeMesh
    ) -> MeshCreated | MeshSame | MeshDiffers | MeshEnding | LimitExceeded:
        decider = self._decider
        now_ms = decider.tick()
        ledger = decider.ledger
        stored = ledger.meshes.stored(request.mesh)
        if stored is not None and stored.ending:
            return MeshEnding()
        existing = None if stored is None else stored.mesh
        if existing is None and ledger.meshes.count() >= self._limits.meshes_max:
            return LimitExceeded("meshes_max", self._limits.meshes_max)
        outcome = decide_mesh(
            existing, request.mesh, request.settings, mesh_id=ledger.next_stream, now_ms=now_ms
        )
        if isinstance(outcome, MeshCreated):
            refused = ledger.usage.refuse(request.owner, {MESHES: 1})
            if refused is not None:
                return refused
            ledger.usage.add(decider.group, request.owner, {MESHES: 1})
            # Meshes, groups and incarnations of streams are numbered together: none comes back.
            ledger.next_stream += 1
            ledger.meshes.save(decider.group, outcome.mesh)
            if request.owner:
                decider.group.statements.append(("own_mesh", (request.owner, outcome.mesh.id)))
        return outcome

    def _end_mesh(self, request: EndMesh) -> Done | MeshNotFound:
        self._decider.tick()
        meshes = self._decider.ledger.meshes
        stored = meshes.stored(request.mesh)
        if stored is None:
            return MeshNotFound()
        if not stored.ending:
            meshes.save(self._decider.group, stored.mesh, ending=True)
        return Done(changed=not stored.ending)

    def _drop_mesh(self, request: DropMesh) -> Done | MeshNotFound:
        decider = self._decider
        now_ms = decider.tick()
        stored = decider.ledger.meshes.stored(request.mesh)
        if stored is None or not stored.ending:
            return MeshNotFound()
        for path in request.paths:
            self._drop_path(stored.mesh, path, now_ms)
        if request.is_last:
            decider.ledger.meshes.drop(decider.group, stored.mesh)
        return Done()

    def _drop_path(self, mesh: Mesh, path: str, now_ms: int) -> None:
        """Delete a stream of a mesh, and what belongs to it."""
        decider = self._decider
        kind, _, name = path.removeprefix(names_root(mesh.name)).partition("/")
        if kind == "topic":
            decider.ledger.meshes.drop_topic(decider.group, (mesh.id, name))
        elif kind == "inbox":
            decider.groups.decide(DeleteGroup(Member(mesh.name, name, 0).group))
        elif kind == "queue":
            decider.groups.decide(DeleteGroup(Queue(mesh.name, name, 0).group))
        entry = decider.alive(path, now_ms)
        if entry is not None and not entry.stream.soft_deleted:
            decider.remove(entry, REMOVED)

    # Topics, members, queues

    def _make_name(self, mesh: Mesh, request: MakeName) -> NameMade | NameHeld | LimitExceeded:
        decider, ledger = self._decider, self._decider.ledger
        now_ms = ledger.last_ms
        entry = decider.alive(request.path, now_ms)
        bodies = decider.alive(bodies_path(mesh.name, request.kind, request.name), now_ms)
        if any(one is not None and one.stream.soft_deleted for one in (entry, bodies)):
            return NameHeld()
        if entry is not None:
            return NameMade(entry.stream.created_ms, fresh=False)
        root = names_root(mesh.name)
        # The streams of bodies, which come first by name, are not counted.
        values = (f"{root}{BODIES}0", root[:-1] + "0")
        rows = ledger.connection.fetch("count_streams_between", values)
        if rows[0][0] >= self._limits.mesh_names_max:
            return LimitExceeded("mesh_names_max", self._limits.mesh_names_max)
        refused = ledger.usage.refuse(request.owner, {STREAMS: 1})
        if refused is not None:
            return refused
        ledger.usage.add(decider.group, request.owner, {STREAMS: 1})
        stream = Stream(
            ledger.next_stream, request.path, JSON, created_ms=now_ms, owner=request.owner
        )
        decider.make(stream)
        settings = group_settings(request)
        if settings is not None:
            asked = MakeGroup(group_of(request), settings, "")
            if isinstance(decider.groups.decide(asked), GroupExists):
                decider.groups.decide(DeleteGroup(asked.group))
                decider.groups.decide(asked)
        return NameMade(now_ms, fresh=True)

    def _drop_name(self, mesh: Mesh, request: DropName) -> Done | NameMissing:
        decider = self._decider
        now_ms = decider.ledger.last_ms
        entry = decider.alive(request.path, now_ms)
        if entry is None or entry.stream.soft_deleted:
            return NameMissing(request.kind, request.name)
        if request.kind == "dm":
            meshes = decider.ledger.meshes
            for topic in meshes.topics_of(mesh.id, request.name):
                meshes.leave(decider.group, (mesh.id, topic), request.name)
        self._drop_path(mesh, request.path, now_ms)
        self._drop_path(mesh, bodies_path(mesh.name, request.kind, request.name), now_ms)
        return Done()

    def _join(self, mesh: Mesh, request: JoinTopic) -> Done | NameMissing | LimitExceeded:
        decider = self._decider
        now_ms = decider.ledger.last_ms
        if self._missing(topic_path(mesh.name, request.topic), now_ms):
            return NameMissing("topic", request.topic)
        meshes = decider.ledger.meshes
        topic = (mesh.id, request.topic)
        is_member = request.member in meshes.members(topic)
        if request.leaves:
            if not is_member:
                return NameMissing("dm", request.member)
            meshes.leave(decider.group, topic, request.member)
            return Done()
        if self._missing(inbox_path(mesh.name, request.member), now_ms):
            return NameMissing("dm", request.member)
        if is_member:
            return Done(changed=False)
        if len(meshes.members(topic)) >= self._limits.recipients_max:
            return LimitExceeded("recipients_max", self._limits.recipients_max)
        meshes.join(decider.group, topic, request.member, now_ms)
        return Done()

    def _missing(self, path: str, now_ms: int) -> bool:
        entry = self._decider.alive(path, now_ms)
        return entry is None or entry.stream.soft_deleted

    def _keep_row(self, mesh: Mesh, row: DedupeRow) -> Done:
        sends = self._decider.ledger.sends
        if sends.find(mesh, row.sender, row.client_message_id) is not None:
            return Done(changed=False)
        sends.keep(self._decider.group, mesh, row)
        return Done()

    # Sends

    def send(self, request: SendRequest) -> SendOutcome:
        """Decide a send, and stage all that it stores."""
        decider, send = self._decider, request.send
        ledger, limits = decider.ledger, self._limits
        now_ms = decider.tick()
        mesh = ledger.meshes.find(request.mesh)
        if mesh is None:
            return MeshNotFound()
        row = origin = destination = None
        entries: dict[str, Entry | None] = {}
        if limits.dedupe:
            row = ledger.sends.find(mesh, send.sender, send.client_message_id)
        path = destination_path(mesh.name, send.kind, send.ref)
        entry = decider.alive(path, now_ms)
        if entry is not None and not entry.stream.soft_deleted:
            stream = entry.stream
            if row is not None:
                origin = Origin(stream.id, stream.first)
            else:
                entries[path] = entry
                recipients = self._recipients(mesh, request, entries, now_ms)
                body_at = self._body_place(mesh, send, entries, now_ms)
                destination = Destination(stream.id, stream.tail, recipients, body_at)
        facts = SendFacts(
            mesh,
            row,
            origin,
            destination,
            self._rate,
            self._buckets.get(send.sender),
            dedupes=limits.dedupe,
        )
        outcome = decide_send(facts, send, now_ms=now_ms, limits=limits)
        if isinstance(outcome, Sent):
            return self._carry_out(mesh, path, outcome, entries, now_ms) or outcome
        return outcome

    def _body_place(
        self, mesh: Mesh, send: Send, entries: dict[str, Entry | None], now_ms: int
    ) -> BodyPlace | None:
        """Where a staged body comes to lie; `entries` gets the stream, or that there is none."""
        if not send.body.parts:
            return None
        path = bodies_path(mesh.name, send.kind, send.ref)
        entry = self._decider.alive(path, now_ms)
        entries[path] = entry
        return BodyPlace(path, START if entry is None else entry.stream.tail)

    def _recipients(
        self, mesh: Mesh, request: SendRequest, entries: dict[str, Entry | None], now_ms: int
    ) -> list[str]:
        """The inboxes that get a delivery; their streams go into `entries`."""
        send = request.send
        if send.kind != "topic":
            return []
        decider = self._decider
        members = decider.ledger.meshes.members((mesh.id, send.ref))
        if len(members) > self._limits.recipients_max:
            return list(members)  # refused by their number: none of them is looked at
        found: list[str] = []
        for member in members:
            path = inbox_path(mesh.name, member)
            entry = decider.alive(path, now_ms)
            if entry is not None and not entry.stream.soft_deleted:
                entries[path] = entry
                found.append(path)
        return found

    def _carry_out(
        self, mesh: Mesh, path: str, sent: Sent, entries: dict[str, Entry | None], now_ms: int
    ) -> PartRefusal | None:
        """Store all of a send, or say why its staged body cannot be had: then nothing is stored."""
        decider = self._decider
        ledger = decider.ledger
        draft = Draft(ledger, entries, decider.claims, now_ms=now_ms)
        outcome = draft.decide(CommitItem(Append(path, _one(sent.message), JSON)))
        assert isinstance(outcome, Appended), f"only sends write to {path}: {outcome}"
        assert outcome.start == sent.sealed.offset
        if sent.sealed.body_at is not None:
            refusal = self._append_body(draft, sent.sealed.body_at.path, sent.sealed.send.body)
            if refusal is not None:
                return refusal
        decider.carry_out(draft)
        decider.use_parts(draft)
        if sent.delivery is not None:
            self._deliver(sent.recipients, _one(sent.delivery), entries, now_ms)
        if sent.row is not None:
            ledger.sends.keep(decider.group, mesh, sent.row)
        if sent.bucket is not None:
            if len(self._buckets) >= SENDERS_MAX:
                self._buckets.clear()
            self._buckets[sent.sealed.send.sender] = sent.bucket
        return None

    def _append_body(self, draft: Draft, path: str, body: Body) -> PartRefusal | None:
        """Make the staged parts messages of the stream of bodies, as they were when they were read.

        What was uploaded to them since is not in the fingerprint, so such a send is to be repeated.
        """
        staging = self._decider.ledger.staging
        expected = iter(body.chunks)
        for part in body.parts:
            for chunk in staging.chunks(part):
                if chunk.digest != next(expected, None):
                    return PartIncomplete(part, chunk.ordinal)
        append = Append(path, None, BODY_TYPE, conditions=Conditions(create_as=BODY_TYPE))
        outcome = draft.decide(CommitItem(append, body.parts))
        if isinstance(outcome, Appended):
            return None
        assert isinstance(outcome, PartRefusal), f"only sends write to {path}: {outcome}"
        return outcome

    def _deliver(
        self,
        recipients: Sequence[str],
        delivery: Batch,
        entries: dict[str, Entry | None],
        now_ms: int,
    ) -> None:
        """Append the delivery to each inbox. Nothing can refuse it any more, so it is no draft."""
        decider = self._decider
        ledger, group, counts = decider.ledger, decider.group, decider.counts
        group.bytes += ROW_BYTES * len(recipients)
        for path in recipients:
            entry = entries[path]
            assert entry is not None, "a recipient has an inbox"
            append = Append(path, delivery, JSON)
            outcome = decide_append(
                entry.stream, None, append, position=ledger.next_position, now_ms=now_ms
            )
            assert isinstance(outcome, Appended), f"only sends write to {path}: {outcome}"
            ledger.apply(group, entry, append, outcome, None, now_ms)
            counts.add(append)


def _one(message: bytes) -> Batch:
    """A batch of one message."""
    return Batch(1, len(message), message, None)


def _mesh_of(request: MakeName | DropName | JoinTopic | KeepRow) -> str:
    return request.row.mesh if isinstance(request, KeepRow) else request.mesh


def group_of(request: MakeName) -> str:
    """The name of the group through which a queue or an inbox is consumed."""
    noun = "inbox" if request.kind == "dm" else request.kind
    return f"mesh:{request.mesh}:{noun}:{request.name}"


def group_settings(request: MakeName) -> GroupSettings | None:
    """With which settings that group is made; None for a topic, which has none."""
    match request.kind:
        case "topic":
            return None
        case "dm":
            # An inbox is handed to one daemon as a whole, and its daemon never gives it up.
            return GroupSettings(
                (request.path,), lease_ms=INBOX_LEASE_MS, lost_max=1_000, start="now"
            )
        case "queue":
            return GroupSettings(
                (request.path,),
                targets="message",
                lease_ms=QUEUE_LEASE_MS,
                on_exhausted="park",
                start="now",
            )
