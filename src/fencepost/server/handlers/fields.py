"""The fields of a request: paths, header values, numbers, times, the query.

A refusal is a `RefusedError`, which carries the finished problem; the dispatcher answers with it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from fencepost.http.messages import Request, Response
from fencepost.http.problems import problem
from fencepost.protocol import paths
from fencepost.protocol.limits import Limits
from fencepost.protocol.meshes import is_managed

T = TypeVar("T")

STREAM_ROOT = b"/v1/stream/"
INTEGER_MAX = 2**53 - 1
REMEMBERED_MAX = 16_384
"""Parsed paths and header values that are kept, of each kind."""

_ZERO = ord("0")
# It goes out in headers again, and may come in a body: no line end or other control gets in.
_CONTENT_TYPE = re.compile(
    r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+([ \t]*;[\t -~]*)?"
)
_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:[0-5]\d)", re.ASCII
)
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


class RefusedError(Exception):
    """The request cannot be taken; `response` says why."""

    def __init__(
        self, status: int, code: str, title: str, detail: str, *headers: tuple[bytes, bytes]
    ) -> None:
        super().__init__(detail)
        self.response: Response = problem(status, code, title, detail, list(headers))


def bad(code: str, detail: str) -> RefusedError:
    """A 400: the request itself is wrong, whatever the state of the stream."""
    return RefusedError(400, code, "Bad request", detail)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, code: str, what: str) -> T:
    """A JSON body, or a refusal with `code`; `what` says what is wrong with other JSON."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise bad(code, f"the body {what}: {error}") from None
    except UnicodeDecodeError:
        raise bad(code, "the body is not UTF-8") from None
    except RecursionError:
        raise bad(code, "the body is nested too deeply") from None


def stream_path(raw: bytes, limits: Limits) -> str:
    """The path of a stream from the part of the URL below the root."""
    return _stream_path(raw, limits.path_bytes_max)


def writable_path(raw: bytes, limits: Limits) -> str:
    """The same for a request that writes. A stream of a mesh is written by sends alone."""
    return _writable_path(raw, limits.path_bytes_max)


@lru_cache(maxsize=REMEMBERED_MAX)
def _writable_path(raw: bytes, bytes_max: int) -> str:
    return refuse_managed(_stream_path(raw, bytes_max))


def refuse_managed(path: str) -> str:
    """`path` itself, unless it belongs to a mesh, whether there is a stream or not."""
    if is_managed(path):
        raise RefusedError(
            403,
            "mesh_managed",
            "Managed by a mesh",
            "streams below __mesh belong to meshes: POST /v1/mesh/{mesh}/send writes to them",
        )
    return path


# Clients write to the same few streams again and again, with the same few headers; what is parsed
# here depends on the bytes alone, so it is remembered. What is refused is not: it raises.
@lru_cache(maxsize=REMEMBERED_MAX)
def _stream_path(raw: bytes, bytes_max: int) -> str:
    if len(raw) > 3 * bytes_max:
        raise _path_too_long(bytes_max)
    if b"%" in raw:
        if _BAD_ESCAPE.search(raw):
            raise bad("path_invalid", "the path has a % that starts no escape")
        if b"%2f" in raw.lower():
            raise bad("path_invalid", "the path has an escaped slash (%2F): use / itself")
        raw = unquote_to_bytes(raw)
    if len(raw) > bytes_max:
        raise _path_too_long(bytes_max)
    try:
        path = raw.decode()
    except UnicodeDecodeError:
        raise bad("path_invalid", "the path is not UTF-8") from None
    return check_path(path)


def check_path(path: str) -> str:
    """`path` itself, if a stream may have that name."""
    refused = paths.check_path(path)
    if refused is not None:
        raise bad(refused.code, refused.detail)
    return path


def _path_too_long(bytes_max: int) -> RefusedError:
    return RefusedError(
        414,
        "path_too_long",
        "Path too long",
        f"a stream path has at most {bytes_max} bytes (path_bytes_max)",
    )


def text_header(request: Request, name: bytes, bytes_max: int) -> str | None:
    """A header's value as text, or None when it is not there."""
    value = request.headers.get(name)
    return None if value is None else bounded_text(value, name.decode(), bytes_max)


def bounded_text(value: bytes, name: str, bytes_max: int) -> str:
    if len(value) > bytes_max:
        raise bad("header_too_long", f"{name} has at most {bytes_max} bytes")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise bad("header_invalid", f"{name} is not UTF-8") from None


def is_true(request: Request, name: bytes) -> bool:
    """Whether a flag header says `true`; any other value counts as absent."""
    value = request.headers.get(name)
    return value is not None and value.strip().lower() == b"true"


def content_type(request: Request, limits: Limits) -> str | None:
    """The content type, checked for its form."""
    value = request.headers.get(b"content-type")
    return _content_type(value, limits.content_type_bytes_max) if value else None


def check_content_type(text: str, limits: Limits) -> str:
    """A content type that did not come in a header, checked the same way."""
    return _content_type(text.encode(), limits.content_type_bytes_max)


@lru_cache(maxsize=REMEMBERED_MAX)
def _content_type(value: bytes, bytes_max: int) -> str:
    text = bounded_text(value, "content-type", bytes_max)
    if not _CONTENT_TYPE.fullmatch(text):
        raise bad("content_type_invalid", "Content-Type is not of the form type/subtype")
    return text


def integer(value: bytes, name: str) -> int:
    """A header's non-negative integer, no larger than JavaScript can hold."""
    if value.isdigit() and len(value) <= 16 and (value[0] != _ZERO or len(value) == 1):
        number = int(value)
        if number <= INTEGER_MAX:
            return number
    raise bad("header_invalid", f"{name} must be an integer from 0 to 2^53-1")


def instant_ms(value: bytes) -> int:
    try:
        text = value.decode("ascii")
        if not _RFC3339.fullmatch(text):
            raise ValueError(text)
        # In UTC already here: near the ends of the calendar another zone's time has no UTC.
        instant = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise bad("expires_at_invalid", "Stream-Expires-At is not an RFC 3339 timestamp") from None
    return (instant - _UNIX_EPOCH) // timedelta(milliseconds=1)


def rfc3339(instant_ms: int) -> str:
    """An instant as headers and problems show it."""
    instant = _UNIX_EPOCH + timedelta(milliseconds=instant_ms)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def calendar_time(instant_ms: int | None) -> str | None:
    """The same where there may be none; an instant beyond the calendar has none either."""
    try:
        return None if instant_ms is None else rfc3339(instant_ms)
    except OverflowError:
        return None


def query_of(request: Request) -> dict[str, str]:
    """The query parameters; ones that we give a meaning to may come only once."""
    if not request.query:
        return {}
    try:
        pairs = parse_qsl(
            request.query.decode("ascii"),
            keep_blank_values=True,
            max_num_fields=64,
            errors="strict",
        )
    except ValueError:
        raise bad("query_invalid", "the query string is malformed") from None
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in values and name in ("offset", "live", "cursor", "before"):
            raise bad("query_repeated", f"the parameter {name} came more than once")
        values[name] = value
    return values
