"""Deciding an append: what a POST does to a stream, as one pure function.

The order of the checks is the contract (docs/reference/http.md has it as a table). A retry of a
request that was accepted is recognised before anything that may have changed since can refuse it,
so a duplicate is always answered as a duplicate.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from fencepost.protocol.batches import Batch
from fencepost.protocol.books import (
    BooksChange,
    BooksClosed,
    BooksPending,
    BooksRequest,
    CutInvalid,
    decide_books,
    may_change,
)
from fencepost.protocol.claims import (
    Actor,
    ClaimCompleted,
    EpochGuarded,
    NotHolder,
    held,
    is_completed,
    refuse,
)
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.leases import GroupGone, LeaseLost, LeaseRef
from fencepost.protocol.offsets import Offset
from fencepost.protocol.rates import TooFast
from fencepost.protocol.streams import Producer, Remembered, Stream, pack


class ProducerTuple(msgspec.Struct, frozen=True, gc=False):
    """Who sends, in which session, as which request of it."""

    id: str
    epoch: int
    seq: int


class Append(msgspec.Struct, frozen=True, gc=False):
    """A request to add a batch to a stream, to close it, or both.

    `digest` is what a repeated request is compared by: content type, closing, and data.
    """

    path: str
    batch: Batch | None
    media_type: str | None
    closes: bool = False
    producer: ProducerTuple | None = None
    seq: str | None = None
    digest: bytes = b""
    # What only some requests have, behind one field so that the others pay for one.
    conditions: Conditions | None = None
    # Who asks; None without authorization.
    actor: Actor | None = None

    @property
    def principal(self) -> str:
        """The principal's name, which scopes keys; empty without authorization."""
        return "" if self.actor is None else self.actor.name


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """What must hold for an append to be accepted, beyond the order of its producer."""

    if_match: Offset | int | Literal["*"] | None = None
    """The tail must be here, or the last message must have this version; `*`: the stream must
    exist."""
    if_empty: bool = False
    """The stream must be empty, or not exist: then it is made (If-None-Match: *)."""
    create_as: str | None = None
    """Make the stream with this content type when it does not exist."""
    producer_if: tuple[int, int] | None = None
    """The producer must be at exactly this epoch and sequence number."""
    strict: bool = False
    """A duplicate with another content is refused, not answered as done."""
    key: str | None = None
    """The Idempotency-Key."""
    lease: LeaseRef | None = None
    """This lease must be current."""
    books: BooksRequest | None = None
    """What the append does to the books of its stream."""

    @property
    def makes(self) -> str | None:
        """The content type to make a missing stream with; None when it may not be made."""
        return None if self.if_match == "*" else self.create_as


NO_CONDITIONS = Conditions()


class KeyRecord(msgspec.Struct, frozen=True, gc=False):
    """What an Idempotency-Key stands for: the request it came with, and where that went."""

    digest: bytes
    start: Offset
    tail: Offset
    closed: bool
    position: int
    created_ms: int


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Accepted: the batch starts at `start` and the stream now ends at `tail`.

    `position` is that of the last message, in the order of all messages of all streams.
    """

    start: Offset
    tail: Offset
    closed: bool
    producer: Producer | None
    position: int
    books: BooksChange | None = None


class Duplicate(NamedTuple):
    """Accepted earlier: nothing is stored again. `original` is None when it is too long ago."""

    tail: Offset
    closed: bool
    producer_epoch: int
    producer_seq: int
    original: Remembered | None
    matches: bool | None
    books_closed: bool = False


class Replayed(NamedTuple):
    """The key was used before, for the same request: this is what was answered then."""

    original: KeyRecord
    books_closed: bool = False


class KeyReused(NamedTuple):
    """The key was used before, for another request."""

    first_used_ms: int


class KeyDisagrees(NamedTuple):
    """The key and the producer headers do not speak of the same request."""


class OtherContent(NamedTuple):
    """A strict duplicate whose content differs from the original, or is too old to compare."""

    original: Remembered | None


class AlreadyClosed(NamedTuple):
    """A close of a closed stream that adds nothing: success, and nothing to do."""

    tail: Offset


class StreamClosed(NamedTuple):
    """The stream takes no more appends; `tail` is its final offset."""

    tail: Offset


class StaleEpoch(NamedTuple):
    """A newer session of this producer exists: this one must stop."""

    epoch: int


class EpochStart(NamedTuple):
    """A new epoch must begin at sequence number 0."""

    epoch: int
    seq: int


class SequenceGap(NamedTuple):
    """A request between the last accepted one and this one is missing."""

    expected: int
    received: int


class TypeMismatch(NamedTuple):
    """The stream holds another content type."""

    expected: str


class ProducerMoved(NamedTuple):
    """The producer is not where Producer-If says: it is here, or unknown (None)."""

    epoch: int | None
    seq: int | None


class TailMoved(NamedTuple):
    """If-Match names another tail, or If-None-Match a stream that is not empty."""

    tail: Offset


class SeqRegression(NamedTuple):
    """Stream-Seq must grow; `last` is the value it has to pass."""

    last: str


AppendOutcome = (
    Appended
    | Duplicate
    | Replayed
    | KeyReused
    | KeyDisagrees
    | OtherContent
    | AlreadyClosed
    | StreamClosed
    | BooksClosed
    | BooksPending
    | CutInvalid
    | StaleEpoch
    | EpochStart
    | SequenceGap
    | TypeMismatch
    | ProducerMoved
    | TailMoved
    | SeqRegression
    | NotHolder
    | EpochGuarded
    | ClaimCompleted
    | TooFast
    | LeaseLost
    | GroupGone
    | LimitExceeded
)


def decide_append(
    stream: Stream,
    producer: Producer | None,
    request: Append,
    *,
    key: KeyRecord | None = None,
    lost: LeaseLost | GroupGone | None = None,
    position: int,
    now_ms: int,
) -> AppendOutcome:
    """What `request` does to `stream`.

    `producer` is what its producer id has done before, `key` what its Idempotency-Key stands for,
    `lost` says that its lease is not current, `position` is the one that its first message gets if
    it is accepted.
    """
    claim = request.producer
    conditions = request.conditions or NO_CONDITIONS
    if key is not None:
        return _replay(producer, request, key, books_closed=stream.books_closed)
    if claim is not None and producer is not None:
        if claim.epoch < producer.epoch:
            return StaleEpoch(producer.epoch)
        if claim.epoch == producer.epoch and claim.seq <= producer.seq:
            return _duplicate(stream, producer, claim, request.digest, conditions)
        if request.actor is not None:
            forbidden = refuse(
                request.actor, producer, claim.epoch, producer_id=claim.id, now_ms=now_ms
            )
            if forbidden is not None:
                return forbidden
    if stream.closed:
        if request.batch is None and request.closes and claim is None:
            return AlreadyClosed(stream.tail)
        return StreamClosed(stream.tail)
    if stream.books_closed_at is not None and not _changes_books(request, conditions):
        return BooksClosed(stream.tail)
    if (
        claim is not None
        and producer is not None
        and request.actor is not None
        and is_completed(request.actor, producer, claim.epoch)
    ):
        return ClaimCompleted()
    if request.batch is not None and request.media_type != stream.media_type:
        return TypeMismatch(stream.content_type)
    if claim is not None:
        refused = _out_of_sequence(producer, claim)
        if refused is not None:
            return refused
    if request.conditions is not None and (
        conditions.if_match is not None
        or conditions.if_empty
        or conditions.producer_if is not None
        or lost is not None
    ):
        unmet = _unmet(stream, producer, conditions, lost)
        if unmet is not None:
            return unmet
    if request.seq is not None and stream.seq is not None and request.seq <= stream.seq:
        return SeqRegression(stream.seq)
    accepted = _accepted(stream, producer, request, position=position, now_ms=now_ms)
    if conditions.books is None:
        return accepted
    return _with_books(stream, request, accepted, conditions.books)


def _changes_books(request: Append, conditions: Conditions) -> bool:
    """Whether closed books let a request in."""
    return conditions.books is not None and may_change(
        conditions.books,
        has_data=request.batch is not None or request.closes,
        names_tail=conditions.if_match not in (None, "*"),
    )


def _with_books(
    stream: Stream, request: Append, accepted: Appended, books: BooksRequest
) -> Appended | CutInvalid:
    has_data = request.batch is not None or request.closes
    change = decide_books(
        books,
        closed=stream.books_closed,
        first=stream.first,
        start=accepted.start,
        has_data=has_data,
    )
    if isinstance(change, CutInvalid):
        return change
    # Without data no message was given the position that would have come next.
    position = accepted.position if has_data else accepted.position - 1
    return msgspec.structs.replace(accepted, position=position, books=change)


def _accepted(
    stream: Stream, producer: Producer | None, request: Append, *, position: int, now_ms: int
) -> Appended:
    start = tail = stream.tail
    batch = request.batch
    last = position
    if batch is not None:
        # As `Offset(...)`, without its constructor in Python, which each append would pay for.
        tail = tuple.__new__(Offset, (start[0] + batch.messages, start[1] + batch.size))
        last += batch.messages - 1
    claim = request.producer
    if claim is None:
        return Appended(start, tail, request.closes, None, last)
    packed = pack(start, request.digest)
    if producer is None or claim.epoch != producer.epoch:
        advanced = Producer.opening(claim.id, claim.epoch, packed, position=position, now_ms=now_ms)
    else:
        advanced = producer.next(claim.seq, packed, position=position, now_ms=now_ms)
    if request.actor is not None:
        advanced = held(request.actor, producer, advanced)
    return Appended(start, tail, request.closes, advanced, last)


def key_record(request: Append, outcome: Appended, *, now_ms: int) -> KeyRecord:
    """What the key of an accepted request stands for from now on."""
    return KeyRecord(
        request.digest, outcome.start, outcome.tail, outcome.closed, outcome.position, now_ms
    )


def _replay(
    producer: Producer | None, request: Append, key: KeyRecord, *, books_closed: bool
) -> Replayed | KeyReused | KeyDisagrees:
    if key.digest != request.digest:
        return KeyReused(key.created_ms)
    claim = request.producer
    if claim is not None:
        known = None
        if producer is not None and claim.epoch == producer.epoch and claim.seq <= producer.seq:
            known = producer.remembered(claim.seq)
        # A batch too old to be remembered cannot contradict the key; a newer epoch has forgotten
        # all of the old one's, and only says that this was sent before it.
        new = (
            producer is None
            or claim.epoch > producer.epoch
            or (claim.epoch == producer.epoch and claim.seq > producer.seq)
        )
        if new or (known is not None and known.offset != key.start):
            return KeyDisagrees()
    return Replayed(key, books_closed)


def _duplicate(
    stream: Stream,
    producer: Producer,
    claim: ProducerTuple,
    digest: bytes,
    conditions: Conditions,
) -> Duplicate | OtherContent | KeyDisagrees:
    original = producer.remembered(claim.seq)
    matches = None if original is None else original.digest == digest
    if conditions.strict and not matches:
        return OtherContent(original)
    if conditions.key is not None and matches is False:
        return KeyDisagrees()
    return Duplicate(
        tail=stream.tail,
        closed=stream.closed,
        producer_epoch=producer.epoch,
        producer_seq=producer.seq,
        original=original,
        matches=matches,
        books_closed=stream.books_closed,
    )


def _out_of_sequence(
    producer: Producer | None, claim: ProducerTuple
) -> EpochStart | SequenceGap | None:
    """Why `claim`, which is neither stale nor a duplicate, is not the next one; None if it is."""
    if producer is None:
        # An unknown producer starts at 0 in any epoch: whatever it sent before is not here.
        return None if claim.seq == 0 else SequenceGap(0, claim.seq)
    if claim.epoch > producer.epoch:
        return None if claim.seq == 0 else EpochStart(claim.epoch, claim.seq)
    expected = producer.seq + 1
    return None if claim.seq == expected else SequenceGap(expected, claim.seq)


def _unmet(
    stream: Stream,
    producer: Producer | None,
    conditions: Conditions,
    lost: LeaseLost | GroupGone | None,
) -> ProducerMoved | LeaseLost | GroupGone | TailMoved | None:
    """The first condition that does not hold; None when all do."""
    wanted = conditions.producer_if
    if wanted is not None and (producer is None or (producer.epoch, producer.seq) != wanted):
        return ProducerMoved(*(None, None) if producer is None else (producer.epoch, producer.seq))
    if lost is not None:
        return lost
    tail = stream.tail
    wanted_tail = conditions.if_match
    if isinstance(wanted_tail, int):
        if tail.messages - 1 != wanted_tail:
            return TailMoved(tail)
    elif wanted_tail is not None and wanted_tail not in ("*", tail):
        return TailMoved(tail)
    if conditions.if_empty and tail.messages > 0:
        return TailMoved(tail)
    return None
