"""How driver and executors reach the server: the options that every read and write shares.

A `Connection` is what travels to the executors, inside the pickled reader or writer. The token is
resolved where the query is planned, so that executors need no environment of their own, and it is
never shown: not by `repr`, not in an error.

| option | default | |
|---|---|---|
| `url` | `FENCEPOST_URL`, else `http://127.0.0.1:4437` | where the server is |
| `token` | `FENCEPOST_TOKEN` | who asks, on a server with principals |
| `connectTimeoutMs` | 5,000 | for a connection to be made |
| `requestTimeoutMs` | 30,000 | for an answer to come |
| `retryTimeoutMs` | 120,000 | how long a server may be away before the task or query fails |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from fencepost.client.connecting import connect
from fencepost.client.errors import FencepostError
from fencepost.client.http import parse_url
from fencepost.client.settings import Retries, Timeouts
from fencepost.client.sync import Client
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options

URL_DEFAULT = "http://127.0.0.1:4437"
ATTEMPTS_MAX = 10_000
"""Time bounds the attempts, not their number."""
DELAY_SECONDS_MAX = 2.0
"""Between attempts: a whole query stands still behind one task that waits."""
LIVE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the server is, who asks, and how patiently."""

    url: str
    token: str | None = field(default=None, repr=False)
    connect_seconds: float = 5.0
    request_seconds: float = 30.0
    retry_seconds: float = 120.0

    def client(
        self, *, live_seconds: float = LIVE_SECONDS, retries: Retries | None = None
    ) -> Client:
        """A client of its own: close it when done."""
        return connect(
            self.url,
            token=self.token,
            timeouts=Timeouts(
                connect=self.connect_seconds, answer=self.request_seconds, live=live_seconds
            ),
            retries=retries
            or Retries(
                attempts_max=ATTEMPTS_MAX,
                seconds_max=self.retry_seconds,
                delay_seconds_max=DELAY_SECONDS_MAX,
            ),
        )


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
