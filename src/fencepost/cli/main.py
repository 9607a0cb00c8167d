"""The command line: `fencepost COMMAND`. Each group of commands has a module of its own.

Only the module of the command that was asked for is imported: a `fencepost read` in a pipe does not
wait for the server's libraries. Help and completion need all of them.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

PANELS = {
    "Begin": {
        "demo": "demo",
        "serve": "serve",
    },
    "Streams": {
        "ls": "streams",
        "create": "streams",
        "append": "append",
        "read": "read",
        "tail": "read",
        "head": "streams",
        "close": "streams",
        "rm": "streams",
        "truncate": "streams",
        "fork": "streams",
        "log": "log",
    },
    "Who writes, and what the server remembers of it": {
        "producers": "streams",
        "claims": "streams",
        "keys": "log",
        "writers": "writers",
        "writer-history": "writers",
        "forget-writer": "writers",
    },
    "Workers and pipelines": {
        "groups": "groups:app",
        "subscriptions": "subscriptions:app",
        "events": "events:app",
        "close-books": "events",
        "pipeline": "pipeline:app",
    },
    "Messages": {
        "send": "meshes",
        "inbox": "meshes",
        "mesh": "meshes:mesh_app",
        "messages": "meshes:messages_app",
        "outbox": "outbox:app",
    },
    "Operate a server": {
        "check": "data",
        "backup": "data",
        "restore": "data",
        "migrate": "migrate",
        "token": "tokens:app",
        "bench": "bench",
    },
}
"""The panels of the help with their commands. Behind each command stands the module that has a
function of its name or, after a colon, the name of a group of commands."""


def build(only: str | None = None) -> typer.Typer:
    """The application, with every command or with one, or one group of them."""
    app = typer.Typer(
        name="fencepost",
        help="Durable streams: every write lands exactly once.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for panel, commands in PANELS.items():
        for name, place in commands.items():
            if only in (None, name):
                _add(app, name, place, panel)
    return app


def _add(app: typer.Typer, name: str, place: str, panel: str) -> None:
    module, _, group = place.partition(":")
    found = getattr(import_module(f"fencepost.cli.{module}"), group or name.replace("-", "_"))
    if group:
        app.add_typer(found, name=name, rich_help_panel=panel)
    else:
        app.command(name, rich_help_panel=panel)(found)


def _root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"fencepost {version_of('fencepost')}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        app = build(asked if any(asked in commands for commands in PANELS.values()) else None)
    except KeyboardInterrupt:
        sys.exit(130)
    app()
