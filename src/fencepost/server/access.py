"""Which request needs what: every route and every kind of write against a principal's grants.

A request passes three points. `Gate.admit` recognises who sends it, before anything is parsed.
After parsing, the `*_allowed` functions say whether what it asks for is granted; they look at the
request alone, so that a 403 is the same whether or not a stream exists. Where an answer is put
together from many streams it is narrowed to those that may be read. A path that this module does
not know is for administrators, so that a new route is closed until somebody says who may use it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Literal, cast
from urllib.parse import parse_qsl

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fencepost.clock import Clock
from fencepost.http.messages import Request
from fencepost.protocol.appends import Append
from fencepost.protocol.claims import Actor, Ending
from fencepost.protocol.creates import Create
from fencepost.protocol.globs import ANY, Glob
from fencepost.protocol.grants import (
    ADMIN,
    APPEND,
    CLOSE,
    CREATE,
    DELETE,
    READ,
    VERBS,
    Narrowed,
    NarrowedSelection,
    Principal,
)
from fencepost.protocol.logs import Part, Selection
from fencepost.server.auth import Auth
from fencepost.server.handlers.parsing import RefusedError, bad, text_header

REASON_BYTES_MAX = 256
SEAL_SECRET = "list-tokens"
"""The name of the key that hides where lists go on."""
_SCOPE_END = "\x1f"  # neither a principal nor a transaction has it in its name

_SUBSCRIPTIONS = b"/v1/stream/__ds/subscriptions/"
_OPEN = frozenset((b"/healthz", b"/v1/stream/__ds/jwks.json"))
_ANYBODY = frozenset(
    (
        b"/v1/commit",
        b"/v1/keys",
        b"/v1/log",
        b"/v1/log/plan",
        b"/v1/openapi.json",
        b"/v1/producers",
        b"/v1/streams",
        b"/v1/writers",
    )
)
"""Routes for every principal: what they do and show is checked where it is known."""
_ANYBODY_BELOW = (b"/v1/staging/", b"/v1/writers/", _SUBSCRIPTIONS)
_WITH_WAKE_TOKEN = frozenset((b"ack", b"callback", b"release"))
_TOKEN_PARAMETERS = frozenset(("access_token", "authorization", "bearer", "jwt", "token"))
_MENTIONS_TOKEN = re.compile(rb"token|auth|bearer|jwt|%", re.IGNORECASE)


class Gate:
    """Lets requests in, and says who sends them."""

    def __init__(self, auth: Auth) -> None:
        self.auth = auth
        settings = auth.settings
        opened = {b"/metrics": settings.metrics_open, b"/readyz": settings.readyz_open}
        self._open = _OPEN | {path for path, is_open in opened.items() if is_open}

    def readers(self, owner: str) -> Callable[[str], bool]:
        """What the owner of a subscription may read: nothing, when nobody is called so any more."""
        principal = self.auth.named(owner)
        return _nothing if principal is None else principal.may_read

    def admit(self, request: Request) -> None:
        """Note who sends a request; raises a 401, or a 403 for a route that is not theirs."""
        if request.method == "OPTIONS" or request.path in self._open:
            return
        if request.query and _MENTIONS_TOKEN.search(request.query):
            _refuse_token_in_url(request)
        path = request.path
        if path.startswith(_SUBSCRIPTIONS) and _is_by_wake_token(path):
            return
        principal = self.auth.recognise(request)
        request.principal = principal
        if path.startswith(b"/v1/stream/") and not path.startswith(b"/v1/stream/__ds/"):
            return
        if path in _ANYBODY or path.startswith(_ANYBODY_BELOW) or principal.is_admin:
            return
        raise forbidden("this needs the verb admin on all streams (**)")


def _is_by_wake_token(path: bytes) -> bool:
    """Whether a subscription's worker speaks here, who shows the token of its wake instead."""
    _, _, action = path[len(_SUBSCRIPTIONS) :].partition(b"/")
    return action in _WITH_WAKE_TOKEN


def _refuse_token_in_url(request: Request) -> None:
    names = (
        name.lower()
        for name, _ in parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
    )
    if not _TOKEN_PARAMETERS.isdisjoint(names):
        raise bad(
            "token_in_url",
            "a token in a URL ends up in logs: send Authorization: Bearer, and make a new token",
        )


def forbidden(detail: str) -> RefusedError:
    """A 403 that depends on the request and on the grants alone."""
    return RefusedError(403, "forbidden", "Forbidden", detail)


def require(principal: Principal, verbs: int, path: str) -> None:
    """Raise a 403 unless the principal has all of these verbs on a stream."""
    missing = verbs & ~principal.verbs_on(path)
    if missing:
        names = [name for name, verb in VERBS.items() if verb & missing]
        raise forbidden(f"you lack the verb {' and '.join(names)} here")


# Requests to one stream


def read_allowed(request: Request, path: str) -> None:
    if request.principal is not None and not request.principal.may_read(path):
        raise forbidden("you lack the verb read here")


def delete_allowed(request: Request, path: str) -> None:
    if request.principal is not None:
        require(request.principal, DELETE, path)


def create_allowed(request: Request, create: Create) -> None:
    """Making a stream, with its first messages, from a source that must be readable."""
    principal = request.principal
    if principal is None:
        return
    needed = CREATE
    if create.batch is not None:
        needed |= APPEND
    if create.closed:
        needed |= CLOSE
    require(principal, needed, create.path)
    source = create.fork_from
    if source is not None and not principal.may_read(source.path):
        raise forbidden("you lack the verb read on the source of the fork")


def append_allowed(append: Append, *, has_data: bool | None = None) -> None:
    """An append, a close, or both; `has_data` when the data is elsewhere."""
    actor = append.actor
    if actor is None:
        return
    principal = actor.principal
    needed = 0
    if append.batch is not None or has_data:
        needed = APPEND
    if append.closes:
        needed |= CLOSE
    if append.conditions is not None and append.conditions.create_as is not None:
        needed |= CREATE
    producer = append.producer
    if producer is not None:
        also = principal.verbs_for(producer.id)
        if also is None:
            raise forbidden("you may not use this producer id")
        needed |= also
    if principal.verbs_on(append.path) & needed != needed:
        require(principal, needed, append.path)


def actor_of(request: Request, path: str, ending: Ending | None = None) -> Actor | None:
    """The principal with what it says about its reasons; None without authorization."""
    principal = request.principal
    if principal is None:
        return None
    headers = request.headers
    reason = ""
    if b"audit-reason" in headers:
        reason = _reason(request)
    if ending is None and b"claim-end" in headers:
        ending = _ending(request)
    if not reason and ending is None:
        return Actor(principal)
    return Actor(principal, reason, bool(reason) and principal.may(ADMIN, path), ending)


def _reason(request: Request) -> str:
    if b"audit-reason" in request.repeated:
        raise bad("header_repeated", "the header audit-reason came more than once")
    reason = (text_header(request, b"audit-reason", REASON_BYTES_MAX) or "").strip()
    if not reason or any(ord(character) < 0x20 for character in reason):
        raise bad("header_invalid", "Audit-Reason says why, in one line")
    return reason


def _ending(request: Request) -> Ending:
    value = request.headers[b"claim-end"]
    if b"claim-end" in request.repeated or value not in (b"released", b"completed"):
        raise bad("header_invalid", "Claim-End is released or completed, once")
    return cast(Literal["released", "completed"], value.decode())


# Staging: what one principal uploads is not there for another


def staging_allowed(request: Request) -> None:
    """Data is staged for appends, so whoever may append nothing stages nothing."""
    if request.principal is not None and not request.principal.may_somewhere(APPEND):
        raise forbidden("you lack the verb append everywhere")


def writing_allowed(request: Request) -> None:
    """A writer publishes by appends, so whoever may append nothing opens none."""
    if request.principal is not None and not request.principal.may_somewhere(APPEND):
        raise forbidden("you lack the verb append everywhere")


def overrides(principal: Principal | None) -> bool:
    """Whether a principal may use what is another one's; nothing is anybody's without them."""
    return principal is None or principal.is_admin


def name_of(principal: Principal | None) -> str:
    """Whose a request is; nobody's without authorization."""
    return "" if principal is None else principal.name


def scope_of(principal: Principal | None) -> str:
    """What the names of a principal's transactions begin with in the store."""
    return "" if principal is None else principal.name + _SCOPE_END


def without_scope(txn: str) -> str:
    """The name of a transaction as its owner knows it."""
    return txn.rpartition(_SCOPE_END)[2]


# Answers that are put together from many streams


def readable_glob(principal: Principal | None, glob: Glob | None) -> Glob | None:
    """A pattern, narrowed to what may be read."""
    if principal is None:
        return glob
    return Narrowed(ANY if glob is None else glob.text, principal.may_read)


def readable_selection(
    principal: Principal | None, paths: list[str], globs: list[Glob], part: Part | None
) -> Selection:
    """A selection of the log, narrowed to what may be read."""
    if principal is None:
        return Selection(paths, globs, part)
    if not principal.may_somewhere(READ):
        # An empty log would look like one without messages.
        raise forbidden("you lack the verb read on every stream")
    return NarrowedSelection(paths, globs, part, principal.may_read)


def may_read(principal: Principal | None) -> Callable[[str], bool]:
    """Whether a path may be shown."""
    return _anything if principal is None else principal.may_read


def _anything(_path: str) -> bool:
    return True


def _nothing(_path: str) -> bool:
    return False


class Seal:
    """Makes tokens that say where a list goes on, without saying what is there."""

    def __init__(self, key: bytes, clock: Clock) -> None:
        self._cipher = AESGCM(key)
        self._clock = clock

    def close(self, text: str) -> str:
        """A token that only this server can read."""
        nonce = self._clock.token(12)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), None)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def open(self, token: str) -> str | None:
        """What a token holds; None when it is not one of ours."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            return self._cipher.decrypt(raw[:12], raw[12:], None).decode()
        except (binascii.Error, ValueError, InvalidTag):
            return None
