"""How the driver and the executors reach the server, and checks that they may read from it.

A `Connection` travels to the executors inside the pickled reader or writer. The driver resolves the
token when it plans the query, so that executors need no environment of their own. The token is
never shown, neither by `repr` nor in an error.

| option | default | |
|---|---|---|
| `url` | `FENCEPOST_URL`, else `http://127.0.0.1:4437` | where the server is |
| `token` | `FENCEPOST_TOKEN` | who asks, on a server with principals |
| `connectTimeoutMs` | 5,000 | for a connection to be made |
| `requestTimeoutMs` | 30,000 | for an answer to come |
| `retryTimeoutMs` | 120,000 | how long a server may be away before the task or query fails |

A server leaves out of its log what a principal may not read. A query over a stream that its
principal may not read would therefore be empty for ever, without an error; so `check_readable`
refuses it before it begins, in words that name the stream.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fencepost.client.aio import AsyncClient
from fencepost.client.connecting import connect, connect_async
from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    UnauthorizedError,
)
from fencepost.client.http import parse_url
from fencepost.client.settings import NO_RETRIES, Retries, Timeouts
from fencepost.client.sync import Client
from fencepost.pipeline.errors import AccessError, OptionError
from fencepost.pipeline.options import Options, Selection

URL_DEFAULT = "http://127.0.0.1:4437"
ATTEMPTS_MAX = 10_000
"""High enough never to be reached: `retryTimeoutMs` ends the attempts."""
DELAY_SECONDS_MAX = 2.0
"""Between attempts: a whole query stands still behind one task that waits."""
LIVE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the server is, who asks, and how long to wait."""

    url: str
    token: str | None = field(default=None, repr=False)
    connect_seconds: float = 5.0
    request_seconds: float = 30.0
    retry_seconds: float = 120.0

    def client(
        self,
        *,
        live_seconds: float = LIVE_SECONDS,
        retries: Retries | None = None,
        on_error: Callable[[FencepostError], None] | None = None,
    ) -> Client:
        """A new client, which the caller closes; `on_error` is told of attempts that failed."""
        return connect(self.url, on_error=on_error, **self._settings(live_seconds, retries))

    def async_client(self) -> AsyncClient:
        """The same for a loop."""
        return connect_async(self.url, **self._settings(LIVE_SECONDS, None))

    def _settings(self, live_seconds: float, retries: Retries | None) -> dict[str, Any]:
        return {
            "token": self.token,
            "timeouts": Timeouts(
                connect=self.connect_seconds, answer=self.request_seconds, live=live_seconds
            ),
            "retries": retries
            or Retries(
                attempts_max=ATTEMPTS_MAX,
                seconds_max=self.retry_seconds,
                delay_seconds_max=DELAY_SECONDS_MAX,
            ),
        }


def connection_of(options: Options, environment: Mapping[str, str] | None = None) -> Connection:
    """The connection that the options describe; the environment fills in what they leave out."""
    found = os.environ if environment is None else environment
    url = options.text("url", found.get("FENCEPOST_URL") or URL_DEFAULT)
    assert url is not None
    try:
        parse_url(url)
    except (FencepostError, ValueError) as error:
        raise OptionError(
            f"option url (or FENCEPOST_URL) must be a URL like {URL_DEFAULT}: {error}"
        ) from None
    return Connection(
        url=url,
        token=options.text("token", found.get("FENCEPOST_TOKEN") or None),
        connect_seconds=options.seconds("connectTimeoutMs", 5_000),
        request_seconds=options.seconds("requestTimeoutMs", 30_000),
        retry_seconds=options.seconds("retryTimeoutMs", 120_000),
    )


log = logging.getLogger(__name__)


def say_if_away(connection: Connection) -> None:
    """Warn if the server does not answer: a query that waits for it looks as if it hung."""
    with connection.client(retries=NO_RETRIES) as client:
        try:
            client.log_head()
        except ConnectionFailedError as error:
            warn_of_waiting(connection, error)
        except FencepostError as error:
            log.debug("the next request will report this in more detail: %s", error)


def warn_of_waiting(connection: Connection, error: Exception) -> None:
    """Warn that the server is away and that requests are repeated for a while."""
    log.warning("%s: trying again for %g s (retryTimeoutMs)", error, connection.retry_seconds)


def check_readable(client: Client, selection: Selection) -> None:
    """Raise `AccessError` if a stream that is named may not be read; it need not exist."""
    for path in selection.streams:
        try:
            with suppress(NotFoundError, GoneError):
                client.stream(path).head()
        except ForbiddenError as error:
            raise AccessError(
                f"the principal of this token may not read the stream {path}: it needs the verb"
                " read there"
            ) from error


@contextmanager
def access_explained() -> Iterator[None]:
    """Say what to do about a wrong url, and a token that is missing, unknown or without grants."""
    try:
        yield
    except UnauthorizedError as error:
        raise AccessError(
            "the server does not know who asks: give a valid token with the option token, or as"
            " FENCEPOST_TOKEN where the driver runs"
        ) from error
    except ForbiddenError as error:
        raise AccessError(
            "the principal of this token may not read any stream: it needs the verb read"
            f" ({error.detail})"
        ) from error
    except NotFoundError as error:
        raise AccessError(
            "there is no log at this url: give the address of a Fencepost server with nothing"
            f" behind it, like http://127.0.0.1:4437 ({error})"
        ) from error
