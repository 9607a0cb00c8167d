"""The decider: it applies the rules of `protocol` to each write request and the current state.

Each method decides one request at once and puts what the request changes into the open group. The
store that owns the decider makes the group durable, and answers after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from fencepost.protocol.acks import AckDecision, acked_items
from fencepost.protocol.appends import (
    AlreadyClosed,
    Append,
    Appended,
    AppendOutcome,
    Conditions,
    Duplicate,
    KeyDisagrees,
    KeyRecord,
    KeyReused,
    OtherContent,
    Replayed,
    StaleEpoch,
    decide_append,
)
from fencepost.protocol.claims import AuditEvent, EpochGuarded, NotHolder
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
from fencepost.protocol.creates import (
    Create,
    Created,
    CreateOutcome,
    ForkPoint,
    decide_create,
)
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.leases import GroupGone, LeaseLost, LeaseRef
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.rates import TooFast
from fencepost.protocol.retention import BeyondTail, Cut, Uncut, decide_truncation
from fencepost.protocol.shares import (
    KEYS,
    PARTS,
    STAGED_BYTES,
    STREAMS,
    WRITERS,
    append_takes,
)
from fencepost.protocol.streams import Producer, Stream
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
    BadOffset,
    ChunkConflict,
    ClaimCounts,
    Counters,
    Deleted,
    Missing,
    PartClosed,
    SoftDeleted,
    Staged,
    StageOutcome,
    TooManyParts,
    Upload,
    Watcher,
)
from fencepost.store.large.locks import Holds
from fencepost.store.read.chunks import fork_point, is_place
from fencepost.store.read.log_selection import head_of
from fencepost.store.records import CLOSED, EXPIRED, REMOVED
from fencepost.store.settings import StoreSettings
from fencepost.store.sql import Connection
from fencepost.store.write.claims import Claims
from fencepost.store.write.drafts import Draft
from fencepost.store.write.group_decider import GroupDecider
from fencepost.store.write.keys import COMMITS
from fencepost.store.write.ledger import NO_PRODUCER, Entry, Ledger, LedgerGroup
from fencepost.store.write.loader import DiskLoader, Loader
from fencepost.store.write.mesh_decider import MeshDecider

log = logging.getLogger(__name__)


STORED_BEFORE = (
    Duplicate,
    Replayed,
    KeyReused,
    KeyDisagrees,
    StaleEpoch,
    OtherContent,
    AlreadyClosed,
)
"""What comes of an append that speaks of an earlier one: no limit on a rate refuses it."""


class Counts:
    """What was accepted since the start, for the metrics."""

    __slots__ = ("appends", "bytes", "duplicates", "messages", "mismatches", "raises", "replays")

    def __init__(self) -> None:
        self.appends = self.messages = self.bytes = self.duplicates = 0
        self.replays = self.mismatches = self.raises = 0

    def add(self, request: Append) -> None:
        self.appends += 1
        if request.batch is not None:
            self.messages += request.batch.messages
            self.bytes += request.batch.size

    def add_raise(self, request: Append, before: Producer | None) -> None:
        """Count an accepted append that raises the epoch of its producer id, and say so in the log.

        With principals the audit stream tells it, and the log need not.
        """
        claim = request.producer
        if claim is None or before is None or claim.epoch == before.epoch:
            return
        self.raises += 1
        if request.actor is None:
            log.info(
                "the epoch of producer %r in stream %r was raised from %d to %d",
                claim.id,
                request.path,
                before.epoch,
                claim.epoch,
            )

    def add_all(self, others: Counts) -> None:
        self.appends += others.appends
        self.messages += others.messages
        self.bytes += others.bytes
        self.raises += others.raises


class Admitted(NamedTuple):
    """A commit whose appends may be looked at, and what its writer then publishes."""

    writer: NextBatch | None


class Decider:
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
        self.settings = settings
        self._connection = connection
        self._now_ms = now_ms
        self.ledger = Ledger(
            loader or DiskLoader(connection),
            streams_max=settings.streams_cached_max,
            producers_max=settings.producers_cached_max,
            key_retention_ms=settings.key_retention_s * 1000 or None,
            writer_history_max=settings.writer_history_max,
            shares=settings.shares,
            exact_deadlines=exact_deadlines,
        )
        self.claims = Claims(connection)
        self.groups = GroupDecider(
            self.ledger,
            settings.groups,
            tick=self.tick,
            open_group=lambda: self.group,
            head=lambda: head_of(connection),
            audit=self._note,
        )
        self.meshes = MeshDecider(self, settings.mesh)
        self.counts = Counts()
        self.watchers: list[Watcher] = []
        self.holds = Holds()
        """What a large commit has hold of: nothing of it may be decided apart from that."""
        self.ledger.usage.is_settled = lambda: self.holds.held is None
        self.group: LedgerGroup
        """The open group, which the store opens: what is decided next joins it."""

    def _note(self, event: AuditEvent) -> None:
        if self.claims.auditor is not None:
            self.claims.auditor(event)

    def new_group(self) -> LedgerGroup:
        """Open another group."""
        self.group = self.ledger.new_group()
        return self.group

    def counters(self) -> Counters:
        """What was counted so far."""
        counts, ledger, claims = self.counts, self.ledger, self.claims
        now_ms = ledger.last_ms
        return Counters(
            appends=counts.appends,
            messages=counts.messages,
            bytes=counts.bytes,
            duplicates=counts.duplicates,
            replays=counts.replays,
            mismatches=counts.mismatches,
            epochs_raised=counts.raises,
            appends_too_fast=claims.refused,
            past_shares=ledger.usage.refused,
            streams_cached=ledger.cached_count,
            next_position=ledger.next_position,
            claims=tuple(
                ClaimCounts(name, standing.open_claims, standing.abandon_ratio(now_ms))
                # A copy, because a writer thread may be deciding meanwhile.
                for name, standing in list(claims.noted.items())
            ),
        )

    def reset(self) -> None:
        """Forget everything that is not on disk."""
        self.ledger.reset()
        self.claims.reset()
        for watcher in self.watchers:
            watcher.reset()

    def append(self, request: Append) -> AppendOutcome | Missing | SoftDeleted:
        """Add a batch, close, or both."""
        now_ms = self.tick()
        entry = self.alive(request.path, now_ms)
        conditions = request.conditions
        if entry is None and conditions is not None and conditions.makes is not None:
            return self._append_to_new(request, conditions.makes, now_ms)
        if entry is None or entry.stream.soft_deleted:
            return Missing() if entry is None else SoftDeleted()
        claim = request.producer
        producer = None if claim is None else self.ledger.find_producer(entry, claim.id)
        key = None
        if conditions is not None and conditions.key is not None:
            actor = request.actor
            owner = "" if actor is None else actor.name
            key = self.ledger.find_key((entry.stream.id, owner, conditions.key))
        outcome = decide_append(
            entry.stream,
            producer,
            request,
            key=key,
            lost=None if conditions is None else self._lost(conditions),
            position=self.ledger.next_position,
            now_ms=now_ms,
        )
        if request.actor is not None:
            # A retry of what is stored is answered however fast it comes, and costs nothing.
            if not isinstance(outcome, STORED_BEFORE):
                outcome = self.claims.pace(request.actor, now_ms) or outcome
            takes = append_takes(request, producer, outcome)
            if takes:
                outcome = self.ledger.usage.refuse(request.actor.name, takes) or outcome
            outcome = self.claims.settle(request, producer, outcome, now_ms)
            if takes and isinstance(outcome, Appended):
                self.ledger.usage.add(self.group, request.actor.name, takes)
        if isinstance(outcome, Appended):
            self.ledger.apply(self.group, entry, request, outcome, now_ms)
            self.counts.add(request)
            if producer is not None:
                self.counts.add_raise(request, producer)
        elif not isinstance(outcome, NotHolder | EpochGuarded | TooFast | LimitExceeded):
            self.counts.duplicates += isinstance(outcome, Duplicate | Replayed)
            if self.ledger.slide(entry, now_ms):
                self.ledger.touch(self.group, entry)
        if request.actor is not None:
            self.claims.tell(request, producer, outcome, now_ms)
        return outcome

    def _append_to_new(self, request: Append, content_type: str, now_ms: int) -> AppendOutcome:
        """An append that makes its stream, if it is accepted."""
        too_fast = self.claims.pace(request.actor, now_ms)
        if too_fast is not None:
            return too_fast
        stream = Stream(
            self.ledger.next_stream,
            request.path,
            content_type,
            created_ms=now_ms,
            owner=request.principal,
        )
        position = self.ledger.next_position
        lost = None if request.conditions is None else self._lost(request.conditions)
        outcome = decide_append(stream, None, request, lost=lost, position=position, now_ms=now_ms)
        usage, takes = self.ledger.usage, {STREAMS: 1, **append_takes(request, None, outcome)}
        if isinstance(outcome, Appended):
            outcome = usage.refuse(request.principal, takes) or outcome
        outcome = self.claims.settle(request, None, outcome, now_ms)
        if isinstance(outcome, Appended):
            usage.add(self.group, request.principal, takes)
            entry = self.make(stream)
            self.ledger.apply(self.group, entry, request, outcome, now_ms)
            self.counts.add(request)
        return outcome

    def _lost(self, conditions: Conditions) -> LeaseLost | GroupGone | None:
        """Whether the lease that an append rests on is not current."""
        return None if conditions.lease is None else self.groups.check(conditions.lease)

    def make(self, stream: Stream) -> Entry:
        """Take in a stream that an append makes; its messages follow."""
        entry = self.ledger.add(self.group, stream)
        for watcher in self.watchers:
            watcher.created(stream.id, stream.path, stream.tail)
        return entry

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
        """What is known of a commit before its appends are looked at."""
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
        now_ms = self.tick()
        part, staging = upload.part, self.ledger.staging
        staged = Staged(upload.batch.messages, upload.batch.size, repeated=False)
        before = staging.find_chunk(part, upload.ordinal)
        if before is not None:
            if before != upload.digest:
                return ChunkConflict("another content was uploaded as this chunk before")
            return staged._replace(repeated=True)
        found = staging.find(part)
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

    def create(self, request: Create) -> CreateOutcome:
        """Make a stream, with its first messages, or say that it is there already."""
        now_ms = self.tick()
        entry = self.alive(request.path, now_ms)
        point: ForkPoint | None = None
        if entry is None and request.fork_from is not None:
            source = self.alive(request.fork_from.path, now_ms)
            found = fork_point(
                self._connection,
                None if source is None else source.stream,
                None if source is None else _committed_tail(source),
                request.fork_from,
            )
            if not isinstance(found, ForkPoint):
                return found
            point = found
        outcome = decide_create(
            None if entry is None else entry.stream,
            request,
            stream_id=self.ledger.next_stream,
            fork_point=point,
            now_ms=now_ms,
        )
        if isinstance(outcome, Created):
            refused = self.ledger.usage.refuse(request.owner, {STREAMS: 1})
            if refused is not None:
                return refused
            self.ledger.usage.add(self.group, request.owner, {STREAMS: 1})
            self._carry_out_create(request, outcome, point)
        return outcome

    def _carry_out_create(self, request: Create, created: Created, point: ForkPoint | None) -> None:
        group = self.group
        entry = self.ledger.add(group, created.stream)
        if request.batch is not None:
            self.ledger.write(group, entry, created.start, request.batch, NO_PRODUCER)
        if created.stream.closed:
            self.ledger.mark(group, entry, CLOSED)
        if point is not None:
            source = self.ledger.find_id(point.source.id)
            assert source is not None
            source.stream.forks_count += 1
            self.ledger.touch(group, source)
        for watcher in self.watchers:
            watcher.created(created.stream.id, created.stream.path, created.start)

    def delete(self, path: str) -> Deleted | Missing | SoftDeleted:
        """Remove a stream."""
        entry = self.alive(path, self.tick())
        if entry is None or entry.stream.soft_deleted:
            return Missing() if entry is None else SoftDeleted()
        self.remove(entry, REMOVED)
        return Deleted()

    def truncate(
        self, path: str, before: Offset | None
    ) -> Cut | Uncut | BadOffset | Missing | SoftDeleted:
        """Drop what a stream holds before an offset; None: all of it."""
        entry = self.alive(path, self.tick())
        if entry is None or entry.stream.soft_deleted:
            return Missing() if entry is None else SoftDeleted()
        stream = entry.stream
        at = stream.tail if before is None else before
        outcome = decide_truncation(stream.first, stream.tail, at)
        if isinstance(outcome, BeyondTail):
            return BadOffset()
        if isinstance(outcome, Uncut):
            return outcome
        if not is_place(self._connection, stream, _committed_tail(entry), at):
            return BadOffset()
        self.ledger.truncate(self.group, entry, outcome.first)
        return outcome

    def truncate_stream(self, stream_id: int, first: Offset) -> bool:
        """Let an incarnation begin at a place that a look at its rows has found."""
        self.tick()
        entry = self.ledger.find_id(stream_id)
        if entry is None or entry.stream.soft_deleted or self._is_held(entry.stream.path):
            return False
        stream = entry.stream
        if not isinstance(decide_truncation(stream.first, stream.tail, first), Cut):
            return False
        self.ledger.truncate(self.group, entry, first)
        return True

    def remove(self, entry: Entry, kind: int) -> None:
        """End a stream, and tell those who watch streams."""
        self.claims.end_all(entry, self.ledger.last_ms)
        self.ledger.remove(self.group, entry, kind)
        for watcher in self.watchers:
            watcher.removed(entry.stream.id, entry.stream.path)

    def expire(self, path: str) -> bool:
        """End the stream at `path` if its time is over."""
        now_ms = self.tick()
        entry = None if self._is_held(path) else self.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or not entry.stream.expired(now_ms):
            return False
        self.remove(entry, EXPIRED)
        return True

    def _is_held(self, path: str) -> bool:
        """Whether a large commit has hold of a stream: then the upkeep comes again later."""
        held = self.holds.held
        return held is not None and path in held.paths

    def tick(self) -> int:
        """The time of the decision about to be made: never earlier than that of the last one."""
        now_ms = max(self._now_ms(), self.ledger.last_ms)
        self.ledger.last_ms = now_ms
        return now_ms

    def alive(self, path: str, now_ms: int) -> Entry | None:
        """The stream at `path`, unless its time is over: then that is decided here and now."""
        entry = self.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or not entry.stream.expired(now_ms):
            return entry
        self.remove(entry, EXPIRED)
        return None if entry.gone else entry

    # What the upkeep asks for

    def drop_part(self, part: Part) -> None:
        """Drop a staged part, unless a commit has taken it, or is about to."""
        held = self.holds.held
        if held is None or part not in held.parts:
            self.ledger.staging.drop(self.group, part)

    def forget_producer(
        self, stream_id: int, producer_id: str, before_ms: int, lifetime_ms: int
    ) -> bool:
        """Forget a producer that has sent nothing since; whether that was so."""
        entry = self.ledger.find_id(stream_id)
        if entry is None or self._is_held(entry.stream.path):
            return False  # its producers go with the stream; or it is another time's work
        producer = self.ledger.find_producer(entry, producer_id)
        if producer is None or producer.updated_ms > before_ms:
            return False
        entry.producers[producer_id] = None
        statements = self.group.statements
        statements.append(("forget_producer", (stream_id, producer_id, before_ms)))
        statements.append(("forget_remembered", (stream_id, producer_id)))
        statements.append(("note_forgetting", (lifetime_ms,)))
        return True


def _committed_tail(entry: Entry) -> Offset | None:
    return None if entry.view is None else entry.view.tail
