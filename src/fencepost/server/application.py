"""Answer requests, whatever front end they came through: find the route, admit, call the handler.

A handler that only has to wait for a commit answers through a callback; any other runs as a task of
the application, which ends it when the server stops or its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable

from fencepost.http.front import close_chunks
from fencepost.http.messages import Answer, Cancellable, Request, Response, StreamingResponse
from fencepost.server.access import Gate
from fencepost.server.handlers.fields import RefusedError
from fencepost.server.handlers.rendering import BROWSER, refused, with_fields
from fencepost.server.origins import Origins
from fencepost.server.routes import Direct, Handlers, Respond, Route, Table, routes
from fencepost.server.settings import ServerSettings
from fencepost.store.contract import DamagedRowError, DataDamagedError, StoreAwayError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class Application:
    """Everything the server answers."""

    def __init__(
        self,
        handlers: Handlers,
        settings: ServerSettings,
        *,
        gate: Gate | None = None,
        origins: Origins | None = None,
    ) -> None:
        """With principals there is a `gate`, without them the rules for pages (`origins`)."""
        self._origins = origins
        self._gate = gate
        self._handlers = handlers
        self._table = Table(routes(handlers, settings.auth))
        self._tasks: set[asyncio.Task[None]] = set()
        self.damaged = 0
        """Answers that could not be given because what they ask for is damaged."""

    def handle(self, request: Request, answer: Respond) -> Cancellable | None:
        try:
            return self._dispatch(request, answer)
        except RefusedError as error:
            answer(_with_browser_headers(error.response))
        except Exception:
            log.exception("a handler failed")
            answer(_internal())
        return None

    def _dispatch(self, request: Request, answer: Respond) -> Cancellable | None:
        method = request.method
        if self._origins is not None:
            self._origins.check(request)
        if method == "OPTIONS":
            answer(self._preflight(request))
            return None
        route, parts = self._table.find(request)
        if self._gate is not None:
            self._gate.admit(request, "administrators" if route is None else route.who)
        if route is None:
            answer(_not_found(request))
            return None
        handler = route.handlers.get(method)
        if handler is None:
            answer(_no_method(method, route))
            return None
        if isinstance(handler, Direct):
            work = handler.call(request, answer, *parts)
            return None if work is None else self._later(work, answer)
        return self._later(handler(request, *parts), answer)

    def _preflight(self, request: Request) -> Response:
        """What a browser asks before it sends a request of a page of another origin."""
        methods, browser = _METHODS, BROWSER
        if self._origins is not None and self._origins.is_cross(request):
            methods = _METHODS_OF_PAGES
            if not self._origins.allows(request):
                # Without Access-Control-Allow-Origin the browser does not send the request.
                browser = BROWSER[:2]
        headers = [
            (b"Access-Control-Allow-Methods", methods),
            (b"Access-Control-Allow-Headers", _REQUEST_HEADERS),
            (b"Access-Control-Max-Age", b"86400"),
        ]
        if b"access-control-request-private-network" in request.headers:
            headers.append((b"Access-Control-Allow-Private-Network", b"true"))
        return Response(204, headers + browser)

    def _later(self, work: Awaitable[Answer], answer: Respond) -> Cancellable:
        task = asyncio.get_running_loop().create_task(self._run(work, answer))
        # The loop holds tasks weakly; this set is their parent, and `close` ends them.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, work: Awaitable[Answer], answer: Respond) -> None:
        try:
            response = self._ending_early(await work)
        except RefusedError as error:
            response = _with_browser_headers(error.response)
        except StoreAwayError:
            response = _store_away()
        except DataDamagedError as error:
            self._note_damage(error)
            response = _data_damaged(error)
        except Exception:
            log.exception("a handler failed")
            response = _internal()
        answer(response)

    def _note_damage(self, error: DataDamagedError) -> None:
        self.damaged += 1
        log.error("a read found damaged data: %s", error)

    def _ending_early(self, answer: Answer) -> Answer:
        """The answer, ended where the store goes away instead of broken off as by a defect."""
        if isinstance(answer, StreamingResponse):
            return StreamingResponse(answer.status, answer.headers, self._readable(answer.chunks))
        return answer

    async def _readable(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield chunk
        except StoreAwayError:
            log.debug("an event stream ends because the store is away")
        except DataDamagedError as error:
            self._note_damage(error)
        finally:
            await close_chunks(chunks)

    def stop_waiting(self) -> None:
        """Answer every client that waits for news: the server is going down."""
        self._handlers.streams.stop_waiting()
        self._handlers.logs.stop_waiting()
        self._handlers.groups.stop_waiting()
        self._handlers.meshes.sessions.stop()

    async def close(self) -> None:
        """End the sessions and the handlers that still run."""
        await self._handlers.meshes.sessions.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _with_browser_headers(response: Response) -> Response:
    """A problem with the headers that let a page in a browser read it."""
    return Response(response.status, response.headers + BROWSER[2:], response.body)


_METHODS = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"
_METHODS_OF_PAGES = b"GET, HEAD, POST, OPTIONS"
"""Those of pages of other origins on a server without principals."""
_REQUEST_HEADERS = ", ".join(
    (
        "Content-Type",
        "Audit-Reason",
        "Authorization",
        "Claim-End",
        "If-Match",
        "If-None-Match",
        "Idempotency-Key",
        "Last-Event-ID",
        "Lease-Token",
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


def _not_found(request: Request) -> Response:
    path = request.path[:200].decode("latin-1")
    detail = f"this server has no route {path!r}: /v1/openapi.json lists all of them"
    return refused(404, "not_found", "Not found", detail)


def _no_method(method: str, route: Route) -> Response:
    return refused(
        405,
        "method_not_allowed",
        "Method not allowed",
        f"{route.path} takes {route.allowed}, not {method}",
        (b"Allow", route.allowed.encode()),
    )


def _internal() -> Response:
    return refused(
        500, "internal_error", "Internal error", "this is a defect; the server's log has more"
    )


# A store on another machine can be out of reach for a while. A read that has not begun to be
# answered gets 503 with Retry-After. An event stream under way just ends: its reader comes back
# with the last offset that it was told, and gets that 503 until the store is there again. Damaged
# data is told in the same way, by a 500 that stays.


def _store_away() -> Response:
    return refused(
        503,
        "store_unavailable",
        "Store unavailable",
        "the database cannot be reached: nothing was changed, retry the same request",
        (b"Retry-After", b"%d" % RETRY_AFTER_S),
    )


def _data_damaged(error: DataDamagedError) -> Response:
    detail = f"{error}: stop the server and run fencepost check; the way back is a backup"
    response = refused(500, "data_damaged", "Data damaged", detail)
    if isinstance(error, DamagedRowError):
        response = with_fields(
            response, position=error.position, behind=error.behind, stream=error.stream
        )
    return response
