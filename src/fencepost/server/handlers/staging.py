"""`/v1/staging/{txn}/{part}`: data that is uploaded before the commit that appends it.

A part is uploaded in numbered chunks. No reader sees it until a commit names it; a part that is not
named in time expires. `part_refused` says why a commit cannot use a part.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fencepost.http.messages import Request, Response
from fencepost.protocol.batches import digest
from fencepost.protocol.commits import (
    Part,
    PartDropped,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartOverfull,
    PartTwice,
    PartUsed,
    UnstageOutcome,
)
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.limits import Limits
from fencepost.protocol.streams import media_type
from fencepost.server import access
from fencepost.server.handlers import parsing, rendering
from fencepost.server.handlers.parsing import RefusedError, bad
from fencepost.server.handlers.querying import Parameters
from fencepost.server.handlers.rendering import BROWSER_BLOCK, refused
from fencepost.store.contract import (
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
PartRefusal = PartMissing | PartUsed | PartIncomplete | PartOverfull | PartMismatch | PartTwice


class Staging:
    """The handlers of staged parts. They answer from a callback, like an append."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    def stage(self, request: Request, answer: Respond, raw: bytes) -> None:
        if request.repeated:
            parsing.refuse_repeated(request)
        access.staging_allowed(request)
        upload = self._parse_upload(request, raw)
        self._store.stage(upload, lambda outcome: answer(_staged(upload, outcome)))

    def unstage(self, request: Request, answer: Respond, raw: bytes) -> None:
        if request.repeated:
            parsing.refuse_repeated(request)
        access.staging_allowed(request)
        Parameters(request, once=(), repeatable=())  # it is dropped as a whole
        part = self._part(request, raw)
        self._store.unstage(part, lambda outcome: answer(_unstaged(outcome)))

    def _part(self, request: Request, raw: bytes) -> Part:
        """The part that a request is about, as the store knows it."""
        names = raw.split(b"/")
        if len(names) != 2:
            raise bad("staging_path_invalid", "a part is uploaded to /v1/staging/TXN/PART")
        txn, part = (parsing.stream_path(name, self._limits) for name in names)
        return Part(access.scope_of(request.principal) + txn, part)

    def _parse_upload(self, request: Request, raw: bytes) -> Upload:
        named = self._part(request, raw)
        chunk = Parameters(request, once=("chunk",), repeatable=()).get("chunk")
        ordinal = 0 if chunk is None else parsing.integer(chunk.encode(), "chunk")
        if ordinal >= self._limits.part_chunks_max:
            raise commit_too_large("chunks", "part_chunks_max", self._limits.part_chunks_max)
        kind = parsing.content_type(request, self._limits)
        if kind is None:
            raise bad("content_type_missing", "a part has the Content-Type of its stream")
        media = media_type(kind)
        batch = parsing.batch_of(request.body, media, self._limits) if request.body else None
        if batch is None:
            raise bad("body_empty", "a chunk holds at least one message")
        return Upload(named, ordinal, media, batch, digest(media, False, batch.data))


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
