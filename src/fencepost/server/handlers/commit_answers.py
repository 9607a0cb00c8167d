"""Answers to commits and to staging: what became of each append, or which one was refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.http.messages import Response
from fencepost.protocol.commits import (
    Commit,
    CommitDuplicate,
    CommitKeyReused,
    CommitOutcome,
    CommitPartial,
    CommitRefused,
    CommitReplayed,
    Committed,
    CommittedInSlices,
    ItemDeleted,
    ItemMissing,
    ItemOutcome,
    Part,
    PartDropped,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartOverfull,
    PartTwice,
    PartUsed,
    UnstageOutcome,
    describe_commit,
)
from fencepost.protocol.writers import (
    BatchDone,
    WriterFenced,
    WriterHeld,
    WriterMissing,
    WriterQueryChanged,
)
from fencepost.server import access
from fencepost.server.handlers import rendering, writers
from fencepost.server.handlers.parsing import rfc3339
from fencepost.server.handlers.rendering import BROWSER_BLOCK, refused
from fencepost.store.contract import (
    ChunkConflict,
    Failed,
    PartClosed,
    Staged,
    StageOutcome,
    TooManyParts,
    Unknown,
    Upload,
)


def committed(
    commit: Commit,
    outcome: CommitOutcome | Failed | Unknown,
    may_read: Callable[[str], bool] | None,
) -> Response:
    match outcome:
        case Committed():
            answer = _readable(commit, describe_commit(commit, outcome), may_read)
            return _described(answer, duplicate=False, batch=_batch_of(commit))
        case CommittedInSlices(answer, duplicate):
            answer = _readable(commit, answer, may_read)
            return _described(answer, duplicate=duplicate, batch=_batch_of(commit))
        case CommitDuplicate():
            answer = _readable(commit, describe_commit(commit, outcome), may_read)
            return _described(answer, duplicate=True, batch=_batch_of(commit))
        case CommitReplayed(answer):
            return _described(_readable(commit, answer, may_read), duplicate=True)
        case CommitKeyReused(first_used_ms):
            return refused(
                409,
                "idempotency_key_reused",
                "Idempotency key reused",
                f"the key was used for another commit at {rfc3339(first_used_ms)}",
            )
        case CommitRefused(index, refusal):
            return at_item(_item_refused(refusal), index)
        case CommitPartial(duplicates):
            return refused(
                409,
                "commit_partial",
                "Partly done before",
                f"some appends were made before ({list(duplicates[:10])}) and others not;"
                " nothing was done",
            )
        case BatchDone(batch, matches):
            shown: dict[str, object] = {
                "duplicate": True,
                "batch": batch,
                "match": matches,
                "appends": [],
            }
            headers = [(b"Content-Type", b"application/json")]
            return Response(200, headers, msgspec.json.encode(shown), BROWSER_BLOCK)
        case WriterMissing() | WriterHeld() | WriterQueryChanged() | WriterFenced():
            return writers.refusal(outcome, missing_status=409)
        case Failed() | Unknown():
            return rendering.failed(outcome)


def _batch_of(commit: Commit) -> int | None:
    return None if commit.writer is None else commit.writer.batch


def _readable(commit: Commit, answer: bytes, may_read: Callable[[str], bool] | None) -> bytes:
    """An answer that says of streams which may not be read only that they were appended to."""
    if may_read is None or all(may_read(item.append.path) for item in commit.items):
        return answer
    shown = [
        append if may_read(append["stream"]) else {"stream": append["stream"]}
        for append in msgspec.json.decode(answer)["appends"]
    ]
    return msgspec.json.encode({"appends": shown})


def _described(answer: bytes, *, duplicate: bool, batch: int | None = None) -> Response:
    published = b"" if batch is None else b'"batch":%d,' % batch
    body = b'{"duplicate":%b,%b%b' % (b"true" if duplicate else b"false", published, answer[1:])
    return Response(200, [(b"Content-Type", b"application/json")], body, BROWSER_BLOCK)


def _item_refused(refusal: ItemOutcome) -> Response:
    match refusal:
        case ItemMissing():
            return rendering.missing()
        case ItemDeleted():
            return rendering.soft_deleted()
        case PartMissing(part):
            detail = f"{_shown(part)} is not staged: it was never uploaded or it expired"
            return refused(409, "part_missing", "No such part", detail)
        case PartUsed(part, position):
            detail = f"{_shown(part)} was committed before, at position {position}"
            return refused(409, "part_committed", "Part committed", detail)
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
        case _:
            return rendering.appended(refusal)


def _shown(part: Part) -> str:
    return f"the part {access.without_scope(part.txn)}/{part.part}"


def at_item(response: Response, index: int) -> Response:
    """A problem that says which append of a commit it is about."""
    assert isinstance(response.body, bytes)
    body: dict[str, Any] = msgspec.json.decode(response.body)
    body["item"] = index
    return Response(response.status, response.headers, msgspec.json.encode(body), response.block)


def staged(upload: Upload, outcome: StageOutcome | Failed | Unknown) -> Response:
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
        case Failed() | Unknown():
            return rendering.failed(outcome)


def unstaged(outcome: UnstageOutcome | Failed | Unknown) -> Response:
    match outcome:
        case PartDropped():
            return Response(204, [], b"", BROWSER_BLOCK)
        case PartMissing(part):
            detail = f"{_shown(part)} is not staged: it was never uploaded or it expired"
            return refused(404, "part_missing", "No such part", detail)
        case PartUsed():
            return _item_refused(outcome)
        case Failed() | Unknown():
            return rendering.failed(outcome)
