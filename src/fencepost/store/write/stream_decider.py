"""Decisions about one stream: appends, creations, truncations and ends.

Each method decides one request at once and puts what the request changes into the open group. What
several streams take part in is in `decider.py`, which stands on this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

from fencepost.protocol.appends import (
    AlreadyClosed,
    Append,
    Appended,
    AppendOutcome,
    Conditions,
    Duplicate,
    KeyDisagrees,
    KeyReused,
    OtherContent,
    Replayed,
    StaleEpoch,
    decide_append,
)
from fencepost.protocol.claims import AuditEvent, EpochGuarded, NotHolder, Standings
from fencepost.protocol.creates import (
    Create,
    Created,
    CreateOutcome,
    ForkPoint,
    decide_create,
)
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.leases import GroupGone, LeaseLost
from fencepost.protocol.offsets import Offset
from fencepost.protocol.rates import TooFast
from fencepost.protocol.retention import BeyondTail, Cut, Uncut, decide_truncation
from fencepost.protocol.shares import (
    STREAMS,
    append_takes,
)
from fencepost.protocol.streams import Producer, Stream
from fencepost.store.contract import (
    BadOffset,
    ClaimCounts,
    Counters,
    Deleted,
    Missing,
    SoftDeleted,
    Watcher,
)
from fencepost.store.large.locks import Holds
from fencepost.store.read.chunks import fork_point, is_place
from fencepost.store.read.log_selection import head_of
from fencepost.store.records import CLOSED, EXPIRED, REMOVED
from fencepost.store.settings import StoreSettings
from fencepost.store.sql import Connection, Row
from fencepost.store.write.claims import Claims
from fencepost.store.write.group_decider import GroupDecider
from fencepost.store.write.ledger import NO_PRODUCER, Ledger
from fencepost.store.write.ledger_group import Entry, LedgerGroup
from fencepost.store.write.loader import DiskLoader, Loader

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
"""Outcomes of appends that repeat or contradict an earlier one: no rate refuses them."""


class Counts:
    """Counts of what was accepted since the start, for the metrics."""

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


class Kept(NamedTuple):
    """What decisions change beside the ledger, as it was before some of them."""

    counts: Counts
    standings: Standings
    too_fast: int
    past_shares: int


class StreamDecider:
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

    def kept(self) -> Kept:
        """What is counted beside the ledger as of now, for `undo`."""
        claims, usage = self.claims, self.ledger.usage
        return Kept(copy(self.counts), claims.noted.copy(), claims.refused, usage.refused)

    def undo(self, group: LedgerGroup, counters: Row, kept: Kept) -> None:
        """Undo what was decided in the open group, since `kept` and those counters of the ledger.

        It undoes appends and commits of streams and parts, and what goes with them, and no more.
        """
        self.ledger.undo(group, counters)
        self.claims.undo(kept.standings)
        self.counts = kept.counts
        self.claims.refused, self.ledger.usage.refused = kept.too_fast, kept.past_shares

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
            self.ledger.apply(self.group, entry, request, outcome, producer, now_ms)
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
            self.ledger.apply(self.group, entry, request, outcome, None, now_ms)
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
        ledger, now_ms = self.ledger, self._now_ms()
        if now_ms > ledger.last_ms:
            ledger.last_ms = now_ms
        return ledger.last_ms

    def alive(self, path: str, now_ms: int) -> Entry | None:
        """The stream at `path`, unless its time is over: then that is decided here and now."""
        entry = self.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or not entry.stream.expired(now_ms):
            return entry
        self.remove(entry, EXPIRED)
        return None if entry.gone else entry

    # What the upkeep asks for

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
