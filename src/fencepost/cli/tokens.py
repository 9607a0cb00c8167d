"""`fencepost token`: making the secrets that principals show."""

from __future__ import annotations

import base64
import json
from typing import Annotated, NoReturn

import typer

from fencepost.clock import SystemClock
from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.grants import VERBS
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
        _fail("a name has letters, digits and . _ : @ | / + -")
    glob = parse_glob(streams)
    if isinstance(glob, BadGlob):
        _fail(f"--streams {streams!r}: {glob.detail}")
    wanted = [verb.strip() for verb in verbs.split(",")]
    for verb in wanted:
        if verb not in VERBS:
            _fail(f"there is no verb {verb!r}; there are {', '.join(VERBS)}")
    secret = SystemClock().token(TOKEN_BYTES)
    token = TOKEN_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    typer.echo(
        "# The token, shown this once; its owner sends it as Authorization: Bearer TOKEN", err=True
    )
    typer.echo(token)
    typer.echo("# For the config file of the server (fencepost serve --config FILE)", err=True)
    typer.echo("[[principals]]")
    typer.echo(f'name = "{name}"')
    typer.echo(f'token_sha256 = "{token_digest(token)}"')
    # A text of JSON is one of TOML too.
    typer.echo(f"grants = [{{ streams = {json.dumps(streams)}, verbs = {json.dumps(wanted)} }}]")


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"fencepost: {sentence}", err=True)
    raise typer.Exit(1)
