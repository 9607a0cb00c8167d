"""The HTTP surface of subscriptions, below /v1/stream/__ds/: parse, let the engine decide, answer.

Every answer waits until what it says is on disk, refusals included.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol.globs import Glob
from fencepost.protocol.grants import APPEND, CLAIM, Principal
from fencepost.protocol.limits import Limits
from fencepost.protocol.subscriptions import (
    PULL_WAKE,
    AlreadyClaimed,
    BadAck,
    Config,
    Fenced,
    NothingPending,
    Subscription,
)
from fencepost.server.handlers.rendering import BROWSER, failed, refused
from fencepost.server.subscriptions.bodies import (
    GENERATION_MAX,
    AckBody,
    Bodies,
    ClaimBody,
    CreateBody,
    StreamsBody,
    SubscriptionRefusedError,
    WakeBody,
    error,
    invalid,
    parse,
    too_many,
)
from fencepost.server.subscriptions.engine import Engine
from fencepost.server.subscriptions.guard import Guard, UnsafeTargetError
from fencepost.server.subscriptions.keys import SigningKey
from fencepost.server.subscriptions.outcomes import ConfigConflict, Made, TooMany, WakeName
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.showing import show_subscription, show_wake
from fencepost.server.subscriptions.tokens import BadToken, Token, Tokens
from fencepost.store.contract import Failed, Unknown

ROOT = b"/v1/stream/__ds/"
SUBSCRIPTIONS = b"subscriptions/"
JWKS = b"jwks.json"

_HOST = re.compile(rb"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NO_STORE = (b"Cache-Control", b"no-store")


class SubscriptionHandlers:
    """Takes every request below the reserved prefix."""

    def __init__(
        self,
        engine: Engine,
        guard: Guard,
        tokens: Tokens,
        settings: SubscriptionSettings,
        limits: Limits,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._tokens = tokens
        self._settings = settings
        self._bodies = Bodies(settings, limits)

    def handle(self, request: Request) -> Awaitable[Answer] | None:
        if not request.path.startswith(ROOT):
            return None
        path = request.path[len(ROOT) :]
        if path == JWKS:
            return show_keys(request, self._engine.signing)
        if not path.startswith(SUBSCRIPTIONS):
            return None
        return self._answer(request, path[len(SUBSCRIPTIONS) :])

    async def _answer(self, request: Request, path: bytes) -> Answer:
        raw_name, _, action = path.partition(b"/")
        try:
            name = self._bodies.name("a subscription's id", _text(raw_name))
            return await self._dispatch(request, name, action)
        except SubscriptionRefusedError as refusal:
            return await self._durably(refusal.response)

    async def _dispatch(self, request: Request, name: str, action: bytes) -> Answer:
        method = request.method
        if action == b"":
            if method == "PUT":
                return await self._put(request, name)
            if method in ("GET", "HEAD"):
                return await self._get(request, name)
            if method == "DELETE":
                return await self._delete(request, name)
            return _no_method(b"GET, HEAD, PUT, DELETE")
        if action.startswith(b"streams/"):
            if method != "DELETE":
                return _no_method(b"DELETE")
            return await self._unlink(request, name, _text(action[len(b"streams/") :]))
        actions = {
            b"streams": self._link,
            b"claim": self._claim,
            b"ack": self._ack,
            b"callback": self._ack,
            b"release": self._release,
        }
        handler = actions.get(action)
        if handler is None:
            return refused(404, "not_found", "Not found", "there is nothing at this path")
        if method != "POST":
            return _no_method(b"POST")
        return await handler(request, name)

    # Subscriptions

    async def _put(self, request: Request, name: str) -> Answer:
        config = self._bodies.config(parse(request, CreateBody))
        base_url = _base_url(request)
        existing = self._engine.find(name)
        self._may_make(request.principal, config, existing)
        if config.webhook_url is not None and (existing is None or existing.config != config):
            await self._check_webhook(config.webhook_url)
        owner = "" if request.principal is None else request.principal.name
        if existing is not None and request.principal is not None:
            owner = existing.owner  # an administrator may repeat what its owner said
        outcome = await self._engine.create(name, config, base_url, owner)
        match outcome:
            case Failed() | Unknown():
                return failed(outcome)
            case TooMany(limit, allowed):
                raise too_many(limit, allowed)
            case ConfigConflict():
                raise SubscriptionRefusedError(
                    409,
                    "SUBSCRIPTION_EXISTS",
                    "a subscription with this id and another configuration exists",
                )
            case Made(subscription, created):
                shown = self._shown(subscription, after="")
                return await self._durably(_json(201 if created else 200, shown))

    async def _check_webhook(self, url: str) -> None:
        """Refuse a URL that leads inside; one that does not resolve yet is checked at delivery."""
        try:
            target = self._guard.check_url(url)
            async with asyncio.timeout(self._settings.resolve_timeout_ms / 1000):
                await self._guard.addresses(target)
        except UnsafeTargetError as unsafe:
            raise SubscriptionRefusedError(400, "WEBHOOK_URL_REJECTED", str(unsafe)) from None
        except (OSError, UnicodeError, TimeoutError):
            return

    async def _get(self, request: Request, name: str) -> Answer:
        after = dict(parse_qsl(request.query.decode("latin-1"))).get("after", "")
        subscription = self._own(request, name)
        return await self._durably(_json(200, self._shown(subscription, after=after)))

    def _shown(self, subscription: Subscription, *, after: str) -> dict[str, object]:
        return show_subscription(
            subscription,
            self._engine.signing,
            after=after,
            streams_max=self._settings.shown_streams_max,
        )

    async def _delete(self, request: Request, name: str) -> Answer:
        self._engine.delete(self._own(request, name))
        return await self._durably(_empty())

    async def _link(self, request: Request, name: str) -> Answer:
        paths = self._bodies.paths(parse(request, StreamsBody).streams)
        subscription = self._own(request, name)
        if subscription.config.wake_stream in paths:
            raise invalid("a subscription does not watch its own wake stream")
        if not all(map(subscription.shows, paths)):
            raise _forbidden("the subscription's owner lacks the verb read on a stream")
        refusal = await self._engine.link(subscription, paths)
        if isinstance(refusal, Failed):
            return failed(refusal)
        if refusal is not None:
            raise too_many(*refusal)
        return await self._durably(_empty())

    async def _unlink(self, request: Request, name: str, path: str) -> Answer:
        self._engine.unlink(self._own(request, name), self._bodies.path(path))
        return await self._durably(_empty())

    # Workers

    async def _claim(self, request: Request, name: str) -> Answer:
        worker = self._bodies.name("worker", parse(request, ClaimBody).worker)
        subscription = self._claimable(request, name)
        if subscription.config.type != PULL_WAKE:
            raise SubscriptionRefusedError(
                409, "NOT_CLAIMABLE", "only pull-wake subscriptions are claimed"
            )
        outcome = self._engine.claim(subscription, worker)
        match outcome:
            case AlreadyClaimed(holder, generation):
                answer = error(
                    409,
                    "ALREADY_CLAIMED",
                    "another worker has the lease: wait for the next wake event",
                    current_holder=holder,
                    generation=generation,
                )
            case NothingPending():
                answer = error(409, "NO_PENDING_WORK", "there is no work: wait for a wake event")
            case _:
                answer = _json(
                    200,
                    {
                        "wake_id": subscription.wake.wake_id,
                        "generation": subscription.wake.generation,
                        "token": self._engine.token(subscription),
                        "streams": show_wake(subscription),
                        "lease_ttl_ms": subscription.config.lease_ttl_ms,
                    },
                )
        return await self._durably(answer)

    async def _ack(self, request: Request, name: str) -> Answer:
        body = parse(request, AckBody)
        acks = self._bodies.acks(body.acks)
        subscription = self._worked_for(request, name)
        wake = self._authorized(request, subscription, body)
        outcome = self._engine.ack(subscription, wake, acks, done=body.done)
        match outcome:
            case Fenced():
                answer = _fenced(outcome)
            case BadAck(path, detail):
                answer = error(400, "INVALID_OFFSET", detail, stream=path)
            case _:
                answer = _json(200, {"ok": True, "next_wake": outcome.next_wake})
        return await self._durably(answer)

    async def _release(self, request: Request, name: str) -> Answer:
        body = parse(request, WakeBody)
        subscription = self._worked_for(request, name)
        wake = self._authorized(request, subscription, body)
        outcome = self._engine.release(subscription, wake)
        return await self._durably(_empty() if outcome is None else _fenced(outcome))

    # Who may: a subscription is its owner's, and for others it is not there

    def _may_make(
        self, principal: Principal | None, config: Config, existing: Subscription | None
    ) -> None:
        if principal is None:
            return
        if existing is not None and not _owns(principal, existing):
            raise _forbidden("a subscription with this id is somebody else's")
        if config.pattern is not None and not principal.may_read_all_of(Glob(config.pattern)):
            raise _forbidden("you lack the verb read on something that the pattern can match")
        if not all(map(principal.may_read, config.streams)):
            raise _forbidden("you lack the verb read on one of the streams")
        if config.wake_stream is not None and not principal.may(APPEND, config.wake_stream):
            raise _forbidden("you lack the verb append on the wake stream")

    def _own(self, request: Request, name: str) -> Subscription:
        subscription = self._engine.find(name)
        if subscription is None or not _owns(request.principal, subscription):
            raise _not_found()
        return subscription

    def _claimable(self, request: Request, name: str) -> Subscription:
        """A subscription whose work somebody may take: its owner, or who has the verb claim on its
        wake stream and may read all that a wake can tell of."""
        subscription, principal = self._existing(name), request.principal
        if principal is None or _owns(principal, subscription):
            return subscription
        config = subscription.config
        if (
            config.wake_stream is None
            or not principal.may(CLAIM, config.wake_stream)
            or not (config.pattern is None or principal.may_read_all_of(Glob(config.pattern)))
            or not all(map(principal.may_read, subscription.links))
        ):
            raise _not_found()
        return subscription

    def _existing(self, name: str) -> Subscription:
        subscription = self._engine.find(name)
        if subscription is None:
            raise _not_found()
        return subscription

    def _worked_for(self, request: Request, name: str) -> Subscription:
        """The subscription that a worker speaks about.

        With authorization, whether there is one is told to those only who have a token for it.
        """
        if self._engine.is_restricted and self._token(request).name != name:
            raise _other_token()
        return self._existing(name)

    def _authorized(self, request: Request, subscription: Subscription, body: WakeBody) -> WakeName:
        """The wake that a request names, once its token is found to be for this subscription."""
        token = self._token(request)
        if token.name != subscription.name:
            raise _other_token()
        if not 0 <= body.generation <= GENERATION_MAX:
            raise invalid("generation is an integer from 0 to 2^53-1")
        # A token of a subscription that was deleted, and whose name is taken again, fits no wake.
        generation = token.generation if token.incarnation == subscription.id else -1
        return WakeName(generation, body.generation, body.wake_id)

    def _token(self, request: Request) -> Token:
        """The token of a wake that a request shows."""
        if b"authorization" in request.repeated:
            raise invalid("the header authorization came more than once")
        scheme, _, text = request.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not text:
            raise _unauthorized("TOKEN_MISSING", "send Authorization: Bearer and the wake's token")
        token = self._tokens.read(text.strip().decode("latin-1"), now_ms=self._engine.now_ms())
        if isinstance(token, BadToken):
            raise _unauthorized("TOKEN_INVALID", token.detail)
        return token

    async def _durably(self, answer: Response) -> Response:
        failure = await self._engine.durable()
        return answer if failure is None else failed(failure)


async def show_keys(request: Request, signing: SigningKey) -> Answer:
    """The key that webhooks are signed with, for everybody."""
    if request.method not in ("GET", "HEAD"):
        return _no_method(b"GET, HEAD")
    headers = [
        (b"Content-Type", b"application/jwk-set+json"),
        (b"Cache-Control", b"public, max-age=300"),
        *BROWSER,
    ]
    return Response(200, headers, signing.jwks())


def _owns(principal: Principal | None, subscription: Subscription) -> bool:
    """Whether somebody may do everything with a subscription; without authorization all may."""
    return principal is None or principal.is_admin or principal.name == subscription.owner


def _not_found() -> SubscriptionRefusedError:
    return SubscriptionRefusedError(
        404, "SUBSCRIPTION_NOT_FOUND", "there is no subscription with this id"
    )


def _forbidden(message: str) -> SubscriptionRefusedError:
    return SubscriptionRefusedError(403, "FORBIDDEN", message)


def _text(raw: bytes) -> str:
    """A part of the path, unescaped; unlike in a stream's own URL, %2F stands for a slash."""
    if _BAD_ESCAPE.search(raw):
        raise invalid("the path has a % that starts no escape")
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise invalid("the path is not UTF-8") from None


def _base_url(request: Request) -> str:
    """Where the client found us: webhooks are told to call back there."""
    host = request.headers.get(b"host", b"localhost")
    if not _HOST.fullmatch(host):
        raise invalid("the Host header is not a host")
    return (request.base_url() + ROOT.rstrip(b"/")).decode()


def _json(status: int, body: dict[str, object]) -> Response:
    headers = [(b"Content-Type", b"application/json"), _NO_STORE, *BROWSER]
    return Response(status, headers, msgspec.json.encode(body))


def _empty() -> Response:
    return Response(204, [_NO_STORE, *BROWSER])


def _fenced(outcome: Fenced) -> Response:
    return error(
        409,
        "FENCED",
        "this wake is over: stop, whoever holds the current one has the work",
        generation=outcome.generation,
    )


def _unauthorized(code: str, message: str) -> SubscriptionRefusedError:
    refusal = SubscriptionRefusedError(401, code, message)
    refusal.response.headers.append((b"WWW-Authenticate", b"Bearer"))
    return refusal


def _other_token() -> SubscriptionRefusedError:
    return _unauthorized("TOKEN_INVALID", "the token is for another subscription")


def _no_method(allowed: bytes) -> Response:
    return refused(
        405,
        "method_not_allowed",
        "Method not allowed",
        f"use {allowed.decode()}",
        (b"Allow", allowed),
    )
