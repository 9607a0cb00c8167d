"""What the store ought to hold, in the plainest Python: the measure for every crash.

The store decides requests one after the other, so after a crash it must hold exactly what some
number of the first requests make, none of them by half. `Model` is applied to the same requests
and copied after each; a recovered store is compared with the copies. It shares no rule with the
product: the rules here are written down a second time, on purpose.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

from fencepost.protocol.appends import Append, ProducerTuple
from fencepost.protocol.batches import bytes_batch
from fencepost.protocol.commits import Commit, CommitItem, Part
from fencepost.protocol.creates import Create
from fencepost.protocol.offsets import Offset
from fencepost.store.contract import Upload


class Remove(NamedTuple):
    """A request to delete."""

    path: str


class Truncate(NamedTuple):
    """A request to drop the beginning of a stream; all of it without an offset."""

    path: str
    before: Offset | None


class Drop(NamedTuple):
    """A request to drop a staged part."""

    part: Part


Request = Append | Create | Remove | Commit | Truncate | Upload | Drop
Messages = tuple[tuple[bytes, ...], ...]
"""What a request carries: one tuple of messages for each append that it is made of."""


@dataclass(frozen=True)
class Kept:
    """A stream as it should be."""

    content_type: str
    messages: tuple[bytes, ...]
    closed: bool
    ttl_s: int | None
    touched_ms: int
    seq: str | None = None
    producers: tuple[tuple[str, tuple[int, int]], ...] = ()
    keys: tuple[tuple[str, bytes], ...] = ()
    source: str | None = None
    forks: int = 0
    soft_deleted: bool = False
    dropped: int = 0  # messages at the beginning that were truncated away
    books_closed: bool = False

    def producer(self, name: str) -> tuple[int, int] | None:
        return dict(self.producers).get(name)

    def expired(self, now_ms: int) -> bool:
        return self.ttl_s is not None and self.touched_ms + self.ttl_s * 1000 <= now_ms

    @property
    def data(self) -> bytes:
        kept = self.messages[self.dropped :]
        return (b"," if self.content_type == "application/json" else b"").join(kept)

    def offset(self, messages: int) -> Offset:
        return Offset(messages, sum(map(len, self.messages[:messages])))

    @property
    def tail(self) -> Offset:
        return self.offset(len(self.messages))


class StagedChunk(NamedTuple):
    """A chunk of a part as it should be."""

    digest: bytes
    messages: tuple[bytes, ...]


@dataclass(frozen=True)
class StagedPart:
    """A part as it should be."""

    content_type: str
    chunks: tuple[tuple[int, StagedChunk], ...] = ()
    committed: bool = False


class View(NamedTuple):
    """What can be seen of a stream from outside; None stands for no stream."""

    content_type: str
    data: bytes
    first: Offset
    tail: Offset
    closed: bool
    ttl_s: int | None
    books_closed: bool


class StagedView(NamedTuple):
    """What is on disk of a part: its chunks by number, and whether it was committed."""

    content_type: str
    chunks: tuple[tuple[int, bytes], ...]
    committed: bool


SOFT = "soft-deleted"
Views = dict[str | Part, View | StagedView | str | None]


class Model:
    """All streams by path, and all staged parts."""

    def __init__(
        self,
        streams: dict[str, Kept] | None = None,
        parts: dict[Part, StagedPart] | None = None,
    ) -> None:
        self.streams = dict(streams or {})
        self.parts = dict(parts or {})

    def copy(self) -> "Model":
        return Model(self.streams, self.parts)

    def alive(self, path: str, now_ms: int) -> Kept | None:
        """The stream at `path`; one whose time is over ends here."""
        kept = self.streams.get(path)
        if kept is not None and kept.expired(now_ms):
            del self.streams[path]
            return None
        return kept

    def view(self, path: str, now_ms: int) -> View | str | None:
        kept = self.alive(path, now_ms)
        if kept is None:
            return None
        if kept.soft_deleted:
            return SOFT
        first = kept.offset(kept.dropped)
        state = (kept.closed, kept.ttl_s, kept.books_closed)
        return View(kept.content_type, kept.data, first, kept.tail, *state)

    def staged(self) -> dict[Part, StagedView]:
        """What the disk should have of all parts."""
        return {
            part: StagedView(
                held.content_type,
                tuple(sorted((ordinal, chunk.digest) for ordinal, chunk in held.chunks)),
                held.committed,
            )
            for part, held in self.parts.items()
        }

    def apply(self, request: Request, messages: Messages, now_ms: int) -> str:
        """Do what `request` asks, or refuse it; the name of the outcome."""
        if isinstance(request, Append):
            return self._append(request, messages[0], now_ms)
        if isinstance(request, Create):
            return self._create(request, messages[0], now_ms)
        if isinstance(request, Commit):
            return self._commit(request, messages, now_ms)
        if isinstance(request, Truncate):
            return self._truncate(request, now_ms)
        if isinstance(request, Upload):
            return self._stage(request, messages[0])
        if isinstance(request, Drop):
            return self._drop(request.part)
        return self._remove(request.path, now_ms)

    def _commit(self, request: Commit, messages: Messages, now_ms: int) -> str:
        draft = self.copy()
        names = [
            draft._item(item, carried, now_ms)
            for item, carried in zip(request.items, messages, strict=True)
        ]
        done = {"Appended"}
        repeated = {"Duplicate", "Replayed", "AlreadyClosed"}
        if any(name not in done | repeated for name in names):
            return "CommitRefused"
        if set(names) <= repeated:
            return "CommitDuplicate"
        if not set(names) <= done:
            return "CommitPartial"
        self.streams = draft.streams
        self.parts = draft.parts
        return "Committed"

    def _item(self, item: CommitItem, messages: tuple[bytes, ...], now_ms: int) -> str:
        """One append of a commit, with what its parts hold if it names some."""
        append = item.append
        if not item.parts:
            return self._append(append, messages, now_ms)
        if len(set(item.parts)) < len(item.parts):
            return "PartTwice"
        used = False
        fingerprint = hashlib.sha256(b"%d" % append.closes)
        carried: tuple[bytes, ...] = ()
        for part in item.parts:
            held = self.parts.get(part)
            if held is None:
                return "PartMissing"
            chunks = [chunk for _, chunk in sorted(held.chunks)]
            if dict(held.chunks).keys() != set(range(len(chunks))):
                return "PartIncomplete"
            if held.content_type != append.media_type:
                return "PartMismatch"
            used = used or held.committed
            for chunk in chunks:
                fingerprint.update(chunk.digest)
                carried += chunk.messages
            self.parts[part] = replace(held, committed=True)
        mark = fingerprint.digest()[:16]
        gathered = Append(
            append.path,
            bytes_batch(b"".join(carried)),
            append.media_type,
            append.closes,
            append.producer,
            append.seq,
            mark,
            append.conditions,
        )
        name = self._append(gathered, carried, now_ms)
        return "PartUsed" if name == "Appended" and used else name

    def _stage(self, upload: Upload, messages: tuple[bytes, ...]) -> str:
        held = self.parts.get(upload.part, StagedPart(upload.media_type))
        chunks = dict(held.chunks)
        if upload.ordinal in chunks:
            return "Staged" if chunks[upload.ordinal].digest == upload.digest else "ChunkConflict"
        if held.committed:
            return "PartClosed"
        if held.content_type != upload.media_type:
            return "ChunkConflict"
        chunk = (upload.ordinal, StagedChunk(upload.digest, messages))
        self.parts[upload.part] = replace(held, chunks=(*held.chunks, chunk))
        return "Staged"

    def _drop(self, part: Part) -> str:
        held = self.parts.get(part)
        if held is None:
            return "PartMissing"
        if held.committed:
            return "PartUsed"
        del self.parts[part]
        return "PartDropped"

    def _truncate(self, request: Truncate, now_ms: int) -> str:
        kept = self.alive(request.path, now_ms)
        if kept is None:
            return "Missing"
        if kept.soft_deleted:
            return "SoftDeleted"
        places = [kept.offset(count) for count in range(len(kept.messages) + 1)]
        before = places[-1] if request.before is None else request.before
        if before not in places:
            return "BadOffset"
        if before.messages <= kept.dropped:
            return "Uncut"
        self.streams[request.path] = replace(kept, dropped=before.messages)
        return "Cut"

    def _append(self, request: Append, messages: tuple[bytes, ...], now_ms: int) -> str:
        kept = self.alive(request.path, now_ms)
        if kept is None:
            return "Missing"
        if kept.soft_deleted:
            return "SoftDeleted"
        kept = replace(kept, touched_ms=now_ms)
        self.streams[request.path] = kept
        key = request.conditions.key if request.conditions is not None else None
        used = dict(kept.keys).get(key or "")
        if used is not None:
            return "Replayed" if used == request.digest else "KeyReused"
        refused = _refusal(kept, request)
        if refused is not None:
            return refused
        producers = dict(kept.producers)
        if request.producer is not None:
            producers[request.producer.id] = (request.producer.epoch, request.producer.seq)
        self.streams[request.path] = replace(
            kept,
            messages=kept.messages + messages,
            closed=request.closes,
            books_closed=_closes_books(kept, request),
            seq=request.seq or kept.seq,
            producers=tuple(producers.items()),
            keys=kept.keys if key is None else (*kept.keys, (key, request.digest)),
        )
        return "Appended"

    def _create(self, request: Create, messages: tuple[bytes, ...], now_ms: int) -> str:
        kept = self.alive(request.path, now_ms)
        if kept is not None:
            return _compared(kept, request)
        inherited: tuple[bytes, ...] = ()
        source, dropped = None, 0
        if request.fork_from is not None:
            source = request.fork_from.path
            origin = self.alive(source, now_ms)
            if origin is None:
                return "SourceMissing"
            if origin.soft_deleted:
                return "SourceDeleted"
            inherited, dropped = origin.messages, origin.dropped
            self.streams[source] = replace(origin, forks=origin.forks + 1)
        assert request.content_type is not None
        self.streams[request.path] = Kept(
            request.content_type,
            inherited + messages,
            request.closed,
            request.lifetime.ttl_s,
            now_ms,
            source=source,
            dropped=dropped,
        )
        return "Created"

    def _remove(self, path: str, now_ms: int) -> str:
        kept = self.alive(path, now_ms)
        if kept is None:
            return "Missing"
        if kept.soft_deleted:
            return "SoftDeleted"
        self._end(path, kept)
        return "Deleted"

    def _end(self, path: str, kept: Kept) -> None:
        if kept.forks:
            self.streams[path] = replace(kept, soft_deleted=True)
            return
        del self.streams[path]
        if kept.source is not None:
            source = self.streams[kept.source]
            source = replace(source, forks=source.forks - 1)
            self.streams[kept.source] = source
            if source.soft_deleted and source.forks == 0:
                self._end(kept.source, replace(source, soft_deleted=False))


def _closes_books(kept: Kept, request: Append) -> bool:
    books = request.conditions.books if request.conditions is not None else None
    return kept.books_closed if books is None else books.state == "close"


def _compared(kept: Kept, request: Create) -> str:
    if kept.soft_deleted:
        return "PathBlocked"
    source = request.fork_from.path if request.fork_from is not None else None
    same = (kept.closed, kept.source, kept.content_type, kept.ttl_s) == (
        request.closed,
        source,
        request.content_type,
        request.lifetime.ttl_s,
    )
    return "Exists" if same else "ConfigConflict"


def _refusal(kept: Kept, request: Append) -> str | None:
    claim = request.producer
    known = None if claim is None else kept.producer(claim.id)
    if claim is not None and known is not None:
        if claim.epoch < known[0]:
            return "StaleEpoch"
        if claim.epoch == known[0] and claim.seq <= known[1]:
            return "Duplicate"
    if kept.closed:
        only_closes = request.closes and request.batch is None and claim is None
        return "AlreadyClosed" if only_closes else "StreamClosed"
    books = request.conditions.books if request.conditions is not None else None
    if kept.books_closed and (books is None or books.state != "open"):
        return "BooksClosed"
    if request.batch is not None and request.media_type != kept.content_type:
        return "TypeMismatch"
    if claim is not None and (out := _out_of_order(known, claim)) is not None:
        return out
    if request.seq is not None and kept.seq is not None and request.seq <= kept.seq:
        return "SeqRegression"
    return None


def _out_of_order(known: tuple[int, int] | None, claim: ProducerTuple) -> str | None:
    if known is None:
        return None if claim.seq == 0 else "SequenceGap"
    if claim.epoch > known[0]:
        return None if claim.seq == 0 else "EpochStart"
    return None if claim.seq == known[1] + 1 else "SequenceGap"
