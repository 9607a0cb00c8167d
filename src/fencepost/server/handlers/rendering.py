"""Writing answers: an outcome of a rule becomes a status, headers and perhaps a problem."""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.http.messages import Headers, Response
from fencepost.http.problems import problem
from fencepost.protocol.appends import (
    AlreadyClosed,
    Appended,
    AppendOutcome,
    Duplicate,
    EpochStart,
    KeyDisagrees,
    KeyReused,
    OtherContent,
    ProducerMoved,
    Replayed,
    SeqRegression,
    SequenceGap,
    StaleEpoch,
    StreamClosed,
    TailMoved,
    TypeMismatch,
)
from fencepost.protocol.books import BooksClosed, BooksPending, CutInvalid
from fencepost.protocol.claims import ClaimCompleted, EpochGuarded, NotHolder
from fencepost.protocol.creates import (
    BadForkPoint,
    ConfigConflict,
    Created,
    CreateOutcome,
    Exists,
    PathBlocked,
    SourceDeleted,
    SourceMissing,
    SourceTypeMismatch,
)
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.leases import AckInvalid, GroupGone, LeaseLost
from fencepost.protocol.offsets import Offset, wire
from fencepost.protocol.rates import TooFast
from fencepost.protocol.retention import Retention
from fencepost.server.handlers.fields import rfc3339
from fencepost.store.contract import Failed, Missing, SoftDeleted, Unknown

BROWSER: Headers = [
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Cross-Origin-Resource-Policy", b"cross-origin"),
    (b"Access-Control-Allow-Origin", b"*"),
    (b"Access-Control-Expose-Headers", b"*"),
]
"""The headers that every answer has for a browser."""

BROWSER_BLOCK = b"".join(b"%b: %b\r\n" % header for header in BROWSER)
"""The same, rendered."""

_CLOSED = (b"Stream-Closed", b"true")
BOOKS_CLOSED = (b"Stream-Books", b"closed")


def _plain(status: int, *headers: tuple[bytes, bytes]) -> Response:
    return Response(status, list(headers), b"", BROWSER_BLOCK)


def refused(
    status: int, code: str, title: str, detail: str, *headers: tuple[bytes, bytes]
) -> Response:
    """A problem with what a browser needs to see it."""
    return problem(status, code, title, detail, [*headers, *BROWSER[2:]])


def with_fields(response: Response, **fields: object) -> Response:
    """A problem that says more than its code, in fields of its own."""
    assert isinstance(response.body, bytes)
    body: dict[str, Any] = msgspec.json.decode(response.body)
    encoded = msgspec.json.encode(body | fields)
    return Response(response.status, response.headers, encoded, response.block)


def next_offset(offset: Offset) -> tuple[bytes, bytes]:
    return (b"Stream-Next-Offset", wire(offset))


def version(tail: Offset) -> tuple[bytes, bytes]:
    return (b"Stream-Version", b"%d" % (tail.messages - 1))


def first_offset(first: Offset) -> tuple[bytes, bytes]:
    """Where the stream begins."""
    return (b"Stream-First-Offset", wire(first))


def retention_headers(retention: Retention) -> Headers:
    """A stream's own retention, as it was asked for."""
    named = (
        (b"Stream-Retention-Age", retention.age_s),
        (b"Stream-Retention-Bytes", retention.bytes),
        (b"Stream-Retention-Messages", retention.messages),
    )
    return [(name, b"%d" % value) for name, value in named if value is not None]


def missing(path: str) -> Response:
    detail = f"no stream at {path!r}: create it with PUT, or append with Stream-Auto-Create"
    return refused(404, "stream_not_found", "No such stream", detail)


def soft_deleted(path: str) -> Response:
    detail = f"the stream at {path!r} was deleted; only its forks remain, use another path"
    return refused(410, "stream_deleted", "Stream deleted", detail)


def not_there(path: str, outcome: Missing | SoftDeleted | Failed | Unknown) -> Response:
    """There is no stream to answer for, or the store could not look."""
    match outcome:
        case Missing():
            return missing(path)
        case SoftDeleted():
            return soft_deleted(path)
        case Failed() | Unknown():
            return failed(outcome)


def failed(outcome: Failed | Unknown) -> Response:
    """The store could not do it; what to do next is in the detail."""
    if isinstance(outcome, Unknown):
        return refused(
            503,
            "outcome_unknown",
            "Outcome unknown",
            "the write may or may not have been stored: retry the same request",
            (b"Retry-After", b"1"),
        )
    if outcome.full:
        return refused(
            507, "storage_full", "Storage full", "the disk is full: nothing was stored, retry later"
        )
    return refused(
        503,
        "storage_unavailable",
        "Storage unavailable",
        "nothing was stored: retry the same request",
        (b"Retry-After", b"1"),
    )


def limit_exceeded(outcome: LimitExceeded) -> Response:
    """A request goes past a limit on what may be there at once."""
    limit, value_max = outcome
    detail = f"the request goes past {limit}, which is {value_max}"
    problem = refused(413, "limit_exceeded", "Limit exceeded", detail)
    return with_fields(problem, limit=limit)


def appended(
    path: str, outcome: AppendOutcome | Missing | SoftDeleted | Failed | Unknown
) -> Response:
    """The answer to a POST."""
    match outcome:
        case Appended():
            return _accepted(outcome)
        case Duplicate():
            return _duplicate(outcome)
        case Replayed():
            return _replayed(outcome)
        case BooksClosed() | BooksPending() | CutInvalid():
            return _books_refused(path, outcome)
        case AlreadyClosed(tail):
            return _plain(204, next_offset(tail), version(tail), _CLOSED)
        case Missing() | SoftDeleted() | Failed() | Unknown():
            return not_there(path, outcome)
        case KeyReused() | KeyDisagrees() | OtherContent() | ProducerMoved() | TailMoved():
            return _unmet(outcome)
        case NotHolder() | EpochGuarded() | ClaimCompleted() | TooFast():
            return _not_yours(outcome)
        case LeaseLost() | GroupGone():
            return lease_refused(outcome)
        case LimitExceeded():
            return limit_exceeded(outcome)
        case _:
            return _out_of_order(path, outcome)


def _out_of_order(
    path: str,
    outcome: StreamClosed | StaleEpoch | EpochStart | SequenceGap | TypeMismatch | SeqRegression,
) -> Response:
    """Answer refusals that the public protocol knows: closed, out of order, another type."""
    match outcome:
        case StreamClosed(tail):
            return refused(
                409,
                "stream_closed",
                "Stream closed",
                f"the stream at {path!r} is closed and takes no more appends",
                next_offset(tail),
                _CLOSED,
            )
        case StaleEpoch(epoch):
            return refused(
                403,
                "producer_epoch_stale",
                "Stale producer epoch",
                f"a newer session of this producer has begun: the epoch is {epoch}",
                (b"Producer-Epoch", b"%d" % epoch),
            )
        case EpochStart(epoch, seq):
            return refused(
                400,
                "producer_epoch_start",
                "Bad epoch start",
                f"epoch {epoch} must begin with Producer-Seq 0, not {seq}",
            )
        case SequenceGap(expected, received):
            return refused(
                409,
                "producer_sequence_gap",
                "Sequence gap",
                f"expected Producer-Seq {expected}, received {received}",
                (b"Producer-Expected-Seq", b"%d" % expected),
                (b"Producer-Received-Seq", b"%d" % received),
            )
        case TypeMismatch(expected_type):
            return refused(
                409,
                "content_type_mismatch",
                "Content type mismatch",
                f"the stream at {path!r} holds {expected_type}: send that Content-Type",
            )
        case SeqRegression(last):
            return refused(
                409,
                "stream_seq_regression",
                "Sequence regression",
                f"Stream-Seq must be greater than {last!r}",
            )


def _books_refused(path: str, outcome: BooksClosed | BooksPending | CutInvalid) -> Response:
    """Answer refusals because of closed books, or of groups that have work left."""
    match outcome:
        case BooksClosed(tail):
            return refused(
                409,
                "books_closed",
                "Books closed",
                f"the books of the stream at {path!r} are closed: only an append of a commit with"
                ' books "open" and if_match at its tail opens them',
                next_offset(tail),
                BOOKS_CLOSED,
            )
        case BooksPending(group):
            detail = (
                f"the group {group!r} has work left on the stream at {path!r}:"
                " let its workers finish, then send the same request again"
            )
            response = refused(409, "books_pending", "Books pending", detail)
            return with_fields(response, group=group)
        case CutInvalid(tail):
            detail = (
                f"truncate_before names no place of the stream at {path!r}: a message ends there,"
                f" at {tail} at the latest; nothing was done"
            )
            return refused(400, "offset_invalid", "Bad offset", detail)


def _not_yours(outcome: NotHolder | EpochGuarded | ClaimCompleted | TooFast) -> Response:
    """Answer refusals by the rules for producer ids, and by the rates of principals."""
    match outcome:
        case NotHolder():
            return refused(
                403,
                "producer_held",
                "Held by another",
                "another principal holds this epoch, and only its holder may go on in it:"
                " raise the epoch, or use another producer id",
            )
        case EpochGuarded(left_ms):
            when = "" if left_ms is None else " before its holder has sent nothing for too long,"
            return refused(
                403,
                "epoch_guarded",
                "Epoch guarded",
                f"this epoch is not raised{when} except by an administrator with an Audit-Reason",
                *(() if left_ms is None else (retry_after(left_ms),)),
            )
        case ClaimCompleted():
            return refused(
                409,
                "claim_completed",
                "Claim completed",
                "the holder completed this claim, so its producer id accepts nothing further:"
                " an administrator with an Audit-Reason may raise its epoch",
            )
        case TooFast(limit, wait_ms):
            return too_fast(limit, wait_ms)


def too_fast(limit: str, retry_after_ms: int) -> Response:
    """A principal went past one of its limits."""
    return refused(
        429,
        "too_fast",
        "Too fast",
        f"you are past your {limit}: wait, then send the same request again",
        retry_after(retry_after_ms),
    )


def retry_after(left_ms: int) -> tuple[bytes, bytes]:
    """When it is worth coming back, in whole seconds."""
    return (b"Retry-After", b"%d" % max(1, -(-left_ms // 1000)))


def lease_refused(reason: LeaseLost | GroupGone | AckInvalid) -> Response:
    """Why nothing is done under a lease. It does not say who has the target now."""
    match reason:
        case LeaseLost():
            detail = "the lease is no longer current: stop this work, another worker may have it"
            return refused(412, "lease_lost", "Lease lost", detail)
        case GroupGone():
            detail = "the group of this lease token does not exist"
            return refused(400, "lease_invalid", "Lease invalid", detail)
        case AckInvalid(detail):
            return refused(400, "ack_invalid", "Ack invalid", detail)


def _unmet(
    outcome: KeyReused | KeyDisagrees | OtherContent | ProducerMoved | TailMoved,
) -> Response:
    """Answer refusals by conditions that are ours: keys, content, Producer-If, If-Match."""
    match outcome:
        case KeyReused(first_used_ms):
            return refused(
                409,
                "idempotency_key_reused",
                "Idempotency key reused",
                f"the key was used for another request at {rfc3339(first_used_ms)}: use a new key",
            )
        case KeyDisagrees():
            return refused(
                409,
                "idempotency_key_conflict",
                "Idempotency key conflict",
                "the Idempotency-Key and the producer headers do not speak of the same request",
            )
        case OtherContent(original):
            return refused(
                409,
                "producer_content_mismatch",
                "Other content",
                "this sequence number was accepted with another content, or too long ago to tell",
                *(() if original is None else (_original(original.offset),)),
            )
        case ProducerMoved(epoch, seq):
            known = epoch is not None and seq is not None
            return refused(
                412,
                "producer_moved",
                "Producer moved",
                "the producer is not where Producer-If says" + ("" if known else ": it is unknown"),
                *(() if epoch is None or seq is None else _producer_state(epoch, seq)),
            )
        case TailMoved(tail):
            return refused(
                412,
                "tail_moved",
                "Tail moved",
                f"the stream ends at {tail}: read from there, then decide again",
                next_offset(tail),
                version(tail),
            )


def _accepted(outcome: Appended) -> Response:
    """The answer that is given most, so its lines are written in one go."""
    tail, producer = outcome.tail, outcome.producer
    messages = tail.messages
    closed = b"Stream-Closed: true\r\n" if outcome.closed else b""
    if producer is None:
        numbers = (messages, tail.bytes, messages - 1, outcome.position)
        return Response(204, [], b"", _ACCEPTED % (*numbers, closed))
    block = _ACCEPTED_OF_PRODUCER % (
        messages,
        tail.bytes,
        messages - 1,
        outcome.position,
        closed,
        producer.epoch,
        producer.seq,
    )
    # 200 says that new data was stored; closing without any is a 204, with a producer too.
    return Response(204 if outcome.start == tail else 200, [], b"", block)


_ACCEPTED = (
    b"Stream-Next-Offset: %%016d_%%016d\r\nStream-Version: %%d\r\nStream-Position: %%d\r\n%b%%b"
    % BROWSER_BLOCK
)
_ACCEPTED_OF_PRODUCER = _ACCEPTED + b"Producer-Epoch: %d\r\nProducer-Seq: %d\r\n"


def _producer_state(epoch: int, seq: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"Producer-Epoch", b"%d" % epoch), (b"Producer-Seq", b"%d" % seq))


def _original(offset: Offset) -> tuple[bytes, bytes]:
    return (b"Stream-Offset", wire(offset))


def _replayed(outcome: Replayed) -> Response:
    """The original answer again, marked."""
    original = outcome.original
    headers = [
        next_offset(original.tail),
        _original(original.start),
        version(original.tail),
        (b"Stream-Position", b"%d" % original.position),
        (b"Idempotency-Replayed", b"true"),
    ]
    if original.closed:
        headers.append(_CLOSED)
    if outcome.books_closed:
        headers.append(BOOKS_CLOSED)
    return _plain(200, *headers)


def _duplicate(outcome: Duplicate) -> Response:
    headers = [
        next_offset(outcome.tail),
        *_producer_state(outcome.producer_epoch, outcome.producer_seq),
        version(outcome.tail),
        *BROWSER,
    ]
    if outcome.original is not None:
        headers.append(_original(outcome.original.offset))
        headers.append((b"Producer-Match", b"true" if outcome.matches else b"false"))
    if outcome.closed:
        headers.append(_CLOSED)
    if outcome.books_closed:
        headers.append(BOOKS_CLOSED)
    return Response(204, headers)


def created(path: str, outcome: CreateOutcome | Failed | Unknown, location: bytes) -> Response:
    """The answer to a PUT."""
    match outcome:
        case Created():
            return _stream_made(201, outcome, (b"Location", location))
        case Exists():
            return _stream_made(200, outcome)
        case ConfigConflict(detail):
            return refused(409, "stream_exists", "Stream exists", detail)
        case PathBlocked():
            return refused(
                409,
                "path_blocked",
                "Path blocked",
                f"the stream at {path!r} was deleted, but its forks still use it: use another path",
            )
        case SourceMissing(source):
            return refused(
                404,
                "fork_source_not_found",
                "No such source",
                f"no stream at {source!r}: nothing to fork",
            )
        case SourceDeleted(source):
            return refused(
                409,
                "fork_source_deleted",
                "Source deleted",
                f"the stream at {source!r} was deleted: fork another one",
            )
        case SourceTypeMismatch(expected_type):
            return refused(
                409,
                "content_type_mismatch",
                "Content type mismatch",
                f"the source holds {expected_type}",
            )
        case BadForkPoint(detail):
            return refused(400, "fork_offset_invalid", "Bad fork offset", detail)
        case LimitExceeded():
            return limit_exceeded(outcome)
        case Failed() | Unknown():
            return failed(outcome)


def _stream_made(status: int, made: Created | Exists, *headers: tuple[bytes, bytes]) -> Response:
    response = _plain(
        status,
        (b"Content-Type", made.stream.content_type.encode()),
        next_offset(made.tail),
        *headers,
    )
    if made.closed:
        response.headers.append(_CLOSED)
    return response
