"""Answers about groups: rows as JSON, refusals as problems."""

from __future__ import annotations

from base64 import b64encode
from functools import lru_cache

import msgspec

from fencepost.http.messages import Response
from fencepost.protocol.groups import Group, GroupExists, GroupInvalid, LimitExceeded
from fencepost.protocol.leases import (
    BeyondHead,
    CorrelationMoved,
    InboxHeld,
    InboxShared,
    LeaseRef,
    Parked,
    Target,
)
from fencepost.protocol.streams import JSON, media_type
from fencepost.server.handlers import rendering
from fencepost.server.handlers.rendering import BROWSER, refused, with_fields
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.store.contract import Failed, Unknown
from fencepost.store.group_contract import (
    AckRefused,
    ClaimDone,
    Event,
    GroupMissing,
    GroupOutcome,
    LaneStats,
    SpanEvents,
    TargetMissing,
)

_NO_STORE = (b"Cache-Control", b"no-store")
_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def json_answer(value: object, status: int = 200) -> Response:
    """A JSON answer that no cache keeps."""
    return raw_answer(msgspec.json.encode(value), status)


def raw_answer(body: bytes, status: int = 200) -> Response:
    """The same, of bytes that are JSON already."""
    headers = [(b"Content-Type", b"application/json"), _NO_STORE, *BROWSER]
    return Response(status, headers, body)


def encode(value: object) -> bytes:
    """A value as JSON."""
    return msgspec.json.encode(value)


def group_missing(name: str) -> Response:
    """A 404 for a group."""
    detail = f"no group {name!r}: make it with PUT /v1/groups/{name}"
    return refused(404, "group_not_found", "No such group", detail)


def refusal(name: str, outcome: GroupOutcome | Failed | Unknown) -> Response:
    """Why a request about a group was not done."""
    match outcome:
        case GroupMissing():
            return group_missing(name)
        case TargetMissing(target):
            detail = f"the group {name!r} has no target or event {target!r}"
            return refused(404, "target_not_found", "No such target", detail)
        case GroupExists():
            detail = f"the group {name!r} exists with other settings: delete it, or use its own"
            return refused(409, "group_exists", "Group exists", detail)
        case GroupInvalid(detail):
            return refused(400, "group_invalid", "Group invalid", detail)
        case InboxHeld():
            detail = "another worker holds this inbox, and the mesh is prefer_oldest: wait for it"
            problem = refused(409, "member_already_connected", "Member already connected", detail)
            return with_fields(problem, close_code=4004)
        case InboxShared():
            detail = (
                "the mesh is allow_concurrent: there is no lease to take, each worker reads the"
                " stream of the inbox from an offset of its own"
            )
            return refused(400, "group_invalid", "Group invalid", detail)
        case LimitExceeded():
            return rendering.limit_exceeded(outcome)
        case CorrelationMoved(watermark):
            detail = f"the group is correlated up to {watermark}: go on from there"
            problem = refused(409, "correlation_moved", "Correlation moved", detail)
            return with_fields(problem, watermark=watermark)
        case BeyondHead(head):
            detail = f"the log ends at {head}"
            return refused(400, "after_beyond_head", "Beyond the head", detail)
        case AckRefused(item, detail):
            problem = refused(400, "ack_invalid", "Ack invalid", detail)
            return with_fields(problem, item=item)
        case Failed() | Unknown():
            return rendering.failed(outcome)
        case _:
            raise AssertionError(f"not a refusal: {outcome}")


def shown_group(group: Group) -> dict[str, object]:
    """A group as it is answered."""
    settings: dict[str, object] = msgspec.to_builtins(group.settings)
    return {
        "group": group.name,
        "incarnation": group.id,
        **settings,
        "correlated": group.watermark,
        "targets_count": group.targets_count,
        "parked_count": group.parked_count,
        "lanes": group.lanes,
        "created_ms": group.created_ms,
    }


def state_of(row: Target, now_ms: int) -> str:
    """What a target is doing, for lists."""
    if row.blocked:
        return "blocked"
    if row.worker is not None:
        return "leased"
    if not row.has_work:
        return "idle"
    return "deferred" if row.deferred_until_ms > now_ms else "ready"


def shown_target(row: Target, now_ms: int) -> dict[str, object]:
    """A target as lists show it. Only its worker gets its token."""
    return {
        "target": row.target,
        "source": row.source,
        "state": state_of(row, now_ms),
        "lane": row.lane,
        "priority": row.priority,
        "at": row.at,
        "work_to": row.work_to,
        "waits_from": row.waits_from,
        "worker": row.worker,
        "lease_until_ms": row.lease_until_ms if row.worker is not None else None,
        "lease_number": row.token,
        "retry": row.retry,
        "lost": row.lost,
        "blocked": row.blocked,
        "error": row.error,
        "failed": row.failed,
        "deferred_until_ms": row.deferred_until_ms or None,
        "replaying": row.replaying,
        "updated_ms": row.updated_ms,
    }


def shown_parked(event: Parked) -> dict[str, object]:
    """A parked event as lists show it."""
    return event._asdict()


def shown_stats(
    lanes: list[LaneStats], group: Group, told: int, head: int, now_ms: int
) -> dict[str, object]:
    """Counts of a group, in all and lane by lane."""
    fields = ("idle", "ready", "leased", "deferred", "blocked", "lag")
    total = {name: sum(getattr(lane, name) for lane in lanes) for name in fields}
    oldest = min((lane.oldest_ms for lane in lanes if lane.oldest_ms is not None), default=None)
    return {
        "targets": group.targets_count,
        **total,
        "parked": group.parked_count,
        "told": told,
        "correlated": group.watermark,
        "head": head,
        "counted_ms": now_ms,
        "uncorrelated": max(0, head - group.watermark),
        "oldest_ms": oldest,
        "lag_ms": 0 if oldest is None else max(0, now_ms - oldest),
        "lanes": [
            lane._asdict() | {"lag_ms": max(0, now_ms - (lane.oldest_ms or now_ms))}
            for lane in lanes
        ],
    }


# Leases


def leases_body(done: ClaimDone, spans: list[SpanEvents], tokens: LeaseTokens) -> bytes:
    """The field `leases` of an answer, with the events of each."""
    shown = []
    for lease, span in zip(done.leases, spans, strict=True):
        row = lease.row
        ref = LeaseRef(done.group.name, done.group.id, row.target, row.token)
        fields = {
            "target": row.target,
            "source": row.source,
            "token": tokens.make(ref),
            "at": row.at,
            "until": row.work_to,
            "read_to": span.read_to,
            "lease_until_ms": row.lease_until_ms,
            "retry": row.retry,
            "pruned": span.pruned and {"from": span.pruned[0], "to": span.pruned[1]},
        }
        if span.untold_to is not None:
            fields["untold_to"] = span.untold_to
        events = b",".join([event_json(event) for event in span.events])
        shown.append(b'%b,"events":[%b]}' % (msgspec.json.encode(fields)[:-1], events))
    due = b"null" if done.due_ms is None else b"%d" % done.due_ms
    return b'"leases":[%b],"due_ms":%b' % (b",".join(shown), due)


_MESSAGE = b'{"position":%d,%b,"offset":"%016d_%016d","version":%d,"timestamp_ms":%d,%b%b%b,%b}'


def event_json(event: Event) -> bytes:
    """An event as `/v1/log` shows a row."""
    stream, content_type, is_json = _head(event.path, event.stream, event.content_type)
    sent = b""
    if event.producer is not None:
        producer_id, epoch, seq = event.producer
        sent = b',"producer":{"id":%b,"epoch":%d,"seq":%d}' % (_text(producer_id), epoch, seq)
    replayed = b',"replayed":true' if event.replayed else b""
    if event.note is not None:
        replayed = b'%b,"note":%b' % (replayed, msgspec.json.encode(event.note))
    data = event.data
    if not is_json:
        field = b'"data_base64":"%b"' % b64encode(data)
    else:
        if b"\n" in data or b"\r" in data:
            data = data.translate(_BREAKS)
        field = b'"data":' + data
    place = (event.version, event.start_bytes, event.version, event.at_ms)
    return _MESSAGE % (event.position, stream, *place, content_type, sent, replayed, field)


@lru_cache(maxsize=16_384)
def _head(path: str, stream: int, content_type: str) -> tuple[bytes, bytes, bool]:
    named = b'"stream":%b,"incarnation":%d' % (_text(path), stream)
    kind = b'"content_type":%b' % _text(content_type)
    return named, kind, media_type(content_type) == JSON


@lru_cache(maxsize=16_384)
def _text(text: str) -> bytes:
    return msgspec.json.encode(text)
