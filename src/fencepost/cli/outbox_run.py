"""`fencepost outbox run`: the daemon, with its settings file, its logs and its exit codes.

The file has `[outbox]`, `[features]` and one `[hooks.NAME]` for each hook. Variables named
FENCEPOST_OUTBOX_... come before it, and options of the command before both.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
import uvloop

import fencepost
from fencepost.cli.options import LogJson, LogLevel, Token, Url
from fencepost.cli.process import set_up_logs, stop_on_signals
from fencepost.cli.profile import ProfileError, read_toml, resolve
from fencepost.cli.settings import default_folder
from fencepost.clock import SystemClock
from fencepost.outbox.daemon.daemon import DiskFailedError
from fencepost.outbox.daemon.database import FileRefusedError, InUseError
from fencepost.outbox.daemon.delivering import Failpoint, no_failpoint
from fencepost.outbox.daemon.gate import TokenRefusedError
from fencepost.outbox.daemon.links import RefusedError
from fencepost.outbox.daemon.running import (
    LAST_EXIT,
    CannotStartError,
)
from fencepost.outbox.daemon.running import run as run_daemon
from fencepost.outbox.daemon.settings import FOLDER, HookSettings, OutboxSettings
from fencepost.outbox.local import FOLDER_VARIABLE, SOCKET_VARIABLE
from fencepost.protocol.fingerprints import NAME

log = logging.getLogger("fencepost.outbox")

EVENTS = ("message", "dead", "connected", "disconnected", "requeued", "dropped")
FAILPOINT = "FENCEPOST_OUTBOX_FAILPOINT"
_COMPOSED = {"folder", "socket", "meshes", "member", "hooks", "require", "optional", "vfs"}


class OutboxSettingsError(Exception):
    """A setting cannot be used: the message says which, and what is allowed."""


def folder_of(given: Path | None) -> Path:
    """The folder of the daemon: an option, else a variable, else the user's own."""
    named = os.environ.get(FOLDER_VARIABLE)
    return given or (Path(named).expanduser() if named else default_folder() / FOLDER)


Meshes = Annotated[
    list[str] | None, typer.Option("--mesh", help="A mesh to serve; may be given several times.")
]
Folder = Annotated[
    Path | None,
    typer.Option("--data", help=f"Folder of the outbox. Else {FOLDER_VARIABLE}."),
]
Socket = Annotated[
    Path | None,
    typer.Option("--socket", help=f"The unix socket. Else {SOCKET_VARIABLE}, one in the folder."),
]


def run(
    meshes: Meshes = None,
    member: Annotated[
        str, typer.Option("--as", help="The member whose inbox is kept, and who sends.")
    ] = "",
    data: Folder = None,
    socket: Socket = None,
    port: Annotated[
        int, typer.Option(help="Also listen on this port of 127.0.0.1, with a token file.", min=0)
    ] = 0,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    url: Url = None,
    token: Token = None,
    log_level: LogLevel = "info",
    log_json: LogJson = None,
) -> None:
    """Accept sends on this machine and deliver them, until SIGTERM or Ctrl-C.

    Examples:

      fencepost outbox run --mesh shop --as ben
      fencepost outbox run --mesh shop --mesh ops --as ben --config outbox.toml
    """
    if not __debug__:
        _fail("fencepost does not run under python -O: its invariants are asserts")
    set_up_logs(log_level, as_json=log_json)
    folder = folder_of(data)
    named = os.environ.get(SOCKET_VARIABLE)
    given = {
        "folder": folder,
        "socket": socket or (Path(named).expanduser() if named else None),
        "meshes": tuple(dict.fromkeys(meshes or ())),
        "member": member,
        "port": port,
    }
    try:
        settings = load(config, given)
        failpoint = _failpoint(os.environ.get(FAILPOINT))
        profile = resolve(url, token, os.environ)
        client = fencepost.connect_async(
            profile.url, token=profile.token, retries=fencepost.NO_RETRIES
        )
    except (OutboxSettingsError, ProfileError, fencepost.FencepostError, ValueError) as error:
        _fail(str(error))
    # Without a token the server has no principals, and takes the sender's word.
    sender = None if profile.token else settings.member or "outbox"
    with suppress(OSError):
        (folder / LAST_EXIT).unlink(missing_ok=True)
    try:
        uvloop.run(_run(settings, client, sender, failpoint))
    except RefusedError as error:
        _note_exit(folder, error.exit_code, error.close_code, str(error))
        _fail(str(error), error.exit_code)
    except (FileRefusedError, InUseError, CannotStartError, TokenRefusedError) as error:
        _fail(str(error))
    except DiskFailedError as error:
        _note_exit(folder, 1, None, str(error))
        _fail(f"{error}: check it, then start again")
    except OSError as error:
        _fail(f"the outbox cannot run in {folder}: {error.strerror or error}")


async def _run(
    settings: OutboxSettings,
    client: fencepost.AsyncClient,
    sender: str | None,
    failpoint: Failpoint,
) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)

    def ready(where: str) -> None:
        print(f"fencepost outbox takes sends on {where}", flush=True)

    async with client:
        await run_daemon(
            settings,
            client,
            SystemClock(),
            sender=sender,
            stop=stop,
            ready=ready,
            failpoint=failpoint,
        )


def _failpoint(point: str | None) -> Failpoint:
    if not point:
        return no_failpoint
    # Loaded here alone: a normal start does not have it.
    module = importlib.import_module("fencepost.outbox.daemon.failpoints")
    log.warning("this daemon kills itself at %s: %s is set", point, FAILPOINT)
    made: Failpoint = module.killing_at(point)
    return made


def _note_exit(folder: Path, exit_code: int, close_code: int | None, detail: str) -> None:
    """Leave behind why the daemon ended, for `status`."""
    found = {"exit_code": exit_code, "close_code": close_code, "detail": detail}
    with suppress(OSError):
        (folder / LAST_EXIT).write_text(json.dumps(found))


def _fail(sentence: str, code: int = 1) -> NoReturn:
    typer.echo(f"fencepost: {sentence}", err=True)
    raise typer.Exit(code)


# The settings file


def load(config: Path | None, given: Mapping[str, Any]) -> OutboxSettings:
    """The settings of a daemon; raises `OutboxSettingsError`."""
    tables = _from_file(config)
    values: dict[str, Any] = {}
    known = {field.name: str(field.type) for field in fields(OutboxSettings)}
    simple = {name: kind for name, kind in known.items() if name not in _COMPOSED}
    for name, value in tables.get("outbox", {}).items():
        if name in ("meshes", "member"):
            values[name] = tuple(value) if isinstance(value, list) else value
        elif name in simple:
            values[name] = _number(name, simple[name], value)
        else:
            allowed = ", ".join(sorted((*simple, "meshes", "member")))
            raise OutboxSettingsError(f"[outbox] has no setting {name!r}; it has {allowed}")
    for name, kind in simple.items():
        text = os.environ.get(f"FENCEPOST_OUTBOX_{name.upper()}")
        if text is not None:
            values[name] = _number(name, kind, text)
    values |= {name: value for name, value in given.items() if value}
    values.setdefault("socket", given["socket"])
    for name, value in tables.get("features", {}).items():
        if name not in ("require", "optional") or not isinstance(value, dict):
            raise OutboxSettingsError("[features] has the tables require and optional")
        values[name] = value
    values["hooks"] = tuple(_hook(name, hook) for name, hook in tables.get("hooks", {}).items())
    settings = OutboxSettings(**values)
    _check(settings)
    return settings


def _from_file(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    tables = read_toml(config, str(config), OutboxSettingsError)
    for name, table in tables.items():
        if name not in ("outbox", "features", "hooks") or not isinstance(table, dict):
            raise OutboxSettingsError(
                f"{config} has {name!r}; it may have [outbox], [features] and [hooks.NAME]"
            )
    return tables


def _number(name: str, kind: str, value: object) -> Any:
    wanted: type = {"int": int, "float": float, "bool": bool}[kind]
    try:
        found: Any = msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError:
        raise OutboxSettingsError(
            f"[outbox] {name} must be of type {kind}, not {value!r}"
        ) from None
    if kind != "bool" and found <= 0 and name not in ("port", "max_age_hours_override"):
        raise OutboxSettingsError(f"[outbox] {name} must be greater than zero, not {value!r}")
    return found


def _hook(name: str, table: object) -> HookSettings:
    if not isinstance(table, dict) or NAME.fullmatch(name) is None:
        raise OutboxSettingsError(f"[hooks.{name}] is a table, its name letters, digits, . _ -")
    given = {
        key: [value] if isinstance(value, str) and key == "on" else value
        for key, value in table.items()
    }
    known = {field.name for field in fields(HookSettings)} - {"name"}
    for key in given:
        if key not in known:
            raise OutboxSettingsError(
                f"[hooks.{name}] has no setting {key!r}; it has {', '.join(sorted(known))}"
            )
    try:
        hook = msgspec.convert({"name": name, **given}, HookSettings)
    except msgspec.ValidationError as error:
        raise OutboxSettingsError(f"[hooks.{name}]: {error}") from None
    if not hook.command or not hook.on or set(hook.on) - set(EVENTS):
        raise OutboxSettingsError(
            f"[hooks.{name}] needs a command (a list: program and arguments) and on, which has"
            f" some of {', '.join(EVENTS)}"
        )
    if hook.timeout_ms <= 0 or hook.attempts_max <= 0:
        raise OutboxSettingsError(f"[hooks.{name}] timeout_ms and attempts_max are at least 1")
    return hook


def _check(settings: OutboxSettings) -> None:
    if not settings.meshes:
        raise OutboxSettingsError("which mesh? Say --mesh NAME, once for each mesh to serve")
    for name in (*settings.meshes, *((settings.member,) if settings.member else ())):
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise OutboxSettingsError(
                f"{name!r} is no name of a mesh or a member: 1 to 64 letters, digits, . _ -"
            )
    if settings.max_age_hours_override < 0 or not 0 <= settings.port < 65536:
        raise OutboxSettingsError("max_age_hours_override and port are not negative")
    if not 0 < settings.disk_percent_max <= 100:
        raise OutboxSettingsError("[outbox] disk_percent_max is above 0 and at most 100")
    if settings.inbox_days < 1 or settings.done_days < 1:
        raise OutboxSettingsError("[outbox] inbox_days and done_days are at least 1")
