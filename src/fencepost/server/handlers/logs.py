"""`/v1/log` and `/v1/log/plan`: every message of every stream in one order.

An answer is a bounded piece of the log with the position to go on after. A reader that has reached
the head may wait for more (long-poll) or be sent it as it comes (SSE); it is woken only by commits
that touch streams it selects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import msgspec

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Headers, Request, Response, StreamingResponse
from fencepost.protocol.grants import Principal
from fencepost.protocol.log_filters import EventFilter, check_correlation, check_names
from fencepost.protocol.logs import (
    BEFORE_ALL,
    COLUMNS,
    POSITION_MAX,
    SIZE,
    Part,
    Selection,
    Split,
    parse_instant_ms,
    parse_part,
    parse_position,
)
from fencepost.server.access import asker_of, name_of, readable_selection
from fencepost.server.handlers import log_columns
from fencepost.server.handlers.fields import RefusedError, bad, calendar_time
from fencepost.server.handlers.log_lines import log_lines
from fencepost.server.handlers.querying import Parameters
from fencepost.server.handlers.rendering import BROWSER, refused
from fencepost.server.handlers.waiting import WaiterLimit
from fencepost.server.settings import ServerSettings
from fencepost.server.waiters import Waiters, Waiting
from fencepost.store.contract import Published
from fencepost.store.log_contract import (
    BeyondHead,
    LogChunk,
    LogQuery,
    LogRows,
    LogStore,
    Plan,
    PlanQuery,
    Pruned,
)

NDJSON = b"application/x-ndjson"

_NO_STORE = (b"Cache-Control", b"no-store")
_SELECTING = ("stream", "match")
_LINES_ACCEPTED = frozenset((NDJSON, b"application/json", b"text/event-stream"))


class _Form:
    """How rows go out: as lines or as Arrow."""

    def __init__(self, content_type: bytes, render: Callable[[LogRows], bytes], empty: bytes):
        self.content_type = content_type
        self.render = render
        self.empty = empty


class Logs:
    """The handlers that read across all streams."""

    def __init__(
        self,
        store: LogStore,
        listen: Callable[[Callable[[Sequence[Published]], None]], None],
        clock: Clock,
        settings: ServerSettings,
        waiter_limit: WaiterLimit,
    ) -> None:
        self._waiter_limit = waiter_limit
        self._store = store
        self._clock = clock
        self._settings = settings
        self._limits = settings.limits
        self.waiters = Waiters()
        waiter_limit.include(lambda: self.waiters.count)
        listen(self.waiters.published)

    def stop_waiting(self) -> None:
        """Answer every reader that waits for news: the server is going down."""
        self.waiters.stop()

    async def head(self, request: Request) -> Answer:
        self._asked(request)  # a HEAD is refused where the GET would be
        head = await self._store.head()
        return Response(200, [(b"Log-Head", b"%d" % head), _NO_STORE, *BROWSER])

    def _asked(self, request: Request) -> tuple[LogQuery, _Form, str | None]:
        """What a request asks for, in which form, and how it waits for more."""
        parameters = Parameters(
            request,
            once=(
                *("after", "until", "limit", "part", "live", "pruned", "order", "correlation"),
                "columns",
            ),
            repeatable=(*_SELECTING, "name"),
        )
        live = parameters.get("live")
        if live not in (None, "long-poll", "sse"):
            raise bad("live_invalid", "live is long-poll or sse")
        resumed = _resumed(request) if live == "sse" else None
        columns = _columns(parameters)
        query = self._query(parameters, resumed, request)
        form = _form(request, columns)
        if columns is not None:
            if form.content_type == NDJSON:
                raise bad(
                    "columns_invalid",
                    "columns are chosen of Arrow: accept application/vnd.apache.arrow.stream, or"
                    " leave columns out",
                )
            query = query._replace(columns=columns)
        if live == "sse" and form.content_type != NDJSON:
            raise _not_acceptable(
                "events carry JSON lines: Arrow is for catching up and long-polls"
            )
        if live is not None and query.descending:
            raise bad("order_invalid", "order=desc reads what is there: it cannot be live")
        return query, form, live

    async def read(self, request: Request) -> Answer:
        query, form, live = self._asked(request)
        if live is None:
            return await self._once(query, form)
        if (too_many := self._waiter_limit.refusal(request)) is not None:
            return too_many
        principal = name_of(request.principal)
        if live == "long-poll":
            return await self._long_poll(query, form, principal)
        return await self._events(query, form, principal)

    def _query(self, parameters: Parameters, resumed: int | None, request: Request) -> LogQuery:
        after = resumed if resumed is not None else _after(parameters)
        until = parameters.integer(
            "until", "until_invalid", least=0, most=POSITION_MAX, default=None
        )
        if after is not None and until is not None and until < after:
            raise bad("range_invalid", "until must not be below after")
        limit = parameters.integer(
            "limit",
            "limit_invalid",
            least=1,
            most=self._limits.log_rows_max,
            default=min(self._limits.log_rows_default, self._limits.log_rows_max),
        )
        pruned = parameters.get("pruned")
        if pruned not in (None, "fail", "skip"):
            raise bad("pruned_invalid", "pruned is fail or skip")
        assert limit is not None
        return LogQuery(
            self._selection(parameters, request.principal),
            after,
            until,
            messages_max=limit,
            bytes_max=self._limits.log_bytes_max,
            skip_pruned=pruned == "skip",
            principal=asker_of(request),
            events=_events_of(parameters),
            descending=_descending(parameters),
        )

    def _selection(self, parameters: Parameters, principal: Principal | None) -> Selection:
        paths = parameters.paths("stream", self._limits)
        if len(paths) > self._limits.log_streams_max:
            raise bad(
                "streams_too_many",
                f"name at most {self._limits.log_streams_max} streams (log_streams_max), or match",
            )
        part: Part | None = None
        text = parameters.get("part")
        if text is not None:
            part = parse_part(text, parts_max=self._limits.log_parts_max)
            if part is None:
                raise bad(
                    "part_invalid",
                    f"part is i/n with 0 <= i < n <= {self._limits.log_parts_max}",
                )
        globs = parameters.globs("match", self._limits)
        return readable_selection(principal, paths, globs, part)

    async def _once(self, query: LogQuery, form: _Form) -> Response:
        found = await self._store.read(query, form.render)
        if isinstance(found, Pruned | BeyondHead):
            return _refusal(found)
        chunk, body = found
        headers = _headers(chunk, form.content_type, descending=query.descending)
        return Response(200, headers, body or form.empty)

    async def _long_poll(self, query: LogQuery, form: _Form, principal: str) -> Response:
        deadline_ms = self._clock.monotonic_ms() + self._settings.long_poll_ms
        with Waiting(self.waiters, query.selection, principal) as waiting:
            while True:
                waiting.look()
                found = await self._store.read(query, form.render)
                if isinstance(found, Pruned | BeyondHead):
                    return _refusal(found)
                chunk, body = found
                headers = _headers(chunk, form.content_type)
                if body is not None:
                    return Response(200, headers, body)
                query = query._replace(after=chunk.next)
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if _is_done(query, chunk) or (
                    chunk.at_head and not await waiting.changed(left_ms / 1000)
                ):
                    return Response(204, headers)

    async def _events(self, query: LogQuery, form: _Form, principal: str) -> Answer:
        # The first piece is read before the answer begins, while it can still be a refusal.
        waiting = Waiting(self.waiters, query.selection, principal)
        found = await self._store.read(query, form.render)
        if isinstance(found, Pruned | BeyondHead):
            return _refusal(found)
        headers: Headers = [
            (b"Content-Type", b"text/event-stream"),
            (b"Cache-Control", b"no-cache"),
            *BROWSER,
        ]
        return StreamingResponse(200, headers, self._follow(query, form, found, waiting))

    async def _follow(
        self,
        query: LogQuery,
        form: _Form,
        found: tuple[LogChunk, bytes | None],
        waiting: Waiting,
    ) -> AsyncIterator[bytes]:
        ends_ms = self._clock.monotonic_ms() + self._settings.sse_ms
        with waiting:
            # What was committed since the first piece was read woke no reader.
            waiting.news.set()
            while True:
                chunk, body = found
                yield _event(chunk, body)
                query = query._replace(after=chunk.next)
                left_ms = ends_ms - self._clock.monotonic_ms()
                if _is_done(query, chunk) or left_ms <= 0:
                    return
                if chunk.at_head and not await waiting.changed(left_ms / 1000):
                    return
                waiting.look()
                again = await self._store.read(query, form.render)
                if isinstance(again, Pruned | BeyondHead):
                    return  # the reader comes back with its last id and is told why
                found = again

    async def plan(self, request: Request) -> Answer:
        parameters = Parameters(
            request,
            once=("after", "until", "rows_max", "bytes_max", "part", "parts", "at"),
            repeatable=_SELECTING,
        )
        asked = self._plan_query(parameters, request)
        plan = await self._store.plan(asked)
        if isinstance(plan, BeyondHead):
            return _refusal(plan)
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Log-Head", b"%d" % plan.head),
            _NO_STORE,
            *BROWSER,
        ]
        return Response(200, headers, msgspec.json.encode(_plan_document(asked, plan)))

    def _plan_query(self, parameters: Parameters, request: Request) -> PlanQuery:
        after = _after(parameters)
        if after is None:
            raise bad("after_invalid", "a plan begins at a position, not at now")
        most = POSITION_MAX
        until = parameters.integer("until", "until_invalid", least=0, most=most, default=None)
        if until is not None and until < after:
            raise bad("range_invalid", "until must not be below after")
        parts = parameters.integer(
            "parts", "parts_invalid", least=1, most=self._limits.plan_parts_max, default=1
        )
        assert parts is not None
        at = parameters.get("at")
        at_ms = None if at is None else parse_instant_ms(at)
        if at is not None and at_ms is None:
            raise bad("at_invalid", "at is a time: RFC 3339, or milliseconds since 1970")
        return PlanQuery(
            self._selection(parameters, request.principal),
            after,
            until,
            rows_max=parameters.integer(
                "rows_max", "rows_max_invalid", least=1, most=most, default=None
            ),
            bytes_max=parameters.integer(
                "bytes_max", "bytes_max_invalid", least=1, most=most, default=None
            ),
            parts=parts,
            at_ms=at_ms,
            principal=asker_of(request),
        )


def _after(parameters: Parameters) -> int | None:
    """The position to read after; None for `now`."""
    text = parameters.get("after")
    if text == "now":
        return None
    if text is None or text == "-1":
        return BEFORE_ALL
    position = parse_position(text)
    if position is None:
        raise bad("after_invalid", "after is a position, -1 (from the beginning) or now")
    return position


def _descending(parameters: Parameters) -> bool:
    order = parameters.get("order")
    if order not in (None, "asc", "desc"):
        raise bad("order_invalid", "order is asc or desc")
    return order == "desc"


def _events_of(parameters: Parameters) -> EventFilter | None:
    """Which events are wanted; None when every message is."""
    names, correlation = parameters.all("name"), parameters.get("correlation")
    wrong = check_names(names)
    if wrong is not None:
        raise bad("name_invalid", wrong)
    wrong = None if correlation is None else check_correlation(correlation)
    if wrong is not None:
        raise bad("correlation_invalid", wrong)
    return EventFilter(frozenset(names), correlation) if names or correlation else None


def _resumed(request: Request) -> int | None:
    """Where a browser that lost its connection goes on."""
    value = request.headers.get(b"last-event-id")
    if value is None or value == b"":
        return None
    text = value.decode("latin-1")
    position = BEFORE_ALL if text == "-1" else parse_position(text)
    if position is None:
        raise bad("after_invalid", "Last-Event-ID is the id of an event of this log")
    return position


def _columns(parameters: Parameters) -> frozenset[str] | None:
    """The columns that are wanted; None when it is not said."""
    text = parameters.get("columns")
    if text is None:
        return None
    names = text.split(",")
    known = COLUMNS | {SIZE}
    if not known.issuperset(names):
        raise bad("columns_invalid", f"columns are some of {','.join(sorted(known))}")
    return frozenset(names)


def _form(request: Request, columns: frozenset[str] | None) -> _Form:
    accepted = {
        piece.partition(b";")[0].strip().lower()
        for piece in request.headers.get(b"accept", b"*/*").split(b",")
    }
    if log_columns.ARROW in accepted:
        wanted = COLUMNS if columns is None else columns
        try:
            empty = log_columns.log_stream(None, wanted)
        except log_columns.ArrowMissingError:
            raise _not_acceptable(
                "this server has no pyarrow: install fencepost[arrow], or accept JSON lines",
                "arrow_unavailable",
            ) from None
        render = partial(log_columns.log_stream, columns=wanted)
        return _Form(log_columns.ARROW, render, empty)
    if accepted & _LINES_ACCEPTED or any(
        kind in (b"", b"*/*", b"application/*") for kind in accepted
    ):
        return _Form(NDJSON, log_lines, b"")
    raise _not_acceptable(
        "the log comes as application/x-ndjson or as application/vnd.apache.arrow.stream"
    )


def _not_acceptable(detail: str, code: str = "not_acceptable") -> RefusedError:
    return RefusedError(406, code, "Not acceptable", detail)


def _is_done(query: LogQuery, chunk: LogChunk) -> bool:
    """Whether a live reader has all it asked for."""
    return query.until is not None and chunk.next >= query.until


def _headers(chunk: LogChunk, content_type: bytes, *, descending: bool = False) -> Headers:
    headers = [
        (b"Content-Type", content_type),
        (b"Log-Head", b"%d" % chunk.head),
        (b"Log-Next", b"%d" % chunk.next),
        _NO_STORE,
        *BROWSER,
    ]
    if chunk.at_head and not descending:
        headers.append((b"Log-Up-To-Date", b"true"))
    if chunk.pruned is not None:
        headers.append((b"Log-Pruned", b"%d" % chunk.pruned))
    return headers


def _event(chunk: LogChunk, body: bytes | None) -> bytes:
    """A piece as events: its rows if there are any, then where the reader stands."""
    events = b""
    if body is not None:
        lines = b"\n".join(b"data: " + line for line in body.splitlines())
        events = b"event: data\nid: %d\n%b\n\n" % (chunk.next, lines)
    control: dict[str, object] = {"logNext": chunk.next, "logHead": chunk.head}
    if chunk.at_head:
        control["upToDate"] = True
    if chunk.pruned is not None:
        control["pruned"] = chunk.pruned
    return b"%bevent: control\nid: %d\ndata: %b\n\n" % (
        events,
        chunk.next,
        msgspec.json.encode(control),
    )


def _refusal(found: Pruned | BeyondHead) -> Response:
    head = (b"Log-Head", b"%d" % found.head)
    if isinstance(found, BeyondHead):
        return refused(
            400,
            "after_beyond_head",
            "Position not reached",
            f"the log has only come to position {found.head}: this position is not from here",
            head,
        )
    return refused(
        410,
        "log_pruned",
        "Rows are gone",
        f"rows of this selection up to position {found.last} were removed after the log's"
        " retention: go on after it, or ask with pruned=skip for what is left",
        head,
        (b"Log-Pruned", b"%d" % found.last),
    )


def _plan_document(asked: PlanQuery, plan: Plan) -> dict[str, object]:
    document: dict[str, object] = {
        "after": asked.after,
        "until": plan.end.position,
        "head": plan.head,
        "rows": plan.end.weight.rows,
        "bytes": plan.end.weight.bytes,
        "splits": [_split_document(split) for split in plan.splits],
        "pruned": plan.pruned,
        "pruned_rows": plan.pruned_rows,
    }
    if asked.at_ms is not None:
        document["at"] = {
            "timestamp_ms": asked.at_ms,
            "time": calendar_time(asked.at_ms),
            "after": plan.at,
        }
    return document


def _split_document(split: Split) -> dict[str, int]:
    return {
        "after": split.after,
        "until": split.until,
        "rows": split.weight.rows,
        "bytes": split.weight.bytes,
    }
