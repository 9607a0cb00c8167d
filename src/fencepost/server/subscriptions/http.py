"""The HTTP surface of subscriptions, below /v1/stream/__ds/: parse, let the engine decide, answer.

Each public method of `SubscriptionHandlers` is one row of `routes.py`. Every answer, refusals
included, waits until what it says is on disk. `bodies.py` reads the request bodies.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
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
    Link,
    NothingPending,
    Subscription,
)
from fencepost.server.handlers.lists import name_after
from fencepost.server.handlers.querying import Parameters, list_limit
from fencepost.server.handlers.rendering import BROWSER, failed
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
from fencepost.server.subscriptions.registry import ConfigConflict, Made, TooMany, WakeName
from fencepost.server.subscriptions.security import (
    BadToken,
    Guard,
    SigningKey,
    Token,
    Tokens,
    UnsafeTargetError,
)
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.webhooks import show_wake
from fencepost.store.contract import Failed, Unknown

ROOT = b"/v1/stream/__ds/"

_HOST = re.compile(rb"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NO_STORE = (b"Cache-Control", b"no-store")


class SubscriptionHandlers:
    """The handlers of subscriptions; `run` calls them."""

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
        self._limits = limits
        self._bodies = Bodies(settings, limits)

    async def run(self, handler: SubscriptionHandler, request: Request, *parts: bytes) -> Answer:
        """Call one of the methods below, with the parts of the URL: first a subscription's id."""
        try:
            if not parts:
                return await handler(self, request)
            name = self._bodies.name("a subscription's id", _text(parts[0]))
            return await handler(self, request, name, *map(_text, parts[1:]))
        except SubscriptionRefusedError as refusal:
            return await self._durably(refusal.response)

    # Subscriptions

    async def put(self, request: Request, name: str) -> Answer:
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

    async def list(self, request: Request) -> Answer:
        """The subscriptions of the sender, in the order of their ids, without their streams."""
        parameters = Parameters(request, once=("after", "limit"), repeatable=())
        after, limit = name_after(parameters), list_limit(parameters, self._limits)
        names = (
            subscription.name
            for subscription in self._engine.registry
            if subscription.name > after and _owns(request.principal, subscription)
        )
        found = heapq.nsmallest(limit + 1, names)
        shown = [
            show_subscription(self._existing(name), self._engine.signing, after="", streams_max=0)
            for name in found[:limit]
        ]
        following = found[limit - 1] if len(found) > limit else None
        return await self._durably(_json(200, {"subscriptions": shown, "next": following}))

    async def get(self, request: Request, name: str) -> Answer:
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

    async def delete(self, request: Request, name: str) -> Answer:
        self._engine.delete(self._own(request, name))
        return await self._durably(_empty())

    async def link(self, request: Request, name: str) -> Answer:
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

    async def unlink(self, request: Request, name: str, path: str) -> Answer:
        self._engine.unlink(self._own(request, name), self._bodies.path(path))
        return await self._durably(_empty())

    # Workers

    async def claim(self, request: Request, name: str) -> Answer:
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

    async def ack(self, request: Request, name: str) -> Answer:
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

    async def release(self, request: Request, name: str) -> Answer:
        body = parse(request, WakeBody)
        subscription = self._worked_for(request, name)
        wake = self._authorized(request, subscription, body)
        outcome = self._engine.release(subscription, wake)
        return await self._durably(_empty() if outcome is None else _fenced(outcome))

    # Who may: a subscription belongs to its owner, and others are told that it does not exist

    def _may_make(
        self, principal: Principal | None, config: Config, existing: Subscription | None
    ) -> None:
        if principal is None:
            return
        if existing is not None and not _owns(principal, existing):
            raise _forbidden("another principal owns the subscription with this id: use another id")
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
        """A subscription whose work the sender may take.

        That is its owner, or a principal with the verb claim on its wake stream that may read every
        stream that a wake can name.
        """
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

        With authorization, only the bearer of a token for it is told whether it exists.
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


SubscriptionHandler = Callable[..., Awaitable[Answer]]
"""A method of `SubscriptionHandlers` that takes a request and parts of its path."""


def show_keys(signing: SigningKey) -> Response:
    """The public key that webhooks are signed with."""
    headers = [
        (b"Content-Type", b"application/jwk-set+json"),
        (b"Cache-Control", b"public, max-age=300"),
        *BROWSER,
    ]
    return Response(200, headers, signing.jwks())


def _owns(principal: Principal | None, subscription: Subscription) -> bool:
    """Whether a principal may do everything with a subscription; without authorization all may."""
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
        "this wake is over: stop, the holder of the current wake has the work",
        generation=outcome.generation,
    )


def _unauthorized(code: str, message: str) -> SubscriptionRefusedError:
    refusal = SubscriptionRefusedError(401, code, message)
    refusal.response.headers.append((b"WWW-Authenticate", b"Bearer"))
    return refusal


def _other_token() -> SubscriptionRefusedError:
    return _unauthorized("TOKEN_INVALID", "the token is for another subscription")


def show_subscription(
    subscription: Subscription, signing: SigningKey, *, after: str, streams_max: int
) -> dict[str, object]:
    """A subscription as GET and PUT answer it, with the streams whose path comes after `after`."""
    config, wake = subscription.config, subscription.wake
    paths = heapq.nsmallest(streams_max, (path for path in subscription.links if path > after))
    return {
        "id": subscription.name,
        "subscription_id": subscription.name,
        "principal": subscription.owner or None,
        "type": config.type,
        "pattern": config.pattern,
        "streams": [_show_link(subscription.links[path]) for path in paths],
        "streams_total": len(subscription.links),
        "webhook": None
        if config.webhook_url is None
        else {
            "url": config.webhook_url,
            "signing": {
                "alg": "ed25519",
                "kid": signing.kid,
                "jwks_url": f"{subscription.base_url}/jwks.json",
            },
        },
        "wake_stream": config.wake_stream,
        "lease_ttl_ms": config.lease_ttl_ms,
        "created_at": _time(subscription.created_ms),
        "status": wake.status,
        "description": config.description,
        "generation": wake.generation,
        "pending_streams": len(subscription.pending),
        "holder": wake.holder,
        "attempts": wake.attempts,
        "next_attempt_at": _time(wake.next_attempt_ms),
        "lease_expires_at": _time(wake.lease_until_ms),
    }


def _show_link(link: Link) -> dict[str, object]:
    return {"path": link.path, "link_type": link.type, "acked_offset": str(link.acked)}


def _time(instant_ms: int | None) -> str | None:
    if instant_ms is None:
        return None
    instant = datetime.fromtimestamp(instant_ms / 1000, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
