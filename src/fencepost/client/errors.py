"""What can go wrong, as one tree: each error is a decision its reader can make.

`FencepostError` is the root. Below it are the network's failures, the server's refusals (one class
for each problem `code` that a program may want to tell apart) and the producer's own. Facts are
fields; the first sentence of a docstring says what happened, the rest what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self

import msgspec

CODE_CHARACTERS_MAX = 100
DETAIL_CHARACTERS_MAX = 4_000
"""How much of what a server says about a refusal is shown; `problem` has all of it."""


class FencepostError(Exception):
    """The root: catch it to catch everything this package raises.

    An error about a request says which: `method` and `path`, and from the answer its `status`, its
    `code` and the `request_id` that the server or a proxy gave it, where there is one.
    """

    method: str | None = None
    path: str | None = None
    status: int | None = None
    code: str | None = None
    request_id: str | None = None

    def locate(
        self, method: str, path: str, status: int | None, headers: Mapping[str, str]
    ) -> Self:
        """Note the request that this error is about, unless that is known already."""
        if self.method is None:
            self.method, self.path = method, path
            self.status = status if self.status is None else self.status
            self.request_id = headers.get("x-request-id") or headers.get("request-id")
            cause = getattr(self, "cause", None)
            if isinstance(cause, FencepostError):
                self.blame(cause.locate(method, path, status, headers))
        return self

    def blame(self, cause: Exception | None) -> None:
        """Be about the request that `cause` is about."""
        if isinstance(cause, FencepostError):
            self.method, self.path = cause.method, cause.path
            self.status, self.code, self.request_id = cause.status, cause.code, cause.request_id

    def __str__(self) -> str:
        said = super().__str__()
        if self.method is None:
            return said
        facts = [f"{self.method} {self.path}"]
        if self.status is not None and str(self.status) not in said:
            facts.append(f"status {self.status}")
        if self.request_id is not None:
            facts.append(f"request {self.request_id}")
        where = f"({', '.join(facts)})"
        return said if where in said else f"{said} {where}"


class InvalidArgumentError(FencepostError, ValueError):
    """An argument has a value that it cannot have; nothing was sent. Change the call."""


def require(holds: bool, rule: str) -> None:
    """Raise `InvalidArgumentError` with the rule that an argument breaks."""
    if not holds:
        raise InvalidArgumentError(rule)


class UnencodableError(FencepostError, TypeError):
    """A message cannot be stored as what the stream holds; nothing was sent. Change the message."""


class ClientClosedError(FencepostError):
    """The client was closed. Connect again."""


class ProtocolError(FencepostError):
    """The other side does not speak HTTP or this protocol. Check the URL."""


class UnreadableError(FencepostError):
    """A message is not what it was read as. Read the stream as bytes, or as another type."""


class ConnectionFailedError(FencepostError):
    """The server could not be reached, or the connection broke. Retry when it is back.

    `sent` is false when no byte of the request has left: then nothing has happened.
    """

    def __init__(self, message: str, *, sent: bool = False, final: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.final = final
        """Whether the program gave the request up (`close`, `on_error`): no retry is wanted."""


class RequestTimeoutError(ConnectionFailedError):
    """The server did not answer in time. Retry, or allow more time."""


class OutcomeUnknownError(FencepostError):
    """A write was sent and its answer lost: it may or may not be stored. Read to find out.

    Raised only when retries were turned off or ran out; `cause` is the last failure.
    """

    def __init__(self, message: str, *, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.blame(cause)


class ResponseError(FencepostError):
    """The server refused. `code` is stable and made for programs; `detail` for people."""

    status: int  # type: ignore[mutable-override]  # an answer has both
    code: str  # type: ignore[mutable-override]

    def __init__(
        self,
        *,
        status: int,
        code: str,
        detail: str,
        headers: Mapping[str, str],
        problem: Mapping[str, Any],
    ) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers
        self.problem = problem
        """All fields of the refusal: some codes come with facts of their own."""
        self.item: int | None = problem.get("item")
        """In a commit: which of its appends was refused."""
        self.uncertain = 0
        """Attempts before this answer that may have arrived."""
        self.final = False
        """Whether the program gave the request up (`on_error`), so that no retry is wanted."""

    @classmethod
    def like(cls, other: ResponseError) -> Self:
        """The same refusal, known to be one of this class."""
        error = cls(
            status=other.status,
            code=other.code,
            detail=other.detail,
            headers=other.headers,
            problem=other.problem,
        )
        error.uncertain = other.uncertain
        return error

    def _text(self, name: str) -> str | None:
        return self.headers.get(name)

    def _integer(self, name: str) -> int | None:
        return integer_of(self.headers.get(name))

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait, whether it names them or a date."""
        value = self.headers.get("retry-after", "").strip()
        if value.isdecimal():
            return float(value)
        until = _instant(value)
        # The server's own clock is the one that its date is by.
        now = _instant(self.headers.get("date", "")) or datetime.now(UTC)
        return None if until is None else max(0.0, (until - now).total_seconds())


class RedirectedError(ResponseError):
    """The server sent the request elsewhere, and it was not followed. Connect to `location`.

    Only reads are followed, and only to the same scheme, host and port: a token never goes to
    another server.
    """

    @property
    def location(self) -> str | None:
        """Where the server sent the request."""
        return self._text("location")


class BadRequestError(ResponseError):
    """The request itself is wrong and nothing has happened. Change it; a retry fails again."""


class TooLargeError(BadRequestError):
    """More than the server takes at once; the detail names the limit. Send less at a time."""


class UnauthorizedError(ResponseError):
    """The server does not know who you are. Give `connect` a token."""


class ForbiddenError(ResponseError):
    """You are known, but may not do this. Ask for a grant."""


class ProducerHeldError(ForbiddenError):
    """Another principal opened this epoch of the producer id, and only it may go on in it.

    For a claim: it is another principal's. Wait until it ends, or take over what is stale.
    """


class EpochGuardedError(ForbiddenError):
    """The server lets you not raise this epoch, or not yet: see `retry_after`.

    The rule for the producer id says when an epoch may be raised (`raising`, `stale_after_s`). Wait
    for at least as long, or have an administrator do it, with a reason.
    """


class NotFoundError(ResponseError):
    """There is nothing here. Check the path."""


class StreamNotFoundError(NotFoundError):
    """There is no such stream, or it expired. Create it first, or append with auto_create."""


class GoneError(ResponseError):
    """It was here and no longer is."""


class StreamDeletedError(GoneError):
    """The stream was deleted and only its forks remain. Use another path."""


class OffsetTruncatedError(GoneError):
    """The stream begins later now. Read from `first_offset`."""

    @property
    def first_offset(self) -> str | None:
        return self._text("stream-first-offset")


class LogPrunedError(GoneError):
    """Rows of this selection left the log after its retention. Go on after `pruned`, or skip."""

    @property
    def pruned(self) -> int | None:
        return self._integer("log-pruned")


class ConflictError(ResponseError):
    """The state of the stream does not allow this. Look at it, then decide again."""


class StreamExistsError(ConflictError):
    """A stream with another configuration is at this path. Use it as it is, or another path."""


class PathBlockedError(ConflictError):
    """A deleted stream whose forks still use it holds this path. Use another one."""


class ContentTypeMismatchError(ConflictError):
    """The stream holds another content type. Open it with that one."""


class StreamClosedError(ConflictError):
    """The stream takes no more appends; it ends at `next_offset`. Write to another one."""

    @property
    def next_offset(self) -> str | None:
        return self._text("stream-next-offset")


class BooksClosedError(ConflictError):
    """The books of the stream are closed: it takes no messages until a commit opens them again.

    That is an append with `books="open"` and `if_match` at the tail, which is `next_offset`.
    """

    @property
    def next_offset(self) -> str | None:
        return self._text("stream-next-offset")


class BooksPendingError(ConflictError):
    """The `group` has work left on the stream. Let its workers finish, then send it again."""

    @property
    def group(self) -> str | None:
        return self.problem.get("group")


class ClaimCompletedError(ConflictError):
    """The producer id is a claim that its holder completed: nothing more is accepted under it."""


class SequenceGapError(ConflictError):
    """A request of this producer is missing before this one: the server expects `expected`."""

    @property
    def expected(self) -> int | None:
        return self._integer("producer-expected-seq")

    @property
    def received(self) -> int | None:
        return self._integer("producer-received-seq")


class ContentMismatchError(ConflictError):
    """This sequence number was used for other bytes. Another program writes as this producer."""

    @property
    def offset(self) -> str | None:
        return self._text("stream-offset")


class StreamSeqError(ConflictError):
    """Stream-Seq did not grow. Another writer was here: read, then decide again."""


class KeyReusedError(ConflictError):
    """The Idempotency-Key was used for another request. Use a new key for new content."""


class KeyConflictError(ConflictError):
    """The key and the producer headers disagree. One of them was used for another request."""


class CommitPartialError(ConflictError):
    """Some appends of the commit were made before and others not; nothing was done now."""


class PartError(ConflictError):
    """A staged part is missing, incomplete, used or other than before; the code says which."""


class WriterNotFoundError(ResponseError):
    """There is no such writer: no program opened it, or it was forgotten. Open a run of it."""


class WriterQueryChangedError(ConflictError):
    """The name is the writer of `query`, which came to `batch`, and your batches count anew.

    Go on with that query, use another name, or open with `allow_new` if what it wrote may stay
    as it is and everything of yours is to be written.
    """

    @property
    def query(self) -> str | None:
        return self.problem.get("query")

    @property
    def batch(self) -> int | None:
        return self.problem.get("batch")


class WriterFencedError(ConflictError):
    """A newer run of this writer has begun, in `epoch`. Stop: the other one writes now."""

    @property
    def epoch(self) -> int | None:
        return self.problem.get("epoch")


class GroupNotFoundError(ResponseError):
    """There is no such group. Make it with `client.group(name).make(...)`."""


class GroupExistsError(ConflictError):
    """A group of this name has other settings. Use it as it is, or delete it first."""


class SubscriptionNotFoundError(NotFoundError):
    """There is no such subscription, or it is another principal's. Create it first."""


class SubscriptionExistsError(ConflictError):
    """A subscription of this name has another configuration. Delete it first, or use another id."""


class WakeFencedError(ConflictError):
    """The wake is over, and `generation` is the current one. Stop: another worker has the work."""

    @property
    def generation(self) -> int | None:
        return _nested(self.problem).get("generation")


class AlreadyClaimedError(ConflictError):
    """Another worker, `holder`, has the work of the subscription. Wait for the next wake."""

    @property
    def holder(self) -> str | None:
        return _nested(self.problem).get("current_holder")

    @property
    def generation(self) -> int | None:
        return _nested(self.problem).get("generation")


class NoPendingWorkError(ConflictError):
    """There is nothing to claim. Wait for the next wake."""


class WebhookSignatureError(FencepostError):
    """A webhook request was not signed by this server, or not recently. Answer it with 401."""


class WebhookReplayedError(WebhookSignatureError):
    """The very same webhook request came before. Answer it with 409 and do nothing."""


class MeshNotFoundError(ResponseError):
    """There is no such mesh. Make it with `client.mesh(name).make()`."""


class MeshExistsError(ConflictError):
    """A mesh of this name has other settings, or is being deleted."""


class DestinationNotFoundError(NotFoundError):
    """The mesh has no such topic, member or queue. The id of the send is still free."""


class FeatureRefusedError(ConflictError):
    """The mesh does not offer what is required; `kind`, `feature` and `close_code` say what."""

    @property
    def close_code(self) -> int | None:
        """The code with which a session would be closed."""
        found = self.problem.get("close_code")
        return found if isinstance(found, int) else None


class SessionClosedError(FencepostError):
    """The server ended the session for good; `kind` and `detail` say why.

    `close_code` is that of the WebSocket. What was sent without an outcome may be stored: the same
    send again, with its id, tells.
    """

    def __init__(self, *, close_code: int, kind: str, feature: str, detail: str) -> None:
        super().__init__(f"the session was closed with {close_code} {kind}: {detail}")
        self.close_code = close_code
        self.kind = kind
        self.feature = feature
        self.detail = detail


class SessionReplacedError(SessionClosedError):
    """A newer session has the inbox now (4003). Stop: it handles what comes."""


class MemberConnectedError(SessionClosedError):
    """Another session has the inbox and keeps it (4004). Wait until it ends, then connect."""


class FeatureUnavailableError(SessionClosedError):
    """The mesh does not have the `feature` that is required (4010)."""


class FeatureInvalidError(SessionClosedError):
    """The params of the `feature` are not understood, or of another version (4011)."""


class FeatureBelowFloorError(SessionClosedError):
    """The mesh offers less of the `feature` than is required (4012)."""


class CorrelationMovedError(ConflictError):
    """Another worker correlated meanwhile, up to `watermark`. Go on from there."""

    @property
    def watermark(self) -> int | None:
        return self.problem.get("watermark")


class WriterRangeMismatchError(ConflictError):
    """The number `batch` was published from other positions than yours; nothing was written.

    Your record of progress is older than what was published. Go on with the newest one, or read
    from where the published batches end, under another name: `writer_history` shows it.
    """

    @property
    def batch(self) -> int | None:
        return self.problem.get("batch")

    @property
    def published(self) -> dict[str, int | None] | None:
        return self.problem.get("published")

    @property
    def sent(self) -> dict[str, int | None] | None:
        return self.problem.get("sent")


class WriterHistoryGoneError(ConflictError):
    """The writer came to `batch`, and no longer knows what it published under your number.

    Nothing was written. Go on with the newest record of progress.
    """

    @property
    def batch(self) -> int | None:
        return self.problem.get("batch")


class PreconditionFailedError(ResponseError):
    """What was assumed does not hold, and nothing has happened. Look again, then decide again."""


class TailMovedError(PreconditionFailedError):
    """Another append came first: the tail is `next_offset`. Read up to it, then decide again."""

    @property
    def next_offset(self) -> str | None:
        return self._text("stream-next-offset")

    @property
    def version(self) -> int | None:
        return self._integer("stream-version")


class LeaseLostError(PreconditionFailedError):
    """The lease is no longer current. Stop this work: another worker may have the target."""


class ProducerMovedError(PreconditionFailedError):
    """The producer is at `epoch` and `seq`, not where Producer-If said; None: it is unknown."""

    @property
    def epoch(self) -> int | None:
        return self._integer("producer-epoch")

    @property
    def seq(self) -> int | None:
        return self._integer("producer-seq")


class StaleEpochError(ForbiddenError):
    """A newer session of this producer has begun, in `epoch`. Stop: the other one writes now."""

    @property
    def epoch(self) -> int | None:
        return self._integer("producer-epoch")


class WriterHeldError(ForbiddenError):
    """The writer is another principal's. Use another name."""


class RateLimitedError(ResponseError):
    """Too much at once, and retries ran out. Wait `retry_after` seconds."""


class OpenClaimsError(RateLimitedError):
    """You hold as many claims as you may (`open_claims_max`). End one before you claim another.

    It is not waited for: only you can end your claims.
    """


class UnavailableError(ResponseError):
    """The server could not do it now, and retries ran out. Retry later."""


class DataDamagedError(ResponseError):
    """The server found that what it should give is damaged. It is not asked again: nothing helps
    but `fencepost check` and a backup. In the log, `position` cannot be read, of `stream`, and a
    reader may go on behind `behind`; all are None for a read of a stream.
    """

    @property
    def stream(self) -> str | None:
        found = self.problem.get("stream")
        return found if isinstance(found, str) else None

    @property
    def position(self) -> int | None:
        found = self.problem.get("position")
        return found if isinstance(found, int) else None

    @property
    def behind(self) -> int | None:
        found = self.problem.get("behind")
        return found if isinstance(found, int) else None


class StorageFullError(UnavailableError):
    """The server's disk is full and nothing was stored. Make room, then retry."""


class ProducerError(FencepostError):
    """Something about a producer rather than about one request."""


class ProducerClosedError(ProducerError):
    """The producer was closed. Open another one."""


class ProducerFailedError(ProducerError):
    """The producer has stopped; `cause` says why, and every unstored message was reported.

    It stores nothing behind a message it could not store. Open another producer to go on.
    """

    def __init__(self, message: str, *, cause: Exception) -> None:
        super().__init__(message)
        self.cause = cause
        self.blame(cause)


class DeliveryTimeoutError(ProducerError, TimeoutError):
    """Not everything was acknowledged in time. It is still being sent: flush again, or close."""


class SequenceUsedError(ProducerError):
    """The server has another request under `seq` of `epoch`: nothing of this batch was stored.

    A predecessor or a second producer used the number. Open a producer without `epoch` and `seq`:
    it begins an epoch of its own.
    """

    def __init__(self, *, epoch: int, seq: int, last_seq: int | None) -> None:
        last = "" if last_seq is None else f"; the last one it has is {last_seq}"
        super().__init__(f"the server holds another request as epoch {epoch}, seq {seq}{last}")
        self.epoch = epoch
        self.seq = seq
        self.last_seq = last_seq


class EpochContestedError(ProducerError):
    """Producers with the same id opened one epoch after the other. Give each an id of its own."""


_INTEGER = re.compile(r"-?[0-9]{1,19}")
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
    nested = _nested(problem)
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


def _nested(problem: Mapping[str, Any]) -> Mapping[str, Any]:
    """The error object that the plain protocol puts around a refusal of subscriptions."""
    found = problem.get("error")
    return found if isinstance(found, dict) else {}


def integer_of(text: str | None) -> int | None:
    """The number in a header; None when there is none."""
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None


def _instant(http_date: str) -> datetime | None:
    """The time that a header names; None when it names none."""
    try:
        found = parsedate_to_datetime(http_date)
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC)


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
