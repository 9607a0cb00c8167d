"""`fencepost serve`: run a server until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop

from fencepost.cli import logs
from fencepost.cli.settings import SettingsError, default_folder, load
from fencepost.server.auth import AuthConfigError
from fencepost.server.running import run
from fencepost.server.settings import ServerSettings
from fencepost.store.sqlite.database import FolderInUseError, SchemaTooNewError
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.store.sqlite.store import StoreBrokenError

log = logging.getLogger(__name__)


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 4437,
    data: Annotated[
        Path | None,
        typer.Option(help=f"Data folder; made when missing. Default: {default_folder()}"),
    ] = None,
    long_poll_ms: Annotated[
        int | None, typer.Option(help="How long a long-poll waits.", min=1)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond this machine although nobody is authorized."
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_json: Annotated[
        bool | None,
        typer.Option(
            "--log-json/--log-text", help="Logs as JSON lines. Default: unless a terminal."
        ),
    ] = None,
) -> None:
    """Run a server until SIGTERM or Ctrl-C, then finish what is in flight."""
    if not __debug__:
        _fail("fencepost does not run under python -O: its invariants are asserts")
    if log_level.lower() not in ("debug", "info", "warning", "error"):
        _fail(f"--log-level is debug, info, warning or error, not {log_level!r}")
    logs.set_up(log_level, as_json=not sys.stderr.isatty() if log_json is None else log_json)
    overrides: dict[str, dict[str, Any]] = {}
    if long_poll_ms is not None:
        overrides["server"] = {"long_poll_ms": long_poll_ms}
    try:
        settings, store = load(config, folder=data, overrides=overrides)
        if not insecure and not settings.auth.principals and not is_loopback(host):
            _fail(
                f"refusing to listen on {host}: without authorization a server listens on this"
                " machine only (127.0.0.1 or ::1). Set up [[principals]], or use --insecure if the"
                " network itself keeps others out"
            )
        uvloop.run(_serve(settings, store, host, port))
    except (SettingsError, AuthConfigError, FolderInUseError, SchemaTooNewError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot serve on {host}:{port} from {data or default_folder()}: {error}")
    except StoreBrokenError as error:
        _fail(f"the disk failed ({error}): check it, then start again")


async def _serve(settings: ServerSettings, store: SqliteSettings, host: str, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        stop.set()
        # A second Ctrl-C does not wait for anybody: whatever was answered is on disk.
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)

    def ready(url: str) -> None:
        print(f"fencepost is listening on {url}", flush=True)

    await run(settings, store, host=host, port=port, stop=stop, ready=ready)


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is this machine's own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)


def _fail(message: str) -> NoReturn:
    typer.echo(f"fencepost: {message}", err=True)
    raise typer.Exit(1)
