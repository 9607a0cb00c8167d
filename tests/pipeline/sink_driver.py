"""A driver and its tasks, called as Spark calls them, without Spark around them.

That Spark does call them so is shown in `test_sink_queries.py`.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pyarrow as pa

import fencepost
from fencepost.pipeline.sink import (
    BatchWriter,
    Sink,
    StreamWriter,
    batch_writer,
    stream_writer,
)
from fencepost.pipeline.sink.commit import TaskWritten
from fencepost.pipeline.sink.identity import Place
from tests.pipeline.sink_support import schema_of
from tests.serving import ServerProcess


class Driver:
    """A driver of a query: starts runs, plans batches, commits them, as Spark does."""

    def __init__(
        self, server: ServerProcess, folder: Path, columns: str = "value string", **options: str
    ) -> None:
        self.url = server.url
        self.folder = folder
        self.columns = columns
        self.options = {"url": server.url, "autoCreate": "true", **options}
        self.query = str(uuid4())
        self.run = str(uuid4())

    def restarted(self) -> Driver:
        """The same query in a new process: another run, another scratch folder."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.run = str(uuid4())
        return other

    def writer(self) -> StreamWriter:
        return stream_writer(self.options, schema_of(self.columns), False)

    def stage(self, batch: int, *partitions: list[Any], writer: Any = None) -> list[TaskWritten]:
        # What goes to executors is pickled on the way there, and so is what comes back.
        sent: Sink = pickle.loads(pickle.dumps((writer or self.writer())._sink))  # noqa: S301
        return [
            pickle.loads(pickle.dumps(sent.stage(iter(rows_of(rows)), self.place(index, batch))))  # noqa: S301
            for index, rows in enumerate(partitions)
        ]

    def place(self, partition: int, batch: int) -> Place:
        return Place(partition, 0, self.query, batch, self.run)

    def write(self, batch: int, *partitions: list[Any]) -> None:
        self.writer().commit(list(self.stage(batch, *partitions)), batch)


class LocalDriver(Driver):
    """A driver with a scratch folder of its own, and the checkpoint in a folder of its machine."""

    def __init__(self, server: ServerProcess, folder: Path, **options: str) -> None:
        super().__init__(server, folder, **options)
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir(parents=True)
        (checkpoint / "metadata").write_text(json.dumps({"id": self.query}))
        self.options["checkpointLocation"] = checkpoint.as_uri()
        self.scratch = self._new_scratch()

    def restarted(self) -> LocalDriver:
        """The same query in a new driver."""
        other = self.rerun()
        other.scratch = self._new_scratch()
        return other

    def rerun(self) -> LocalDriver:
        """The same query, started again in the same driver."""
        other = super().restarted()
        assert isinstance(other, LocalDriver)
        return other

    def stage(self, batch: int, *partitions: list[Any], writer: Any = None) -> list[TaskWritten]:
        with self._environment():
            return super().stage(batch, *partitions, writer=writer)

    def commit(self, staged: list[TaskWritten], batch: int) -> None:
        with self._environment():
            self.writer().commit(list(staged), batch)

    def _new_scratch(self) -> Path:
        made = self.folder / f"scratch-{uuid4()}"
        made.mkdir()
        return made

    def _environment(self) -> AbstractContextManager[Any]:
        return patch.dict(os.environ, {"SPARK_LOCAL_DIRS": str(self.scratch)})


def rows_of(rows: list[Any]) -> Iterator[pa.RecordBatch]:
    """Texts are values; pairs are a stream and a value."""
    if rows and isinstance(rows[0], tuple):
        streams, values = zip(*rows, strict=True)
        yield pa.RecordBatch.from_pydict({"stream": list(streams), "value": list(values)})
    else:
        yield pa.RecordBatch.from_pydict({"value": pa.array(rows, pa.string())})


class Job:
    """A batch write, as Spark makes it: in a plain job, or inside foreachBatch of a query."""

    def __init__(self, server: ServerProcess, query: Driver | None = None, **options: str) -> None:
        self.options = {"url": server.url, "autoCreate": "true", **options}
        self.query = query

    def save(self, rows: list[str], batch: int = 0) -> None:
        writer: BatchWriter = batch_writer(self.options, schema_of("value string"), False)
        place = self.query.place(0, batch) if self.query else Place(0, 0)
        written = writer._sink.stage(rows_of(rows), place)
        # Spark keeps the pickled writer for the commit, unlike that of a stream.
        pickle.loads(pickle.dumps(writer)).commit([written])  # noqa: S301


def parts_waiting(server: ServerProcess, parts: list[TaskWritten]) -> list[bool]:
    """Whether each part is still there: dropping it tells."""
    found = []
    with fencepost.connect(server.url) as client:
        for written in parts:
            for part in written.parts:
                try:
                    client.unstage(part.txn, part.part)
                    found.append(True)
                except fencepost.PartError:
                    found.append(False)
    return found
