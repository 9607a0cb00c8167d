"""`backfill` brings tables up to now, `follow` keeps them up to date, `read` gives them to Spark.

There are two kinds of tables. A **state** table holds the rows that a State stream has now, one
table for each type. A **rows** table holds every message of any streams, one row each. Both are
made from the log piece by piece. The position at which a piece ends is committed in one step with
its data, so a run that was killed continues at the last commit, and `backfill` and `follow` may
take turns on the same folder. `vacuum` removes files that no version of a table needs any more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.options import Options
from fencepost.pipeline.sessions import register
from fencepost.pipeline.source.columns import log_schema, struct_of
from fencepost.pipeline.source.reader import beyond_head_error
from fencepost.pipeline.tables import state
from fencepost.pipeline.tables.files import ROWS, STREAMS, Mark, TableError, define, defined
from fencepost.pipeline.tables.manifests import ManifestBook
from fencepost.pipeline.tables.pieces import (
    Applying,
    Format,
    Kind,
    Layout,
    book_of,
    read_files,
    widened,
)

CHECKPOINT = "_checkpoint"
BUCKETS = 8
ROWS_PER_COMMIT = 1_000_000
KEEP_VERSIONS = 2
UNNAMED_SECONDS = 3_600.0

Schema = StructType | str
"""A schema as Spark has it, or as DDL: `name string, total double`."""


class Reached(NamedTuple):
    """How far a backfill is: rows so far, messages that are none of the State Protocol, place."""

    rows: int
    invalid: int
    position: int
    head: int


def backfill(
    spark: SparkSession,
    to: str | Path,
    *,
    stream: str | Sequence[str] | None = None,
    match: str | None = None,
    kind: Kind = "state",
    format: Format = "parquet",
    types: Mapping[str, Schema | None] | None = None,
    schema: Schema | None = None,
    buckets: int = BUCKETS,
    options: Mapping[str, Any] | None = None,
    rows_per_commit: int = ROWS_PER_COMMIT,
    on_commit: Callable[[Reached], None] | None = None,
) -> Reached:
    """Bring tables up to where the log ends now, a commit for every `rows_per_commit` messages.

    Args:
        to: The folder of the tables: one that driver and executors share.
        stream: The stream or streams to take, by path; or `match`, a pattern of paths.
        kind: `state`: what State streams say now, a table for each type. `rows`: every message.
        format: `parquet`, read with `read`; or `delta`, read by anything that knows Delta Lake.
        types: Of state: which types, each with the schema of its values or None for JSON text.
            Without it every type that comes has a table, as JSON text.
        schema: Of rows: the schema of the values of JSON streams. Without it they stay bytes.
        buckets: Of state: into how many files a table is cut by key; a commit rewrites those that
            its changes fall into.
        options: More of `.format("fencepost")`: url, token and the like.
        rows_per_commit: How much is lost, and done again, when the run is killed.
        on_commit: Called after every commit.
    """
    plan = _plan(to, stream, match, kind, format, types, schema, buckets, options)
    register(spark)
    rows = invalid = 0
    with plan.connection.client() as client:
        head = client.log_head()
        position = plan.applying.book().load().position
        if position > head:
            raise beyond_head_error(position, head)
        while position < head:
            piece = client.plan(
                after=position,
                until=head,
                rows_max=rows_per_commit,
                streams=plan.streams or None,
                match=match,
            )
            if piece.rows:
                taken = {"startingPosition": position + 1, "endingPosition": piece.until}
                reading = spark.read.format("fencepost").options(**plan.source, **taken)
                read = reading.schema(plan.applying.columns).load()
                done = plan.applying.apply(read, Mark(piece.until), None)
                rows, invalid = rows + done.rows, invalid + done.invalid
            position = piece.until
            reached = Reached(rows, invalid, position, head)
            if on_commit is not None:
                on_commit(reached)
    return Reached(rows, invalid, position, head)


def follow(
    spark: SparkSession,
    to: str | Path,
    *,
    stream: str | Sequence[str] | None = None,
    match: str | None = None,
    kind: Kind = "state",
    format: Format = "parquet",
    types: Mapping[str, Schema | None] | None = None,
    schema: Schema | None = None,
    buckets: int = BUCKETS,
    options: Mapping[str, Any] | None = None,
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> StreamingQuery:
    """Keep tables up to date: a streaming query that commits every micro-batch to them.

    It begins where the tables are. The arguments are those of `backfill`; besides:

    Args:
        options: Also `maxRowsPerTrigger` and others of a streaming read.
        trigger: As for `writeStream.trigger`, as in `{"processingTime": "10 seconds"}` or
            `{"availableNow": True}`; by default the next batch begins when the last one is done.
        name: What the query is called in Spark's pages and in metrics.
    """
    plan = _plan(to, stream, match, kind, format, types, schema, buckets, options)
    register(spark)
    position = plan.applying.book().load().position
    source = {"startingPosition": "earliest" if position < 0 else position + 1, **plan.source}
    applying = plan.applying

    def apply(batch: DataFrame, batch_id: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        applying.apply(batch, None, None if query is None else (str(query), batch_id))

    reading = spark.readStream.format("fencepost").options(**source)
    writer = reading.schema(applying.columns).load().writeStream
    writer = writer.foreachBatch(apply).option("checkpointLocation", str(plan.root / CHECKPOINT))
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def read(spark: SparkSession, place: str | Path, type: str = ROWS) -> DataFrame:
    """A table as its newest commit left it: the table of a type, or of rows."""
    root = Path(place).resolve()  # Spark has a working folder of its own
    layout = _layout(defined(root))
    book = book_of(root, layout.format)
    contents = book.load()
    if layout.kind == "state" and type not in contents.tables:
        there = sorted(contents.tables.keys() - {STREAMS})
        if type == ROWS or (layout.schemas is not None and type not in layout.schemas):
            raise TableError(
                f"{root} has a table for each type: say which one ({', '.join(there) or 'none'})"
            )
    if layout.kind == "rows" and type != ROWS:
        raise TableError(f"{root} holds the rows of all messages: it has no table {type!r}")
    files = contents.files_of(type)
    return read_files(spark, _columns(spark, layout, type), book.root_of(type), files)


def types(place: str | Path) -> list[str]:
    """The types that have tables in a folder of state."""
    root = Path(place).resolve()  # Spark has a working folder of its own
    found = book_of(root, _layout(defined(root)).format).load()
    return sorted(found.tables.keys() - {STREAMS, ROWS})


def position(place: str | Path) -> int:
    """Up to which position of the log the tables of a folder are; -1 before the first commit."""
    root = Path(place).resolve()  # Spark has a working folder of its own
    return book_of(root, _layout(defined(root)).format).load().position


def vacuum(
    place: str | Path,
    *,
    keep_versions: int = KEEP_VERSIONS,
    unnamed_seconds: float = UNNAMED_SECONDS,
) -> int:
    """Remove files that nothing needs any more; how many there were.

    Args:
        keep_versions: Of Parquet: how many of the newest versions readers may still be reading.
        unnamed_seconds: How old a file must be that no version names: a younger one may belong to
            a commit that is under way. Of Delta: how long a removed file stays, in whole hours.
    """
    root = Path(place).resolve()  # Spark has a working folder of its own
    layout = _layout(defined(root))
    if layout.format == "parquet":
        book = ManifestBook(root)
        removed = book.vacuum(
            keep_versions=keep_versions, unnamed_seconds=unnamed_seconds, now=time.time()
        )
        return len(removed)
    from fencepost.pipeline.tables.delta import DeltaBook

    return len(DeltaBook(root).vacuum(unnamed_seconds=unnamed_seconds))


# Settings


class _Plan(NamedTuple):
    root: Path
    source: dict[str, Any]
    streams: list[str]
    connection: Connection
    applying: Applying


def _plan(
    to: str | Path,
    stream: str | Sequence[str] | None,
    match: str | None,
    kind: Kind,
    format: Format,
    types: Mapping[str, Schema | None] | None,
    schema: Schema | None,
    buckets: int,
    options: Mapping[str, Any] | None,
) -> _Plan:
    """Everything checked and in one place, and the folder's definition written or compared."""
    if "://" in str(to):
        raise TableError(
            f"{to}: tables go to a folder that driver and executors share; mount it, and give its"
            " path"
        )
    if (stream is None) == (match is None):
        raise TableError("say which streams a table is of: by stream, or by match, not both")
    if kind == "state" and schema is not None:
        raise TableError("schema is for rows; give the schemas of state by type, with types")
    if kind == "rows" and types is not None:
        raise TableError("types are of state; give the schema of rows with schema")
    if buckets < 1:
        raise TableError("a table has at least one bucket")
    streams = [stream] if isinstance(stream, str) else list(stream or ())
    given = {ROWS: schema} if kind == "rows" else types
    schemas = None if given is None else {name: _parsed(one) for name, one in given.items()}
    layout = Layout(kind, format, schemas, buckets)
    if kind == "state":
        for values in (schemas or {}).values():
            state.columns_of(values)
    root = Path(to).resolve()
    selected = {"match": match} if match is not None else {"streams": json.dumps(streams)}
    source = {**(options or {}), **selected}
    connection = connection_of(Options({key: str(value) for key, value in source.items()}))
    define(root, _definition(layout, streams, match))
    return _Plan(root, source, streams, connection, Applying(root, layout))


def _parsed(schema: Schema | None) -> StructType | None:
    if schema is None or isinstance(schema, StructType):
        return schema
    return struct_of(schema)


def _definition(layout: Layout, streams: Sequence[str], match: str | None) -> dict[str, Any]:
    schemas = layout.schemas
    return {
        "kind": layout.kind,
        "format": layout.format,
        "buckets": layout.buckets,
        "streams": sorted(streams),
        "match": match,
        "types": None
        if schemas is None
        else {name: None if one is None else one.jsonValue() for name, one in schemas.items()},
    }


def _layout(definition: Mapping[str, Any]) -> Layout:
    found = definition["types"]
    schemas = None
    if found is not None:
        schemas = {
            name: None if one is None else StructType.fromJson(one) for name, one in found.items()
        }
    return Layout(definition["kind"], definition["format"], schemas, definition["buckets"])


def _columns(spark: SparkSession, layout: Layout, name: str) -> StructType:
    if name == STREAMS:
        return struct_of(state.BOUNDS)
    if layout.kind == "state":
        return state.columns_of(layout.schema_of(name))

    return widened(spark.createDataFrame([], log_schema()), layout.schema_of(name)).schema
