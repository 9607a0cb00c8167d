"""`POST /v1/stream/{path}?truncate&before=<offset>`: dropping the beginning of a stream."""

from __future__ import annotations

from fencepost.http.messages import Headers, Request, Response
from fencepost.protocol.offsets import START, Offset, parse_offset, wire
from fencepost.protocol.retention import Cut, Retention, Uncut
from fencepost.server.handlers import rendering
from fencepost.server.handlers.parsing import (
    bad,
    query_of,
    refuse_headers_of_appends,
    refuse_repeated,
)
from fencepost.server.handlers.rendering import BROWSER, next_offset, refused
from fencepost.store.contract import BadOffset, Failed, Missing, SoftDeleted, Unknown


def is_truncation(request: Request) -> bool:
    """Whether a POST with a query asks for a truncation; any other query means nothing to it."""
    return "truncate" in query_of(request)


def parse_truncation(request: Request) -> Offset | None:
    """The offset before which everything goes; None for the tail at that moment."""
    if request.repeated:
        refuse_repeated(request)
    refuse_headers_of_appends(request, "a truncation")
    query = query_of(request)
    if query["truncate"] not in ("", "true"):
        raise bad("truncate_invalid", "truncate takes no value: say ?truncate&before=<offset>")
    if request.body:
        raise bad("body_unexpected", "a truncation has no body: nothing was appended")
    before = query.get("before")
    if before is None:
        raise bad("before_missing", "a truncation needs before=<offset>, or before=now for all")
    parsed = parse_offset(before)
    if parsed is None:
        raise bad("offset_invalid", "before is not an offset that this server has given out")
    if parsed == "-1":
        return START
    return None if parsed == "now" else parsed


def truncated(
    outcome: Cut | Uncut | BadOffset | Missing | SoftDeleted | Failed | Unknown,
) -> Response:
    """The answer: where the stream begins now, whether that is news or not."""
    match outcome:
        case Cut(first, tail) | Uncut(first, tail):
            return Response(204, [next_offset(tail), first_offset(first), *BROWSER])
        case BadOffset():
            return refused(400, "offset_invalid", "Bad offset", "the stream has no such offset")
        case Missing():
            return rendering.missing()
        case SoftDeleted():
            return rendering.soft_deleted()
        case Failed() | Unknown():
            return rendering.failed(outcome)


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
