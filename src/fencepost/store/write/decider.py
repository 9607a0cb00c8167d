"""The decider: it applies the rules of `protocol` to each write request and the current state.

Each method decides one request at once and puts what the request changes into the open group. The
store that owns the decider makes the group durable, and answers after that. Here are commits, what
is staged for them, and the writers that publish batches by them; `stream_decider.py` has what is
about one stream, `group_decider.py` and `mesh_decider.py` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fencepost.protocol.acks import AckDecision, acked_items
from fencepost.protocol.appends import (
    KeyRecord,
)
from fencepost.protocol.commits import (
    Commit,
    CommitDuplicate,
    CommitItem,
    CommitKeyReused,
    CommitLeaseLost,
    CommitOutcome,
    CommitRefused,
    CommitReplayed,
    Committed,
    Part,
    PartDropped,
    PartMissing,
    PartUsed,
    UnstageOutcome,
    decide_commit,
    describe_commit,
    owner_of,
)
from fencepost.protocol.leases import LeaseRef
from fencepost.protocol.offsets import START
from fencepost.protocol.rates import TooFast
from fencepost.protocol.shares import (
    KEYS,
    PARTS,
    STAGED_BYTES,
    WRITERS,
)
from fencepost.protocol.writers import (
    BatchDone,
    BatchRefusal,
    NextBatch,
    WriterBatch,
    WriterForgetOutcome,
    WriterForgotten,
    WriterMissing,
    WriterOpen,
    WriterOpened,
    WriterOpenOutcome,
    WritersFull,
    decide_writer_batch,
    decide_writer_open,
)
from fencepost.store.contract import (
    ChunkConflict,
    PartClosed,
    Staged,
    StageOutcome,
    TooManyParts,
    Upload,
)
from fencepost.store.settings import StoreSettings
from fencepost.store.sql import Connection
from fencepost.store.write.drafts import Draft
from fencepost.store.write.keys import COMMITS
from fencepost.store.write.loader import Loader
from fencepost.store.write.mesh_decider import MeshDecider
from fencepost.store.write.staging import StagedPart
from fencepost.store.write.stream_decider import STORED_BEFORE, StreamDecider


class Admitted(NamedTuple):
    """A commit whose appends may be looked at, and what its writer then publishes."""

    writer: NextBatch | None


class Decider(StreamDecider):
    """The decisions of one store, on its ledger."""

    def __init__(
        self,
        connection: Connection,
        settings: StoreSettings,
        now_ms: Callable[[], int],
        *,
        loader: Loader | None = None,
        exact_deadlines: bool = False,
    ) -> None:
        super().__init__(
            connection, settings, now_ms, loader=loader, exact_deadlines=exact_deadlines
        )
        self.meshes = MeshDecider(self, settings.mesh)

    def commit(self, request: Commit) -> CommitOutcome:
        """Make several appends, all of them or none."""
        now_ms = self.tick()
        admitted = self.admit(request, now_ms)
        if not isinstance(admitted, Admitted):
            return admitted
        writer = admitted.writer
        paths = dict.fromkeys(item.append.path for item in request.items)
        entries = {path: self.alive(path, now_ms) for path in paths}
        draft = Draft(
            self.ledger, entries, self.claims, now_ms=now_ms, check_lease=self.groups.check
        )
        outcomes = []
        for item in request.items:
            outcomes.append(draft.decide(item))
            if isinstance(decide_commit(outcomes[-1:]), CommitRefused):
                break
        outcome: CommitOutcome = decide_commit(outcomes)
        acks: list[tuple[LeaseRef, AckDecision]] = []
        if request.leases and not isinstance(outcome, CommitDuplicate):
            prepared = self.groups.prepare(request.leases, request.random)
            if isinstance(prepared, CommitLeaseLost):
                return prepared
            acks = prepared
        if draft.books and isinstance(outcome, Committed):
            pending = self.ledger.books.pending(draft.books, acks)
            if pending is not None:
                outcome = CommitRefused(*pending)
        if isinstance(outcome, Committed):
            if request.key is not None:
                draft.takes[KEYS] += 1
            refused = self.ledger.usage.refuse(request.principal, draft.takes)
            outcome = outcome if refused is None else CommitRefused(0, refused)
        if isinstance(outcome, Committed):
            self.ledger.usage.add(self.group, request.principal, draft.takes)
            self.carry_out(draft)
            self.groups.apply(acks)
            outcome = outcome._replace(acks=acked_items(request.leases, acks))
            self.ledger.books.retire(draft.books, self.group)
            self._keep_commit(request, draft, outcome, now_ms)
            self.claims.take_over(draft.standings)
        if writer is not None and isinstance(outcome, Committed | CommitDuplicate):
            # Appends that were made before, by their producers' numbers, publish the batch as well.
            self.ledger.writers.publish(self.group, writer)
        for append, before, decided in draft.audited(outcome):
            self.claims.tell(append, before, decided, now_ms)
        return outcome

    def admit(self, request: Commit, now_ms: int) -> Admitted | CommitOutcome:
        """Check writer, key and rate of a commit, before its appends are decided."""
        writer = None
        if request.writer is not None:
            decided = self._writer_batch(request.writer, now_ms)
            if not isinstance(decided, NextBatch):
                if isinstance(decided, BatchDone):
                    self.counts.replays += 1
                    self.counts.mismatches += decided.matches is False
                return decided
            writer = decided
        known = None if request.key is None else self._commit_key(request)
        if known is not None:
            record, answer = known
            same = record.digest == request.digest
            return CommitReplayed(answer) if same else CommitKeyReused(record.created_ms)
        if request.items:
            too_fast = self._pace_commit(request, now_ms)
            if too_fast is not None:
                return CommitRefused(0, too_fast)
        return Admitted(writer)

    def _pace_commit(self, request: Commit, now_ms: int) -> TooFast | None:
        """Count the appends of a commit, or say that they come too fast."""
        first = request.items[0]
        actor = first.append.actor
        if actor is None or actor.principal.pace.appends is None:
            return None
        # When its first append was stored before, nothing of the commit is stored now: it is a
        # retry, or refused.
        if self._was_stored(first, now_ms):
            return None
        return self.claims.pace(actor, now_ms, appends=len(request.items))

    def _was_stored(self, item: CommitItem, now_ms: int) -> bool:
        path = item.append.path
        draft = Draft(self.ledger, {path: self.alive(path, now_ms)}, self.claims, now_ms=now_ms)
        return isinstance(draft.decide(item), STORED_BEFORE)

    def _writer_batch(
        self, request: WriterBatch, now_ms: int
    ) -> NextBatch | BatchDone | BatchRefusal:
        writers = self.ledger.writers
        current, published = writers.find(request.name), None
        if current is not None and current.batch is not None and request.batch <= current.batch:
            published = writers.find_batch(request.name, request.batch)
        return decide_writer_batch(current, request, published=published, now_ms=now_ms)

    def _keep_commit(self, request: Commit, draft: Draft, outcome: Committed, now_ms: int) -> None:
        last = self.ledger.next_position - 1
        self.use_parts(draft)
        if request.key is not None:
            record = KeyRecord(request.digest, START, START, False, last, now_ms)
            answer = describe_commit(request, outcome)
            place = (COMMITS, request.principal, request.key)
            self.ledger.keep_key(self.group, place, record, answer)

    def use_parts(self, draft: Draft) -> None:
        """The staged parts of a draft that was carried out are used up."""
        last = self.ledger.next_position - 1
        for part in draft.parts:
            self.ledger.staging.use(self.group, part, last)

    def _commit_key(self, request: Commit) -> tuple[KeyRecord, bytes] | None:
        assert request.key is not None
        return self.ledger.find_commit_key(request.principal, request.key)

    def carry_out(self, draft: Draft) -> None:
        """Do what a draft has decided, on the ledger and in the open group."""
        for stream in draft.made.values():
            self.make(stream)
        draft.carry_out(self.group)
        for append, _ in draft.decided:
            self.counts.add(append)
        for append, before in draft.raises:
            self.counts.add_raise(append, before)

    def stage(self, upload: Upload) -> StageOutcome:
        """Keep data for a later commit."""
        part, staging = upload.part, self.ledger.staging
        found = staging.find(part)
        # Chunks are forgotten before their part is, so without a part none is looked for.
        before = None if found is None else staging.find_chunk(part, upload.ordinal)
        return self._stage(upload, found, before, self.tick())

    def stage_all(self, uploads: Sequence[Upload]) -> list[StageOutcome]:
        """Keep several chunks, each if it may be kept, with one look at their parts."""
        now_ms = self.tick()
        staging = self.ledger.staging
        found = staging.find_all({upload.part for upload in uploads})
        places = [(upload.part, upload.ordinal) for upload in uploads]
        before = staging.find_chunks([place for place in places if place[0] in found])
        outcomes = []
        for upload, place in zip(uploads, places, strict=True):
            outcome = self._stage(upload, found.get(upload.part), before.get(place), now_ms)
            if isinstance(outcome, Staged):
                found.setdefault(upload.part, StagedPart(upload.media_type, None))
                before[place] = upload.digest
            outcomes.append(outcome)
        return outcomes

    def _stage(
        self, upload: Upload, found: StagedPart | None, before: bytes | None, now_ms: int
    ) -> StageOutcome:
        """`found` is the part as it is, and `before` the digest of this chunk, if it has it."""
        part, staging = upload.part, self.ledger.staging
        staged = Staged(upload.batch.messages, upload.batch.size, repeated=False)
        if before is not None:
            if before != upload.digest:
                return ChunkConflict("another content was uploaded as this chunk before")
            return staged._replace(repeated=True)
        if found is None:
            if staging.waiting_count >= self.settings.staged_parts_max:
                return TooManyParts(self.settings.staged_parts_max)
        elif found.committed is not None:
            return PartClosed(found.committed)
        elif found.media_type != upload.media_type:
            return ChunkConflict(f"the part holds {found.media_type}")
        owner, usage = owner_of(part), self.ledger.usage
        takes = {PARTS: int(found is None), STAGED_BYTES: upload.batch.size}
        refused = usage.refuse(owner, takes)
        if refused is not None:
            return refused
        usage.add(self.group, owner, takes)
        staging.add(self.group, upload, new=found is None, now_ms=now_ms)
        return staged

    def unstage(self, part: Part) -> UnstageOutcome:
        """Drop a part that no commit used."""
        found = self.ledger.staging.find(part)
        if found is None:
            return PartMissing(part)
        if found.committed is not None:
            return PartUsed(part, found.committed)
        self.drop_part(part)
        return PartDropped()

    def open_writer(self, request: WriterOpen) -> WriterOpenOutcome:
        """Begin a run of a writer."""
        writers = self.ledger.writers
        current = writers.find(request.name)
        outcome = decide_writer_open(current, request, now_ms=self.tick())
        if isinstance(outcome, WriterOpened):
            if current is None and writers.count >= self.settings.writers_max:
                return WritersFull(self.settings.writers_max)
            if current is None:
                refused = self.ledger.usage.refuse(request.principal, {WRITERS: 1})
                if refused is not None:
                    return refused
                self.ledger.usage.add(self.group, request.principal, {WRITERS: 1})
            if current is None or current.query == request.query:
                writers.save(self.group, outcome.writer)
            else:
                writers.begin_anew(self.group, outcome.writer)
        return outcome

    def forget_writer(self, name: str, owner: str | None) -> WriterForgetOutcome:
        """Remove a writer."""
        current = self.ledger.writers.find(name)
        if current is None or owner not in (None, current.principal):
            return WriterMissing()
        self.ledger.writers.forget(self.group, name)
        return WriterForgotten()

    def drop_part(self, part: Part) -> None:
        """Drop a staged part, unless a commit has taken it, or is about to."""
        held = self.holds.held
        if held is None or part not in held.parts:
            self.ledger.staging.drop(self.group, part)
