"""Drafts: deciding several appends on top of each other before any of them is carried out.

A draft works on copies of the streams and producers that it touches. When every append is accepted
it is carried out on the ledger in the same order, so that it comes to exactly what was decided;
else it is dropped, and nothing has happened.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from fencepost.protocol.appends import (
    Append,
    Appended,
    AppendOutcome,
    Duplicate,
    KeyRecord,
    ProducerTuple,
    decide_append,
    key_record,
)
from fencepost.protocol.batches import DIGEST_BYTES, Batch, StagedChunk
from fencepost.protocol.books import BooksChange, BooksCheck, CutInvalid
from fencepost.protocol.claims import Standings
from fencepost.protocol.commits import (
    CommitItem,
    CommitOutcome,
    Committed,
    ItemDeleted,
    ItemMissing,
    ItemOutcome,
    Part,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartOverfull,
    PartRefusal,
    PartTwice,
    PartUsed,
)
from fencepost.protocol.leases import NOWHERE, GroupGone, LeaseLost, LeaseRef
from fencepost.protocol.offsets import Offset
from fencepost.protocol.rates import TooFast
from fencepost.protocol.shares import STREAMS, append_takes
from fencepost.protocol.streams import Producer, Stream
from fencepost.store.write.claims import Claims
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.ledger_group import Entry, LedgerGroup
from fencepost.store.write.staging import ROW_BYTES
from fencepost.store.write.usage import Usage


class Draft:
    """Appends that are decided together. `entries` are the streams that exist, by their paths.

    The caller has ended those that have expired before it makes the draft, because their ends take
    positions too, and the positions of the draft follow them.
    """

    def __init__(
        self,
        ledger: Ledger,
        entries: Mapping[str, Entry | None],
        claims: Claims,
        *,
        now_ms: int,
        standings: Standings | None = None,
        taken: Container[Part] = (),
        check_lease: Callable[[LeaseRef], LeaseLost | GroupGone | None] | None = None,
        first_item: int = 0,
        written: Container[str] = (),
        usage: Usage | None = None,
        takes: Counter[str] | None = None,
    ) -> None:
        self._ledger = ledger
        self._usage = usage or ledger.usage
        self._unpaid: set[str] = set()  # new streams whose first append is not decided
        self._taken = taken
        self._check_lease = check_lease
        self._written = written
        self._item = first_item - 1
        self._claims = claims
        self._entries = entries
        self._now_ms = now_ms
        self._position = ledger.next_position
        self._next_stream = ledger.next_stream
        self._streams: dict[str, Stream] = {}
        self._producers: dict[tuple[int, str], Producer | None] = {}
        self._keys: dict[tuple[int, str, str], KeyRecord] = {}
        self.raises: list[tuple[Append, Producer]] = []
        """Accepted appends that raise an epoch, with the producer as it was."""
        self.tries: list[tuple[Append, Producer | None, AppendOutcome]] = []
        """What was decided of appends with principals and producers, for their standing."""
        self.standings: Standings = {} if standings is None else standings
        """Where the draft leaves principals, if it is carried out; with where it found them, if it
        goes on from another one."""
        self.takes: Counter[str] = Counter() if takes is None else takes
        """What the draft takes of the shares of its principal; with what the draft before it took,
        if it goes on from one."""
        self.parts: set[Part] = set()
        """The staged parts that the draft uses."""
        self.made: dict[str, Stream] = {}
        """Streams that do not exist yet, as they are before their first append."""
        self.decided: list[tuple[Append, Appended]] = []
        self.books: list[BooksCheck] = []
        """Conditions on groups: they have no work left, or the appends are not accepted."""

    def decide(self, item: CommitItem) -> ItemOutcome:
        """Decide one more append, on top of those before it."""
        self._item += 1
        append = item.append
        used = None
        if item.parts:
            gathered = self._gather(item)
            if isinstance(gathered, PartMissing):
                return self._known(append) or gathered
            if not isinstance(gathered, _Gathered):
                return gathered
            append, used = gathered
        stream = self._stream(append)
        if not isinstance(stream, Stream):
            return stream
        outcome = self._decide(stream, append)
        if isinstance(outcome, Appended):
            if used is not None:
                return used
            if outcome.books is not None and not self._note_books(stream, append, outcome.books):
                return CutInvalid(stream.tail)
            self._carry(stream, append, outcome)
        return outcome

    def _note_books(self, stream: Stream, append: Append, change: BooksChange) -> bool:
        """Note what an append asks of groups; whether it cuts at a place of the stream."""
        cut = change.first
        if cut is not None and not self._is_place(stream, cut):
            return False
        if cut is None and not change.closes and not change.retires:
            return True
        last = NOWHERE
        before = stream.tail if change.closes else cut
        if before is not None:
            last = self._last_position(stream, before)
        self.books.append(BooksCheck(self._item, append.path, last, change.retires))
        return True

    def _last_position(self, stream: Stream, before: Offset) -> int:
        """The position of the last message before a place, those of this commit included."""
        if stream.path in self._written or any(
            append.path == stream.path and append.batch is not None for append, _ in self.decided
        ):
            # These messages are nowhere yet, and no group has seen them.
            return self._position - 1
        if stream.path in self.made:
            return NOWHERE
        return self._ledger.books.last_position(stream.id, before)

    def _is_place(self, stream: Stream, at: Offset) -> bool:
        """Whether a message of the stream ends at an offset."""
        if at == stream.tail:
            return True
        row = self._ledger.books.last_row(stream.id, at)
        if row is not None and row.reaches(at):
            return row.has_place(at)
        return bool(stream.segments) and self._ledger.is_place(stream, at)

    def _known(self, append: Append) -> Duplicate | None:
        """An append whose parts are gone, if its producer made it before: nothing is compared."""
        stream = self._stream(append)
        if append.producer is None or not isinstance(stream, Stream):
            return None
        producer = self._producer(stream, append.producer)
        position, now_ms = self._position, self._now_ms
        outcome = decide_append(stream, producer, append, position=position, now_ms=now_ms)
        return outcome._replace(matches=None) if isinstance(outcome, Duplicate) else None

    def _producer(self, stream: Stream, claim: ProducerTuple) -> Producer | None:
        place = (stream.id, claim.id)
        if place not in self._producers:
            entry = None if stream.path in self.made else self._ledger.find_id(stream.id)
            self._producers[place] = (
                None if entry is None else self._ledger.find_producer(entry, claim.id)
            )
        return self._producers[place]

    def _decide(self, stream: Stream, append: Append) -> AppendOutcome:
        claim, conditions = append.producer, append.conditions
        producer = None if claim is None else self._producer(stream, claim)
        key = None
        if conditions is not None and conditions.key is not None:
            used = (stream.id, append.principal, conditions.key)
            key = self._keys.get(used)
            if key is None and stream.path not in self.made:
                key = self._ledger.find_key(used)
        lost = None
        if conditions is not None and conditions.lease is not None and self._check_lease:
            lost = self._check_lease(conditions.lease)
        position, now_ms = self._position, self._now_ms
        outcome = decide_append(
            stream, producer, append, key=key, lost=lost, position=position, now_ms=now_ms
        )
        if append.actor is not None:
            outcome = self._share(append, producer, outcome)
            outcome = self._settle(append, producer, outcome)
        raised = claim is not None and producer is not None and claim.epoch != producer.epoch
        if raised and producer is not None and isinstance(outcome, Appended):
            self.raises.append((append, producer))
        return outcome

    def _share(
        self, append: Append, producer: Producer | None, outcome: AppendOutcome
    ) -> AppendOutcome:
        """The outcome, unless its principal has no share left for what it takes."""
        if not isinstance(outcome, Appended):
            return outcome
        more = append_takes(append, producer, outcome)
        if append.path in self._unpaid:
            more[STREAMS] = 1
        if not more:
            return outcome
        total = self.takes + Counter(more)
        refused = self._usage.refuse(append.principal, total)
        if refused is not None:
            return refused
        self._unpaid.discard(append.path)
        self.takes.update(more)
        return outcome

    def _settle(
        self, append: Append, producer: Producer | None, outcome: AppendOutcome
    ) -> AppendOutcome:
        if isinstance(outcome, Appended) and outcome.producer is None:
            return outcome
        standings = {**self._claims.standings, **self.standings}
        changed = self._claims.weigh(standings, append, producer, outcome, self._now_ms)
        if isinstance(changed, TooFast):
            return changed
        self.standings.update(changed)
        self.tries.append((append, producer, outcome))
        return outcome

    def audited(
        self, outcome: CommitOutcome
    ) -> list[tuple[Append, Producer | None, AppendOutcome]]:
        """What the audit stream may have to tell: of a commit that is refused, the refusal."""
        done = isinstance(outcome, Committed)
        return [tried for tried in self.tries if isinstance(tried[2], Appended) == done]

    def _carry(self, stream: Stream, append: Append, outcome: Appended) -> None:
        stream.tail = outcome.tail
        stream.closed = stream.closed or outcome.closed
        stream.seq = append.seq or stream.seq
        if outcome.producer is not None:
            self._producers[stream.id, outcome.producer.id] = outcome.producer
        conditions = append.conditions
        if conditions is not None and conditions.key is not None:
            record = key_record(append, outcome, now_ms=self._now_ms)
            self._keys[stream.id, append.principal, conditions.key] = record
        self._position += 0 if append.batch is None else append.batch.messages
        self._position += outcome.closed  # its marker
        if outcome.books is not None:
            if outcome.books.first is not None:
                stream.first = outcome.books.first
                self._position += 1  # the marker of the truncation
            stream.books_closed_at = self._position if outcome.books.closed else None
        self.decided.append((append, outcome))

    def carry_out(self, group: LedgerGroup) -> None:
        """Make the appends that were decided, on the ledger; the new streams are there already."""
        group.bytes += ROW_BYTES * len(self.decided)
        for append, outcome in self.decided:
            entry = self._ledger.find(append.path)
            assert entry is not None
            claim, ledger = append.producer, self._ledger
            before = None if claim is None else ledger.find_producer(entry, claim.id)
            ledger.apply(group, entry, append, outcome, before, ledger.last_ms)

    def _stream(self, append: Append) -> Stream | ItemMissing | ItemDeleted:
        """The draft's copy of the stream; made up when it does not exist but may be made."""
        stream = self._streams.get(append.path)
        if stream is not None:
            return stream
        entry = self._entries[append.path]
        if entry is not None:
            if entry.stream.soft_deleted:
                return ItemDeleted()
            stream = copy.copy(entry.stream)
        else:
            content_type = None if append.conditions is None else append.conditions.makes
            if content_type is None:
                return ItemMissing()
            stream = Stream(
                self._next_stream,
                append.path,
                content_type,
                created_ms=self._now_ms,
                owner=append.principal,
            )
            self._next_stream += 1
            self._unpaid.add(append.path)
            self.made[append.path] = copy.copy(stream)
        self._streams[append.path] = stream
        return stream

    def _gather(self, item: CommitItem) -> _Gathered | PartRefusal:
        """The append with its staged parts as its batch."""
        append = item.append
        used = None
        chunks: list[StagedChunk] = []
        hashed = hashlib.sha256(b"%d" % append.closes)
        if append.conditions is not None and append.conditions.books is not None:
            hashed.update(append.conditions.books.mark())
        media_type = append.media_type
        counts = item.chunks or (None,) * len(item.parts)
        for part, count in zip(item.parts, counts, strict=True):
            if part in self.parts or part in self._taken:
                return PartTwice(part)
            found = self._ledger.staging.find(part)
            if found is None:
                return PartMissing(part)
            if media_type is not None and found.media_type != media_type:
                return PartMismatch(part, found.media_type, media_type)
            media_type = found.media_type
            if found.committed is not None and used is None:
                used = PartUsed(part, found.committed)
            self.parts.add(part)
            rows = self._ledger.staging.chunks(part)
            if count is not None and len(rows) < count:
                missing = next((n for n, row in enumerate(rows) if row.ordinal != n), len(rows))
                return used or PartIncomplete(part, missing)
            if count is not None and len(rows) > count:
                return used or PartOverfull(part, len(rows), count)
            for expected, chunk in enumerate(rows):
                if chunk.ordinal != expected:
                    return used or PartIncomplete(part, expected)
                chunks.append(StagedChunk(chunk.id, chunk.messages, chunk.size))
                hashed.update(chunk.digest)
        batch = Batch(
            messages=sum(chunk.messages for chunk in chunks),
            size=sum(chunk.size for chunk in chunks),
            data=b"",
            lengths=None,
            chunks=tuple(chunks),
        )
        gathered = Append(
            append.path,
            batch,
            media_type,
            append.closes,
            append.producer,
            append.seq,
            hashed.digest()[:DIGEST_BYTES],
            append.conditions,
            append.actor,
        )
        return _Gathered(gathered, used)


class _Gathered(NamedTuple):
    """An append made of staged parts.

    `used` is a part of it that was committed before. That refuses a new append, but not the retry
    of the one that used the part: which of them it is, its producer or its key will tell.
    """

    append: Append
    used: PartUsed | None
