"""The whole surface on one screen: which path and method leads to which handler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Cancellable, Request, Response
from fencepost.protocol.grants import AUDIT
from fencepost.server import access
from fencepost.server.access import Gate
from fencepost.server.away import ending_when_away, store_away
from fencepost.server.handlers import parsing, rendering, truncation
from fencepost.server.handlers.commits import COMMIT_PATH, LARGE_BODY_BYTES, STAGING_ROOT, Commits
from fencepost.server.handlers.parsing import STREAM_ROOT, RefusedError
from fencepost.server.handlers.reads import Reads
from fencepost.server.handlers.rendering import BROWSER, refused
from fencepost.server.settings import ServerSettings
from fencepost.server.tails import Tails
from fencepost.store.contract import (
    Deleted,
    Failed,
    Missing,
    SoftDeleted,
    Store,
    StoreAwayError,
    Unknown,
)

log = logging.getLogger(__name__)

Respond = Callable[[Answer], None]
Extra = Callable[[Request], Awaitable[Answer] | None]
"""Handlers that are put in beside the streams: they take a request or pass it on with None."""

AUDIT_PATH = STREAM_ROOT + AUDIT.encode()
_METHODS = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"


class Application:
    """Everything the server answers, whatever front end the request came through."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        settings: ServerSettings,
        *,
        extras: tuple[Extra, ...] = (),
        gate: Gate | None = None,
    ) -> None:
        self._store = store
        self._gate = gate
        self._limits = settings.limits
        self._extras = extras
        self._commits = Commits(store, settings.limits)
        self.tails = Tails(store)
        self.reads = Reads(store, self.tails, clock, settings, shared=gate is None)
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: Request, answer: Respond) -> Cancellable | None:
        try:
            return self._dispatch(request, answer)
        except RefusedError as error:
            answer(with_browser(error.response))
        except Exception:
            log.exception("a handler failed")
            answer(_internal())
        return None

    def _dispatch(self, request: Request, answer: Respond) -> Cancellable | None:
        if self._gate is not None:
            self._gate.admit(request)
        raw = request.path
        if not raw.startswith(STREAM_ROOT) or raw.startswith(b"/v1/stream/__ds/"):
            return self._beside_streams(request, answer)
        method = request.method
        if method in ("GET", "HEAD") and raw == AUDIT_PATH:
            path = AUDIT  # reserved everywhere else
        else:
            path = parsing.stream_path(raw[len(STREAM_ROOT) :], self._limits)
        if method == "POST":
            if request.query and truncation.is_truncation(request):
                before = truncation.parse_truncation(request)
                access.delete_allowed(request, path)
                self._store.truncate(
                    path, before, lambda outcome: answer(truncation.truncated(outcome))
                )
                return None
            actor = None if self._gate is None else access.actor_of(request, path)
            append = parsing.parse_append(request, path, self._limits, actor)
            if actor is not None:
                access.append_allowed(append)
            self._store.append(append, lambda outcome: answer(rendering.appended(outcome)))
            return None
        if method == "GET":
            access.read_allowed(request, path)
            return self._later(self.reads.get(request, path), answer)
        if method == "HEAD":
            access.read_allowed(request, path)
            return self._later(self.reads.head(path), answer)
        if method == "PUT":
            create = parsing.parse_create(request, path, self._limits)
            access.create_allowed(request, create)
            location = _location(request)
            self._store.create(create, lambda outcome: answer(rendering.created(outcome, location)))
            return None
        if method == "DELETE":
            access.delete_allowed(request, path)
            self._store.delete(path, lambda outcome: answer(_deleted(outcome)))
            return None
        answer(_preflight() if method == "OPTIONS" else _no_method())
        return None

    def _beside_streams(self, request: Request, answer: Respond) -> Cancellable | None:
        if request.method == "OPTIONS":
            answer(_preflight())
            return None
        if request.path == COMMIT_PATH or request.path.startswith(STAGING_ROOT):
            if request.method == "POST":
                commits = self._commits
                if request.path == COMMIT_PATH and len(request.body) > LARGE_BODY_BYTES:
                    return self._later(commits.commit_large(request), answer)
                handler = commits.commit if request.path == COMMIT_PATH else commits.stage
                handler(request, answer)
            elif request.method == "DELETE" and request.path != COMMIT_PATH:
                self._commits.unstage(request, answer)
            else:
                answer(_no_method("POST" if request.path == COMMIT_PATH else "POST, DELETE"))
            return None
        for extra in self._extras:
            work = extra(request)
            if work is not None:
                return self._later(work, answer)
        answer(refused(404, "not_found", "Not found", "there is nothing at this path"))
        return None

    def _later(self, work: Awaitable[Answer], answer: Respond) -> Cancellable:
        task = asyncio.get_running_loop().create_task(self._run(work, answer))
        # The loop holds tasks weakly; this set is their parent, and `close` ends them.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, work: Awaitable[Answer], answer: Respond) -> None:
        try:
            response = ending_when_away(await work)
        except RefusedError as error:
            response = with_browser(error.response)
        except StoreAwayError:
            response = store_away()
        except Exception:
            log.exception("a handler failed")
            response = _internal()
        answer(response)

    def stop_waiting(self) -> None:
        """Answer everyone who waits for news: the server is going down."""
        self.reads.stopping.set()
        self.tails.wake()

    async def close(self) -> None:
        """End whatever still waits."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def with_browser(response: Response) -> Response:
    """A problem with what a browser needs to see it."""
    return Response(response.status, response.headers + BROWSER[2:], response.body)


def _location(request: Request) -> bytes:
    return request.base_url() + request.path


def _deleted(outcome: Deleted | Missing | SoftDeleted | Failed | Unknown) -> Response:
    match outcome:
        case Deleted():
            return Response(204, list(BROWSER))
        case Missing():
            return rendering.missing()
        case SoftDeleted():
            return rendering.soft_deleted()
        case Failed() | Unknown():
            return rendering.failed(outcome)


_REQUEST_HEADERS = ", ".join(
    (
        "Content-Type",
        "Audit-Reason",
        "Authorization",
        "Claim-End",
        "If-Match",
        "If-None-Match",
        "Idempotency-Key",
        "Producer-Epoch",
        "Producer-Id",
        "Producer-If",
        "Producer-Seq",
        "Producer-Strict",
        "Stream-Auto-Create",
        "Stream-Closed",
        "Stream-Expires-At",
        "Stream-Fork-Offset",
        "Stream-Fork-Sub-Offset",
        "Stream-Forked-From",
        "Stream-Retention-Age",
        "Stream-Retention-Bytes",
        "Stream-Retention-Messages",
        "Stream-Seq",
        "Stream-TTL",
    )
).encode()


def _preflight() -> Response:
    headers = [
        (b"Access-Control-Allow-Methods", _METHODS),
        (b"Access-Control-Allow-Headers", _REQUEST_HEADERS),
        (b"Access-Control-Max-Age", b"86400"),
    ]
    return Response(204, headers + BROWSER)


def _no_method(known: str = "GET, HEAD, POST, PUT, DELETE") -> Response:
    return refused(
        405,
        "method_not_allowed",
        "Method not allowed",
        f"what is here knows {known} and OPTIONS",
        (b"Allow", f"{known}, OPTIONS".encode()),
    )


def _internal() -> Response:
    return refused(
        500, "internal_error", "Internal error", "this is a defect; the server's log has more"
    )
