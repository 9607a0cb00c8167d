"""Reading requests: what an append, a creation or a fork says becomes typed values.

The rule for all of them: what is not understood completely is refused, and nothing has happened
yet. Single fields are read by `fields`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from fencepost.http.messages import Request
from fencepost.protocol.appends import NO_CONDITIONS, Append, Conditions, ProducerTuple
from fencepost.protocol.batches import (
    Batch,
    Malformed,
    TooDeep,
    TooMany,
    bytes_batch,
    digest,
    json_batch_within,
)
from fencepost.protocol.claims import Actor
from fencepost.protocol.creates import Create, ForkFrom
from fencepost.protocol.leases import LeaseRef
from fencepost.protocol.limits import Limits
from fencepost.protocol.offsets import START, Offset, parse_offset
from fencepost.protocol.retention import KEEP_ALL, Retention
from fencepost.protocol.streams import JSON, Lifetime, media_type
from fencepost.server.handlers.fields import (
    INTEGER_MAX,
    STREAM_ROOT,
    RefusedError,
    bad,
    bounded_text,
    content_type,
    instant_ms,
    integer,
    is_true,
    stream_path,
    text_header,
)
from fencepost.server.lease_tokens import LeaseTokens

_INTEGER = re.compile(rb"0|[1-9][0-9]{0,15}")
_CONTROLS = re.compile("[\x00-\x1f\x7f]")
_SINGLE = (
    b"content-type",
    b"stream-seq",
    b"stream-ttl",
    b"stream-expires-at",
    b"stream-closed",
    b"stream-forked-from",
    b"stream-fork-offset",
    b"stream-fork-sub-offset",
    b"stream-retention-age",
    b"stream-retention-bytes",
    b"stream-retention-messages",
    b"producer-id",
    b"producer-epoch",
    b"producer-seq",
    b"producer-if",
    b"producer-strict",
    b"stream-auto-create",
    b"if-match",
    b"if-none-match",
    b"idempotency-key",
    b"lease-token",
    b"authorization",
    b"audit-reason",
    b"claim-end",
)
_OF_APPENDS = (
    b"if-match",
    b"if-none-match",
    b"producer-id",
    b"producer-epoch",
    b"producer-seq",
    b"producer-if",
    b"producer-strict",
    b"stream-auto-create",
    b"stream-seq",
    b"stream-closed",
    b"idempotency-key",
    b"lease-token",
)


def refuse_repeated(request: Request) -> None:
    """Refuse a request that says twice what may be said once."""
    for name in _SINGLE:
        if name in request.repeated:
            raise bad("header_repeated", f"the header {name.decode()} came more than once")


def refuse_headers_of_appends(request: Request, where: str, *, but: bytes = b"") -> None:
    """Refuse headers that only an append heeds: their sender counts on them."""
    _refuse_x_producer(request)
    for name in _OF_APPENDS:
        if name in request.headers and name != but:
            raise bad("header_unexpected", f"{where} has no {name.decode()}: nothing was done")


def _refuse_x_producer(request: Request) -> None:
    """Refuse other names for the producer headers: ignored, they would store an append twice."""
    for name in _X_PRODUCER:
        if name in request.headers:
            raise bad(
                "header_unexpected",
                f"{name.decode()} means nothing here: a producer sends Producer-Id,"
                " Producer-Epoch and Producer-Seq; nothing was done",
            )


def producer_tuple(request: Request, limits: Limits) -> ProducerTuple | None:
    """The three producer headers: all of them or none."""
    _refuse_x_producer(request)
    headers = request.headers
    producer_id = headers.get(b"producer-id")
    epoch = headers.get(b"producer-epoch")
    seq = headers.get(b"producer-seq")
    if producer_id is None and epoch is None and seq is None:
        return None
    if producer_id is None or epoch is None or seq is None:
        raise bad(
            "producer_headers_incomplete",
            "Producer-Id, Producer-Epoch and Producer-Seq come together or not at all",
        )
    name = bounded_text(producer_id, "producer-id", limits.producer_id_bytes_max)
    if not name or name.isspace():
        raise bad("producer_id_empty", "Producer-Id must not be empty")
    return ProducerTuple(name, integer(epoch, "Producer-Epoch"), integer(seq, "Producer-Seq"))


def parse_append(
    request: Request,
    path: str,
    limits: Limits,
    actor: Actor | None = None,
    *,
    tokens: LeaseTokens | None = None,
) -> Append:
    """A POST to a stream."""
    known = None if request.head is None else request.head.parsed
    if isinstance(known, _RepeatedAppend) and request.body:
        return _parse_repeated(request, path, limits, actor, known, tokens)
    if request.repeated:
        refuse_repeated(request)
    # Most appends have none of these headers, and looking for one is cheaper than calling for it.
    headers = request.headers
    closes = b"stream-closed" in headers and is_true(request, b"stream-closed")
    body = request.body
    batch: Batch | None = None
    media: str | None = None
    # Without a body the protocol forbids to judge by the Content-Type: libraries attach one anyway.
    if body:
        kind = content_type(request, limits)
        if kind is None:
            raise bad("content_type_missing", "an append needs a Content-Type")
        media = media_type(kind)
        batch = batch_of(body, media, limits)
        if batch is None:
            raise bad("batch_empty", "an empty array appends nothing")
    elif not closes:
        raise bad(
            "body_empty", "an append needs a body, unless it only closes (Stream-Closed: true)"
        )
    producer = None if _PRODUCER.isdisjoint(headers) else producer_tuple(request, limits)
    seq = None
    if b"stream-seq" in headers:
        seq = text_header(request, b"stream-seq", limits.stream_seq_bytes_max)
        if seq == "":
            raise bad("header_invalid", "Stream-Seq must not be empty")
    conditions = None
    if not _CONDITIONS.isdisjoint(headers):
        conditions = parse_conditions(request, limits, tokens)
    mark = b""
    if producer is not None or (conditions is not None and conditions.key is not None):
        mark = digest(media or "", closes, b"" if batch is None else batch.data)
    if request.head is not None and media is not None and not closes and seq is None:
        has_conditions = not _CONDITIONS.isdisjoint(headers)
        request.head.parsed = _RepeatedAppend(media, producer, has_conditions)
    return Append(path, batch, media, closes, producer, seq, mark, conditions, actor)


class _RepeatedAppend(NamedTuple):
    """What was parsed of the header lines that an append has in common with the ones before it."""

    media: str
    producer: ProducerTuple | None  # but for its number
    has_conditions: bool


def _parse_repeated(
    request: Request,
    path: str,
    limits: Limits,
    actor: Actor | None,
    known: _RepeatedAppend,
    tokens: LeaseTokens | None,
) -> Append:
    """The same of an append of which only the body, the numbers, or the conditions are new."""
    body = request.body
    media, producer, has_conditions = known
    batch = bytes_batch(body) if media != JSON else batch_of(body, media, limits)
    if batch is None:
        raise bad("batch_empty", "an empty array appends nothing")
    if producer is not None:
        seq = integer(request.headers[b"producer-seq"], "Producer-Seq")
        producer = ProducerTuple(producer.id, producer.epoch, seq)
    conditions = parse_conditions(request, limits, tokens) if has_conditions else None
    mark = b""
    if producer is not None or (conditions is not None and conditions.key is not None):
        mark = digest(media, False, batch.data)
    return Append(path, batch, media, False, producer, None, mark, conditions, actor)


_X_PRODUCER = (b"x-producer-id", b"x-producer-epoch", b"x-producer-seq")
_PRODUCER = frozenset((b"producer-id", b"producer-epoch", b"producer-seq", *_X_PRODUCER))
_OTHER_CONDITIONS = frozenset(
    (
        b"if-match",
        b"if-none-match",
        b"stream-auto-create",
        b"producer-if",
        b"producer-strict",
        b"lease-token",
    )
)
_CONDITIONS = _OTHER_CONDITIONS | {b"idempotency-key"}


def parse_conditions(
    request: Request, limits: Limits, tokens: LeaseTokens | None = None
) -> Conditions | None:
    """The headers that make an append conditional; None when they come to nothing."""
    headers = request.headers
    token = headers.get(b"lease-token")
    key = headers.get(b"idempotency-key")
    if key is not None and _OTHER_CONDITIONS.isdisjoint(headers):
        # A key alone is what most requests with conditions have.
        return Conditions(key=_key(key, limits))
    if_empty = b"if-none-match" in headers and _only_star(headers[b"if-none-match"])
    create_as = None
    if if_empty or (b"stream-auto-create" in headers and is_true(request, b"stream-auto-create")):
        create_as = content_type(request, limits)
        if create_as is None:
            raise bad(
                "content_type_missing", "an append that may make a stream needs a Content-Type"
            )
    if_match = headers.get(b"if-match")
    conditions = Conditions(
        if_match=None if if_match is None else _if_match(if_match),
        if_empty=if_empty,
        create_as=create_as,
        producer_if=producer_if(headers.get(b"producer-if")),
        strict=b"producer-strict" in headers and is_true(request, b"producer-strict"),
        key=None if key is None else _key(key, limits),
        lease=None if token is None else lease_of(token.decode("latin-1"), tokens),
    )
    if conditions.producer_if is not None and b"producer-id" not in headers:
        raise bad("producer_headers_incomplete", "Producer-If needs the producer headers")
    if conditions.if_match is not None and if_empty:
        raise bad("precondition_conflict", "give If-Match or If-None-Match, not both")
    return None if conditions == NO_CONDITIONS else conditions


def _only_star(value: bytes) -> bool:
    if value != b"*":
        raise bad("if_none_match_invalid", "on an append If-None-Match can only be *")
    return True


def lease_of(text: str, tokens: LeaseTokens | None) -> LeaseRef:
    """The lease that a token speaks of; a token that this server did not make is refused."""
    ref = None if tokens is None else tokens.read(text)
    if ref is None:
        raise bad("lease_invalid", "the lease token was not given out by this server")
    return ref


def _if_match(value: bytes) -> Offset | int | Literal["*"]:
    if value == b"*":
        return "*"
    if len(value) > 2 and value[:1] == b'"' and value[-1:] == b'"':
        return expected_tail(value[1:-1].decode("latin-1"))
    raise bad("if_match_invalid", 'If-Match is a quoted offset or version (If-Match: "...") or *')


_VERSION = re.compile(r"0|[1-9][0-9]{0,15}")


def expected_tail(text: str) -> Offset | int:
    """Where a stream must end: an offset, which contains `_`, or a version, which is a number."""
    if _VERSION.fullmatch(text) and int(text) <= INTEGER_MAX:
        return int(text)
    return _tail_offset(text)


def _tail_offset(text: str) -> Offset:
    """The offset of a precondition; -1 stands for the tail of an empty stream."""
    parsed = parse_offset(text)
    if parsed == "-1":
        return START
    if parsed is None or parsed == "now":
        raise bad("if_match_invalid", "If-Match does not hold an offset that this server gave out")
    return parsed


def producer_if(value: bytes | None) -> tuple[int, int] | None:
    """Where a producer must be, as EPOCH.SEQ."""
    if value is None:
        return None
    epoch, dot, seq = value.partition(b".")
    if not dot:
        raise bad("producer_if_invalid", "Producer-If is EPOCH.SEQ")
    return integer(epoch, "Producer-If"), integer(seq, "Producer-If")


def _key(value: bytes, limits: Limits) -> str:
    text = bounded_text(value, "idempotency-key", limits.key_bytes_max)
    # Few keys hold anything but printable characters, and that is found out sooner than which.
    return text if text and text.isprintable() else check_key(text)


def check_key(value: str) -> str:
    """An Idempotency-Key, if it can be one."""
    if not value or _CONTROLS.search(value):
        raise bad("idempotency_key_invalid", "an Idempotency-Key is neither empty nor has controls")
    return value


def parse_create(request: Request, path: str, limits: Limits) -> Create:
    """A PUT of a stream."""
    if request.repeated:
        refuse_repeated(request)
    _refuse_x_producer(request)
    kind = content_type(request, limits)
    batch: Batch | None = None
    fork_from = _fork_from(request, limits)
    if request.body:
        if kind is None and fork_from is not None:
            raise bad("content_type_missing", "a fork with a body needs a Content-Type")
        batch = batch_of(request.body, media_type(kind or ""), limits)
    return Create(
        path,
        content_type=kind,
        lifetime=_lifetime(request, limits),
        closed=is_true(request, b"stream-closed"),
        batch=batch,
        fork_from=fork_from,
        retention=_retention(request, limits),
        owner="" if request.principal is None else request.principal.name,
    )


def _retention(request: Request, limits: Limits) -> Retention:
    headers = request.headers
    named = {name for name in headers if name.startswith(b"stream-retention-")}
    if not named:
        return KEEP_ALL
    known = {
        b"stream-retention-age": limits.ttl_s_max,
        b"stream-retention-bytes": INTEGER_MAX,
        b"stream-retention-messages": INTEGER_MAX,
    }
    if named - known.keys():
        # Misspelt, it would keep everything, and that would show only when the disk is full.
        raise bad("retention_invalid", "a retention is Stream-Retention-Age, -Bytes or -Messages")
    bounds = []
    for name, value_max in known.items():
        value = headers.get(name)
        if value is not None and (
            not _INTEGER.fullmatch(value) or not 1 <= int(value) <= value_max
        ):
            raise bad(
                "retention_invalid", f"{name.decode()} is a whole number from 1 to {value_max}"
            )
        bounds.append(None if value is None else int(value))
    return Retention(*bounds)


def batch_of(body: bytes, media: str, limits: Limits) -> Batch | None:
    """The messages of a body; None for an empty JSON array."""
    if media != JSON:
        return bytes_batch(body)
    batch = json_batch_within(
        body, messages_max=limits.messages_per_append_max, depth_max=limits.json_depth_max
    )
    if isinstance(batch, TooMany):
        raise RefusedError(
            413,
            "batch_too_large",
            "Too many messages",
            f"one append has at most {limits.messages_per_append_max} messages"
            " (messages_per_append_max)",
        )
    if isinstance(batch, TooDeep):
        raise bad(
            "json_invalid",
            f"arrays and objects are nested more than {limits.json_depth_max} deep"
            " (json_depth_max)",
        )
    if isinstance(batch, Malformed):
        raise bad("json_invalid", batch.detail)
    return batch


def _lifetime(request: Request, limits: Limits) -> Lifetime:
    ttl = request.headers.get(b"stream-ttl")
    expires_at = request.headers.get(b"stream-expires-at")
    if ttl is not None and expires_at is not None:
        raise bad("lifetime_conflict", "give Stream-TTL or Stream-Expires-At, not both")
    if ttl is not None:
        if not _INTEGER.fullmatch(ttl) or int(ttl) > limits.ttl_s_max:
            raise bad(
                "ttl_invalid",
                f"Stream-TTL is a whole number of seconds from 0 to {limits.ttl_s_max}",
            )
        return Lifetime(ttl_s=int(ttl))
    if expires_at is not None:
        return Lifetime(expires_at_ms=instant_ms(expires_at))
    return Lifetime()


def _fork_from(request: Request, limits: Limits) -> ForkFrom | None:
    source = request.headers.get(b"stream-forked-from")
    offset = request.headers.get(b"stream-fork-offset")
    sub_offset = request.headers.get(b"stream-fork-sub-offset")
    if source is None:
        if offset is not None or sub_offset is not None:
            raise bad("fork_source_missing", "a fork offset needs Stream-Forked-From")
        return None
    source = source.removeprefix(request.root)
    if not source.startswith(STREAM_ROOT):
        raise bad("fork_source_invalid", "Stream-Forked-From is the URL path of a stream")
    path = stream_path(source[len(STREAM_ROOT) :], limits)
    sub = 0
    if sub_offset is not None:
        if not _INTEGER.fullmatch(sub_offset) or int(sub_offset) > INTEGER_MAX:
            raise bad(
                "fork_sub_offset_invalid", "Stream-Fork-Sub-Offset is an integer from 0 to 2^53-1"
            )
        sub = int(sub_offset)
    if offset is None:
        if sub:
            raise bad("fork_offset_missing", "Stream-Fork-Sub-Offset needs Stream-Fork-Offset")
        return ForkFrom(path)
    return ForkFrom(path, _fork_offset(offset), sub)


def _fork_offset(value: bytes) -> Offset | None:
    parsed = parse_offset(value.decode("latin-1"))
    if parsed is None:
        raise bad("offset_invalid", "Stream-Fork-Offset is not an offset")
    if parsed == "-1":
        return START
    return None if parsed == "now" else parsed
