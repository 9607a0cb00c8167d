"""What a table consists of, whatever its format: files, positions, and changes by a commit.

A folder of tables has a definition, written once, and a `Book` that records which files each table
consists of. `manifests.py` is the book of Parquet tables, `delta.py` that of Delta tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fencepost.pipeline.errors import PipelineError

DEFINITION = "_definition.json"
STREAMS = "_streams"
"""The name of the table that holds the bounds of streams, beside the tables of types."""
ROWS = ""
"""The name of the one table of rows."""

BUCKET = "_bucket"
"""The column by which Spark puts the rows of a bucket into one folder."""
UNBUCKETED = -1

_IN_PATH = re.compile(rf"{BUCKET}=(\d+)/")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class TableError(PipelineError):
    """The table cannot be written or read as asked; the sentence says why and what to do."""


class File(msgspec.Struct, frozen=True):
    """A Parquet file of a table, and which bucket of its keys it holds."""

    path: str
    """Relative to the folder of the tables."""
    bucket: int
    rows: int
    bytes: int


class TableContents(msgspec.Struct, frozen=True, kw_only=True):
    """The files that are a table, up to a position of the log."""

    schema: str
    """As Spark writes schemas down in JSON."""
    position: int
    files: tuple[File, ...] = ()


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of a folder at one version, and up to where they hold the log."""

    version: int = -1
    position: int = -1
    query: str | None = None
    batch: int | None = None
    tables: dict[str, TableContents] = {}

    def position_of(self, name: str) -> int:
        """Up to where a table holds the log; formats without one commit for all may differ."""
        return self.tables[name].position if name in self.tables else -1

    def files_of(self, name: str) -> tuple[File, ...]:
        return self.tables[name].files if name in self.tables else ()


class Mark(msgspec.Struct, frozen=True):
    """How far a commit brings a table, and by which batch of which query."""

    position: int
    query: str | None = None
    batch: int | None = None


class TableChange(msgspec.Struct, frozen=True, kw_only=True):
    """Files that come to a table, and files that go."""

    schema: str
    add: tuple[File, ...] = ()
    remove: tuple[File, ...] = ()


class Book(Protocol):
    """The record of which files the tables of a folder consist of; each format has one."""

    def load(self) -> Contents:
        """The tables as the newest commit left them."""
        ...

    def place(self, name: str) -> Path:
        """The folder below which new files of a table go."""
        ...

    def root_of(self, name: str) -> Path:
        """The folder that the paths of a table's files are relative to."""
        ...

    def commit(self, before: Contents, changes: Mapping[str, TableChange], mark: Mark) -> Contents:
        """Change tables on top of `before`; refused if another writer did so first."""
        ...


def folder_name(table: str) -> str:
    """A name for the folder of a table, whatever is in its name: types come from messages."""
    if _PLAIN.fullmatch(table):
        return table
    if table in (STREAMS, ROWS):
        return table or "rows"
    kept = (
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"~{byte:02x}"
        for byte in table.encode()
    )
    return "".join(kept)


def bucket_in(path: str) -> int:
    """The bucket that a file holds, by its path."""
    found = _IN_PATH.search(path)
    return int(found[1]) if found else UNBUCKETED


def define(root: Path, definition: Mapping[str, Any]) -> None:
    """Write down what the tables of a folder are, once; refused if they are something else."""
    path = root / DEFINITION
    wanted = msgspec.json.encode(definition, order="sorted")
    root.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = root / f".{DEFINITION}.{os.urandom(8).hex()}"
        write_synced(draft, wanted)
        os.replace(draft, path)
        sync_folder(root)
    known = defined(root)
    if known == msgspec.json.decode(wanted):
        return
    differing = sorted(
        name for name in {*known, *definition} if known.get(name) != definition.get(name)
    )
    raise TableError(
        f"the tables in {root} were made with another {' and '.join(differing)}"
        f" ({', '.join(f'{name} = {known.get(name)!r}' for name in differing)}):"
        " give the same again, or another folder"
    )


def defined(root: Path) -> dict[str, Any]:
    """The definition of the tables in a folder, as `define` wrote it."""
    try:
        raw = (root / DEFINITION).read_bytes()
    except FileNotFoundError:
        raise TableError(f"there are no tables in {root}: make them with tables.backfill") from None
    found: dict[str, Any] = msgspec.json.decode(raw)
    return found


def write_synced(path: Path, data: bytes) -> None:
    """Write a file durably."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make a new name in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
