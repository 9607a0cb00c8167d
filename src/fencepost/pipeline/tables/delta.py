"""Tables as Delta Lake tables, through the package `deltalake`: no jars, any Delta reader.

Executors have written the files; here the driver commits them to a table's log. Every commit
carries two application transactions: the position of the log up to which the table holds it, and
the query and batch that brought it there. A replay finds them and adds nothing.

Each type has a table of its own and so a commit of its own. The bounds of streams, which say how
far all of them are, are committed last: a driver that dies in between leaves some tables ahead, and
the next run passes over what those have already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)
from pyspark.sql.types import StructType

from fencepost.pipeline.source.columns import arrow_schema
from fencepost.pipeline.tables.files import (
    ROWS,
    STREAMS,
    Contents,
    File,
    Mark,
    TableChange,
    TableContents,
    bucket_in,
    folder_name,
)
from fencepost.pipeline.tables.manifests import CommitConflictError

POSITION = "fencepost.position"
"""The application whose transaction version is a position of the log."""
FILES = "files"
"""Where new files go, below the folder of their table."""


class DeltaBook:
    """The tables of one folder, each with a Delta log."""

    def __init__(self, root: Path, query: str | None = None) -> None:
        self._root = root
        self._query = query
        self._loaded: dict[str, DeltaTable] = {}
        """The tables as they were read: a commit goes on top of these, and of nothing newer."""

    def load(self) -> Contents:
        """The tables as their logs have them; a table that was never committed is not there."""
        found = self._loaded = dict(self._tables())
        # Whether the folder holds one table of rows or many of state, this one is written last.
        last = found.get(ROWS) or found.get(STREAMS)
        position = -1 if last is None else last.transaction_version(POSITION)
        batch = None
        if last is not None and self._query is not None:
            batch = last.transaction_version(self._query)
        return Contents(
            version=-1 if last is None else last.version(),
            position=-1 if position is None else position,
            query=None if batch is None else self._query,
            batch=batch,
            tables={name: _contents(table) for name, table in found.items()},
        )

    def place(self, name: str) -> Path:
        return self.root_of(name) / FILES

    def root_of(self, name: str) -> Path:
        return self._root if name == ROWS else self._root / folder_name(name)

    def commit(self, before: Contents, changes: Mapping[str, TableChange], mark: Mark) -> Contents:
        for name, change in sorted(changes.items(), key=lambda item: item[0] == STREAMS):
            if before.position_of(name) < mark.position:
                self._commit(name, change, mark)
        return self.load()

    def vacuum(self, *, unnamed_seconds: float) -> list[Path]:
        """Remove files that the tables no longer name, or never named; what was removed."""
        removed: list[Path] = []
        for name, table in self._tables():
            gone = table.vacuum(
                retention_hours=int(unnamed_seconds // 3600),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
            removed += [self.root_of(name) / path for path in gone]
        return removed

    def _tables(self) -> list[tuple[str, DeltaTable]]:
        if (self._root / "_delta_log").is_dir():
            return [(ROWS, DeltaTable(str(self._root)))]
        if not self._root.is_dir():
            return []
        folders = [one for one in sorted(self._root.iterdir()) if (one / "_delta_log").is_dir()]
        tables = [DeltaTable(str(one)) for one in folders]
        return [(table.metadata().name or STREAMS, table) for table in tables]

    def _commit(self, name: str, change: TableChange, mark: Mark) -> None:
        now_ms = time.time_ns() // 1_000_000
        done = [Transaction(POSITION, mark.position)]
        if mark.query is not None and mark.batch is not None:
            done.append(Transaction(mark.query, mark.batch))
        # Delta goes on over a commit that came meanwhile and does not concern this one, as a
        # vacuum's; over one with a transaction of the same application it does not.
        properties = CommitProperties(app_transactions=done)
        schema = arrow_schema(StructType.fromJson(msgspec.json.decode(change.schema)))
        adds = [_add(file, now_ms) for file in change.add]
        folder = self.root_of(name)
        table = self._loaded.get(name)
        try:
            if table is None:
                folder.mkdir(parents=True, exist_ok=True)
                create_table_with_add_actions(
                    str(folder),
                    _delta_schema(schema),
                    adds,
                    name=name or None,
                    commit_properties=properties,
                )
                return
            removes = [RemoveAction(file.path, True, now_ms, file.bytes) for file in change.remove]
            table.create_write_transaction(
                [*adds, *removes],
                "append",
                _delta_schema(schema),
                commit_properties=properties,
            )
        except (CommitFailedError, DeltaError) as error:
            raise CommitConflictError(
                f"the Delta table in {folder} did not take the commit ({error}); if another writer"
                " follows it, stop one of the two, then run this one again"
            ) from error


def _contents(table: DeltaTable) -> TableContents:
    position = table.transaction_version(POSITION)
    actions: Any = table.get_add_actions()
    rows = zip(
        *(actions.column(name).to_pylist() for name in ("path", "num_records", "size_bytes")),
        strict=True,
    )
    return TableContents(
        schema="",
        position=-1 if position is None else position,
        files=tuple(File(path, bucket_in(path), count or 0, size) for path, count, size in rows),
    )


def _add(file: File, now_ms: int) -> AddAction:
    return AddAction(
        path=file.path,
        size=file.bytes,
        partition_values={},
        modification_time=now_ms,
        data_change=True,
        stats=msgspec.json.encode({"numRecords": file.rows}).decode(),
    )


def _delta_schema(schema: Any) -> Any:
    from deltalake import Schema

    return Schema.from_arrow(schema)
