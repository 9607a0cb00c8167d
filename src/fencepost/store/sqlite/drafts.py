"""Drafts: deciding several appends on top of each other before any of them is carried out.

A draft works on copies of the streams and producers that it touches. When every append is accepted
it is carried out on the ledger in the same order, so that it comes to exactly what was decided;
else it is dropped, and nothing has happened.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

from fencepost.protocol.appends import (
    Append,
    Appended,
    AppendOutcome,
    decide_append,
)
from fencepost.protocol.batches import Batch, StagedChunk
from fencepost.protocol.commits import (
    CommitItem,
    ItemDeleted,
    ItemMissing,
    ItemOutcome,
    Part,
    PartIncomplete,
    PartMissing,
    PartTwice,
    PartUsed,
)
from fencepost.protocol.streams import Producer, Stream
from fencepost.store.sqlite.ledger import Entry, Ledger

Lookup = Callable[[str, tuple[object, ...]], list[tuple[object, ...]]]


class Draft:
    """Appends that are decided together."""

    def __init__(
        self, ledger: Ledger, alive: Callable[[str, int], Entry | None], now_ms: int
    ) -> None:
        self._ledger = ledger
        self._alive = alive
        self._now_ms = now_ms
        self._position = ledger.next_position
        self._next_stream = ledger.next_stream
        self._streams: dict[str, Stream] = {}
        self._producers: dict[tuple[int, str], Producer | None] = {}
        self._parts: set[Part] = set()
        self.made: dict[str, Stream] = {}
        """Streams that do not exist yet, as they are before their first append."""
        self.decided: list[tuple[Append, Appended]] = []

    @property
    def parts(self) -> set[Part]:
        """The staged parts that the draft uses."""
        return self._parts

    def decide(self, item: CommitItem) -> ItemOutcome:
        """What one more append comes to."""
        append = item.append
        if item.parts:
            gathered = self._gather(item)
            if not isinstance(gathered, Append):
                return gathered
            append = gathered
        stream = self._stream(append)
        if not isinstance(stream, Stream):
            return stream
        outcome = self._decide(stream, append)
        if isinstance(outcome, Appended):
            self._carry(stream, append, outcome)
        return outcome

    def _decide(self, stream: Stream, append: Append) -> AppendOutcome:
        claim, conditions = append.producer, append.conditions
        is_made = stream.path in self.made
        producer = None
        if claim is not None:
            place = (stream.id, claim.id)
            if place not in self._producers:
                entry = None if is_made else self._ledger.find_id(stream.id)
                self._producers[place] = (
                    None if entry is None else self._ledger.find_producer(entry, claim.id)
                )
            producer = self._producers[place]
        key = None
        if conditions is not None and conditions.key is not None and not is_made:
            key = self._ledger.find_key(stream.id, conditions.key)
        return decide_append(
            stream, producer, append, key=key, position=self._position, now_ms=self._now_ms
        )

    def _carry(self, stream: Stream, append: Append, outcome: Appended) -> None:
        stream.tail = outcome.tail
        stream.closed = stream.closed or outcome.closed
        stream.seq = append.seq or stream.seq
        if outcome.producer is not None:
            self._producers[stream.id, outcome.producer.id] = outcome.producer
        self._position += 0 if append.batch is None else append.batch.messages
        self._position += outcome.closed  # its marker
        self.decided.append((append, outcome))

    def _stream(self, append: Append) -> Stream | ItemMissing | ItemDeleted:
        """The draft's copy of the stream; made up when it does not exist but may be made."""
        stream = self._streams.get(append.path)
        if stream is not None:
            return stream
        entry = self._alive(append.path, self._now_ms)
        if entry is not None:
            if entry.stream.soft_deleted:
                return ItemDeleted()
            stream = copy.copy(entry.stream)
        else:
            conditions = append.conditions
            if conditions is None or conditions.create_as is None:
                return ItemMissing()
            stream = Stream(
                self._next_stream, append.path, conditions.create_as, created_ms=self._now_ms
            )
            self._next_stream += 1
            self.made[append.path] = copy.copy(stream)
        self._streams[append.path] = stream
        return stream

    def _gather(
        self, item: CommitItem
    ) -> Append | PartMissing | PartUsed | PartIncomplete | PartTwice:
        """The append with its staged parts as its batch."""
        chunks: list[StagedChunk] = []
        hashed = hashlib.sha256()
        media_type = item.append.media_type
        for part in item.parts:
            if part in self._parts:
                return PartTwice(part)
            found = self._ledger.find_part(part)
            if found is None:
                return PartMissing(part)
            media_type, committed, rows = found
            if committed is not None:
                return PartUsed(part, committed)
            self._parts.add(part)
            for expected, (chunk_id, ordinal, count, size, digest) in enumerate(rows):
                if ordinal != expected:
                    return PartIncomplete(part, expected)
                chunks.append(StagedChunk(chunk_id, count, size))
                hashed.update(digest)
        batch = Batch(
            messages=sum(chunk.messages for chunk in chunks),
            size=sum(chunk.size for chunk in chunks),
            data=b"",
            lengths=None,
            chunks=tuple(chunks),
        )
        original = item.append
        return Append(
            original.path,
            batch,
            media_type,
            original.closes,
            original.producer,
            original.seq,
            hashed.digest()[:16],
            original.conditions,
        )
