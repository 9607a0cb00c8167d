"""Check requests against the grants of the principal that sends them.

A request passes three points. `Gate.admit` recognises its principal, before anything is parsed, and
checks that the route is for it (`routes.Who`). After parsing, the `*_allowed`
functions check that what it asks for is granted; they look at the request alone, so that a 403 is
the same whether or not a stream exists. Where an answer is put together from many streams, it is
narrowed to those that the principal may read. A path without a route is for administrators.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Literal, cast
from urllib.parse import parse_qsl, unquote_to_bytes

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fencepost.clock import Clock
from fencepost.http.messages import Request
from fencepost.protocol.appends import Append, Conditions
from fencepost.protocol.claims import Actor, Ending
from fencepost.protocol.commits import SCOPE_END
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
from fencepost.protocol.shares import CONNECTIONS, limit_of
from fencepost.server.auth import Auth
from fencepost.server.handlers.fields import STREAM_ROOT, RefusedError, bad, text_header
from fencepost.server.handlers.waiting import Tally

REASON_BYTES_MAX = 256
SEAL_SECRET = "list-tokens"
"""The name of the key that hides where lists go on."""

_TOKEN_PARAMETERS = frozenset(("access_token", "authorization", "bearer", "jwt", "token"))
_MENTIONS_TOKEN = re.compile(rb"token|auth|bearer|jwt|%", re.IGNORECASE)


class Gate:
    """Admits requests and notes the principal of each."""

    def __init__(
        self,
        auth: Auth,
        read_grant: Callable[[str], tuple[str, str, bool] | None],
        connections_share: int = 0,
    ) -> None:
        self.auth = auth
        self.connections = Tally(connections_share)
        """How many connections each principal uses."""
        self._read_grant = read_grant
        """A read token's principal and stream, and whether it has ended (`handlers/tokens.py`)."""

    def readers(self, owner: str) -> Callable[[str], bool]:
        """A test of whether the owner of a subscription may read a path; no principal, no path."""
        principal = self.auth.named(owner)
        return _nothing if principal is None else principal.may_read

    def knows_sender(self, headers: dict[bytes, bytes], repeated: frozenset[bytes]) -> str | None:
        """The principal that a request comes from, found by its headers before its body is read."""
        try:
            return self.auth.recognise(
                Request("POST", b"/", b"", headers, b"", repeated=repeated)
            ).name
        except RefusedError:
            return None

    def admit(self, request: Request, who: str) -> None:
        """Note which principal sends a request to a route that is for `who` (`routes.Who`).

        Raises a 401, or a 403 when the route is not for this principal.
        """
        if who == "all":
            return
        if request.query and _MENTIONS_TOKEN.search(request.query):
            read_token = _token_in_url(request)
            if read_token is not None:
                request.principal = self._bearer(request, read_token)
                self._count(request, request.principal)
                return
        if who == "wake token":
            return  # the handler checks it: it stands for a principal
        request.principal = principal = self.auth.recognise(request)
        if request.connection is not None and request.connection.principal is not principal:
            self._count(request, principal)
        if who == "administrators" and not principal.is_admin:
            raise forbidden("this needs the verb admin on all streams (**)")

    def _count(self, request: Request, principal: Principal) -> None:
        """Count a connection for the principal whose requests come on it; raises a 503."""
        connection = request.connection
        if connection is None:
            return
        before, connection.principal = connection.principal, principal
        if before is not None and before.name == principal.name:
            return
        connection.counted = None
        connection.counted = self.connections.take(principal.name)
        if connection.counted is None:
            connection.principal = None
            connection.last_came(request)
            raise RefusedError(
                503,
                "too_many_connections",
                "Too many connections",
                f"at most {self.connections.share} connections of one principal are served at once"
                f" ({limit_of(CONNECTIONS)}); retry later",
                (b"Retry-After", b"1"),
            )

    def _bearer(self, request: Request, token: str) -> Principal:
        """The principal that gave out the read token of a GET; raises a 401."""
        grant = self._read_grant(token)
        if grant is None:
            raise _token_in_url_error()
        name, stream, has_ended = grant
        principal = self.auth.named(name)
        if has_ended or principal is None:
            raise self.auth.rejected_token("the read token has ended: ask for another one")
        if unquote_to_bytes(request.path[len(STREAM_ROOT) :]) != stream.encode():
            raise self.auth.rejected_token("the read token is for another stream")
        return principal


def _token_in_url(request: Request) -> str | None:
    """The read token of a GET of a stream; any other token in a URL is refused."""
    pairs = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
    found = [pair for pair in pairs if pair[0].lower() in _TOKEN_PARAMETERS]
    if not found:
        return None
    if (
        len(found) == 1
        and found[0][0] == "token"
        and request.method == "GET"
        and request.path.startswith(STREAM_ROOT)
        and not request.path.startswith(b"/v1/stream/__ds/")
        and b"authorization" not in request.headers
    ):
        return found[0][1]
    raise _token_in_url_error()


def _token_in_url_error() -> RefusedError:
    return bad(
        "token_in_url",
        "a token in a URL ends up in logs: send Authorization: Bearer, and make a new token; only"
        " a read token (POST /v1/tokens) goes into the URL of a GET of its stream",
    )


def forbidden(detail: str) -> RefusedError:
    """A 403 that depends on the request and on the grants alone."""
    return RefusedError(403, "forbidden", "Forbidden", detail)


def require(principal: Principal, verbs: int, path: str) -> None:
    """Raise a 403 unless the principal has all of these verbs on a stream."""
    missing = verbs & ~principal.verbs_on(path)
    if missing:
        names = [name for name, verb in VERBS.items() if verb & missing]
        raise forbidden(f"you lack the verb {' and '.join(names)} on {path}")


# Requests to one stream


def writes_allowed(request: Request, verbs: int, path: str) -> None:
    """A request with a large body, before that is parsed."""
    if request.principal is not None:
        require(request.principal, verbs, path)


def read_allowed(request: Request, path: str) -> None:
    if request.principal is not None and not request.principal.may_read(path):
        raise forbidden(f"you lack the verb read on {path}")


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
    if append.conditions is not None:
        needed |= _verbs_of_conditions(append.conditions)
    producer = append.producer
    if producer is not None:
        also = principal.verbs_for(producer.id)
        if also is None:
            raise forbidden("you may not use this producer id")
        needed |= also
    if principal.verbs_on(append.path) & needed != needed:
        require(principal, needed, append.path)


def _verbs_of_conditions(conditions: Conditions) -> int:
    needed = 0 if conditions.create_as is None else CREATE
    books = conditions.books
    if books is not None and books.state is not None:
        needed |= CLOSE
    if books is not None and books.truncate_before is not None:
        needed |= DELETE
    return needed


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
    if b"claim-end" in request.repeated:
        raise bad("header_repeated", "the header claim-end came more than once")
    if value not in (b"released", b"completed"):
        raise bad("header_invalid", "Claim-End is released or completed")
    return cast(Literal["released", "completed"], value.decode())


# Staging: no principal sees what another one uploads


def staging_allowed(request: Request) -> None:
    """Data is staged for appends, so a principal that may append nothing stages nothing."""
    if request.principal is not None and not request.principal.may_somewhere(APPEND):
        raise forbidden("you lack the verb append everywhere")


def writing_allowed(request: Request) -> None:
    """A writer publishes by appends, so a principal that may append nothing opens none."""
    if request.principal is not None and not request.principal.may_somewhere(APPEND):
        raise forbidden("you lack the verb append everywhere")


def joining_allowed(request: Request, inbox: str) -> None:
    """A member gets what is sent to the topic: for who may send to it, or reads that inbox."""
    principal = request.principal
    if principal is not None and not principal.verbs_on(inbox) & (APPEND | READ):
        raise forbidden("you lack the verbs append and read on the member's inbox: one of them")


def overrides(principal: Principal | None) -> bool:
    """Whether a principal may use what belongs to another one; always, without authorization."""
    return principal is None or principal.is_admin


def name_of(principal: Principal | None) -> str:
    """The name of the principal that sent a request; empty without authorization."""
    return "" if principal is None else principal.name


def asker_of(request: Request) -> str:
    """Whose turn a request takes where turns are taken; an address without authorization."""
    return request.peer if request.principal is None else request.principal.name


def scope_of(principal: Principal | None) -> str:
    """What the names of a principal's transactions begin with in the store."""
    return "" if principal is None else principal.name + SCOPE_END


def without_scope(txn: str) -> str:
    """The name of a transaction as its owner knows it."""
    return txn.rpartition(SCOPE_END)[2]


# Answers that are put together from many streams


def readable_glob(principal: Principal | None, glob: Glob | None) -> Glob | None:
    """A pattern, narrowed to what may be read."""
    if principal is None:
        return glob
    text = ANY if glob is None else glob.text
    return Narrowed(text, principal.may_read, principal.read_ranges)


def readable_selection(
    principal: Principal | None, paths: list[str], globs: list[Glob], part: Part | None
) -> Selection:
    """A selection of the log, narrowed to what may be read."""
    if principal is None:
        return Selection(paths, globs, part)
    if not principal.may_somewhere(READ):
        # An empty log would look like one without messages.
        raise forbidden("you lack the verb read on every stream")
    return NarrowedSelection(paths, globs, part, principal.may_read, principal.read_ranges)


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
