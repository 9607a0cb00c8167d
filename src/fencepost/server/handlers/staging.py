"""`/v1/staging/{txn}/{part}`: data that is uploaded before the commit that appends it.

A part is uploaded in numbered chunks. No reader sees it until a commit names it; a part that is not
named in time expires. `part_refused` says why a commit cannot use a part.

A bundle is one upload with chunks of many parts, for writers to thousands of streams. Its first
line says of each chunk which stream it is for, its type, its length and its piece; the chunks
follow, one behind the other. Piece 7 of a bundle that is uploaded to TXN/p is the part TXN/p.7, as
if it had been uploaded to there, so commits know nothing of bundles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from fencepost.http.exchanges import SHARED_BODY_BYTES_MAX
from fencepost.http.messages import Request, Response
from fencepost.protocol.batches import digest
from fencepost.protocol.commits import (
    Part,
    PartDropped,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartOverfull,
    PartRefusal,
    PartTwice,
    PartUsed,
    UnstageOutcome,
)
from fencepost.protocol.grants import APPEND
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.limits import Limits
from fencepost.protocol.streams import media_type
from fencepost.server import access
from fencepost.server.handlers import fields, parsing, rendering
from fencepost.server.handlers.fields import INTEGER_MAX, RefusedError, bad, decoded
from fencepost.server.handlers.querying import Parameters
from fencepost.server.handlers.rendering import BROWSER_BLOCK, refused
from fencepost.store.contract import (
    Bundle,
    ChunkConflict,
    Failed,
    PartClosed,
    Staged,
    StageOutcome,
    Store,
    TooManyParts,
    Unknown,
    Upload,
)

Respond = Callable[[Response], None]
BUNDLE = "application/vnd.fencepost.bundle"
INDEX_BYTES_MAX = 1 << 20


class _Piece(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the index of a bundle."""

    piece: int
    stream: str
    content_type: str
    bytes: int
    chunk: int = 0


_INDEX = msgspec.json.Decoder(list[_Piece])


class _Chunk(NamedTuple):
    """A chunk as it came, its messages not looked at yet."""

    part: Part
    ordinal: int
    media_type: str
    shown: str
    body: bytes


class Staging:
    """The handlers of staged parts. They answer from a callback, like an append."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    def stage(self, request: Request, answer: Respond, raw: bytes) -> Awaitable[Response] | None:
        if request.repeated:
            parsing.refuse_repeated(request)
        access.staging_allowed(request)
        chunks = self._chunks_of(request, raw)
        if len(request.body) > SHARED_BODY_BYTES_MAX:
            return self._stage_large(chunks)
        self._stage([self._upload(chunk) for chunk in chunks], answer)
        return None

    async def _stage_large(self, chunks: list[_Chunk]) -> Response:
        """An upload with a large body, which is read beside the loop."""
        uploads = await asyncio.to_thread(lambda: [self._upload(chunk) for chunk in chunks])
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def answer(response: Response) -> None:
            if not answered.done():  # the client may be gone by the time that it is stored
                answered.set_result(response)

        self._stage(uploads, answer)
        return await answered

    def _stage(self, uploads: list[Upload], answer: Respond) -> None:
        if len(uploads) == 1:
            [upload] = uploads
            self._store.stage(upload, lambda outcome: answer(_staged(upload, outcome)))
        else:
            self._store.stage_all(
                Bundle(uploads), lambda outcomes: answer(_all_staged(uploads, outcomes))
            )

    def unstage(self, request: Request, answer: Respond, raw: bytes) -> None:
        if request.repeated:
            parsing.refuse_repeated(request)
        access.staging_allowed(request)
        asked = Parameters(request, once=("first", "pieces"), repeatable=())
        most = self._limits.bundle_pieces_max
        pieces = asked.integer("pieces", "pieces_invalid", least=1, most=most, default=None)
        first = asked.integer("first", "pieces_invalid", least=0, most=INTEGER_MAX, default=0)
        part = self._part(request, raw)
        if pieces is None:
            self._store.unstage(part, lambda outcome: answer(_unstaged(outcome)))
            return
        outcomes: list[UnstageOutcome | Failed | Unknown] = []

        def dropped(outcome: UnstageOutcome | Failed | Unknown) -> None:
            outcomes.append(outcome)
            if len(outcomes) == pieces:
                # What was not there need not be dropped.
                kept = [one for one in outcomes if not isinstance(one, PartDropped | PartMissing)]
                answer(_unstaged(kept[0] if kept else PartDropped()))

        for number in range(first or 0, (first or 0) + pieces):
            self._store.unstage(_piece_of(part, number), dropped)

    def _part(self, request: Request, raw: bytes) -> Part:
        """The part that a request is about, as the store knows it."""
        names = raw.split(b"/")
        if len(names) != 2:
            raise bad("staging_path_invalid", "a part is uploaded to /v1/staging/TXN/PART")
        txn, part = (fields.stream_path(name, self._limits) for name in names)
        return Part(access.scope_of(request.principal) + txn, part)

    def _chunks_of(self, request: Request, raw: bytes) -> list[_Chunk]:
        """The chunks that a request brings, their content not looked at yet."""
        named = self._part(request, raw)
        kind = fields.content_type(request, self._limits)
        if kind is not None and media_type(kind) == BUNDLE:
            return self._pieces(request, named)
        chunk = Parameters(request, once=("chunk",), repeatable=()).get("chunk")
        ordinal = 0 if chunk is None else fields.integer(chunk.encode(), "chunk")
        self._check_ordinal(ordinal)
        if kind is None:
            raise bad("content_type_missing", "a part has the Content-Type of its stream")
        return [_Chunk(named, ordinal, media_type(kind), "a chunk", request.body)]

    def _pieces(self, request: Request, named: Part) -> list[_Chunk]:
        """The chunks of a bundle, each for a stream that the principal may append to."""
        Parameters(request, once=(), repeatable=())
        end = request.body.find(b"\n", 0, INDEX_BYTES_MAX)
        if end < 0:
            raise bad("bundle_invalid", "a bundle begins with a line of JSON: its index")
        index = decoded(_INDEX, request.body[:end], "bundle_invalid", "is no index of a bundle")
        if not index:
            raise bad("bundle_invalid", "a bundle holds at least one chunk")
        if len(index) > self._limits.bundle_pieces_max:
            most = self._limits.bundle_pieces_max
            raise commit_too_large("pieces of a bundle", "bundle_pieces_max", most)
        at = end + 1
        chunks = []
        for entry in index:
            chunks.append(self._piece(request, named, entry, at))
            at += entry.bytes
        if at != len(request.body):
            raise bad("bundle_invalid", "there are bytes behind the last chunk of the index")
        if len({(chunk.part, chunk.ordinal) for chunk in chunks}) < len(chunks):
            raise bad("bundle_invalid", "a bundle holds every chunk once")
        return chunks

    def _piece(self, request: Request, named: Part, entry: _Piece, at: int) -> _Chunk:
        stream = fields.check_path(entry.stream)
        if request.principal is not None:
            access.require(request.principal, APPEND, stream)
        if not 0 <= entry.piece <= INTEGER_MAX or not entry.chunk >= 0 or entry.bytes < 1:
            raise bad("bundle_invalid", "piece and chunk are from 0 on, and bytes from 1 on")
        self._check_ordinal(entry.chunk)
        media = media_type(fields.check_content_type(entry.content_type, self._limits))
        body = request.body[at : at + entry.bytes]
        if len(body) < entry.bytes:
            raise bad("bundle_invalid", "the body ends before the last chunk of the index")
        part = _piece_of(named, entry.piece)
        return _Chunk(part, entry.chunk, media, f"a chunk for {stream!r}", body)

    def _check_ordinal(self, ordinal: int) -> None:
        if ordinal >= self._limits.part_chunks_max:
            raise commit_too_large("chunks", "part_chunks_max", self._limits.part_chunks_max)

    def _upload(self, chunk: _Chunk) -> Upload:
        """A chunk with its messages, checked and counted: this may take long."""
        part, ordinal, media, what, body = chunk
        batch = parsing.batch_of(body, media, self._limits) if body else None
        if batch is None:
            raise bad("body_empty", f"{what} holds no message")
        return Upload(part, ordinal, media, batch, digest(media, False, batch.data))


def _piece_of(part: Part, piece: int) -> Part:
    return Part(part.txn, f"{part.part}.{piece}")


def _all_staged(
    uploads: Sequence[Upload], outcomes: Sequence[StageOutcome] | Failed | Unknown
) -> Response:
    """One answer to the chunks of a bundle; the first refusal stands for all."""
    if isinstance(outcomes, Failed | Unknown):
        return rendering.failed(outcomes)
    whole = Staged(0, 0, repeated=True)
    for upload, outcome in zip(uploads, outcomes, strict=True):
        if not isinstance(outcome, Staged):
            return _staged(upload, outcome)
        whole = Staged(
            whole.messages + outcome.messages,
            whole.bytes + outcome.bytes,
            whole.repeated and outcome.repeated,
        )
    return _staged(uploads[0], whole)


def _staged(upload: Upload, outcome: StageOutcome | Failed | Unknown) -> Response:
    match outcome:
        case Staged():
            shown = {
                "txn": access.without_scope(upload.part.txn),
                "part": upload.part.part,
                "chunk": upload.ordinal,
                "messages": outcome.messages,
                "bytes": outcome.bytes,
                "duplicate": outcome.repeated,
            }
            status = 200 if outcome.repeated else 201
            headers = [(b"Content-Type", b"application/json")]
            return Response(status, headers, msgspec.json.encode(shown), BROWSER_BLOCK)
        case ChunkConflict(detail):
            return refused(409, "chunk_conflict", "Chunk conflict", detail)
        case PartClosed(position):
            return refused(
                409,
                "part_committed",
                "Part committed",
                f"the part was committed at position {position}: nothing can be added",
            )
        case TooManyParts(parts_max):
            return refused(
                429,
                "too_many_parts",
                "Too many parts",
                f"at most {parts_max} parts wait at once (staged_parts_max)",
                (b"Retry-After", b"60"),
            )
        case LimitExceeded():
            return rendering.limit_exceeded(outcome)
        case Failed() | Unknown():
            return rendering.failed(outcome)


def _unstaged(outcome: UnstageOutcome | Failed | Unknown) -> Response:
    match outcome:
        case PartDropped():
            return Response(204, [], b"", BROWSER_BLOCK)
        case PartMissing(part):
            detail = f"{_shown(part)} is not staged: it was never uploaded or it expired"
            return refused(404, "part_missing", "No such part", detail)
        case PartUsed():
            return _part_used(outcome)
        case Failed() | Unknown():
            return rendering.failed(outcome)


def part_refused(refusal: PartRefusal) -> Response:
    """Why a commit cannot use a part that it names."""
    match refusal:
        case PartMissing(part):
            detail = f"{_shown(part)} is not staged: it was never uploaded or it expired"
            return refused(409, "part_missing", "No such part", detail)
        case PartUsed():
            return _part_used(refusal)
        case PartIncomplete(part, ordinal):
            detail = f"{_shown(part)} lacks its chunk {ordinal}"
            return refused(409, "part_incomplete", "Part incomplete", detail)
        case PartOverfull(part, chunks, said):
            detail = f"{_shown(part)} has {chunks} chunks, and the commit says {said}"
            return refused(409, "part_overfull", "Part overfull", detail)
        case PartMismatch(part, held, expected):
            detail = f"{_shown(part)} holds {held}, not {expected}"
            return refused(409, "part_type_mismatch", "Part type mismatch", detail)
        case PartTwice(part):
            detail = f"the commit names {_shown(part)} twice"
            return refused(400, "part_repeated", "Part repeated", detail)


def _part_used(used: PartUsed) -> Response:
    detail = f"{_shown(used.part)} was committed before, at position {used.position}"
    return refused(409, "part_committed", "Part committed", detail)


def _shown(part: Part) -> str:
    return f"the part {access.without_scope(part.txn)}/{part.part}"


def commit_too_large(what: str, name: str, limit: int) -> RefusedError:
    return RefusedError(
        413,
        "commit_too_large",
        "Too large",
        f"at most {limit} {what} ({name}): split the commit, or raise the limit",
    )
