"""`fencepost check`, `backup` and `restore`: what an operator does with a data folder.

All three work on the files and need no server; `check` and `backup` may run beside one. They show
their progress on a terminal, and say the result as a table, or with --json as one object. Which
folder it is, the settings of the server can say. A store on PostgreSQL is copied by PostgreSQL's
own tools, and these commands name the one to use.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fencepost.cli.options import Config, StoreUrl
from fencepost.cli.settings import SettingsError, default_folder, load_store
from fencepost.store.check.report import Progress as Tell
from fencepost.store.check.report import Report, UnreadableError, ignore
from fencepost.store.contract import StoreAwayError
from fencepost.store.opener import (
    AnyStoreSettings,
    CannotOpenError,
    describe,
    require_postgres,
    saying_why,
)
from fencepost.store.settings import PostgresSettings, SqliteSettings
from fencepost.store.sql import SchemaTooNewError
from fencepost.store.sqlite import backup as copies
from fencepost.store.sqlite.check import check as check_place
from fencepost.store.sqlite.connection import FolderInUseError

FINDINGS, UNREADABLE = 1, 2
"""Exit codes beside 0: something is wrong with the data, or nothing can be said about it."""
FINDINGS_SHOWN_MAX = 50

Data = Annotated[
    Path | None,
    typer.Option(help=f"Data folder, or a backup of one. Default: {default_folder()}"),
]
Folder = Annotated[Path | None, typer.Option(help=f"Data folder. Default: {default_folder()}")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def check(
    data: Data = None,
    store: StoreUrl = None,
    config: Config = None,
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the check of indexes against tables.")
    ] = False,
) -> None:
    """Verify every invariant of a data folder or a database, also while servers use it.

    Exit code 0: all is well; 1: there are findings; 2: it cannot be read.
    """
    settings = _settings(config, data, store, as_json)
    try:
        with _progress(as_json) as tell:
            if isinstance(settings, SqliteSettings):
                report = check_place(settings.folder, quick=quick, progress=tell)
            else:
                report = _check_database(settings, tell)
    except (
        *(UnreadableError, CannotOpenError, SchemaTooNewError),
        *(StoreAwayError, OSError),
    ) as error:
        _fail(str(error), as_json, UNREADABLE)
    _show(describe(settings), report, as_json)
    if not report.is_clean:
        raise typer.Exit(FINDINGS)


def _check_database(settings: PostgresSettings, tell: Tell) -> Report:
    require_postgres(settings)
    from fencepost.store.postgres.check import check as check_database

    with saying_why(settings):
        return check_database(settings, progress=tell)


def backup(
    destination: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")],
    data: Folder = None,
    store: StoreUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Copy a data folder to one file, consistently, while a server goes on writing."""
    settings = _settings(config, data, store, as_json)
    if isinstance(settings, PostgresSettings):
        place = describe(settings)
        dumping = f"pg_dump --format=custom --file={shlex.quote(str(destination))}"
        _fail(
            f"{place} is copied by PostgreSQL's own tool, also while servers write:"
            f" {dumping} {shlex.quote(place)}",
            as_json,
            FINDINGS,
        )
    source = settings.folder
    try:
        with _progress(as_json) as tell:
            copied = copies.backup(source, destination, progress=tell)
    except copies.DestinationExistsError as error:
        _fail(str(error), as_json, FINDINGS)
    except (UnreadableError, OSError) as error:
        _fail(str(error), as_json, UNREADABLE)
    if as_json:
        print(json.dumps({"file": str(copied.file), "bytes": copied.bytes}))
    else:
        print(f"backed up {source} to {copied.file} ({copied.bytes:,} bytes)")


def restore(
    source: Annotated[Path, typer.Argument(help="A file that `fencepost backup` made.")],
    data: Annotated[
        Path | None, typer.Option(help=f"Data folder to make. Default: {default_folder()}")
    ] = None,
    store: StoreUrl = None,
    config: Config = None,
    force: Annotated[
        bool, typer.Option("--force", help="Move a folder that has data aside first.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a data folder from a backup, after checking it. No server may be using the folder."""
    settings = _settings(config, data, store, as_json)
    if isinstance(settings, PostgresSettings):
        place = describe(settings)
        _fail(
            f"{place} is restored by PostgreSQL's own tool, into an empty database that no server"
            f" uses: pg_restore --exit-on-error --dbname={shlex.quote(place)}"
            f" {shlex.quote(str(source))}",
            as_json,
            FINDINGS,
        )
    folder = settings.folder
    aside = f".replaced-{datetime.now(UTC):%Y%m%dT%H%M%SZ}" if force else None
    moved: Path | None = None
    try:
        with _progress(as_json) as tell:
            report = check_place(source, progress=tell)
            if report.is_clean:
                moved = copies.restore(source, folder, aside=aside, progress=tell)
    except (FolderInUseError, copies.FolderNotEmptyError) as error:
        _fail(str(error), as_json, FINDINGS)
    except (UnreadableError, copies.DestinationExistsError, OSError) as error:
        _fail(str(error), as_json, UNREADABLE)
    if not report.is_clean:
        _show(str(source), report, as_json)
        raise typer.Exit(FINDINGS)
    if as_json:
        print(json.dumps({"data": str(folder), "moved": None if moved is None else str(moved)}))
        return
    if moved is not None:
        print(f"moved the old data to {moved}")
    print(f"restored {source} to {folder}")


def _settings(
    config: Path | None, data: Path | None, url: str | None, as_json: bool
) -> AnyStoreSettings:
    try:
        return load_store(config, folder=data, url=url)
    except SettingsError as error:
        _fail(str(error), as_json, UNREADABLE)


@contextmanager
def _progress(as_json: bool) -> Iterator[Tell]:
    """Bars on a terminal, one for each pass; nothing elsewhere."""
    if as_json or not sys.stderr.isatty():
        yield ignore
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield tell


def _show(place: str, report: Report, as_json: bool) -> None:
    if as_json:
        result = {
            "data": place,
            "clean": report.is_clean,
            "counts": dict(report.counts),
            "findings_count": report.findings_count,
            "findings": [finding._asdict() for finding in report.findings],
        }
        print(json.dumps(result))
        return
    counts = ", ".join(f"{count:,} {what}" for what, count in report.counts.items())
    if report.is_clean:
        print(f"{place}: no findings ({counts})")
        return
    table = Table(
        title=Text(f"{report.findings_count:,} findings in {place}"), title_justify="left"
    )
    for column in ("what", "where", "detail"):
        table.add_column(column, overflow="fold")
    for finding in report.findings[:FINDINGS_SHOWN_MAX]:
        table.add_row(*map(Text, finding))
    Console().print(table)
    if report.findings_count > FINDINGS_SHOWN_MAX:
        print(f"the first {FINDINGS_SHOWN_MAX} are shown; --json has more")


def _fail(message: str, as_json: bool, code: int) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message}))
    typer.echo(f"fencepost: {message}", err=True)
    raise typer.Exit(code)
