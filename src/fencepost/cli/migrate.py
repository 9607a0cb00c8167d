"""`fencepost migrate`: bring the schema of a store up to date, or show what that would run.

A server does this by itself when it starts. The command is for operators who start servers with
`--no-migrate`, to choose the moment or another database user themselves. Several may
run at once, and beside old servers: each step is made once, and the steps are safe for those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import apsw
import typer

from fencepost.cli.options import AsJson, Config, StoreUrl
from fencepost.cli.settings import SettingsError, default_folder, load_store
from fencepost.store.contract import StoreAwayError
from fencepost.store.opener import CannotOpenError, describe, schema_of
from fencepost.store.opener import migrate as migrate_store
from fencepost.store.sql import Schema, SchemaTooNewError
from fencepost.store.sqlite.connection import FolderInUseError


def migrate(
    data: Annotated[
        Path | None, typer.Option(help=f"Data folder. Default: {default_folder()}")
    ] = None,
    store: StoreUrl = None,
    config: Config = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the schema of a folder or of a database up to date; a server does so when it starts."""
    try:
        settings = load_store(config, folder=data, url=store)
        schema = schema_of(settings) if dry_run else migrate_store(settings)
    except (SettingsError, FolderInUseError, SchemaTooNewError, CannotOpenError) as error:
        _fail(str(error), as_json)
    except (StoreAwayError, OSError, apsw.Error) as error:
        _fail(f"the store cannot be opened: {error}", as_json)
    _show(describe(settings), schema, as_json, dry_run=dry_run)


def _show(place: str, schema: Schema, as_json: bool, *, dry_run: bool) -> None:
    if as_json:
        result = {
            "store": place,
            "version": schema.current if dry_run else schema.newest,
            "newest": schema.newest,
            "steps": [{"number": step.number, "name": step.name} for step in schema.pending],
            "dry_run": dry_run,
        }
        print(json.dumps(result))
        return
    if not schema.is_older:
        print(f"{place}: up to date at version {schema.current}")
        return
    for step in schema.pending:
        if dry_run:
            print(f"-- {step.number:04}_{step.name}\n{step.sql.strip()}\n")
        else:
            print(f"{place}: made step {step.number:04}_{step.name}")
    if dry_run:
        print(f"-- {place}: from version {schema.current} to {schema.newest}; nothing was run")


def _fail(message: str, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message}))
    typer.echo(f"fencepost: {message}", err=True)
    raise typer.Exit(1)
