"""`/v1/writers` and `/v1/writer-history`: runs of writers, and what they published.

A writer is its principal's: others cannot see it, and are refused when they open it or commit as
it; administrators can do all of that. What a refusal knows about the writer stands in fields of the
problem beside its code.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.limits import Limits
from fencepost.protocol.writers import (
    BatchRefusal,
    PositionRange,
    PublishedBatch,
    Writer,
    WriterBatch,
    WriterFenced,
    WriterForgetOutcome,
    WriterForgotten,
    WriterHeld,
    WriterHistoryGone,
    WriterMissing,
    WriterOpen,
    WriterOpened,
    WriterOpenOutcome,
    WriterQueryChanged,
    WriterRangeMismatch,
    WritersFull,
    may_use,
)
from fencepost.server import access
from fencepost.server.handlers import fields, rendering
from fencepost.server.handlers.fields import bad, decoded
from fencepost.server.handlers.lists import name_after
from fencepost.server.handlers.querying import Parameters, glob_of, list_limit
from fencepost.server.handlers.rendering import BROWSER, BROWSER_BLOCK, refused
from fencepost.server.settings import ServerSettings
from fencepost.store.contract import Failure, Store
from fencepost.store.log_contract import ListStore

NO_POSITION = -1
"""The position before the first one."""

_NO_STORE = (b"Cache-Control", b"no-store")


class RangeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The positions that a batch was read from: those after `after`, up to `until`."""

    until: int
    after: int | None = None


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """The field `writer` of a commit."""

    name: str
    query: str
    epoch: int
    batch: int
    digest: str | None = None
    range: RangeBody | None = None


class _OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    allow_new: bool = False
    after: int | None = None


_OPEN = msgspec.json.Decoder(_OpenBody)


def batch_of(body: BatchBody, request: Request, limits: Limits) -> WriterBatch:
    """The batch that a commit publishes."""
    name = fields.check_path(body.name)
    if len(name.encode()) > limits.path_bytes_max:
        raise bad("path_too_long", f"a writer's name has at most {limits.path_bytes_max} bytes")
    for what, value in (("epoch", body.epoch), ("batch", body.batch)):
        if not 0 <= value <= fields.INTEGER_MAX:
            raise bad("writer_invalid", f"writer.{what} is an integer from 0 to 2^53-1")
    digest = None if body.digest is None else _text(body.digest, "writer.digest", limits)
    principal = request.principal
    return WriterBatch(
        name,
        _query(body.query, "writer.query", limits),
        body.epoch,
        body.batch,
        digest,
        access.name_of(principal),
        access.overrides(principal),
        None if body.range is None else _range(body.range),
    )


def _range(body: RangeBody) -> PositionRange:
    after = NO_POSITION if body.after is None else body.after
    if not NO_POSITION <= after <= body.until <= fields.INTEGER_MAX:
        raise bad(
            "writer_invalid",
            "writer.range has the positions after and until, integers from -1 to 2^53-1, the"
            " first not above the second",
        )
    return PositionRange(body.after, body.until)


def _query(text: str, name: str, limits: Limits) -> str:
    if not text:
        raise bad("writer_invalid", f"{name} must not be empty: it says whose batches these are")
    return _text(text, name, limits)


def _text(text: str, name: str, limits: Limits) -> str:
    if len(text) > limits.writer_text_max:
        detail = f"{name} has at most {limits.writer_text_max} characters (writer_text_max)"
        raise bad("writer_invalid", detail)
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        raise bad("writer_invalid", f"{name} has no control characters")
    return text


class Writers:
    """The handlers of writers."""

    def __init__(self, store: Store, lists: ListStore, settings: ServerSettings) -> None:
        self._store = store
        self._lists = lists
        self._limits = settings.limits

    def _name(self, raw: bytes) -> str:
        return fields.stream_path(raw, self._limits)

    async def open(self, request: Request, raw: bytes) -> Answer:
        access.writing_allowed(request)
        name = self._name(raw)
        body = decoded(_OPEN, request.body, "writer_invalid", "opens no writer")
        if body.after is not None and not 0 <= body.after <= fields.INTEGER_MAX:
            raise bad("writer_invalid", "after is an epoch: an integer from 0 to 2^53-1")
        opening = WriterOpen(
            name,
            _query(body.query, "query", self._limits),
            body.allow_new,
            access.name_of(request.principal),
            access.overrides(request.principal),
            body.after,
        )
        answered: asyncio.Future[WriterOpenOutcome | Failure] = _future()
        self._store.open_writer(opening, lambda outcome: _resolve(answered, outcome))
        return _opened(await answered)

    async def show(self, request: Request, raw: bytes) -> Answer:
        found = await self._find(request, self._name(raw))
        return found if isinstance(found, Response) else _json(shown(found))

    async def history(self, request: Request, raw: bytes) -> Answer:
        name = self._name(raw)
        parameters = Parameters(request, once=("after", "limit"), repeatable=())
        before = parameters.integer(
            "after", "after_invalid", least=0, most=fields.INTEGER_MAX, default=None
        )
        limit = list_limit(parameters, self._limits)
        found = await self._find(request, name)
        if isinstance(found, Response):
            return found
        page = await self._lists.list_writer_history(name, before=before, limit=limit)
        following = None if page.next is None else page.next[0]
        return _json({"batches": [_shown_batch(one) for one in page.entries], "next": following})

    async def _find(self, request: Request, name: str) -> Writer | Response:
        """The writer, if there is one that the principal may see."""
        found = await self._store.find_writer(name)
        principal = request.principal
        if not isinstance(found, Writer):
            return refusal(found) if isinstance(found, WriterMissing) else rendering.failed(found)
        if not may_use(found, access.name_of(principal), overrides=access.overrides(principal)):
            return refusal(WriterMissing())
        return found

    async def forget(self, request: Request, raw: bytes) -> Answer:
        name = self._name(raw)
        principal = request.principal
        owner = None if access.overrides(principal) else access.name_of(principal)
        answered: asyncio.Future[WriterForgetOutcome | Failure] = _future()
        self._store.forget_writer(name, owner, lambda outcome: _resolve(answered, outcome))
        outcome = await answered
        match outcome:
            case WriterForgotten():
                return Response(204, [], b"", BROWSER_BLOCK)
            case WriterMissing():
                return refusal(outcome)
            case _:
                return rendering.failed(outcome)

    async def list(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("match", "after", "limit"), repeatable=())
        match = parameters.get("match")
        principal = request.principal
        page = await self._lists.list_writers(
            None if match is None else glob_of(match, "match", self._limits),
            owner=None if access.overrides(principal) else access.name_of(principal),
            after=name_after(parameters),
            limit=list_limit(parameters, self._limits),
        )
        following = None if page.next is None else page.next[0]
        return _json({"writers": [shown(writer) for writer in page.entries], "next": following})


def shown(writer: Writer) -> dict[str, object]:
    """A writer as it is answered."""
    return writer._asdict()


def _shown_batch(published: PublishedBatch) -> dict[str, object]:
    return published._asdict() | {"range": shown_range(published.range)}


def shown_range(read: PositionRange | None) -> dict[str, int | None] | None:
    """The positions that a batch was read from, as they are answered."""
    return None if read is None else read._asdict()


def refusal(outcome: BatchRefusal, *, missing_status: int = 404) -> Response:
    """Why something is not done in the name of a writer."""
    match outcome:
        case WriterMissing():
            detail = "no writer of this name was opened, or it was forgotten: open a run first"
            title = "No such writer"
            if missing_status == 404:
                return refused(404, "writer_not_found", title, detail)
            return refused(409, "writer_not_found", title, detail)
        case WriterHeld():
            detail = "the writer is another principal's: use another name"
            return refused(403, "writer_held", "Writer held", detail)
        case WriterQueryChanged(query, batch):
            reached = "no batch yet" if batch is None else f"batch {batch}"
            problem = refused(
                409,
                "writer_query_changed",
                "Writer of another query",
                f"the name is the writer of query {query}, which came to {reached}: go on with"
                " that query, use another name, or open with allow_new to begin anew",
            )
            return _with(problem, query=query, batch=batch)
        case WriterFenced(epoch):
            problem = refused(
                409,
                "writer_fenced",
                "Writer fenced",
                f"the current run of this writer has epoch {epoch}: stop, another one writes now",
            )
            return _with(problem, epoch=epoch)
        case WriterRangeMismatch(batch, published, sent):
            problem = refused(
                409,
                "writer_range_mismatch",
                "Batch of another range",
                f"batch {batch} was published from {_said(published)}, and this one was read from"
                f" {_said(sent)}: nothing was written. The record of progress is older than what"
                " was published (a restored checkpoint): go on with the newest one, or read from"
                " where the published batches end, under another name",
            )
            ranges = {"published": shown_range(published), "sent": shown_range(sent)}
            return _with(problem, batch=batch, **ranges)
        case WriterHistoryGone(batch):
            problem = refused(
                409,
                "writer_history_gone",
                "Batch older than the history",
                f"the writer came to batch {batch}, and its history does not tell what was"
                " published under this number (writer_history_max): nothing was written. Go on"
                " with the newest record of progress, or read from where the published batches"
                " end, under another name",
            )
            return _with(problem, batch=batch)


def _said(read: PositionRange) -> str:
    begin = "its start" if read.after is None else f"position {read.after}"
    return f"the positions after {begin} up to {read.until}"


def _opened(outcome: WriterOpenOutcome | Failure) -> Response:
    match outcome:
        case WriterOpened(writer):
            return _json(shown(writer))
        case WriterHeld() | WriterQueryChanged() | WriterFenced() | WriterMissing():
            return refusal(outcome, missing_status=409)
        case LimitExceeded():
            return rendering.limit_exceeded(outcome)
        case WritersFull(writers_max):
            return refused(
                429,
                "too_many_writers",
                "Too many writers",
                f"at most {writers_max} writers are kept (writers_max): forget some of them",
                (b"Retry-After", b"60"),
            )
        case _:
            return rendering.failed(outcome)


def _with(response: Response, **facts: object) -> Response:
    """A problem that says more than its code, in fields of its own."""
    assert isinstance(response.body, bytes)
    body: dict[str, Any] = msgspec.json.decode(response.body)
    encoded = msgspec.json.encode(body | facts)
    return Response(response.status, response.headers, encoded, response.block)


def _json(value: object) -> Response:
    headers = [(b"Content-Type", b"application/json"), _NO_STORE, *BROWSER]
    return Response(200, headers, msgspec.json.encode(value))


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _resolve(future: asyncio.Future[Any], outcome: object) -> None:
    # The client may be gone by the time that the commit is done.
    if not future.done():
        future.set_result(outcome)
