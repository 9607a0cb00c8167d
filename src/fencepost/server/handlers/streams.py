"""`/v1/stream/{path}`: create, append, truncate, delete; and hand reads to `reads.py`.

Each handler reads the request, checks the grants, and gives the store a typed value with a callback
that renders the outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from fencepost.http.exchanges import SHARED_BODY_BYTES_MAX
from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol.appends import AppendOutcome
from fencepost.protocol.claims import Actor
from fencepost.protocol.creates import CreateOutcome
from fencepost.protocol.grants import APPEND, AUDIT, CREATE
from fencepost.protocol.offsets import START, Offset, parse_offset
from fencepost.protocol.retention import Cut, Uncut
from fencepost.server import access
from fencepost.server.handlers import fields, parsing, rendering
from fencepost.server.handlers.fields import bad, query_of
from fencepost.server.handlers.parsing import refuse_headers_of_appends, refuse_repeated
from fencepost.server.handlers.reads import Reads
from fencepost.server.handlers.rendering import BROWSER, first_offset, next_offset, refused
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.server.settings import ServerSettings
from fencepost.store.contract import (
    BadOffset,
    Deleted,
    Failed,
    Missing,
    SoftDeleted,
    Store,
    Unknown,
)

Respond = Callable[[Answer], None]


class Streams:
    """The handlers of one stream. `raw` is its path as it stands in the URL."""

    def __init__(
        self,
        store: Store,
        reads: Reads,
        settings: ServerSettings,
        tokens: LeaseTokens,
        *,
        is_authorized: bool,
    ) -> None:
        self._store = store
        self._reads = reads
        self._limits = settings.limits
        self._tokens = tokens
        self._is_authorized = is_authorized

    def stop_waiting(self) -> None:
        """Answer every reader that waits for news: the server is going down."""
        self._reads.stop_waiting()

    def get(self, request: Request, raw: bytes) -> Awaitable[Answer]:
        path = self._readable(raw)
        access.read_allowed(request, path)
        return self._reads.get(request, path)

    def head(self, request: Request, raw: bytes) -> Awaitable[Answer]:
        path = self._readable(raw)
        access.read_allowed(request, path)
        return self._reads.head(path)

    def _readable(self, raw: bytes) -> str:
        # The audit stream is reserved: it can be read, and nothing else.
        return AUDIT if raw == AUDIT.encode() else fields.stream_path(raw, self._limits)

    def post(self, request: Request, answer: Respond, raw: bytes) -> Awaitable[Answer] | None:
        path = fields.writable_path(raw, self._limits)
        if request.query and _is_truncation(request):
            before = _parse_truncation(request)
            access.delete_allowed(request, path)
            self._store.truncate(path, before, lambda outcome: answer(_truncated(path, outcome)))
            return None
        actor = access.actor_of(request, path) if self._is_authorized else None
        if len(request.body) > SHARED_BODY_BYTES_MAX:
            access.writes_allowed(request, APPEND, path)
            return self._append_large(request, path, actor)
        append = parsing.parse_append(request, path, self._limits, actor, tokens=self._tokens)
        if actor is not None:
            access.append_allowed(append)
        self._store.append(append, partial(_answer_append, answer, path))
        return None

    async def _append_large(self, request: Request, path: str, actor: Actor | None) -> Answer:
        """An append with a large body, which is read beside the loop."""
        append = await asyncio.to_thread(
            parsing.parse_append, request, path, self._limits, actor, tokens=self._tokens
        )
        access.append_allowed(append)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def done(outcome: AppendOutcome | Missing | SoftDeleted | Failed | Unknown) -> None:
            if not answered.done():  # the client may be gone by the time that it is stored
                answered.set_result(rendering.appended(path, outcome))

        self._store.append(append, done)
        return await answered

    def put(self, request: Request, answer: Respond, raw: bytes) -> Awaitable[Answer] | None:
        path = fields.writable_path(raw, self._limits)
        if len(request.body) > SHARED_BODY_BYTES_MAX:
            access.writes_allowed(request, CREATE | APPEND, path)
            return self._create_large(request, path)
        create = parsing.parse_create(request, path, self._limits)
        access.create_allowed(request, create)
        location = request.base_url() + request.path
        self._store.create(
            create, lambda outcome: answer(rendering.created(path, outcome, location))
        )
        return None

    async def _create_large(self, request: Request, path: str) -> Answer:
        """A stream made with a large body, which is read beside the loop."""
        create = await asyncio.to_thread(parsing.parse_create, request, path, self._limits)
        access.create_allowed(request, create)
        location = request.base_url() + request.path
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def done(outcome: CreateOutcome | Failed | Unknown) -> None:
            if not answered.done():
                answered.set_result(rendering.created(path, outcome, location))

        self._store.create(create, done)
        return await answered

    def delete(self, request: Request, answer: Respond, raw: bytes) -> None:
        path = fields.writable_path(raw, self._limits)
        access.delete_allowed(request, path)
        self._store.delete(path, lambda outcome: answer(_deleted(path, outcome)))


def _answer_append(
    answer: Respond,
    path: str,
    outcome: AppendOutcome | Missing | SoftDeleted | Failed | Unknown,
) -> None:
    answer(rendering.appended(path, outcome))


def _deleted(path: str, outcome: Deleted | Missing | SoftDeleted | Failed | Unknown) -> Response:
    match outcome:
        case Deleted():
            return Response(204, list(BROWSER))
        case Missing() | SoftDeleted() | Failed() | Unknown():
            return rendering.not_there(path, outcome)


# POST ?truncate&before=<offset>: dropping the beginning of a stream


def _is_truncation(request: Request) -> bool:
    """Whether a POST with a query asks for a truncation; any other query means nothing to it."""
    return "truncate" in query_of(request)


def _parse_truncation(request: Request) -> Offset | None:
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
        raise bad("offset_invalid", f"before={before!r} is not an offset that this server gave out")
    if parsed == "-1":
        return START
    return None if parsed == "now" else parsed


def _truncated(
    path: str, outcome: Cut | Uncut | BadOffset | Missing | SoftDeleted | Failed | Unknown
) -> Response:
    """The answer: where the stream begins now, whether that is news or not."""
    match outcome:
        case Cut(first, tail) | Uncut(first, tail):
            return Response(204, [next_offset(tail), first_offset(first), *BROWSER])
        case BadOffset():
            detail = f"no message of {path!r} ends at that offset: nothing was truncated"
            return refused(400, "offset_invalid", "Bad offset", detail)
        case Missing() | SoftDeleted() | Failed() | Unknown():
            return rendering.not_there(path, outcome)
