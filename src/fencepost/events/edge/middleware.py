"""The ASGI middleware: claim the key, run the application, keep its answer, replay it.

    app.add_middleware(
        IdempotencyMiddleware, backend=StreamBackend(client), principal=by_header("authorization")
    )

An answer is stored before its last byte is sent. So a client that has an answer finds it again, and
one that has none may repeat the request: it runs once, or gets the answer of the run before.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from fencepost.clock import Clock, SystemClock
from fencepost.events.edge.answers import (
    ASGIApp,
    Disconnected,
    Problem,
    Receive,
    Scope,
    Send,
    TooLarge,
    read_body,
    receive_again,
    send_replay,
)
from fencepost.events.edge.backends import Backend, BackendUnavailableError
from fencepost.events.edge.claims import Claim, ClaimLostError
from fencepost.events.edge.recording import Recording
from fencepost.events.edge.rules import (
    KEY_CHARACTERS_MAX,
    KeyInvalid,
    NotKept,
    OtherRequest,
    Replay,
    Running,
    Take,
    decide_key,
    fingerprint_of,
    record_id,
)
from fencepost.events.edge.settings import IdempotencySettings

PrincipalOf = Callable[[Scope], str | Awaitable[str]]
EFFECT_KEY = "fencepost.effect_key"
BYPASSES = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)
"""Extensions by which an answer would pass the middleware unseen."""


def by_header(name: str) -> PrincipalOf:
    """Take the principal from a request header, such as `authorization`; empty if it is absent."""
    wanted = name.lower().encode()

    def principal(scope: Scope) -> str:
        values = [value for header, value in scope["headers"] if header.lower() == wanted]
        return b"\0".join(values).decode("latin-1")

    return principal


def effect_key(scope: Scope) -> str | None:
    """A key for the effects of this request, the same each time it is repeated; None without one.

    Give it to `append(key=...)` or `commit(key=...)`, or to another service as its
    Idempotency-Key: then not even a crash between the effect and its answer makes the effect twice.
    """
    key: str | None = scope.get(EFFECT_KEY)
    return key


class IdempotencyMiddleware:
    """Runs a request with an Idempotency-Key once, and gives repeated ones the same answer.

    Args:
        backend: Where keys and answers are kept.
        principal: Gives the name of the caller of a request. Callers never share keys.
        settings: Times, sizes and what to do with duplicates.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        backend: Backend,
        principal: PrincipalOf,
        settings: IdempotencySettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._backend = backend
        self._principal = principal
        self._settings = settings or IdempotencySettings()
        self._clock = clock or SystemClock()
        self._releasing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in self._settings.methods:
            await self._app(scope, receive, send)
            return
        values = [value for name, value in scope["headers"] if name.lower() == b"idempotency-key"]
        key = decide_key(values, required=self._settings.required)
        if isinstance(key, KeyInvalid):
            await _KEY_PROBLEMS[key.reason].send(send)
        elif key is None:
            await self._app(scope, receive, send)
        else:
            await self._with_key(key, scope, receive, send)

    async def _with_key(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, bytes_max=self._settings.request_bytes_max)
        except Disconnected:
            return
        except TooLarge:
            await _too_large(self._settings.request_bytes_max).send(send)
            return
        claim = await self._claim_of(key, scope, body)
        try:
            decision = await self._take(claim)
            if isinstance(decision, Take):
                inner = _inner_scope(scope, claim.record_id)
                await self._run(claim, inner, receive_again(body, receive), send)
                return
        except asyncio.CancelledError:
            await self._release_whatever_happens(claim)
            raise
        if isinstance(decision, Replay):
            await send_replay(decision.answer, send)
        else:
            await decision.send(send)

    async def _claim_of(self, key: str, scope: Scope, body: bytes) -> Claim:
        principal = self._principal(scope)
        if inspect.isawaitable(principal):
            principal = await principal
        path = scope.get("raw_path") or scope["path"].encode()
        return Claim(
            self._backend,
            record_id(principal, scope["method"], path, key),
            fingerprint_of(scope.get("query_string", b""), body),
            self._settings,
            self._clock,
        )

    async def _take(self, claim: Claim) -> Take | Replay | Problem:
        waits = self._settings.on_running == "wait"
        try:
            decision = await (claim.take_or_wait() if waits else claim.take())
        except BackendUnavailableError as error:
            return _unavailable(error)
        return decision if isinstance(decision, Take | Replay) else _problem_of(decision)

    async def _run(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application while the claim is renewed; cancel it when the claim is lost."""
        recording = Recording(claim, send, self._settings)
        failure: Exception | None = None
        is_lost = False
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(claim.keep())
                try:
                    await self._app(scope, receive, recording.send)
                except Exception as error:
                    failure = error
                renewing.cancel()
        except* ClaimLostError:
            is_lost = True
        if is_lost:
            await recording.end_as_lost()
            return
        if not recording.is_complete:
            await claim.release()
        if failure is not None:
            raise failure

    async def _release_whatever_happens(self, claim: Claim) -> None:
        """Release in a task of its own: the request's task may be cancelled again at any await."""
        releasing = asyncio.create_task(claim.release())
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        await asyncio.shield(releasing)


def _inner_scope(scope: Scope, key: str) -> Scope:
    extensions = scope.get("extensions") or {}
    kept = {name: value for name, value in extensions.items() if name not in BYPASSES}
    return {**scope, "extensions": kept, EFFECT_KEY: key}


_KEY_PROBLEMS = {
    "missing": Problem(
        status=400,
        code="idempotency_key_missing",
        detail="this request needs an Idempotency-Key: a text that is new for each intent and the"
        " same for each attempt",
    ),
    "repeated": Problem(
        status=400,
        code="idempotency_key_repeated",
        detail="the request has more than one Idempotency-Key",
    ),
    "malformed": Problem(
        status=400,
        code="idempotency_key_invalid",
        detail=f"an Idempotency-Key has 1 to {KEY_CHARACTERS_MAX} visible ASCII characters",
    ),
}


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        status=413,
        code="idempotency_body_too_large",
        detail=f"a request with an Idempotency-Key has at most {bytes_max} bytes"
        " (request_bytes_max)",
    )


def _unavailable(error: BackendUnavailableError) -> Problem:
    return Problem(
        status=503,
        code="idempotency_unavailable",
        detail=f"the key could not be claimed, and nothing was done: {error}",
        retry_after_s=1,
    )


def _problem_of(decision: Running | NotKept | OtherRequest) -> Problem:
    match decision:
        case Running(left_ms):
            return Problem(
                status=409,
                code="idempotency_running",
                detail="the first request with this key still runs",
                retry_after_s=max(1, -(-left_ms // 1000)),
            )
        case NotKept(status):
            return Problem(
                status=409,
                code="idempotency_answer_not_kept",
                detail=f"the request was done and answered with {status}; its answer was too large"
                " to keep",
            )
        case OtherRequest():
            return Problem(
                status=422,
                code="idempotency_key_reused",
                detail="this key was used with another body: use a new key for a new request",
            )
