"""`/v1/streams`, `/v1/producers` and `/v1/keys`: what there is, page by page.

A page is an object with its entries and `next`, the value to give as `after` for the page that
follows; null at the end. A page may be short, or empty, before the end: a pattern that matches
little is not allowed to hold a page up.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable

import msgspec

from fencepost.protocol.globs import Glob
from fencepost.protocol.logs import parse_instant_ms
from fencepost.server.handlers.parsing import bad, rfc3339
from fencepost.server.handlers.querying import Parameters, glob_of
from fencepost.server.handlers.rendering import BROWSER, refused
from fencepost.server.http import Answer, Request, Response
from fencepost.server.settings import ServerSettings
from fencepost.store.log_contract import ListedKey, ListedProducer, ListedStream, ListStore

_NO_STORE = (b"Cache-Control", b"no-store")


class Lists:
    """The handlers that list."""

    def __init__(self, store: ListStore, settings: ServerSettings) -> None:
        self._store = store
        self._limits = settings.limits

    def handle(self, request: Request) -> Awaitable[Answer] | None:
        known = {
            b"/v1/streams": self._streams,
            b"/v1/producers": self._producers,
            b"/v1/keys": self._keys,
        }
        handler = known.get(request.path)
        if handler is None:
            return None
        return handler(request) if request.method in ("GET", "HEAD") else _no_method()

    async def _streams(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("match", "after", "limit"), repeatable=())
        after = parameters.get("after") or ""
        page = await self._store.list_streams(
            self._glob(parameters, "match"), after=after, limit=self._limit(parameters)
        )
        following = None if page.next is None else page.next[0]
        return _page("streams", [_stream(entry) for entry in page.entries], following)

    async def _producers(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("stream", "match", "after", "limit"), repeatable=())
        path, producer_id = _key(parameters, 2) or ("", "")
        page = await self._store.list_producers(
            self._glob(parameters, "stream"),
            self._glob(parameters, "match"),
            after=(path, producer_id),
            limit=self._limit(parameters),
        )
        return _page("producers", [_producer(entry) for entry in page.entries], _token(page.next))

    async def _keys(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("after", "as_of", "limit"), repeatable=())
        stream, principal, key = _key(parameters, 3) or ("-1", "", "")
        if not stream.removeprefix("-").isdecimal() or len(stream) > 16:
            raise _bad_after()
        as_of = parameters.get("as_of")
        as_of_ms = None if as_of is None else parse_instant_ms(as_of)
        if as_of is not None and as_of_ms is None:
            raise bad("as_of_invalid", "as_of is a time: RFC 3339, or milliseconds since 1970")
        page = await self._store.list_keys(
            after=(int(stream), principal, key), as_of_ms=as_of_ms, limit=self._limit(parameters)
        )
        return _page("keys", [_listed_key(entry) for entry in page.entries], _token(page.next))

    def _glob(self, parameters: Parameters, name: str) -> Glob | None:
        text = parameters.get(name)
        return None if text is None else glob_of(text, name, self._limits)

    def _limit(self, parameters: Parameters) -> int:
        most = self._limits.list_rows_max
        limit = parameters.integer(
            "limit",
            "limit_invalid",
            least=1,
            most=most,
            default=min(self._limits.list_rows_default, most),
        )
        assert limit is not None
        return limit


def _key(parameters: Parameters, length: int) -> tuple[str, ...] | None:
    """The key that a token stands for: so many texts."""
    token = parameters.get("after")
    if token is None:
        return None
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        key = msgspec.json.decode(raw, type=tuple[str, ...])
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise _bad_after() from None
    if len(key) != length:
        raise _bad_after()
    return key


def _bad_after() -> Exception:
    return bad("after_invalid", "after is the `next` of the page before")


def _token(key: tuple[str, ...] | None) -> str | None:
    if key is None:
        return None
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode()


def _page(name: str, entries: list[dict[str, object]], following: str | None) -> Response:
    body = msgspec.json.encode({name: entries, "next": following})
    return Response(200, [(b"Content-Type", b"application/json"), _NO_STORE, *BROWSER], body)


def _stream(entry: ListedStream) -> dict[str, object]:
    described: dict[str, object] = {
        "path": entry.path,
        "id": entry.id,
        "content_type": entry.content_type,
        "tail": str(entry.tail),
        "version": entry.tail.messages - 1,
        "size_bytes": entry.tail.bytes - entry.first.bytes,
        "closed": entry.closed,
        "created": rfc3339(entry.created_ms),
        "updated": rfc3339(entry.updated_ms),
        "ttl_seconds": entry.lifetime.ttl_s,
        "expires_at": _instant(entry.lifetime.expires_at_ms),
    }
    if entry.forked_from is not None:
        described["forked_from"] = entry.forked_from
    return described


def _producer(entry: ListedProducer) -> dict[str, object]:
    return {
        "stream": entry.stream,
        "id": entry.id,
        "epoch": entry.epoch,
        "seq": entry.seq,
        "offset": None if entry.offset is None else str(entry.offset),
        "updated": rfc3339(entry.updated_ms),
    }


def _listed_key(entry: ListedKey) -> dict[str, object]:
    return {
        "stream": entry.stream,
        "incarnation": entry.incarnation,
        "principal": entry.principal,
        "key": entry.key,
        "offset": str(entry.offset),
        "position": entry.position,
        "created": rfc3339(entry.created_ms),
        "expires": _instant(entry.expires_ms),
    }


def _instant(instant_ms: int | None) -> str | None:
    return None if instant_ms is None else rfc3339(instant_ms)


async def _no_method() -> Answer:
    return refused(
        405, "method_not_allowed", "Method not allowed", "use GET", (b"Allow", b"GET, HEAD")
    )
