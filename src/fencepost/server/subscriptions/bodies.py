"""Reading the bodies of subscription requests: typed, bounded, and refused with a named code.

Refusals here have the shape that the public protocol gives them, `{"error": {"code": ...}}`, with
the fields of a problem (RFC 9457) beside it, so that a client which knows either finds its way.
Unknown fields are ignored, as the protocol's extensions require.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from fencepost.http.messages import Request, Response
from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.meshes import is_managed
from fencepost.protocol.offsets import START, Offset, parse_offset
from fencepost.protocol.streams import JSON, media_type
from fencepost.protocol.subscriptions import PULL_WAKE, WEBHOOK, Ack, Config, normalised
from fencepost.server.handlers.fields import RefusedError, check_path
from fencepost.server.handlers.rendering import BROWSER
from fencepost.server.subscriptions.settings import SubscriptionSettings

GENERATION_MAX = 2**53 - 1


class Webhook(msgspec.Struct):
    url: str


class CreateBody(msgspec.Struct):
    type: Literal["webhook", "pull-wake"]
    pattern: str | None = None
    streams: list[str] | None = None
    webhook: Webhook | None = None
    wake_stream: str | None = None
    lease_ttl_ms: int | None = None
    description: str | None = None


class StreamsBody(msgspec.Struct):
    streams: list[str]


class ClaimBody(msgspec.Struct):
    worker: str


class AckItem(msgspec.Struct):
    stream: str
    offset: str


class WakeBody(msgspec.Struct):
    wake_id: str
    generation: int


class AckBody(WakeBody):
    acks: list[AckItem] = []
    done: bool = False


BodyT = TypeVar("BodyT")


class SubscriptionRefusedError(RefusedError):
    """The request cannot be taken; `response` says why, in the protocol's own shape."""

    def __init__(self, status: int, code: str, message: str, **facts: object) -> None:
        Exception.__init__(self, message)
        self.response = error(status, code, message, **facts)


def error(status: int, code: str, message: str, **facts: object) -> Response:
    """A refusal; `facts` go into its error object."""
    body = {
        "error": {"code": code, "message": message, **facts},
        "type": "about:blank",
        "title": code.replace("_", " ").capitalize(),
        "status": status,
        "code": code.lower(),
        "detail": message,
    }
    return Response(status, [*_HEADERS, *BROWSER[2:]], msgspec.json.encode(body))


_HEADERS = [
    (b"Content-Type", b"application/json"),
    (b"Cache-Control", b"no-store"),
    *BROWSER[:2],
]


def invalid(message: str) -> SubscriptionRefusedError:
    """A 400: the request itself is wrong."""
    return SubscriptionRefusedError(400, "INVALID_REQUEST", message)


def parse(request: Request, kind: type[BodyT]) -> BodyT:
    """The body of a request as a typed record."""
    content_type = request.headers.get(b"content-type")
    if content_type is not None and media_type(content_type.decode("latin-1")) != JSON:
        raise SubscriptionRefusedError(
            415, "UNSUPPORTED_MEDIA_TYPE", f"the body of this request is {JSON}"
        )
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise invalid(f"the body is not understood: {problem}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


class Bodies:
    """The checks that need the limits."""

    def __init__(self, settings: SubscriptionSettings, limits: Limits) -> None:
        self._settings = settings
        self._limits = limits

    def config(self, body: CreateBody) -> Config:
        """What a PUT asks for, in its one form."""
        settings = self._settings
        streams = self.paths(body.streams or ())
        if body.pattern is None and not streams:
            raise invalid("a subscription has a pattern, streams, or both")
        if body.type == WEBHOOK and body.webhook is None:
            raise invalid("a webhook subscription has webhook.url")
        if body.type == PULL_WAKE and body.wake_stream is None:
            raise invalid("a pull-wake subscription has a wake_stream")
        if body.pattern is not None:
            self._check_pattern(body.pattern)
        url = None if body.webhook is None else body.webhook.url
        _bounded("webhook.url", url or "", settings.url_bytes_max)
        _bounded("description", body.description or "", settings.description_bytes_max)
        lease_ms = body.lease_ttl_ms
        if lease_ms is not None and not settings.lease_ms_min <= lease_ms <= settings.lease_ms_max:
            raise invalid(
                f"lease_ttl_ms is from {settings.lease_ms_min} to {settings.lease_ms_max}"
            )
        config = normalised(
            body.type,
            pattern=body.pattern,
            streams=streams,
            webhook_url=url,
            wake_stream=body.wake_stream,
            lease_ttl_ms=lease_ms,
            description=body.description,
        )
        if config.wake_stream is not None:
            self.path(config.wake_stream)
            if is_managed(config.wake_stream):
                raise invalid("streams below __mesh are written by sends, not by wakes")
            if config.wake_stream in config.streams:
                raise invalid("a subscription does not watch its own wake stream")
        return config

    def _check_pattern(self, pattern: str) -> None:
        _bounded("pattern", pattern, self._settings.pattern_bytes_max)
        glob = parse_glob(pattern)
        if isinstance(glob, BadGlob):
            raise invalid(glob.detail)

    def paths(self, paths: Iterable[str]) -> list[str]:
        """Stream paths, each checked."""
        checked = [self.path(path) for path in paths]
        if len(checked) > self._settings.explicit_streams_max:
            raise too_many("explicit_streams_max", self._settings.explicit_streams_max)
        return checked

    def path(self, path: str) -> str:
        """A stream path, if a stream may have that name."""
        try:
            encoded = path.encode()
        except UnicodeEncodeError:
            raise invalid("a stream path is not Unicode text") from None
        if len(encoded) > self._limits.path_bytes_max:
            raise invalid(f"a stream path has at most {self._limits.path_bytes_max} bytes")
        try:
            return check_path(path)
        except RefusedError as refused:
            raise invalid(f"{path!r}: {refused}") from None

    def name(self, what: str, name: str) -> str:
        """The id of a subscription, or a worker's name."""
        if not name or any(ord(mark) < 0x20 or ord(mark) == 0x7F for mark in name):
            raise invalid(f"{what} is not empty and has no control characters")
        return _bounded(what, name, self._settings.name_bytes_max)

    def acks(self, items: list[AckItem]) -> list[Ack]:
        """The acks of a request."""
        if len(items) > self._settings.acks_max:
            raise too_many("acks_max", self._settings.acks_max)
        return [Ack(item.stream, _offset(item.offset)) for item in items]


def too_many(limit: str, allowed: int) -> SubscriptionRefusedError:
    """More than a limit lets through."""
    return SubscriptionRefusedError(
        413, "LIMIT_EXCEEDED", f"at most {allowed} are allowed ({limit})", limit=limit
    )


def _bounded(what: str, text: str, bytes_max: int) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise invalid(f"{what} is not Unicode text") from None
    if size > bytes_max:
        raise invalid(f"{what} has at most {bytes_max} bytes")
    return text


def _offset(text: str) -> Offset:
    offset = parse_offset(text)
    if offset == "-1":
        return START
    if offset is None or offset == "now":
        raise invalid(f"{text!r} is not an offset to ack")
    return offset
