"""Find the error that an answer stands for: by its problem code, else by its status.

A server of the plain protocol sends no codes; its headers say what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fencepost.client.errors.refusals import (
    BadRequestError,
    ConflictError,
    DataDamagedError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    PreconditionFailedError,
    RateLimitedError,
    RedirectedError,
    ResponseError,
    StorageFullError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    error_object,
)
from fencepost.client.errors.streams import (
    BooksClosedError,
    BooksPendingError,
    ClaimCompletedError,
    CommitPartialError,
    ContentMismatchError,
    ContentTypeMismatchError,
    CorrelationMovedError,
    EpochGuardedError,
    KeyConflictError,
    KeyReusedError,
    LogPrunedError,
    OffsetTruncatedError,
    OpenClaimsError,
    PartError,
    PathBlockedError,
    ProducerHeldError,
    ProducerMovedError,
    SequenceGapError,
    StaleEpochError,
    StreamClosedError,
    StreamDeletedError,
    StreamExistsError,
    StreamNotFoundError,
    StreamSeqError,
    TailMovedError,
    WriterFencedError,
    WriterHeldError,
    WriterHistoryGoneError,
    WriterNotFoundError,
    WriterQueryChangedError,
    WriterRangeMismatchError,
)
from fencepost.client.errors.work import (
    AlreadyClaimedError,
    DestinationNotFoundError,
    FeatureRefusedError,
    GroupExistsError,
    GroupNotFoundError,
    LeaseLostError,
    MeshExistsError,
    MeshNotFoundError,
    NoPendingWorkError,
    SubscriptionExistsError,
    SubscriptionNotFoundError,
    WakeFencedError,
)

CODE_CHARACTERS_MAX = 100
DETAIL_CHARACTERS_MAX = 4_000
"""How much of what a server says about a refusal is shown; `problem` has all of it."""

_BY_CODE: dict[str, type[ResponseError]] = {
    "stream_not_found": StreamNotFoundError,
    "fork_source_not_found": StreamNotFoundError,
    "stream_deleted": StreamDeletedError,
    "fork_source_deleted": StreamDeletedError,
    "offset_truncated": OffsetTruncatedError,
    "log_pruned": LogPrunedError,
    "stream_exists": StreamExistsError,
    "path_blocked": PathBlockedError,
    "content_type_mismatch": ContentTypeMismatchError,
    "stream_closed": StreamClosedError,
    "books_closed": BooksClosedError,
    "books_pending": BooksPendingError,
    "claim_completed": ClaimCompletedError,
    "producer_held": ProducerHeldError,
    "epoch_guarded": EpochGuardedError,
    "producer_sequence_gap": SequenceGapError,
    "producer_content_mismatch": ContentMismatchError,
    "producer_epoch_stale": StaleEpochError,
    "stream_seq_regression": StreamSeqError,
    "idempotency_key_reused": KeyReusedError,
    "idempotency_key_conflict": KeyConflictError,
    "commit_partial": CommitPartialError,
    "commit_too_large": TooLargeError,
    "chunk_conflict": PartError,
    "part_missing": PartError,
    "part_committed": PartError,
    "part_incomplete": PartError,
    "part_overfull": PartError,
    "part_repeated": PartError,
    "part_type_mismatch": PartError,
    "writer_not_found": WriterNotFoundError,
    "writer_query_changed": WriterQueryChangedError,
    "writer_fenced": WriterFencedError,
    "writer_range_mismatch": WriterRangeMismatchError,
    "writer_history_gone": WriterHistoryGoneError,
    "writer_held": WriterHeldError,
    "group_not_found": GroupNotFoundError,
    "group_exists": GroupExistsError,
    "mesh_not_found": MeshNotFoundError,
    "mesh_exists": MeshExistsError,
    "destination_not_found": DestinationNotFoundError,
    "feature_refused": FeatureRefusedError,
    "correlation_moved": CorrelationMovedError,
    "subscription_not_found": SubscriptionNotFoundError,
    "subscription_exists": SubscriptionExistsError,
    "fenced": WakeFencedError,
    "already_claimed": AlreadyClaimedError,
    "no_pending_work": NoPendingWorkError,
    "lease_lost": LeaseLostError,
    "tail_moved": TailMovedError,
    "producer_moved": ProducerMovedError,
    "storage_full": StorageFullError,
    "data_damaged": DataDamagedError,
}
_BY_STATUS: dict[int, type[ResponseError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    412: PreconditionFailedError,
    413: TooLargeError,
    414: TooLargeError,
    431: TooLargeError,
    408: UnavailableError,
    425: UnavailableError,
    429: RateLimitedError,
}


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ResponseError:
    """The error that an answer stands for; servers without problem codes are understood too."""
    problem: dict[str, Any] = {}
    if "json" in headers.get("content-type", ""):
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            decoded = None
        if isinstance(decoded, dict):
            problem = decoded
    code = problem.get("code")
    nested = error_object(problem)
    if not isinstance(code, str) and isinstance(nested.get("code"), str):
        code = nested["code"].lower()
    if not isinstance(code, str) or len(code) > CODE_CHARACTERS_MAX:
        code = _code_of(status, headers)
    detail = problem.get("detail", nested.get("message"))
    if not isinstance(detail, str):
        detail = body[:500].decode(errors="replace") or "the server gave no reason"
    if len(detail) > DETAIL_CHARACTERS_MAX:
        detail = detail[:DETAIL_CHARACTERS_MAX] + " ..."
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if status < 400:
        kind, code = RedirectedError, "redirected"
        detail = f"the server sends this request to {headers.get('location', 'no address')}"
    if code == "too_fast" and "open_claims_max" in detail:
        kind = OpenClaimsError
    if kind is None:
        kind = UnavailableError if status >= 500 else BadRequestError
    return kind(status=status, code=code, detail=detail, headers=headers, problem=problem)


def _code_of(status: int, headers: Mapping[str, str]) -> str:
    """What a server of the plain protocol means, from the headers that the protocol gives it."""
    if status == 403 and "producer-epoch" in headers:
        return "producer_epoch_stale"
    if status == 409 and "producer-expected-seq" in headers:
        return "producer_sequence_gap"
    if status == 409 and headers.get("stream-closed", "").lower() == "true":
        return "stream_closed"
    if status == 410:
        return "offset_truncated" if "stream-first-offset" in headers else "stream_deleted"
    return "stream_not_found" if status == 404 else f"http_{status}"
