"""Deciding a large commit on a copy of the state, a slice at a time.

The caller lets other requests in between two slices. Each store has its own place for a decided
slice: the embedded store writes it down and carries it out later (`SlicedDecision`), the store on
PostgreSQL writes it in a transaction that is not visible yet. Nothing of it counts before
`conclude`.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fencepost.protocol.acks import AckDecision, AckItem, acked_items
from fencepost.protocol.appends import (
    AlreadyClosed,
    Append,
    Appended,
    AppendOutcome,
    Duplicate,
    KeyRecord,
    Replayed,
)
from fencepost.protocol.books import BooksCheck
from fencepost.protocol.claims import Standings, is_same_hold
from fencepost.protocol.commits import (
    Commit,
    CommitItem,
    CommitLeaseLost,
    CommitPartial,
    CommitRefused,
    CommittedInSlices,
    Part,
    describe_items,
    end_described,
    join_described,
)
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.leases import GroupGone, LeaseLost, LeaseRef
from fencepost.protocol.offsets import START
from fencepost.protocol.rates import TooFast
from fencepost.protocol.shares import KEYS
from fencepost.protocol.streams import Producer
from fencepost.protocol.writers import NextBatch
from fencepost.store.large.copies import CommitCopy, Numbers, SnapshotLoader
from fencepost.store.large.slices import CERTAIN, slice_of
from fencepost.store.sql import Connection
from fencepost.store.write.behind import Behind
from fencepost.store.write.decider import Decider
from fencepost.store.write.drafts import Draft
from fencepost.store.write.keys import COMMITS
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.store.write.loader import Loader
from fencepost.store.write.stream_decider import Counts

Try = tuple[Append, Producer | None, AppendOutcome]
"""An append as it was decided, and its producer before."""


class Decided(NamedTuple):
    """A commit that will happen: its slices are written, and its answer is known."""

    last_slice: int
    answer: bytes
    counts: Counts
    acks: tuple[AckItem, ...] = ()


class LargeDecision(ABC):
    """The decision about one large commit, made slice by slice."""

    def __init__(
        self,
        decider: Decider,
        loader: Loader,
        request: Commit,
        *,
        new_streams: int,
        writer: NextBatch | None,
        messages: int = 0,
    ) -> None:
        self._decider = decider
        self._loader = loader
        self._request = request
        self._new_streams = new_streams
        self._writer = writer
        self._messages = messages
        self._count = 0
        self._decided_count = 0
        self._counts = Counts()
        self._now_ms = 0
        self.copy: CommitCopy
        """The ledger that it is decided on, once it has begun."""
        self.first = self._last = -1
        self._refused: CommitRefused | None = None
        self._done_count = 0
        self._repeated: list[int] = []
        self._pieces: list[bytes] = []
        self._packer = zlib.compressobj(1)
        self._packed: list[bytes] = []
        self._parts: set[Part] = set()
        self._standings: Standings = {}
        self._takes: Counter[str] = Counter()
        if request.key is not None:
            self._takes[KEYS] = 1
        self._tries: list[Try] = []
        # The leases of single appends, by their places, and what the commit's own acks come to:
        self._leases: list[tuple[int, LeaseRef]] = []
        self._acks: list[tuple[LeaseRef, AckDecision]] = []
        # What books ask of groups, the streams written to so far, and positions that no row took:
        self._books: list[BooksCheck] = []
        self._written: set[str] = set()
        self._unused = 0

    def leftovers(self) -> list[dict[Any, Any] | set[Any] | list[Any]]:
        """The collections to empty, a few objects at a time, when all is decided."""
        return [*self.copy.leftovers(), self._parts, self._pieces, self._written]

    def begin(self) -> int:
        """Take the commit's positions, and the numbers of its new streams; the first position."""
        ledger = self._decider.ledger
        # Counts are not read again before the commit is done, so they begin fresh.
        ledger.usage.reset()
        self._now_ms = self._decider.tick()
        self.first = ledger.next_position
        self._last = self.first + max(self._messages, 1) - 1
        numbers = Numbers(self.first, ledger.next_stream, self._now_ms)
        self.copy = CommitCopy(self._loader, numbers, like=ledger)
        ledger.next_position = self._last + 1
        ledger.next_stream += self._new_streams
        self._decider.group.statements.append(("begin_large", (self.first, self._last)))
        return self.first

    def decide(self, items: list[CommitItem]) -> LedgerGroup | None:
        """Decide the next slice: what it writes, or None when one of its appends is refused."""
        group = self._decide(items, self._decided_count)
        if group is None:
            return None
        self._decided_count += len(items)
        self._count += 1
        return self.copy.sealed(group)

    def _decide(self, items: list[CommitItem], at: int) -> LedgerGroup | None:
        copy = self.copy.ledger
        draft = Draft(
            copy,
            {item.append.path: copy.find(item.append.path) for item in items},
            self._decider.claims,
            now_ms=self._now_ms,
            standings=self._standings,
            taken=self._parts,
            first_item=at,
            written=self._written,
            usage=self._decider.ledger.usage,
            takes=self._takes,
        )
        outcomes: list[Appended | Duplicate | Replayed | AlreadyClosed] = []
        for index, item in enumerate(items, at):
            outcome = draft.decide(item)
            conditions = item.append.conditions
            if conditions is not None and conditions.lease is not None:
                self._leases.append((index, conditions.lease))
            match outcome:
                case Appended():
                    self._done_count += 1
                case Duplicate() | Replayed() | AlreadyClosed():
                    self._repeated.append(index)
                case _:
                    self._refused = CommitRefused(index, outcome)
                    self._tries = [*draft.audited(self._refused)]
                    return None
            outcomes.append(outcome)
        self._tries += [tried for tried in draft.tries if _matters(tried)]
        self._books += draft.books
        self._written.update(append.path for append, _ in draft.decided)
        self._unused += sum(map(_is_uncut, draft.decided))
        group = copy.new_group()
        for stream in draft.made.values():
            copy.add(group, stream)
        draft.carry_out(group)
        for append, _ in draft.decided:
            self._counts.add(append)
        for append, before in draft.raises:
            self._counts.add_raise(append, before)
        for part in draft.parts:
            # The parts that wait are counted by the store, once the commit is certain.
            group.statements.append(("commit_part", (self._last, *part)))
        self._parts |= draft.parts
        self._describe(items, outcomes)
        return group

    def _describe(
        self,
        items: list[CommitItem],
        outcomes: list[Appended | Duplicate | Replayed | AlreadyClosed],
    ) -> None:
        piece = describe_items(items, outcomes)
        if self._request.key is not None:
            before = b"," if self._pieces else b'{"appends":['
            self._packed.append(self._packer.compress(before + piece))
        self._pieces.append(piece)

    def conclude(
        self,
    ) -> Decided | CommittedInSlices | CommitRefused | CommitPartial | CommitLeaseLost:
        """Conclude: a commit to be carried out is certain once the open group is on disk."""
        outcome = self._weighed()
        if not isinstance(outcome, Decided):
            for append, before, decided in self._tries if self._refused is not None else ():
                self._decider.claims.tell(append, before, decided, self._now_ms)
            if isinstance(outcome, CommittedInSlices) and self._writer is not None:
                self._decider.ledger.writers.publish(self._decider.group, self._writer)
            return outcome
        # Every append was accepted, so the positions that were counted are those that were used.
        assert self.copy.ledger.next_position == self.first + self._messages - self._unused
        for append, before, decided in self._tries:
            self._decider.claims.tell(append, before, decided, self._now_ms)
        self._decider.groups.apply(self._acks)
        self._decider.ledger.books.retire(self._books, self._decider.group)
        self._conclude()
        return outcome

    @abstractmethod
    def _conclude(self) -> None:
        """Let the commit be certain with the open group, with what is kept of it as a whole."""

    @property
    def comes_to_something(self) -> bool:
        """Whether all appends are new, so that the commit happens unless it comes too fast."""
        return self._refused is None and not self._repeated

    def _weighed(
        self,
    ) -> Decided | CommittedInSlices | CommitRefused | CommitPartial | CommitLeaseLost:
        is_duplicate = self._refused is None and self._repeated and not self._done_count
        lost = None if is_duplicate else self._lost()
        if lost is not None:
            return lost
        if self._refused is not None:
            return self._refused
        if self._repeated and self._done_count:
            return CommitPartial(tuple(self._repeated))
        acks = acked_items(self._request.leases, self._acks)
        answer = join_described(self._pieces, acks)
        if self._repeated:
            return CommittedInSlices(answer, duplicate=True)
        pending = None
        if self._books:
            pending = self._decider.ledger.books.pending(self._books, self._acks)
        if pending is not None:
            return CommitRefused(*pending)
        refused = self._take_over()
        if refused is not None:
            return CommitRefused(0, refused)
        return Decided(self._count, answer, self._counts, acks)

    def _lost(self) -> CommitLeaseLost | CommitRefused | None:
        """Whether a lease is not current now, in the decision that makes the commit certain."""
        groups = self._decider.groups
        if self._request.leases:
            acks = groups.prepare(self._request.leases, self._request.random)
            if isinstance(acks, CommitLeaseLost):
                return acks
            self._acks = acks
        checked: dict[LeaseRef, LeaseLost | GroupGone | None] = {}
        for index, ref in self._leases:
            if ref not in checked:
                checked[ref] = groups.check(ref)
            lost = checked[ref]
            if lost is not None:
                return CommitRefused(index, lost)
        return None

    def _take_over(self) -> TooFast | LimitExceeded | None:
        """Let principals stand as the commit leaves them, others' requests since included."""
        usage, principal = self._decider.ledger.usage, self._request.principal
        refused = usage.refuse(principal, self._takes)
        if refused is not None:
            return refused
        claims = self._decider.claims
        for append, before, decided in self._tries:
            changed = claims.weigh(claims.standings, append, before, decided, self._now_ms)
            if isinstance(changed, TooFast):
                claims.reset()
                return changed
            claims.take_over(changed)
        usage.add(self._decider.group, principal, self._takes)
        return None

    def _keep(self, ledger: Ledger, group: LedgerGroup) -> None:
        """What is kept of the commit as a whole."""
        request = self._request
        if self._writer is not None:
            ledger.writers.publish(group, self._writer)
        if request.key is not None:
            record = KeyRecord(request.digest, START, START, False, self._last, self._now_ms)
            end = end_described(acked_items(request.leases, self._acks))
            self._packed += [self._packer.compress(end), self._packer.flush()]
            place = (COMMITS, request.principal, request.key)
            ledger.keep_key(group, place, record, b"".join(self._packed))


class SlicedDecision(LargeDecision):
    """The same in the embedded store: slices join its groups as they are decided.

    Each step is a generator: at each yield the caller waits until what was written down so far is
    on disk.
    """

    def __init__(
        self,
        decider: Decider,
        state: Connection,
        behind: Behind,
        request: Commit,
        slices: Callable[[], Iterable[list[CommitItem]]],
        *,
        new_streams: int,
        writer: NextBatch | None,
    ) -> None:
        self._snapshot = SnapshotLoader(state, behind)
        super().__init__(decider, self._snapshot, request, new_streams=new_streams, writer=writer)
        self._state = state
        self._slices = slices

    def leftovers(self) -> list[dict[Any, Any] | set[Any] | list[Any]]:
        return [*super().leftovers(), self._snapshot.asked]

    def weigh(self) -> Iterator[None]:
        """Count the positions that the commit may need."""
        for items in self._slices():
            parts = [part for item in items for part in item.parts]
            if parts:
                named = {"parts": json.dumps(parts)}
                [(count,)] = self._state.fetch("count_staged_messages", named)
                self._messages += count
            self._messages += sum(map(messages_of, items))
            yield

    def slices(self) -> Iterator[None]:
        """Decide the appends; what each slice writes joins the open group."""
        for items in self._slices():
            self._snapshot.fetch(items)
            number = self._count
            sealed = self.decide(items)
            if sealed is None:
                return
            self._write_down(number, sealed)
            yield

    def _write_down(self, number: int, sealed: LedgerGroup, *, is_last: bool = False) -> None:
        content = slice_of(sealed, is_last=is_last).encode()
        group = self._decider.group
        group.statements.append(("save_slice", (self.first, number, content)))
        group.bytes += len(content)

    def _conclude(self) -> None:
        group = self.copy.ledger.new_group()
        self._keep(self.copy.ledger, group)
        self._write_down(self._count, self.copy.sealed(group), is_last=True)
        self._decider.group.statements.append(("turn_large", (CERTAIN, self.first)))
        self._decider.ledger.staging.waiting_count -= len(self._parts)


def messages_of(item: CommitItem) -> int:
    """Positions that an append takes beside those of its staged parts."""
    batch, conditions = item.append.batch, item.append.conditions
    books = None if conditions is None else conditions.books
    truncates = books is not None and books.truncate_before is not None
    return (0 if batch is None else batch.messages) + item.append.closes + truncates


def _is_uncut(decided: tuple[Append, Appended]) -> bool:
    """Whether an append was to cut its stream, and there was nothing to cut."""
    append, outcome = decided
    if outcome.books is None or append.conditions is None or append.conditions.books is None:
        return False
    return append.conditions.books.truncate_before is not None and outcome.books.first is None


def _matters(tried: Try) -> bool:
    """Whether an accepted append changes who holds what, or has to be audited."""
    append, before, outcome = tried
    if not isinstance(outcome, Appended) or outcome.producer is None:
        return False
    overrides = append.actor is not None and append.actor.overrides
    return overrides or not is_same_hold(before, outcome.producer)
