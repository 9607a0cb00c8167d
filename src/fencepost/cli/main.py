"""The command line: `fencepost COMMAND`. Each group of commands has a module of its own."""

from __future__ import annotations

import typer

from fencepost.cli import data, serve, tokens

app = typer.Typer(
    name="fencepost",
    help="Durable streams: every write lands exactly once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("check")(data.check)
app.command("backup")(data.backup)
app.command("restore")(data.restore)
app.add_typer(tokens.app, name="token")


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"fencepost {version_of('fencepost')}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    app()
