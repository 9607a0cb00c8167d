"""Arguments and options that several commands share, with their help and completion."""

from __future__ import annotations

import os
import pathlib
from typing import Annotated

import typer

import fencepost
from fencepost.cli.profile import TOKEN_VARIABLE, URL_VARIABLE, ProfileError, resolve
from fencepost.cli.render import USAGE, CommandError, fail

COMPLETIONS_MAX = 100
COMPLETION_SECONDS_MAX = 1.0

TYPES = {"json": "application/json", "text": "text/plain", "bytes": "application/octet-stream"}


def complete_paths(incomplete: str) -> list[str]:
    """Paths of streams that begin so; nothing when the server cannot be asked."""
    timeouts = fencepost.Timeouts(connect=COMPLETION_SECONDS_MAX, answer=COMPLETION_SECONDS_MAX)
    found: list[str] = []
    try:
        profile = resolve(None, None, os.environ)
        with fencepost.connect(
            profile.url, token=profile.token, timeouts=timeouts, retries=fencepost.NO_RETRIES
        ) as client:
            # They come in order, so those that begin so stand together behind it.
            for info in client.streams(after=incomplete or None):
                if not info.path.startswith(incomplete) or len(found) == COMPLETIONS_MAX:
                    break
                found.append(info.path)
    except (fencepost.FencepostError, ProfileError, ValueError):
        return []
    return found


def _check_log_level(level: str) -> str:
    if level.lower() not in ("debug", "info", "warning", "error"):
        fail(f"--log-level is debug, info, warning or error, not {level!r}", USAGE)
    return level


LogLevel = Annotated[
    str, typer.Option(callback=_check_log_level, help="debug, info, warning or error.")
]
LogJson = Annotated[
    bool | None,
    typer.Option("--log-json/--log-text", help="Logs as JSON lines. Default: unless a terminal."),
]
Path = Annotated[
    str,
    typer.Argument(help="Path of the stream, as in orders/7.", autocompletion=complete_paths),
]
Url = Annotated[
    str | None,
    typer.Option(help=f"The server. Else {URL_VARIABLE}, the config file, this machine."),
]
Token = Annotated[
    str | None,
    typer.Option(help=f"Token to show the server. Else {TOKEN_VARIABLE}, the config file."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Config = Annotated[pathlib.Path | None, typer.Option(help="Settings file of the server (TOML).")]
StoreUrl = Annotated[
    str | None,
    typer.Option(help="PostgreSQL database in place of a folder: postgresql://user@host/name."),
]
Type = Annotated[
    str | None, typer.Option("--type", help="json, text, bytes, or a whole content type.")
]
Ttl = Annotated[
    int | None, typer.Option(help="Seconds the stream lives after its last use.", min=1)
]
ExpiresAt = Annotated[
    str | None, typer.Option(help="When the stream ends, as in 2030-01-31T12:00:00Z.")
]
Patience = Annotated[
    float | None,
    typer.Option(help="Seconds that the server may be away before giving up.", min=0.0),
]


def content_type_of(named: str) -> str:
    """A content type by its short name, or as it is."""
    if "/" not in named and named not in TYPES:
        raise CommandError(
            f"--type is json, text, bytes or a whole type like text/csv, not {named!r}", USAGE
        )
    return TYPES.get(named, named)
