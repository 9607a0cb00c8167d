"""What the messages of State streams do to the rows of current-state tables.

A row is the newest change of its stream and key. Two events remove rows without naming them: the
stream is deleted and created again, or a control message clears it (a reset, or the end of a
snapshot). Both are kept for each stream as two bounds, so that a table that is made piece by piece
equals one that is made at once:

    a row stays while its position is at least `since` and its offset is at least `floor`.

Bounds only rise. A reset to a place before an earlier reset therefore brings nothing back.

`advance`, `is_kept` and `parse` are these rules as pure functions. The functions over DataFrames
carry them out: `parsed` reads the messages of a piece, `stream_bounds` moves the bounds of its
streams, and `merged` puts the changes of one type over the rows of its table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import UNSET, UnsetType
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812  (its usual name)
from pyspark.sql.types import StringType, StructField, StructType

from fencepost.client import state
from fencepost.pipeline.source.columns import struct_of
from fencepost.pipeline.tables.files import STREAMS, TableError

CORRUPT = "_corrupt"
"""The text of a value that does not fit the schema of its table."""
VALUE = "value"
NEEDED = ("stream", "offset", "version", "position", "value")
"""What a message is looked at for."""
OWN_FIRST = ("stream", "key")
OWN_LAST = ("version", "position", "offset")

_PARSED = (
    "stream string, offset string, version long, position long, kind string, type string,"
    " key string, operation string, value string, control string, target string"
)
_PARSED_ARROW = pa.schema(
    [
        *(("stream", pa.string()), ("offset", pa.string())),
        *(("version", pa.int64()), ("position", pa.int64())),
        *((name, pa.string()) for name in ("kind", "type", "key", "operation")),
        *((name, pa.string()) for name in ("value", "control", "target")),
    ]
)
BOUNDS = "stream string, since long, offset string, floor string, snapshot string"
_BOUNDS_ARROW = pa.schema(
    [
        *(("stream", pa.string()), ("since", pa.int64()), ("offset", pa.string())),
        *(("floor", pa.string()), ("snapshot", pa.string()), ("cleared", pa.bool_())),
    ]
)


def parsed(messages: DataFrame) -> DataFrame:
    """Every message as what it says: a change, a control, or `invalid`."""
    return messages.select(*NEEDED).mapInArrow(_parse_batches, _PARSED)


def _parse_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        kept = [batch.column(name) for name in ("stream", "offset", "version", "position")]
        said = [parse(value or b"") for value in batch.column("value").to_pylist()]
        columns = zip(*said, strict=True) if said else ((),) * 7
        texts = [pa.array(column, pa.string()) for column in columns]
        yield pa.RecordBatch.from_arrays(_as_declared([*kept, *texts]), schema=_PARSED_ARROW)


def _as_declared(columns: list[pa.Array]) -> list[pa.Array]:
    return [column.cast(field.type) for column, field in zip(columns, _PARSED_ARROW, strict=True)]


def stream_bounds(messages: DataFrame, known: DataFrame) -> DataFrame:
    """The bounds of every stream in a parsed piece after it; `cleared` where they have risen."""
    order = Window.partitionBy("stream").orderBy("position")
    before = F.lag("offset").over(order)
    told = messages.select("stream", "position", "offset", "control", "target").withColumn(
        "before", before
    )
    first, again = F.col("before").isNull(), F.col("offset") <= F.col("before")
    moves = first | again | F.col("control").isNotNull()
    event = F.struct("position", "offset", "control", "target")
    pieces = told.groupBy("stream").agg(
        F.sort_array(F.collect_list(F.when(moves, event))).alias("events"),
        F.max_by("offset", "position").alias("newest"),
    )
    joined = pieces.join(known.withColumnRenamed("offset", "reached"), "stream", "left")
    return joined.mapInArrow(_advance_batches, f"{BOUNDS}, cleared boolean")


def _advance_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = [_advanced(row) for row in batch.to_pylist()]
        yield pa.RecordBatch.from_pylist(rows, schema=_BOUNDS_ARROW)


def _advanced(row: dict[str, object]) -> dict[str, object]:
    known = StreamState()
    if row["since"] is not None:
        known = StreamState(
            _number(row["since"]),
            str(row["reached"]),
            str(row["floor"]),
            None if row["snapshot"] is None else str(row["snapshot"]),
        )
    found = row["events"]
    assert isinstance(found, list)
    events = [Event(one["position"], one["offset"], one["control"], one["target"]) for one in found]
    now = advance(known, events, str(row["newest"]))
    # A stream that was not known has no rows yet that could be removed.
    risen = row["since"] is not None and (now.since, now.floor) != (known.since, known.floor)
    return {"stream": row["stream"], **now._asdict(), "cleared": risen}


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def columns_of(schema: StructType | None) -> StructType:
    """The columns of a table of a type, given those of its values, if they are known."""
    own = struct_of("stream string, key string, version long, position long, offset string")
    if schema is None:
        values = [StructField(VALUE, StringType())]
    else:
        values = [*schema.fields, StructField(CORRUPT, StringType())]
        taken = sorted(set(schema.names) & {*own.names, CORRUPT})
        if taken:
            raise TableError(
                f"the schema has columns that the table has itself: {', '.join(taken)}."
                " Leave them out, or leave the schema out and take the values as JSON text"
            )
    fields = {field.name: field for field in own}
    return StructType(
        [
            *(fields[name] for name in OWN_FIRST),
            *(StructField(field.name, field.dataType) for field in values),
            *(fields[name] for name in OWN_LAST),
        ]
    )


def typed(changes: DataFrame, schema: StructType | None) -> DataFrame:
    """The changes of one type with the columns of its table, and `operation`."""
    if schema is None:
        values = [F.col(VALUE)]
    else:
        whole = StructType([*schema.fields, StructField(CORRUPT, StringType())])
        read = F.from_json(VALUE, whole, {"columnNameOfCorruptRecord": CORRUPT})
        changes = changes.withColumn("_read", read)
        values = [F.col("_read").getField(name).alias(name) for name in schema.names]
        unread = F.col(VALUE).isNotNull() & F.col("_read").isNull()
        corrupt = F.when(unread, F.col(VALUE)).otherwise(F.col("_read").getField(CORRUPT))
        values.append(corrupt.alias(CORRUPT))
    own = [F.col(name) for name in (*OWN_LAST, "operation")]
    return changes.select(*OWN_FIRST, *values, *own)


def merged(rows: DataFrame, changes: DataFrame, bounds: DataFrame) -> DataFrame:
    """The rows of a table with typed changes over them, without what is deleted or cleared."""
    names = rows.columns
    both = rows.withColumn("operation", F.lit("upsert")).unionByName(changes)
    newest = both.groupBy("stream", "key").agg(
        F.max_by(F.struct(*names, "operation"), "position").alias("newest")
    )
    left = newest.select("newest.*").where("operation != 'delete'")
    limits = bounds.select("stream", F.col("since").alias("_since"), F.col("floor").alias("_floor"))
    kept = F.col("_since").isNull() | (
        (F.col("position") >= F.col("_since")) & (F.col("offset") >= F.col("_floor"))
    )
    return left.join(limits, "stream", "left").where(kept).select(*names)


def merged_bounds(known: DataFrame, risen: DataFrame) -> DataFrame:
    """The bounds of all streams, those of a piece in place of what was known of them."""
    names = known.columns
    return known.join(risen.select("stream"), "stream", "left_anti").unionByName(
        risen.select(*names)
    )


def bucket_of(buckets: int, *names: str) -> Column:
    """The bucket of a key: the same in every run, because files are named by it."""
    return F.pmod(F.hash(*names), F.lit(buckets))


CONTROLS = ("snapshot-start", "snapshot-end", "reset")


class StreamState(NamedTuple):
    """How far a stream was folded, and which of its rows still count."""

    since: int = -1
    """The position at which its present incarnation begins."""
    offset: str = ""
    """Where the newest message starts that was folded."""
    floor: str = ""
    """Rows whose change starts below it are gone."""
    snapshot: str | None = None
    """Where the snapshot began that has not come to its end yet."""


class Event(NamedTuple):
    """A message that may move the bounds of its stream: a control, or the first of a piece."""

    position: int
    offset: str
    control: str | None = None
    target: str | None = None
    """The offset that a reset says to begin again at."""


def advance(known: StreamState, events: Iterable[Event], newest: str) -> StreamState:
    """The state of a stream after a piece of it, given what in it may move bounds, in order.

    An offset that is not greater than the one before it is another incarnation's. `newest` is where
    the last message of the piece starts.
    """
    since, offset, floor, snapshot = known
    for event in events:
        if event.offset <= offset:
            since, floor, snapshot = event.position, "", None
        offset = event.offset
        if event.control == "snapshot-start":
            snapshot = event.offset
        elif event.control == "snapshot-end":
            floor = max(floor, snapshot or "")
            snapshot = None
        elif event.control == "reset":
            floor = max(floor, event.target or event.offset)
            snapshot = None
    return StreamState(since, max(offset, newest), floor, snapshot)


def is_kept(bounds: StreamState, position: int, offset: str) -> bool:
    """Whether a row whose newest change is there still counts."""
    return position >= bounds.since and offset >= bounds.floor


class Parsed(NamedTuple):
    """A message of a State stream, its value still as JSON text."""

    kind: Literal["change", "control", "invalid"]
    type: str | None = None
    key: str | None = None
    operation: str | None = None
    value: str | None = None
    control: str | None = None
    target: str | None = None


INVALID = Parsed("invalid")


class _Change(msgspec.Struct, frozen=True):
    """A change as in the client, but with its value left as JSON text."""

    type: state.Name
    key: state.Name
    headers: state.ChangeHeaders
    value: msgspec.Raw | UnsetType = UNSET


_CHANGES = msgspec.json.Decoder(_Change)


def parse(message: bytes) -> Parsed:
    """What a message says, by the rules of `fencepost.client.state`."""
    try:
        if b'"control"' in message:
            # Only a look at the whole of it tells a control message from a value with such a word.
            parsed = state.parse(msgspec.json.decode(message))
            if isinstance(parsed, state.Control):
                target = parsed.headers.offset
                return Parsed(
                    "control", control=parsed.control, target=None if target is UNSET else target
                )
        change = _CHANGES.decode(message)
        operation = change.headers.operation
        # A type of our own table's name would be lost in it.
        if change.type == STREAMS or (change.value is UNSET and operation != "delete"):
            return INVALID
        value = None if change.value is UNSET else bytes(change.value).decode()
    except (msgspec.DecodeError, state.StateMessageError, UnicodeDecodeError, RecursionError):
        return INVALID
    return Parsed("change", change.type, change.key, operation, value)
