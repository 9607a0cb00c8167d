"""Set up a process of `fencepost serve`: its logs, its signals, the reason why it ends.

Logs are one JSON object a line on standard error, or plain lines for a terminal.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import sys

from fencepost.server.auth import AuthConfigError
from fencepost.server.running import WorkerPortError
from fencepost.store.contract import StoreAwayError
from fencepost.store.opener import AnyStoreSettings, CannotOpenError, describe
from fencepost.store.sql import SchemaTooNewError
from fencepost.store.sqlite.connection import FolderInUseError
from fencepost.store.sqlite.store import StoreBrokenError


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logs(level: str, *, as_json: bool | None) -> bool:
    """Send all logs to standard error at `level`, and return whether they are JSON.

    With None they are, unless standard error is a terminal.
    """
    if as_json is None:
        as_json = not sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if as_json
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return as_json


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and on Ctrl-C."""
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        stop.set()
        # A second Ctrl-C ends the process at once: everything that was answered is on disk.
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)


def sentence_for(error: Exception, store: AnyStoreSettings, host: str, port: int) -> str | None:
    """Why a server does not start or go on; None when that is a defect and wants a traceback."""
    if isinstance(
        error,
        AuthConfigError | FolderInUseError | SchemaTooNewError | CannotOpenError | WorkerPortError,
    ):
        return str(error)
    if isinstance(error, StoreBrokenError):
        return f"the disk failed ({error}): check it, then start again"
    if isinstance(error, StoreAwayError):
        return f"the database at {describe(store)} cannot be reached: {error}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"another program listens on {host}:{port}, perhaps a fencepost server: stop it, or"
            " choose another port with --port"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{describe(store)} is no folder: choose another one with --data"
    if isinstance(error, OSError):
        return f"cannot serve on {host}:{port} from {describe(store)}: {error}"
    return None
