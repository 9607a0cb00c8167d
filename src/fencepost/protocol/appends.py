"""Deciding an append: what a POST does to a stream, as one pure function.

The order of the checks is the contract (docs/reference/http.md has it as a table). A retry of a
request that was accepted is recognised before anything that may have changed since can refuse it,
so a duplicate is always answered as a duplicate.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fencepost.protocol.batches import Batch
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Producer, Remembered, Stream, pack


class ProducerTuple(msgspec.Struct, frozen=True, gc=False):
    """Who sends, in which session, as which request of it."""

    id: str
    epoch: int
    seq: int


class Append(msgspec.Struct, frozen=True, gc=False):
    """A request to add a batch to a stream, to close it, or both."""

    path: str
    batch: Batch | None
    media_type: str | None
    closes: bool = False
    producer: ProducerTuple | None = None
    seq: str | None = None
    digest: bytes = b""


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Accepted: the batch starts at `start` and the stream now ends at `tail`."""

    start: Offset
    tail: Offset
    closed: bool
    producer: Producer | None


class Duplicate(NamedTuple):
    """Accepted earlier: nothing is stored again. `original` is None when it is too long ago."""

    tail: Offset
    closed: bool
    producer_epoch: int
    producer_seq: int
    original: Remembered | None
    matches: bool | None


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


class SeqRegression(NamedTuple):
    """Stream-Seq must grow; `last` is the value it has to pass."""

    last: str


AppendOutcome = (
    Appended
    | Duplicate
    | AlreadyClosed
    | StreamClosed
    | StaleEpoch
    | EpochStart
    | SequenceGap
    | TypeMismatch
    | SeqRegression
)


def decide_append(
    stream: Stream, producer: Producer | None, request: Append, *, position: int, now_ms: int
) -> AppendOutcome:
    """What `request` does to `stream`; `producer` is what its producer id has done before.

    `position` is the one that the batch gets in the order of all batches if it is accepted.
    """
    claim = request.producer
    if claim is not None and producer is not None:
        if claim.epoch < producer.epoch:
            return StaleEpoch(producer.epoch)
        if claim.epoch == producer.epoch and claim.seq <= producer.seq:
            return _duplicate(stream, producer, claim, request.digest)
    if stream.closed:
        if request.batch is None and request.closes and claim is None:
            return AlreadyClosed(stream.tail)
        return StreamClosed(stream.tail)
    if request.batch is not None and request.media_type != stream.media_type:
        return TypeMismatch(stream.content_type)
    if claim is not None:
        refused = _out_of_sequence(producer, claim)
        if refused is not None:
            return refused
    if request.seq is not None and stream.seq is not None and request.seq <= stream.seq:
        return SeqRegression(stream.seq)

    start = stream.tail
    batch = request.batch
    tail = (
        start
        if batch is None
        else Offset(start.messages + batch.messages, start.bytes + batch.size)
    )
    if claim is None:
        return Appended(start, tail, request.closes, None)
    packed = pack(start, request.digest)
    if producer is None or claim.epoch != producer.epoch:
        advanced = Producer.opening(claim.id, claim.epoch, packed, position=position, now_ms=now_ms)
    else:
        advanced = producer.next(claim.seq, packed, position=position, now_ms=now_ms)
    return Appended(start, tail, request.closes, advanced)


def _duplicate(
    stream: Stream, producer: Producer, claim: ProducerTuple, digest: bytes
) -> Duplicate:
    original = producer.remembered(claim.seq)
    return Duplicate(
        tail=stream.tail,
        closed=stream.closed,
        producer_epoch=producer.epoch,
        producer_seq=producer.seq,
        original=original,
        matches=None if original is None else original.digest == digest,
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
