"""What `fencepost serve` and its workers share: how they are told to stop, how they say why not."""

from __future__ import annotations

import asyncio
import signal

from fencepost.server.auth import AuthConfigError
from fencepost.server.stores import AnyStoreSettings, CannotOpenError, describe
from fencepost.store.contract import StoreAwayError
from fencepost.store.sql import SchemaTooNewError
from fencepost.store.sqlite.connection import FolderInUseError
from fencepost.store.sqlite.store import StoreBrokenError


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and on Ctrl-C."""
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        stop.set()
        # A second Ctrl-C does not wait for anybody: whatever was answered is on disk.
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)


def sentence_for(error: Exception, store: AnyStoreSettings, host: str, port: int) -> str | None:
    """Why a server does not start or go on; None when that is a defect and wants a traceback."""
    if isinstance(error, AuthConfigError | FolderInUseError | SchemaTooNewError | CannotOpenError):
        return str(error)
    if isinstance(error, StoreBrokenError):
        return f"the disk failed ({error}): check it, then start again"
    if isinstance(error, StoreAwayError):
        return f"the database at {describe(store)} cannot be reached: {error}"
    if isinstance(error, OSError):
        return f"cannot serve on {host}:{port} from {describe(store)}: {error}"
    return None
