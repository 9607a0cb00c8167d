"""The command line: `fencepost COMMAND`. Each group of commands has a module of its own.

Only the module of the command that was asked for is imported: a `fencepost read` in a pipe does not
wait for the server's libraries. Help and completion need all of them.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

COMMANDS = {
    "demo": "demo",
    "serve": "serve",
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
    "producers": "streams",
    "claims": "streams",
    "log": "log",
    "keys": "log",
    "writers": "writers",
    "writer-history": "writers",
    "forget-writer": "writers",
    "close-books": "events",
    "send": "meshes",
    "inbox": "meshes",
    "bench": "bench",
    "migrate": "migrate",
    "check": "data",
    "backup": "data",
    "restore": "data",
}
"""Commands in the order of the help, each with the module that has a function of its name."""

GROUPS = {
    "groups": "groups:app",
    "subscriptions": "subscriptions:app",
    "events": "events:app",
    "mesh": "meshes:mesh_app",
    "messages": "meshes:messages_app",
    "outbox": "outbox:app",
    "token": "tokens:app",
    "pipeline": "pipeline:app",
}
"""Groups of commands, each with the module that has them and their name there."""


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
    for name, module in COMMANDS.items():
        if only in (None, name):
            function = name.replace("-", "_")
            app.command(name)(getattr(import_module(f"fencepost.cli.{module}"), function))
    for name, place in GROUPS.items():
        if only in (None, name):
            module, _, commands = place.partition(":")
            found = getattr(import_module(f"fencepost.cli.{module}"), commands)
            app.add_typer(found, name=name)
    return app


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
        app = build(asked if asked in COMMANDS or asked in GROUPS else None)
    except KeyboardInterrupt:
        sys.exit(130)
    app()
