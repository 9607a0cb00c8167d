"""The endpoints of the daemon: requests in, rows and events out.

A send is answered when its row is on disk, from a callback of the writer and without a task of its
own. Everything else is a small coroutine.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from fencepost.http.messages import Answer, Cancellable, Request, Response
from fencepost.http.problems import failure, problem
from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.daemon import Daemon
from fencepost.outbox.daemon.database import DiskFullError, File, OutcomeUnknownError
from fencepost.outbox.daemon.feed import BadPlaceError, TooManyReadersError
from fencepost.outbox.daemon.gate import Gate
from fencepost.outbox.daemon.metrics import render
from fencepost.outbox.delivery import read_send, row_of
from fencepost.outbox.states import (
    STATUSES,
    AlreadyDelivered,
    AlreadyQueued,
    Conflict,
    Dropped,
    IdUsed,
    NotOpen,
    Queued,
    Requeued,
    Row,
    Successor,
    facts_of,
)
from fencepost.protocol.fingerprints import Unsendable, refuse_id

log = logging.getLogger(__name__)

Respond = Callable[[Answer], None]
LIST_MAX = 1_000
IPC_FEATURES = ("send", "inbox", "events", "outbox", "requeue_payload", "hooks")
_JSON = [(b"Content-Type", b"application/json"), (b"Cache-Control", b"no-store")]
_ROW = re.compile(rb"/v1/outbox/([\w.-]{1,64})(?:/(requeue|drop))?")


class RefusedError(Exception):
    """The request is answered with a problem."""

    def __init__(self, status: int, code: str, detail: str, **fields: object) -> None:
        super().__init__(detail)
        self.response = _problem(status, code, detail, fields)


def _problem(
    status: int, code: str, detail: str, fields: dict[str, object] | None = None
) -> Response:
    headers = [(b"Retry-After", b"1")] if status in (429, 503) else None
    made = problem(status, code, code.replace("_", " ").capitalize(), detail, headers)
    if fields:
        assert isinstance(made.body, bytes)
        made.body = msgspec.json.encode({**msgspec.json.decode(made.body), **fields})
    return made


def json_answer(value: object, status: int = 200) -> Response:
    return Response(status, list(_JSON), msgspec.json.encode(value))


class Endpoints:
    """Answers the requests of one way in."""

    def __init__(self, daemon: Daemon, gate: Gate) -> None:
        self._daemon = daemon
        self._gate = gate
        self._tasks: set[asyncio.Task[None]] = set()
        self._fixed: dict[bytes, tuple[str, Callable[[Request], Awaitable[Answer]]]] = {
            b"/v1/inbox": ("GET", self._inbox),
            b"/v1/events": ("GET", self._events),
            b"/v1/outbox": ("GET", self._list),
            b"/v1/hooks/runs": ("GET", self._runs),
            b"/v1/health": ("GET", self._health),
            b"/v1/metrics": ("GET", self._metrics),
            b"/v1/version": ("GET", self._version),
        }

    def handle(self, request: Request, answer: Respond) -> Cancellable | None:
        refused = self._gate.refuse(request) or self._gate.enter()
        if refused is not None:
            answer(refused)
            return None

        def leave(response: Answer) -> None:
            self._gate.leave()
            answer(response)

        try:
            return self._dispatch(request, leave)
        except RefusedError as error:
            leave(error.response)
        except Exception:
            log.exception("an endpoint failed")
            leave(failure())
        return None

    def _dispatch(self, request: Request, answer: Respond) -> Cancellable | None:
        if request.path == b"/v1/send":
            _allow(request, "POST")
            self._send(request, answer)
            return None
        fixed = self._fixed.get(request.path)
        if fixed is not None:
            _allow(request, fixed[0])
            return self._later(fixed[1](request), answer)
        match = _ROW.fullmatch(request.path)
        if match is None:
            path = request.path[:100].decode("latin-1")
            raise RefusedError(404, "not_found", f"an outbox has no endpoint {path!r}")
        row_id = match[1].decode()
        what = (match[2] or b"").decode()
        _allow(request, "POST" if what else "GET")
        if what == "requeue":
            return self._later(self._requeue(request, row_id), answer)
        if what == "drop":
            return self._later(self._drop(request, row_id), answer)
        return self._later(self._inspect(request, row_id), answer)

    def _later(self, work: Awaitable[Answer], answer: Respond) -> Cancellable | None:
        task = asyncio.get_running_loop().create_task(self._run(work, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _run(self, work: Awaitable[Answer], answer: Respond) -> None:
        try:
            response = await work
        except RefusedError as error:
            response = error.response
        except Exception as error:
            response = _failed(error)
        answer(response)

    async def close(self) -> None:
        """End what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Sending

    def _send(self, request: Request, answer: Respond) -> None:
        daemon = self._daemon
        query = _query(request, {"mesh"})
        mesh = self._mesh(query.get("mesh"))
        if len(request.body) > daemon.settings.body_bytes_max:
            limit = daemon.settings.body_bytes_max
            raise RefusedError(413, "body_too_large", f"a send has at most {limit} bytes")
        # A send without an id gets that of its row, which is as unique.
        row_id = daemon.row_id()
        send = read_send(request.body, header_id=_header_id(request), minted_id=row_id)
        if isinstance(send, Unsendable):
            raise RefusedError(400, send.code, send.detail)
        if daemon.disk_is_full():
            percent = daemon.settings.disk_percent_max
            detail = f"the disk is more than {percent:g} % full (disk_percent_max): make room"
            raise RefusedError(507, "storage_full", detail)
        offered = row_of(send, mesh=mesh, row_id=row_id, now_ms=daemon.clock.now_ms())

        def told(outcome: Any, error: Exception | None) -> None:
            if error is not None:
                answer(_failed(error))
                return
            daemon.failpoint("accepted")
            if isinstance(outcome, Queued):
                daemon.queued(outcome.row)
            answer(_accepted(outcome))

        daemon.writer.submit(lambda file: rows.do_accept(file, offered), told)

    def _mesh(self, given: str | None) -> str:
        meshes = self._daemon.settings.meshes
        if given is None:
            if len(meshes) == 1:
                return meshes[0]
            detail = f"which mesh? Say ?mesh=NAME; this outbox serves {', '.join(meshes)}"
            raise RefusedError(400, "mesh_required", detail, meshes=list(meshes))
        if given not in meshes:
            detail = f"this outbox serves {', '.join(meshes)}, not {given!r}"
            raise RefusedError(404, "mesh_not_served", detail, meshes=list(meshes))
        return given

    # Rows

    async def _list(self, request: Request) -> Answer:
        query = _query(request, {"status", "mesh", "after", "limit"})
        status = query.get("status")
        if status is not None and status not in STATUSES:
            detail = f"status is one of {', '.join(STATUSES)}"
            raise RefusedError(400, "query_invalid", detail)
        limit = _limit(query)
        mesh, after = query.get("mesh"), query.get("after", "")
        found = await self._daemon.writer.read(
            lambda file: rows.listed(file, status, mesh, after, limit + 1)
        )
        return self._page("rows", found[:limit], more=len(found) > limit, key="id")

    async def _inspect(self, request: Request, row_id: str) -> Answer:
        _query(request, set())
        found = await self._daemon.writer.read(lambda file: rows.chain(file, row_id))
        if not found:
            raise _no_row(row_id)
        first = {**facts_of(found[0]), "payload": msgspec.Raw(found[0].payload)}
        return json_answer({**first, "successors": [facts_of(row) for row in found[1:]]})

    async def _requeue(self, request: Request, row_id: str) -> Answer:
        _query(request, set())
        asked = _decoded(request.body, _Requeue)
        daemon = self._daemon
        if (asked.new_id is None) == (not asked.auto):
            detail = "say auto, or name a new_id: one of the two"
            raise RefusedError(400, "requeue_invalid", detail)
        new_id = daemon.new_id() if asked.new_id is None else asked.new_id
        refused = refuse_id(new_id)
        if refused is not None:
            raise RefusedError(400, refused.code, refused.detail)
        row = await daemon.writer.read(lambda file: rows.get(file, row_id))
        if row is None:
            raise _no_row(row_id)
        payload, fingerprint = _patched(row, asked, new_id)
        successor = Successor(daemon.row_id(), new_id, payload, fingerprint)
        now_ms, by = daemon.clock.now_ms(), asked.by

        def job(file: File) -> Any:
            return rows.do_requeue(file, row_id, successor, by=by, now_ms=now_ms)

        outcome = await daemon.writer.write(job)
        match outcome:
            case rows.Done(before, Requeued(old, new)):
                daemon.requeued(before, old, new)
                return json_answer({"old": facts_of(old), "new": facts_of(new)})
            case IdUsed(used):
                detail = f"the id {used!r} was used in this mesh: choose another, or say auto"
                raise RefusedError(409, "idempotency_key_reused", detail)
            case NotOpen(status):
                raise _not_open(row_id, status)
            case _:
                raise _no_row(row_id)

    async def _drop(self, request: Request, row_id: str) -> Answer:
        _query(request, set())
        asked = _decoded(request.body, _Drop)
        daemon = self._daemon
        now_ms, by = daemon.clock.now_ms(), asked.by

        def job(file: File) -> Any:
            return rows.do_drop(file, row_id, by=by, now_ms=now_ms)

        outcome = await daemon.writer.write(job)
        match outcome:
            case rows.Done(before, Dropped(dropped)):
                daemon.dropped(before, dropped)
                return json_answer(facts_of(dropped))
            case NotOpen(status):
                raise _not_open(row_id, status)
            case _:
                raise _no_row(row_id)

    def _page(self, name: str, shown: list[dict[str, Any]], *, more: bool, key: str) -> Response:
        """Answer with as many entries as fit; `next` is where the next request goes on."""
        room = self._daemon.settings.answer_bytes_max
        parts: list[bytes] = []
        for entry in shown:
            encoded = msgspec.json.encode(entry)
            room -= len(encoded) + 1
            if room < 0 and parts:
                break
            parts.append(encoded)
        ended = len(parts) == len(shown) and not more
        last = shown[len(parts) - 1][key] if parts else None
        tail = b"null" if ended else msgspec.json.encode(str(last))
        body = b'{"%b":[%b],"next":%b}' % (name.encode(), b",".join(parts), tail)
        return Response(200, list(_JSON), body)

    # What came in, and what happened

    async def _inbox(self, request: Request) -> Answer:
        query = _query(request, {"mesh", "after", "limit"})
        limit, after = _limit(query), _number(query, "after")
        room = self._daemon.settings.answer_bytes_max
        page = await self._daemon.inbox.listed(query.get("mesh"), after, limit, room)
        return self._page("messages", page.messages, more=page.more, key="seq")

    async def _events(self, request: Request) -> Answer:
        mesh = _query(request, {"mesh"}).get("mesh")
        try:
            return await self._daemon.feed.stream(request.headers.get(b"last-event-id"), mesh)
        except BadPlaceError as error:
            raise RefusedError(400, "event_id_invalid", str(error)) from None
        except TooManyReadersError as error:
            raise RefusedError(429, "too_many_streams", str(error)) from None

    async def _runs(self, request: Request) -> Answer:
        query = _query(request, {"after", "limit"})
        limit, after = _limit(query), _number(query, "after")
        found = await self._daemon.writer.read(lambda file: file.fetch("runs", after, limit + 1))
        names = ("id", "hook", "event", "started_ms", "took_ms", "outcome", "exit_code", "output")
        shown = [dict(zip(names, run, strict=True)) for run in found]
        return self._page("runs", shown[:limit], more=len(found) > limit, key="id")

    async def _health(self, request: Request) -> Answer:
        _query(request, set())
        shown = self._daemon.shown()
        return json_answer(shown)

    async def _metrics(self, request: Request) -> Answer:
        _query(request, set())
        headers = [(b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8")]
        oldest_ms = await self._daemon.writer.read(rows.oldest_ms)
        return Response(200, headers, render(self._daemon, oldest_ms))

    async def _version(self, request: Request) -> Answer:
        _query(request, set())
        version = self._daemon.version
        return json_answer({"version": version, "ipc_features": list(IPC_FEATURES)})


class _Requeue(msgspec.Struct, forbid_unknown_fields=True):
    new_id: str | None = None
    auto: bool = False
    payload: msgspec.Raw = msgspec.Raw()
    by: str = "local"


class _Drop(msgspec.Struct, forbid_unknown_fields=True):
    by: str = "local"


def _patched(row: Row, asked: _Requeue, new_id: str) -> tuple[bytes | None, bytes | None]:
    """The payload and the fingerprint of a requeue with another payload; else nothing."""
    if not bytes(asked.payload):
        return None, None
    send = read_send(bytes(asked.payload), header_id=new_id, minted_id=new_id)
    if isinstance(send, Unsendable):
        raise RefusedError(400, send.code, f"the payload: {send.detail}")
    patched = row_of(send, mesh=row.mesh, row_id=row.id, now_ms=0)
    if patched.destination != row.destination or patched.priority != row.priority:
        detail = f"a requeue keeps its destination and priority, {row.destination} {row.priority}"
        raise RefusedError(400, "requeue_invalid", detail)
    return patched.payload, patched.request_fingerprint


def _accepted(outcome: Queued | AlreadyQueued | AlreadyDelivered | Conflict) -> Response:
    match outcome:
        case Queued(row) | AlreadyQueued(row):
            body = {
                "id": row.id,
                "mesh": row.mesh,
                "client_message_id": row.client_message_id,
                "status": "queued",
                "duplicate": isinstance(outcome, AlreadyQueued),
            }
            return json_answer(body, 202)
        case AlreadyDelivered(row):
            body = {
                "id": row.id,
                "mesh": row.mesh,
                "client_message_id": row.client_message_id,
                "status": "done",
                "duplicate": True,
                "broker_message_id": row.broker_message_id or "",
            }
            return json_answer(body)
        case Conflict(conflict, prefix, reason):
            detail = "the id stands for another send, or for one that failed: choose another id"
            fields: dict[str, object] = {"conflict": conflict, "fingerprint_prefix": prefix}
            if reason is not None:
                fields["reason"] = reason
            return _problem(409, "idempotency_key_reused", detail, fields)


def _failed(error: Exception) -> Response:
    if isinstance(error, DiskFullError):
        detail = "there is no room on the disk: nothing was stored"
        return _problem(507, "storage_full", detail)
    if isinstance(error, OutcomeUnknownError):
        detail = "the disk failed: whether it was stored is unknown, send the same again"
        return _problem(503, "outcome_unknown", detail)
    log.error("an endpoint failed", exc_info=error)
    detail = "nothing was stored: send the same again"
    return _problem(503, "storage_unavailable", detail)


def _allow(request: Request, method: str) -> None:
    if request.method != method and not (request.method == "HEAD" and method == "GET"):
        detail = f"{request.path.decode('latin-1')} takes {method}"
        raise RefusedError(405, "method_not_allowed", detail)


def _query(request: Request, known: set[str]) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            request.query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(request.query),
            errors="strict",
            max_num_fields=16,
        )
    except (ValueError, UnicodeDecodeError):
        raise RefusedError(400, "query_invalid", "the query cannot be read") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known or name in found:
            detail = f"the query has {name!r}; it may have {', '.join(sorted(known)) or 'nothing'}"
            raise RefusedError(400, "query_invalid", detail)
        found[name] = value
    return found


def _limit(query: dict[str, str]) -> int:
    limit = _number(query, "limit", 100)
    if not 1 <= limit <= LIST_MAX:
        raise RefusedError(400, "query_invalid", f"limit is 1 to {LIST_MAX}")
    return limit


def _number(query: dict[str, str], name: str, default: int = 0) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not text.isascii() or len(text) > 18:
        raise RefusedError(400, "query_invalid", f"{name} is a whole number from 0")
    return int(text)


def _header_id(request: Request) -> str | None:
    value = request.headers.get(b"idempotency-key")
    if value is None:
        return None
    if b"idempotency-key" in request.repeated:
        raise RefusedError(400, "message_id_invalid", "Idempotency-Key comes once")
    try:
        return value.decode()
    except UnicodeDecodeError:
        detail = "Idempotency-Key is 1 to 256 bytes of UTF-8"
        raise RefusedError(400, "message_id_invalid", detail) from None


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(400, "body_invalid", f"the body: {error}") from None


def _no_row(row_id: str) -> RefusedError:
    return RefusedError(404, "row_not_found", f"the outbox has no row {row_id}")


def _not_open(row_id: str, status: str) -> RefusedError:
    detail = f"the row {row_id} is {status}: nothing of it is left to send"
    return RefusedError(409, "row_not_open", detail, status_of_row=status)
