"""Sending a request until it is answered, where that is safe.

| request | may be repeated because |
|---|---|
| GET, HEAD | it changes nothing |
| create, fork (PUT) | the same PUT again finds the stream as it made it |
| delete | a 404 after a first attempt that may have arrived is the deletion done |
| append, close, commit (POST) | the server knows it again by its key or producer's number |
| truncate, staging (POST) | the same again changes nothing |
| opening a writer (POST) | a run whose answer was lost is never used |
| forgetting a writer, dropping a part (DELETE) | as with delete |
| append with `retry=False` | it may not: a lost answer is `OutcomeUnknownError` |

Repeated are failures of the network and the answers 408, 425, 429, 500, 502, 503, 504 and 507,
after a delay with jitter that grows, and never before Retry-After. A 429 because of
`open_claims_max` is not: only the caller itself can end its claims. Nor is a 500 `data_damaged`:
what was lost does not come back by itself.
"""

from __future__ import annotations

import logging
from enum import Enum
from urllib.parse import urlencode

import msgspec

from fencepost.client.effects import Call, Operation, Send, Sleep
from fencepost.client.errors import (
    ConnectionFailedError,
    DataDamagedError,
    OpenClaimsError,
    OutcomeUnknownError,
    ResponseError,
    require,
)
from fencepost.client.errors.answers import error_of
from fencepost.client.http import Request, Response, check_headers, path_of, redirected
from fencepost.client.settings import WARNED_ATTEMPT, ClientSettings, RetryWith, Value

log = logging.getLogger(__name__)

REPEATED = frozenset((408, 425, 429, 500, 502, 503, 504, 507))
NOTHING_DONE = frozenset(("storage_unavailable", "storage_full", "too_many_waiters"))
"""Codes that say that nothing was stored: even what must not happen twice may be sent again."""
FINAL = (OpenClaimsError, DataDamagedError)
"""What asking again does not change, whatever its status."""
RETRY_AFTER_SECONDS_MAX = 300.0
REDIRECTS_MAX = 5


class Kind(Enum):
    """What repeating a request means."""

    READ = "nothing is changed"
    WRITE = "the server knows it again"
    ONCE = "it would happen twice"


class Answer(msgspec.Struct, frozen=True):
    """A response, and how many attempts before it may have arrived."""

    response: Response
    uncertain: int


def exchange(settings: ClientSettings, request: Request, kind: Kind) -> Operation[Answer]:
    """The answer to `request`; raises what the server refused or what kept it from answering."""
    clock = settings.clock
    retries = settings.retries
    ends_ms = clock.monotonic_ms() + retries.seconds_max * 1000
    uncertain = 0
    attempt = 0
    renewed = False
    while True:
        failure: ConnectionFailedError | ResponseError
        try:
            response: Response = yield from _answered(settings, request)
        except ConnectionFailedError as error:
            failure = error
            uncertain += error.sent
            repeatable = (kind is not Kind.ONCE or not error.sent) and not error.final
            if repeatable:
                decided = yield from asked_user(settings, failure, request)
                repeatable = not failure.final
                request = request if decided is None else decided
        else:
            if response.status < 300:
                return Answer(response, uncertain)
            failure = error_of(response.status, response.headers, response.body)
            failure.uncertain = uncertain
            decided = yield from asked_user(settings, failure, request)
            if failure.final:
                raise failure
            if decided is not None and attempt < retries.attempts_max:
                request = decided
                attempt += 1
                continue
            if response.status == 401 and settings.changes and not renewed:
                renewed = True  # the token function is asked again
                continue
            if response.status not in REPEATED or isinstance(failure, FINAL):
                raise failure
            done_nothing = response.status in (425, 429) or failure.code in NOTHING_DONE
            uncertain += not done_nothing
            repeatable = kind is not Kind.ONCE or done_nothing
        delay = retries.delay(attempt, clock.random(), retry_after(failure))
        attempt += 1
        late = clock.monotonic_ms() + delay * 1000 > ends_ms
        if not repeatable or attempt >= retries.attempts_max or late:
            raise _final(failure, kind, uncertain)
        log.log(
            logging.WARNING if attempt == WARNED_ATTEMPT else logging.DEBUG,
            "%s %s is not done yet, trying again for up to %.0f s: %s",
            request.method,
            path_of(settings.address, request),
            (ends_ms - clock.monotonic_ms()) / 1000,
            failure,
        )
        yield Sleep(delay)


def asked_user(
    settings: ClientSettings, failure: ConnectionFailedError | ResponseError, request: Request
) -> Operation[Request | None]:
    """The request that `on_error` wants to be sent; None: as usual.

    If it gives up, the failure is final.
    """
    hook = settings.on_error
    if hook is None:
        return None
    path = path_of(settings.address, request)
    headers = failure.headers if isinstance(failure, ResponseError) else {}
    failure.locate(request.method, path, failure.status, headers)
    answer: RetryWith | bool | None = yield Call(lambda: hook(failure))
    failure.final = answer is False
    if not isinstance(answer, RetryWith):
        return None
    check_headers(answer.headers)
    replaced = {name.lower() for name in answer.headers}
    kept = tuple(pair for pair in request.headers if pair[0].lower() not in replaced)
    target = request.target
    if answer.params:
        target += ("&" if "?" in target else "?") + urlencode(dict(answer.params))
    headers_now = (*kept, *answer.headers.items())
    return msgspec.structs.replace(request, headers=headers_now, target=target)


def _answered(settings: ClientSettings, request: Request) -> Operation[Response]:
    """The answer to one attempt, behind the redirects that may be followed."""
    sent = yield from dressed(settings, request)
    response: Response = yield Send(sent)
    for _hop in range(REDIRECTS_MAX):
        following = redirected(settings.address, sent, response) if is_redirect(response) else None
        if following is None:
            break
        response = yield Send(following)
        sent = following
    return response


def is_redirect(response: Response) -> bool:
    return response.status in (301, 302, 303, 307, 308)


def _final(failure: ConnectionFailedError | ResponseError, kind: Kind, uncertain: int) -> Exception:
    if kind is Kind.READ or not uncertain:
        return failure
    unknown = OutcomeUnknownError(f"the write may or may not be stored: {failure}", cause=failure)
    unknown.__cause__ = failure
    return unknown


def retry_after(failure: Exception) -> float | None:
    """How long the server asks to wait, within reason."""
    if not isinstance(failure, ResponseError) or failure.retry_after is None:
        return None
    return min(failure.retry_after, RETRY_AFTER_SECONDS_MAX)


def dressed(settings: ClientSettings, request: Request) -> Operation[Request]:
    """The request with what every request of this client carries."""
    if settings.token is None and not settings.headers and not settings.params:
        return request
    headers: dict[str, str] = {}
    own = {name.lower() for name, _value in request.headers}
    given = {name.lower() for name in settings.headers}
    if settings.token is not None and "authorization" not in own | given:
        headers["Authorization"] = "Bearer " + (yield from _value("token", settings.token))
    for name, value in settings.headers.items():
        if name.lower() not in own:
            headers[name] = yield from _value(name, value)
    check_headers(headers)
    target = request.target
    params = []
    for name, value in settings.params.items():
        params.append((name, (yield from _value(name, value))))
    if params:
        target += ("&" if "?" in target else "?") + urlencode(params)
    return msgspec.structs.replace(
        request, target=target, headers=(*headers.items(), *request.headers)
    )


def _value(name: str, value: Value) -> Operation[str]:
    if isinstance(value, str):
        return value
    given = yield Call(value)
    require(given is not None, f"the function for {name} gave None")
    return str(given)
