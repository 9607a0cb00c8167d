"""`fencepost serve`: run a server until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop

from fencepost.cli.options import LogJson, LogLevel
from fencepost.cli.process import sentence_for, set_up_logs, stop_on_signals
from fencepost.cli.settings import TWO_STORES, SettingsError, default_folder, load
from fencepost.cli.workers import Plan, WorkersFailedError, supervise, supports_sharing
from fencepost.server.running import run
from fencepost.server.settings import ServerSettings
from fencepost.store.opener import AnyStoreSettings
from fencepost.store.settings import SqliteSettings

PORT_MAX = 65535


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=PORT_MAX)
    ] = 4437,
    data: Annotated[
        Path | None,
        typer.Option(help=f"Data folder; made when missing. Default: {default_folder()}"),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="PostgreSQL database in place of a folder: postgresql://user@host/name. The"
            " variable FENCEPOST_STORE_URL keeps a password out of the process list."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes on this port; more than one with --store only.", min=1)
    ] = 1,
    migrate: Annotated[
        bool,
        typer.Option(
            "--migrate/--no-migrate", help="Bring an older schema up to date, or refuse it."
        ),
    ] = True,
    long_poll_ms: Annotated[
        int | None, typer.Option(help="How long a long-poll waits.", min=1)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond this machine although no principals are set up."
        ),
    ] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = None,
) -> None:
    """Run a server until SIGTERM or Ctrl-C, then finish what is in flight."""
    if not __debug__:
        _fail("fencepost does not run under python -O: its invariants are asserts")
    as_json = set_up_logs(log_level, as_json=log_json)
    overrides: dict[str, dict[str, Any]] = {}
    if long_poll_ms is not None:
        overrides["server"] = {"long_poll_ms": long_poll_ms}
    if data is not None and store is not None:
        _fail(TWO_STORES)
    try:
        settings, store_settings = load(config, folder=data, url=store, overrides=overrides)
    except SettingsError as error:
        _fail(str(error))
    if not insecure and not settings.auth.principals and not is_loopback(host):
        _fail(
            f"refusing to listen on {host}: without authorization a server listens on this"
            " machine only (127.0.0.1 or ::1). Set up [[principals]], or use --insecure if the"
            " network itself keeps others out"
        )
    if workers > 1:
        _check_workers(workers, port, settings, store_settings)
    plan = Plan(settings, store_settings, host, port, workers, migrate, log_level, as_json)
    try:
        uvloop.run(_serve(plan))
    except WorkersFailedError as error:
        _fail(str(error))
    except Exception as error:
        sentence = sentence_for(error, store_settings, host, port)
        if sentence is None:
            raise
        _fail(sentence)


def _check_workers(
    workers: int, port: int, settings: ServerSettings, store: AnyStoreSettings
) -> None:
    if isinstance(store, SqliteSettings):
        _fail(
            "--workers is for PostgreSQL: a SQLite folder is served by one process. Leave it out,"
            " or name a database with --store"
        )
    if not supports_sharing():
        _fail("--workers needs a system where several processes can listen on one port")
    first = settings.worker_port
    if first and (first <= port < first + workers or first + workers > PORT_MAX + 1):
        _fail(
            f"[server] worker_port: {workers} workers need the ports from {first} on for"
            f" themselves, beside {port} and below {PORT_MAX + 1}"
        )


async def _serve(plan: Plan) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)

    def ready(url: str) -> None:
        print(f"fencepost is listening on {url}", flush=True)

    if plan.workers > 1:
        await supervise(plan, stop=stop, ready=ready)
        return
    await run(
        plan.settings,
        plan.store,
        host=plan.host,
        port=plan.port,
        stop=stop,
        ready=ready,
        migrate=plan.migrate,
    )


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
