"""What a server answers instead of doing it: `ResponseError`, and a class for each kind of refusal.

A kind is what a status stands for, such as 404 or 409. The modules beside this one have a class for
each problem `code` of the server that a program may want to tell from others of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self

from fencepost.client.errors.root import FencepostError

_INTEGER = re.compile(r"-?[0-9]{1,19}")


class ResponseError(FencepostError):
    """The server refused. `code` is stable and made for programs; `detail` for people."""

    status: int  # type: ignore[mutable-override]  # an answer has both
    code: str  # type: ignore[mutable-override]

    def __init__(
        self,
        *,
        status: int,
        code: str,
        detail: str,
        headers: Mapping[str, str],
        problem: Mapping[str, Any],
    ) -> None:
        super().__init__(f"{status} {code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers
        self.problem = problem
        """All fields of the refusal: some codes come with facts of their own."""
        self.item: int | None = problem.get("item")
        """In a commit: which of its appends was refused."""
        self.uncertain = 0
        """Attempts before this answer that may have arrived."""
        self.final = False
        """Whether the program gave the request up (`on_error`), so that no retry is wanted."""

    @classmethod
    def like(cls, other: ResponseError) -> Self:
        """The same refusal, known to be one of this class."""
        error = cls(
            status=other.status,
            code=other.code,
            detail=other.detail,
            headers=other.headers,
            problem=other.problem,
        )
        error.uncertain = other.uncertain
        return error

    def _text(self, name: str) -> str | None:
        return self.headers.get(name)

    def _integer(self, name: str) -> int | None:
        return integer_of(self.headers.get(name))

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait, whether it names them or a date."""
        value = self.headers.get("retry-after", "").strip()
        if value.isdecimal():
            return float(value)
        until = _instant(value)
        # The server's own clock is the one that its date is by.
        now = _instant(self.headers.get("date", "")) or datetime.now(UTC)
        return None if until is None else max(0.0, (until - now).total_seconds())


class RedirectedError(ResponseError):
    """The server sent the request elsewhere, and it was not followed. Connect to `location`.

    Only reads are followed, and only to the same scheme, host and port: a token never goes to
    another server.
    """

    @property
    def location(self) -> str | None:
        """Where the server sent the request."""
        return self._text("location")


class BadRequestError(ResponseError):
    """The request itself is wrong and nothing has happened. Change it; a retry fails again."""


class TooLargeError(BadRequestError):
    """More than the server takes at once; the detail names the limit. Send less at a time."""


class UnauthorizedError(ResponseError):
    """The server does not know who you are. Give `connect` a token."""


class ForbiddenError(ResponseError):
    """You are known, but may not do this. Ask for a grant."""


class NotFoundError(ResponseError):
    """There is nothing here. Check the path."""


class GoneError(ResponseError):
    """It was here and no longer is."""


class ConflictError(ResponseError):
    """The state of the stream does not allow this. Look at it, then decide again."""


class PreconditionFailedError(ResponseError):
    """What was assumed does not hold, and nothing has happened. Look again, then decide again."""


class RateLimitedError(ResponseError):
    """Too much at once, and retries ran out. Wait `retry_after` seconds."""


class UnavailableError(ResponseError):
    """The server could not do it now, and retries ran out. Retry later."""


class DataDamagedError(ResponseError):
    """The server found that what it should give is damaged. It is not asked again: nothing helps
    but `fencepost check` and a backup. In the log, `position` cannot be read, of `stream`, and a
    reader may go on behind `behind`; all are None for a read of a stream.
    """

    @property
    def stream(self) -> str | None:
        found = self.problem.get("stream")
        return found if isinstance(found, str) else None

    @property
    def position(self) -> int | None:
        found = self.problem.get("position")
        return found if isinstance(found, int) else None

    @property
    def behind(self) -> int | None:
        found = self.problem.get("behind")
        return found if isinstance(found, int) else None


class StorageFullError(UnavailableError):
    """The server's disk is full and nothing was stored. Make room, then retry."""


def error_object(problem: Mapping[str, Any]) -> Mapping[str, Any]:
    """The error object that the plain protocol puts around a refusal of subscriptions."""
    found = problem.get("error")
    return found if isinstance(found, dict) else {}


def integer_of(text: str | None) -> int | None:
    """The number in a header; None when there is none."""
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None


def _instant(http_date: str) -> datetime | None:
    """The time that a header names; None when it names none."""
    try:
        found = parsedate_to_datetime(http_date)
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC)
