"""Whether a server can be read from, found out before a query begins.

What may not be read simply does not come.

A server narrows its log to what a principal may see. A query over a stream that it may not read
would be quietly empty, for ever; so it is refused here, in words that name the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    UnauthorizedError,
)
from fencepost.client.settings import NO_RETRIES
from fencepost.client.sync import Client
from fencepost.pipeline.connection import Connection
from fencepost.pipeline.errors import AccessError
from fencepost.pipeline.selection import Selection

log = logging.getLogger(__name__)


def say_if_away(connection: Connection) -> None:
    """Warn of a server that does not answer: minutes of patience look like a query that hangs."""
    with connection.client(retries=NO_RETRIES) as client:
        try:
            client.log_head()
        except ConnectionFailedError as error:
            warn_of_waiting(connection, error)
        except FencepostError as error:
            log.debug("what is asked for next will say it better: %s", error)


def warn_of_waiting(connection: Connection, error: Exception) -> None:
    """What is said before a patient attempt."""
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
