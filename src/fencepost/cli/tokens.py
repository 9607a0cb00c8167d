"""`fencepost token`: making the secrets that principals show."""

from __future__ import annotations

import base64
from typing import Annotated

import typer

from fencepost.clock import SystemClock
from fencepost.server.auth import TOKEN_PREFIX, is_name, token_digest

TOKEN_BYTES = 32

app = typer.Typer(help="Tokens that principals show.", no_args_is_help=True)


@app.callback()
def _tokens() -> None:
    """Tokens that principals show."""


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="The principal's name.")],
    streams: Annotated[str, typer.Option(help="Glob of the streams it may use.")] = "**",
    verbs: Annotated[str, typer.Option(help="What it may do, separated by commas.")] = "read",
) -> None:
    """Make a token: print it once, and the lines for the config file that know its hash only."""
    if not is_name(name):
        typer.echo("fencepost: a name has letters, digits and . _ : @ | / + -", err=True)
        raise typer.Exit(1)
    secret = SystemClock().token(TOKEN_BYTES)
    token = TOKEN_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    shown = ", ".join(f'"{verb.strip()}"' for verb in verbs.split(","))
    typer.echo(
        "# The token, shown this once; its owner sends it as Authorization: Bearer TOKEN", err=True
    )
    typer.echo(token)
    typer.echo("# For the config file of the server (fencepost serve --config FILE)", err=True)
    typer.echo("[[principals]]")
    typer.echo(f'name = "{name}"')
    typer.echo(f'token_sha256 = "{token_digest(token)}"')
    typer.echo(f'grants = [{{ streams = "{streams}", verbs = [{shown}] }}]')
