"""Adding one piece of the log to the tables of a folder: what is read, written and committed.

`tables.follow` and `tables.backfill` share `Applying`. It gets a piece as a DataFrame with the
columns of the source, and a mark that says where the piece ends. It passes over rows at or below
the position that a table has reached, so a piece may be applied again, whole or in part.

Executors write the rows to new Parquet files; the driver only reads the footers of the files, to
say in the commit how many rows there are. New files go to a folder that no other attempt has. Files
that no commit names are never read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from fencepost.pipeline.source.columns import log_schema, struct_of
from fencepost.pipeline.tables import state
from fencepost.pipeline.tables.files import (
    BUCKET,
    ROWS,
    STREAMS,
    Book,
    Contents,
    File,
    Mark,
    TableChange,
    TableError,
    bucket_in,
    sync_folder,
)
from fencepost.pipeline.tables.manifests import ManifestBook

Kind = Literal["state", "rows"]
Format = Literal["parquet", "delta"]
PLACE = ("stream", "offset", "version", "position", "timestamp")
WRITER = ("producer_id", "producer_epoch", "producer_seq")


class Layout(NamedTuple):
    """The kind, format and schemas of the tables in a folder."""

    kind: Kind
    format: Format
    schemas: Mapping[str, StructType | None] | None
    """The schema of each type that has a table. None: every type that comes has one, with values as
    JSON text. A table of rows has the schema of its values under the name ROWS."""
    buckets: int

    def schema_of(self, name: str) -> StructType | None:
        return None if self.schemas is None else self.schemas[name]


class Applied(NamedTuple):
    """The result of applying a piece: the position it reached, its rows, and those not valid."""

    position: int
    rows: int
    invalid: int


class Applying:
    """One writer of the tables in one folder."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self._root = root
        self._layout = layout

    @property
    def columns(self) -> StructType:
        """The columns of messages that the tables are made of: no others need to be read."""
        whole = log_schema()
        if self._layout.kind == "state":
            return StructType([whole[name] for name in state.NEEDED])
        if self._layout.schema_of(ROWS) is None:
            return whole
        return StructType([whole[name] for name in (*PLACE, *WRITER, "value")])

    def book(self, query: str | None = None) -> Book:
        return book_of(self._root, self._layout.format, query)

    def apply(self, piece: DataFrame, mark: Mark | None, query: tuple[str, int] | None) -> Applied:
        """Bring the tables forward by a piece; without a mark, to its newest row."""
        book = self.book(None if query is None else query[0])
        before = book.load()
        if query is not None and before.query == query[0] and (before.batch or 0) >= query[1]:
            return Applied(before.position, 0, 0)
        fresh = piece.where(F.col("position") > before.position)
        if self._layout.kind == "rows":
            return self._rows(book, before, fresh, mark, query)
        return self._state(book, before, fresh, mark, query)

    # Rows

    def _rows(
        self,
        book: Book,
        before: Contents,
        fresh: DataFrame,
        mark: Mark | None,
        query: tuple[str, int] | None,
    ) -> Applied:
        wide = widened(fresh, self._layout.schema_of(ROWS))
        files = write_plain(wide, book.place(ROWS), book.root_of(ROWS))
        count = sum(file.rows for file in files)
        if not count:
            return Applied(before.position, 0, 0)
        if mark is None:
            spark = fresh.sparkSession
            written = read_files(spark, wide.schema, book.root_of(ROWS), files)
            mark = _mark(_newest(written), query)
        change = TableChange(schema=wide.schema.json(), add=files)
        book.commit(before, {ROWS: change}, mark)
        return Applied(mark.position, count, 0)

    # State

    def _state(
        self,
        book: Book,
        before: Contents,
        fresh: DataFrame,
        mark: Mark | None,
        query: tuple[str, int] | None,
    ) -> Applied:
        spark, buckets = fresh.sparkSession, self._layout.buckets
        messages = (
            state.parsed(fresh)
            .withColumn("_key", state.bucket_of(buckets, "stream", "key"))
            .withColumn("_stream", state.bucket_of(buckets, "stream"))
            .persist()
        )
        try:
            found = _summary(messages)
            if not found.rows:
                return Applied(before.position, 0, 0)
            mark = mark or _mark(found.position, query)
            known = self._read(spark, book, before, STREAMS, found.streams)
            bounds = state.stream_bounds(messages, known).persist()
            try:
                changes = self._changes(book, before, messages, bounds, found)
                changes[STREAMS] = self._bounds(book, before, known, bounds, found)
            finally:
                bounds.unpersist()
            book.commit(before, changes, mark)
        finally:
            messages.unpersist()
        return Applied(mark.position, found.rows, found.invalid)

    def _changes(
        self,
        book: Book,
        before: Contents,
        messages: DataFrame,
        bounds: DataFrame,
        found: _Summary,
    ) -> dict[str, TableChange]:
        """The change that the piece makes to the table of each type in it."""
        cleared = bool(bounds.where("cleared").limit(1).count())
        wanted = set(found.types) if self._layout.schemas is None else set(self._layout.schemas)
        names = wanted & set(found.types)
        if cleared:
            names |= wanted | (before.tables.keys() - {STREAMS})
        return {
            name: self._changed(
                book, before, name, messages, bounds, found.types.get(name), cleared
            )
            for name in sorted(names)
            if cleared or name in found.types
        }

    def _changed(
        self,
        book: Book,
        before: Contents,
        name: str,
        messages: DataFrame,
        bounds: DataFrame,
        touched: frozenset[int] | None,
        cleared: bool,
    ) -> TableChange:
        schema = self._layout.schema_of(name)
        columns = state.columns_of(schema)
        old = [
            file
            for file in before.files_of(name)
            if cleared or (touched is not None and file.bucket in touched)
        ]
        rows = read_files(messages.sparkSession, columns, book.root_of(name), old)
        said = messages.where((F.col("kind") == "change") & (F.col("type") == name))
        # A table may be ahead of the others after a crash, where each has a commit of its own.
        said = said.where(F.col("position") > before.position_of(name))
        merged = state.merged(rows, state.typed(said, schema), bounds)
        bucket = state.bucket_of(self._layout.buckets, "stream", "key")
        held = self._layout.buckets if cleared else len(touched or ())
        files = write_bucketed(merged, bucket, held, book.place(name), book.root_of(name))
        return TableChange(schema=columns.json(), add=files, remove=tuple(old))

    def _bounds(
        self, book: Book, before: Contents, known: DataFrame, bounds: DataFrame, found: _Summary
    ) -> TableChange:
        old = [file for file in before.files_of(STREAMS) if file.bucket in found.streams]
        bucket = state.bucket_of(self._layout.buckets, "stream")
        merged = state.merged_bounds(known, bounds)
        place, root = book.place(STREAMS), book.root_of(STREAMS)
        files = write_bucketed(merged, bucket, len(found.streams), place, root)
        return TableChange(schema=known.schema.json(), add=files, remove=tuple(old))

    def _read(
        self,
        spark: SparkSession,
        book: Book,
        before: Contents,
        name: str,
        touched: frozenset[int],
    ) -> DataFrame:
        files = [file for file in before.files_of(name) if file.bucket in touched]
        return read_files(spark, struct_of(state.BOUNDS), book.root_of(name), files)


class _Summary(NamedTuple):
    rows: int
    position: int
    invalid: int
    types: dict[str, frozenset[int]]
    """Which buckets the changes of each type are in."""
    streams: frozenset[int]


def _summary(messages: DataFrame) -> _Summary:
    """Count a piece, and find its types and buckets, in one pass over it."""
    found = (
        messages.groupBy("kind", "type")
        .agg(
            F.count("*").alias("rows"),
            F.max("position").alias("position"),
            F.collect_set("_key").alias("keys"),
            F.collect_set("_stream").alias("streams"),
        )
        .collect()
    )
    return _Summary(
        rows=sum(one.rows for one in found),
        position=max((one.position for one in found), default=-1),
        invalid=sum(one.rows for one in found if one.kind == "invalid"),
        types={one.type: frozenset(one.keys) for one in found if one.kind == "change"},
        streams=frozenset(bucket for one in found for bucket in one.streams),
    )


def widened(messages: DataFrame, schema: StructType | None) -> DataFrame:
    """The messages of any streams as rows: as they are, or with the columns of their values."""
    if schema is None:
        return messages
    taken = sorted(set(schema.names) & {*PLACE, *WRITER, state.CORRUPT})
    if taken:
        raise TableError(
            f"the schema has columns that the table has itself: {', '.join(taken)}."
            " Leave them out, or leave the schema out and take the values as they are"
        )
    whole = StructType([*schema.fields, StructField(state.CORRUPT, StringType())])
    text = F.col("value").cast("string")
    read = F.from_json(text, whole, {"columnNameOfCorruptRecord": state.CORRUPT})
    values = [F.col("_read").getField(name).alias(name) for name in whole.names[:-1]]
    corrupt = F.when(F.col("_read").isNull(), text).otherwise(
        F.col("_read").getField(state.CORRUPT)
    )
    named = messages.withColumn("_read", read)
    return named.select(*PLACE, *WRITER, *values, corrupt.alias(state.CORRUPT))


def book_of(root: Path, format: Format, query: str | None = None) -> Book:
    """Where the tables of a folder are written down."""
    if format == "parquet":
        return ManifestBook(root)
    from fencepost.pipeline.tables.delta import DeltaBook

    return DeltaBook(root, query)


def _newest(rows: DataFrame) -> int:
    found = rows.agg(F.max("position")).first()
    assert found is not None
    position: int = found[0]
    return position


def _mark(position: int, query: tuple[str, int] | None) -> Mark:
    return Mark(position) if query is None else Mark(position, *query)


UNFINISHED = "_temporary"
"""Below a folder that Spark writes to: what tasks have not handed over yet."""


def write_bucketed(
    rows: DataFrame, bucket: Column, touched: int, place: Path, root: Path
) -> tuple[File, ...]:
    """Write rows to one new file for each bucket that has any."""
    folder = _new_folder(place)
    parted = rows.withColumn(BUCKET, bucket).repartition(max(1, touched), F.col(BUCKET))
    parted.write.partitionBy(BUCKET).parquet(str(folder))
    return written_files(folder, root)


def write_plain(rows: DataFrame, place: Path, root: Path) -> tuple[File, ...]:
    """Write rows to new files as they are partitioned."""
    folder = _new_folder(place)
    rows.write.parquet(str(folder))
    return written_files(folder, root)


def read_files(
    spark: SparkSession, schema: StructType, root: Path, files: Iterable[File]
) -> DataFrame:
    """The rows of some files of a table."""
    paths = [str(root / file.path) for file in files]
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*paths)


def _new_folder(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place / os.urandom(8).hex()


def written_files(folder: Path, root: Path) -> tuple[File, ...]:
    """The files that a write left, made durable; files without rows are not worth naming.

    An attempt that lost to its copy may still be writing, where Spark has it write.
    """
    files = []
    for path in sorted(folder.rglob("*.parquet")):
        if UNFINISHED in path.relative_to(folder).parts:
            continue
        rows = pq.read_metadata(path).num_rows
        if not rows:
            continue
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
        sync_folder(path.parent)
        relative = path.relative_to(root).as_posix()
        files.append(File(relative, bucket_in(relative), rows, path.stat().st_size))
    if files:
        sync_folder(folder)
    return tuple(files)
