"""What must hold of a log, as functions from DataFrames to a DataFrame of defects.

The **facts** are what an audit knows of the log: a row for each message and each marker, without
payloads. If the caller names a path that identifies messages, a fact also has the `identity` at
that path. `numbered` tells the incarnations of a stream apart, by the markers that end them. Each
rule looks for one kind of thing that must not be, and says for every case which kind it is, where,
and what is wrong. On a sound log all of them find nothing.

`lists.py` compares the log with what the server lists of streams, producers and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

FACTS = (
    "stream string, offset string, version long, position long, timestamp timestamp,"
    " producer_id string, producer_epoch long, producer_seq long, size long, marker string,"
    " identity string"
)
IDENTITY_SHOWN_MAX = 60
ENDS = ("deleted", "expired")
"""Markers after which a stream of the same path is another one."""

DAMAGED = "damaged"
"""Marks where the server says that it has lost data."""

KINDS = {
    "data_damaged": "the server cannot read messages any more: see `fencepost check`",
    "version_gap": "messages of a stream are missing",
    "version_repeated": "a stream has two messages of one version",
    "offset_broken": "an offset does not follow from the message before it",
    "beginning_missing": "a stream does not begin with its first message",
    "seq_gap": "batches of a producer are missing",
    "seq_repeated": "a batch of a producer was stored twice",
    "seq_disordered": "batches of a producer are stored in another order than they were sent",
    "epoch_stale": "a producer wrote in an epoch that had been fenced off",
    "message_repeated": "two messages of a stream are the same one, by what `--once` names",
    "written_after_close": "a stream grew after it was closed",
    "closed_twice": "a stream was closed more than once",
    "closure_lost": "a stream was closed, and is listed as open",
    "closure_unmarked": "a stream is listed as closed, and the log does not say when",
    "stream_lost": "a stream with messages is not listed",
    "tail_missing": "a stream is listed as longer than its messages",
    "tail_behind": "a stream is listed as shorter than its messages",
    "tail_wrong": "a stream is listed with another end than its last message has",
    "producer_lost": "a producer with messages is not listed: a retry of it would be stored again",
    "producer_ahead": "a producer is listed with a batch that is not in the log",
    "producer_behind": "a producer is listed behind its messages: a retry would be stored again",
    "writer_ahead": "a writer says that it published a batch that its history does not have",
    "writer_behind": "a writer is behind its history: a batch would be published twice",
    "writer_digest_wrong": "a writer and its history say different things of its newest batch",
    "writer_rows_missing": "a batch published more rows than the log has of its moment",
    "writer_range_ahead": "a batch was read from positions that the log does not have",
    "key_without_message": "an idempotency key stands for a message that is not there",
    "key_repeated": "two idempotency keys stand for one message",
    "key_offset_wrong": "an idempotency key tells another offset than its message has",
}
"""Every kind of defect, and what it means."""

_OF_STREAM = ("stream", "incarnation")


def facts_of(messages: DataFrame, markers: DataFrame | None = None) -> DataFrame:
    """Facts from messages with the columns of the source, and markers, if there are any."""
    names = ("stream", "offset", "version", "position", "timestamp")
    producer = ("producer_id", "producer_epoch", "producer_seq")
    known = messages.select(
        *names,
        *producer,
        F.length("value").cast("long").alias("size"),
        F.lit(None).cast("string").alias("marker"),
        F.lit(None).cast("string").alias("identity"),
    )
    return known if markers is None else known.unionByName(markers, allowMissingColumns=True)


def numbered(facts: DataFrame) -> DataFrame:
    """Facts with the `incarnation` of their stream, from 0 in the range, and if it is `live`."""
    whole = Window.partitionBy("stream")
    before = whole.orderBy("position").rowsBetween(Window.unboundedPreceding, -1)
    end = F.when(F.col("marker").isin(*ENDS), 1).otherwise(0)
    ended = F.coalesce(F.sum(end).over(before), F.lit(0)).cast("long")
    return facts.withColumn("incarnation", ended).withColumn(
        "live", F.col("incarnation") == F.sum(end).over(whole)
    )


def messages_of(facts: DataFrame) -> DataFrame:
    return facts.where(F.col("marker").isNull())


class Case(NamedTuple):
    """A kind of defect, when a row has it, and what to say of it."""

    kind: str
    when: Column
    detail: Column


def defects_in(rows: DataFrame, *cases: Case) -> DataFrame:
    """The defects of rows that have a stream and a position: all cases in one pass."""
    for case in cases:
        assert case.kind in KINDS, case.kind
    found = F.array(
        *(
            F.when(case.when, F.struct(F.lit(case.kind).alias("kind"), case.detail.alias("detail")))
            for case in cases
        )
    )
    each = F.explode(F.filter(found, lambda one: one.isNotNull()))
    known = rows.select("stream", F.col("position").cast("long"), each.alias("defect"))
    return known.select("defect.kind", "stream", "position", "defect.detail")


def said(template: str, *names: str) -> Column:
    """A sentence with the values of columns in it, `-` for those that are not known."""
    values = (F.coalesce(F.col(name).cast("string"), F.lit("-")) for name in names)
    return F.format_string(template, *values)


def flagged(rows: DataFrame, streams: DataFrame, name: str) -> DataFrame:
    """Rows with a column that says whether their stream is one of some."""
    marked = streams.select("stream").distinct().withColumn(name, F.lit(True))
    return rows.join(marked, "stream", "left").withColumn(name, F.coalesce(name, F.lit(False)))


def union_of(found: Sequence[DataFrame]) -> DataFrame:
    whole = found[0]
    for one in found[1:]:
        whole = whole.unionByName(one)
    return whole


# What the server cannot read


def damages(facts: DataFrame) -> DataFrame:
    """Every place that the server found damaged."""
    return defects_in(
        facts,
        Case(
            "data_damaged",
            F.col("marker") == DAMAGED,
            said("it is read up to here, and not at position %s", "position"),
        ),
    )


# Streams


def sequences(facts: DataFrame) -> DataFrame:
    """Versions and offsets of every stream are contiguous; a closed one does not grow."""
    order = Window.partitionBy(*_OF_STREAM).orderBy("position")
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    is_message, is_close = F.col("marker").isNull(), F.col("marker") == "closed"

    def of_message_before(column: Column) -> Column:
        return F.last(F.when(is_message, column), ignorenulls=True).over(before)

    linked = (
        facts.withColumn("version_before", of_message_before(F.col("version")))
        .withColumn("expected", of_message_before(end_of(F.col("offset"), F.col("size"))))
        .withColumn("closed_at", F.min(F.when(is_close, F.col("position"))).over(before))
    )
    after_close = F.col("closed_at").isNotNull()
    step = F.when(is_message, F.col("version") - F.col("version_before"))
    return defects_in(
        linked,
        Case("version_gap", step > 1, said("version %s follows %s", "version", "version_before")),
        Case(
            "version_repeated",
            step < 1,
            said("version %s comes after version %s", "version", "version_before"),
        ),
        Case(
            "offset_broken",
            (step == 1) & (F.col("offset") != F.col("expected")),
            said("%s, expected %s", "offset", "expected"),
        ),
        Case(
            "written_after_close",
            is_message & after_close,
            said("version %s came after the close at position %s", "version", "closed_at"),
        ),
        Case(
            "closed_twice",
            is_close & after_close,
            said("it was closed at position %s already", "closed_at"),
        ),
    )


def repetitions(facts: DataFrame) -> DataFrame:
    """No two messages of a stream have the same identity; those without one are passed over."""
    same = Window.partitionBy(*_OF_STREAM, "identity").orderBy("position")
    linked = (
        messages_of(facts)
        .where("identity is not null")
        .withColumn("first", F.min("position").over(same))
        .withColumn("shown", F.substring("identity", 1, IDENTITY_SHOWN_MAX))
    )
    return defects_in(
        linked,
        Case(
            "message_repeated",
            F.col("position") > F.col("first"),
            said("%s was stored before, at position %s", "shown", "first"),
        ),
    )


def end_of(offset: Column, size: Column) -> Column:
    """Where a message ends that starts at an offset."""
    parts = F.split(offset, "_")
    messages, size_before = parts.getItem(0).cast("long"), parts.getItem(1).cast("long")
    return F.format_string("%016d_%016d", messages + 1, size_before + size)


# Producers

_OF_PRODUCER = (*_OF_STREAM, "producer_id")
_OF_EPOCH = (*_OF_PRODUCER, "producer_epoch")


def batches_of(facts: DataFrame) -> DataFrame:
    """The batches of producers: each stretch of messages under one number of one epoch."""
    return (
        messages_of(facts)
        .where("producer_id is not null")
        .groupBy(*_OF_EPOCH, "producer_seq", "live")
        .agg(
            F.count("*").alias("messages"),
            F.min("version").alias("first"),
            F.max("version").alias("last"),
            F.min("position").alias("position"),
            F.countDistinct("timestamp").alias("times"),
        )
    )


def producers(batches: DataFrame, cut: DataFrame) -> DataFrame:
    """Numbers are contiguous from 0 in every epoch, in order, none twice; epochs never go back.

    `cut` names streams whose first messages are not there, so that numbers may begin later.
    """
    order = Window.partitionBy(*_OF_EPOCH).orderBy("producer_seq")
    earlier = (
        Window.partitionBy(*_OF_PRODUCER)
        .orderBy("position")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    linked = flagged(
        batches.withColumn("seq_before", F.lag("producer_seq").over(order))
        .withColumn("first_before", F.lag("first").over(order))
        .withColumn("raised", F.max("producer_epoch").over(earlier))
        .withColumn("who", said("%s in epoch %s", "producer_id", "producer_epoch")),
        cut,
        "cut",
    )
    seq, seq_before = F.col("producer_seq"), F.col("seq_before")
    torn = (F.col("messages") != F.col("last") - F.col("first") + 1) | (F.col("times") > 1)
    begins_late = seq_before.isNull() & (seq > 0) & ~F.col("cut")
    return defects_in(
        linked,
        Case(
            "seq_gap",
            (seq > seq_before + 1) | begins_late,
            said("%s: number %s follows %s", "who", "producer_seq", "seq_before"),
        ),
        Case("seq_repeated", torn, said("%s: number %s", "who", "producer_seq")),
        Case(
            "seq_disordered",
            ~torn & (F.col("first") < F.col("first_before")),
            said("%s: number %s lies before %s", "who", "producer_seq", "seq_before"),
        ),
        Case(
            "epoch_stale",
            F.col("producer_epoch") < F.col("raised"),
            said("%s wrote after epoch %s had begun", "who", "raised"),
        ),
    )


# Counts


def counts(facts: DataFrame) -> DataFrame:
    """How many messages and bytes each stream got on each day (UTC)."""
    day = F.to_date(F.to_utc_timestamp("timestamp", F.current_timezone())).alias("day")
    return (
        messages_of(facts)
        .groupBy("stream", day)
        .agg(F.count("*").alias("messages"), F.sum("size").alias("bytes"))
    )


def span(facts: DataFrame) -> DataFrame:
    """The time of the first message and of the last one, in seconds since 1970."""
    at = F.unix_seconds("timestamp")
    return messages_of(facts).agg(F.min(at).alias("first"), F.max(at).alias("last"))


def counts_by(facts: DataFrame, seconds: int) -> DataFrame:
    """How many messages and bytes came in each stretch of so many seconds, by its beginning."""
    at = F.unix_seconds("timestamp")
    return (
        messages_of(facts)
        .groupBy((at - at % seconds).alias("at"))
        .agg(F.count("*").alias("messages"), F.sum("size").alias("bytes"))
    )
