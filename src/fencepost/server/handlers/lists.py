"""`/v1/streams`, `/v1/producers` and `/v1/keys`: what there is, page by page.

A page is an object with its entries and `next`, the value to give as `after` for the page that
follows; null at the end. A page may be short, or empty, before the end: a pattern that matches
little is not allowed to hold a page up.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

import msgspec

from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol.globs import Glob
from fencepost.protocol.grants import ADMIN, READ, Principal
from fencepost.protocol.logs import parse_instant_ms
from fencepost.server.access import Seal, may_read, readable_glob
from fencepost.server.handlers.fields import bad, calendar_time, rfc3339
from fencepost.server.handlers.querying import Parameters, glob_of, list_limit
from fencepost.server.handlers.rendering import BROWSER
from fencepost.server.settings import ServerSettings
from fencepost.store.log_contract import ListedKey, ListedProducer, ListedStream, ListStore

_SEALED_PATH = "/"
"""What a sealed place in the list of streams begins with, and no path does."""
_NO_STORE = (b"Cache-Control", b"no-store")


class Lists:
    """The handlers that list."""

    def __init__(
        self, store: ListStore, settings: ServerSettings, seal: Seal | None = None
    ) -> None:
        self._store = store
        self._seal = seal  # with authorization: where a list goes on may be a secret
        self._limits = settings.limits

    async def streams(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("match", "after", "limit"), repeatable=())
        after = name_after(parameters)
        if self._seal is not None and after.startswith(_SEALED_PATH):
            after = self._opened(after.removeprefix(_SEALED_PATH))
        glob = readable_glob(request.principal, self._glob(parameters, "match"))
        page = await self._store.list_streams(
            glob, after=after, limit=list_limit(parameters, self._limits)
        )
        following = None if page.next is None else page.next[0]
        shown = may_read(request.principal)
        if following is not None and self._seal is not None and not shown(following):
            following = _SEALED_PATH + self._seal.close(following)
        return _page("streams", [_stream(entry, shown) for entry in page.entries], following)

    async def producers(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("stream", "match", "after", "limit"), repeatable=())
        path, producer_id = self._key(parameters, 2) or ("", "")
        page = await self._store.list_producers(
            readable_glob(request.principal, self._glob(parameters, "stream")),
            self._glob(parameters, "match"),
            after=(path, producer_id),
            limit=list_limit(parameters, self._limits),
        )
        entries = [_producer(entry) for entry in page.entries]
        return _page("producers", entries, self._token(page.next))

    async def keys(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("after", "as_of", "limit"), repeatable=())
        stream, principal, key = self._key(parameters, 3) or ("-1", "", "")
        if not stream.removeprefix("-").isdecimal() or len(stream) > 16:
            raise _bad_after()
        as_of = parameters.get("as_of")
        as_of_ms = None if as_of is None else parse_instant_ms(as_of)
        if as_of is not None and as_of_ms is None:
            raise bad("as_of_invalid", "as_of is a time: RFC 3339, or milliseconds since 1970")
        limit = list_limit(parameters, self._limits)
        asking = request.principal
        entries: list[ListedKey] = []
        following: tuple[str, ...] | None = (stream, principal, key)
        while following is not None and len(entries) < limit:
            stream, principal, key = following
            owner = _keys_owner(asking)
            page = await self._store.list_keys(
                owner=owner,
                after=(int(stream), principal, key),
                as_of_ms=as_of_ms,
                limit=limit - len(entries),
            )
            entries += [entry for entry in page.entries if _may_see(asking, entry)]
            following = page.next
            # The size of a page must not tell how many keys others have: it goes on until it is
            # full where some were left out that another principal sees.
            if asking is None or asking.is_admin or owner is not None:
                break
        return _page("keys", [_listed_key(entry) for entry in entries], self._token(following))

    def _key(self, parameters: Parameters, length: int) -> tuple[str, ...] | None:
        """The key that a token stands for: so many texts."""
        token = parameters.get("after")
        if token is None:
            return None
        try:
            raw = (
                base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
                if self._seal is None
                else self._opened(token).encode()
            )
            key = msgspec.json.decode(raw, type=tuple[str, ...])
        except (binascii.Error, ValueError, msgspec.DecodeError):
            raise _bad_after() from None
        # No text that is kept holds a NUL, so no key does.
        if len(key) != length or "\0" in "".join(key):
            raise _bad_after()
        return key

    def _token(self, key: tuple[str, ...] | None) -> str | None:
        if key is None:
            return None
        raw = msgspec.json.encode(key)
        if self._seal is not None:
            return self._seal.close(raw.decode())
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    def _opened(self, token: str) -> str:
        assert self._seal is not None
        text = self._seal.open(token)
        if text is None:
            raise _bad_after()
        return text

    def _glob(self, parameters: Parameters, name: str) -> Glob | None:
        text = parameters.get(name)
        return None if text is None else glob_of(text, name, self._limits)


def name_after(parameters: Parameters) -> str:
    """The name that a page comes after; empty for the first one."""
    name = parameters.get("after") or ""
    # No name that is kept holds a NUL.
    if "\0" in name:
        raise _bad_after()
    return name


def _bad_after() -> Exception:
    return bad("after_invalid", "after is the `next` of the page before")


def _keys_owner(principal: Principal | None) -> str | None:
    """Whose keys to look at: a principal that administers nothing sees its own."""
    if principal is None or principal.may_somewhere(ADMIN):
        return None
    return principal.name


def _may_see(principal: Principal | None, entry: ListedKey) -> bool:
    """Whether a principal may see a key: its owner may, and administrators of its stream."""
    if principal is None or principal.is_admin:
        return True
    if entry.stream is None:  # of a commit, or of a stream that is gone
        return entry.principal == principal.name
    verbs = principal.verbs_on(entry.stream)
    return bool(verbs & ADMIN or (verbs & READ and entry.principal == principal.name))


def _page(name: str, entries: list[dict[str, object]], following: str | None) -> Response:
    body = msgspec.json.encode({name: entries, "next": following})
    return Response(200, [(b"Content-Type", b"application/json"), _NO_STORE, *BROWSER], body)


def _stream(entry: ListedStream, may_read: Callable[[str], bool]) -> dict[str, object]:
    described: dict[str, object] = {
        "path": entry.path,
        "id": entry.id,
        "content_type": entry.content_type,
        "tail": str(entry.tail),
        "version": entry.tail.messages - 1,
        "size_bytes": entry.tail.bytes - entry.first.bytes,
        "closed": entry.closed,
        **({"books": "closed"} if entry.books_closed else {}),
        "created": rfc3339(entry.created_ms),
        "updated": rfc3339(entry.updated_ms),
        "ttl_seconds": entry.lifetime.ttl_s,
        "expires_at": calendar_time(entry.lifetime.expires_at_ms),
    }
    if entry.forked_from is not None and may_read(entry.forked_from):
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
        "expires": calendar_time(entry.expires_ms),
    }
