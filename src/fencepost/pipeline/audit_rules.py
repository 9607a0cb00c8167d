"""What must hold of a log, as functions from DataFrames to a DataFrame of defects.

The **facts** are what an audit knows of the log: a row for each message and each marker, without
payloads. `numbered` tells the incarnations of a stream apart, by the markers that end them. Each
rule then looks for what must not be, and says for every case which kind it is, where, and what is
wrong with it; on a sound log all of them find nothing.

How the log compares with what the server lists of streams, producers and keys is in
`audit_lists.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

FACTS = (
    "stream string, offset string, version long, position long, timestamp timestamp,"
    " producer_id string, producer_epoch long, producer_seq long, size long, marker string"
)
DEFECTS = "kind string, stream string, position long, detail string"
ENDS = ("deleted", "expired")
"""Markers after which a stream of the same path is another one."""

KINDS = {
    "version_gap": "messages of a stream are missing",
    "version_repeated": "a stream has two messages of one version",
    "offset_broken": "an offset does not follow from the message before it",
    "beginning_missing": "a stream does not begin with its first message",
    "seq_gap": "batches of a producer are missing",
    "seq_repeated": "a batch of a producer was stored twice",
    "seq_disordered": "batches of a producer are stored in another order than they were sent",
    "epoch_stale": "a producer wrote in an epoch that had been fenced off",
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
    )
    return known if markers is None else known.unionByName(markers, allowMissingColumns=True)


def numbered(facts: DataFrame) -> DataFrame:
    """Facts with the `incarnation` of their stream, counted from 0 within the range."""
    before = (
        Window.partitionBy("stream").orderBy("position").rowsBetween(Window.unboundedPreceding, -1)
    )
    ended = F.sum(F.when(F.col("marker").isin(*ENDS), 1).otherwise(0)).over(before)
    return facts.withColumn("incarnation", F.coalesce(ended, F.lit(0)).cast("long"))


def messages_of(facts: DataFrame) -> DataFrame:
    return facts.where(F.col("marker").isNull())


def defect(kind: str, detail: Column) -> list[Column]:
    """The columns of a defect, for a DataFrame that has `stream` and `position`."""
    assert kind in KINDS, kind
    return [
        F.lit(kind).alias("kind"),
        F.col("stream"),
        F.col("position").cast("long"),
        detail.alias("detail"),
    ]


def said(template: str, *names: str) -> Column:
    """A sentence with the values of columns in it."""
    return F.format_string(template, *(F.col(name).cast("string") for name in names))


def union_of(found: Sequence[DataFrame]) -> DataFrame:
    whole = found[0]
    for one in found[1:]:
        whole = whole.unionByName(one)
    return whole


# Streams


def sequences(facts: DataFrame) -> DataFrame:
    """Versions and offsets of every stream are contiguous."""
    order = Window.partitionBy(*_OF_STREAM).orderBy("position")
    messages_before, bytes_before = _numbers(F.col("offset_before"))
    follows = F.format_string(
        "%016d_%016d", messages_before + 1, bytes_before + F.col("size_before")
    )
    linked = (
        messages_of(facts)
        .withColumn("version_before", F.lag("version").over(order))
        .withColumn("offset_before", F.lag("offset").over(order))
        .withColumn("size_before", F.lag("size").over(order))
        .where("version_before is not null")
        .withColumn("expected", follows)
    )
    next_to = F.col("version") == F.col("version_before") + 1
    return union_of(
        [
            linked.where("version > version_before + 1").select(
                *defect(
                    "version_gap",
                    said("version %s follows version %s", "version", "version_before"),
                )
            ),
            linked.where("version <= version_before").select(
                *defect(
                    "version_repeated",
                    said("version %s comes after version %s", "version", "version_before"),
                )
            ),
            linked.where(next_to & (F.col("offset") != F.col("expected"))).select(
                *defect("offset_broken", said("%s, expected %s", "offset", "expected"))
            ),
        ]
    )


def beginnings(facts: DataFrame, excused: DataFrame) -> DataFrame:
    """Every stream that is there as a whole begins with version 0.

    `excused` names streams whose beginning lies elsewhere: forks, and those whose first messages
    were dropped and purged.
    """
    first = (
        messages_of(facts)
        .groupBy(*_OF_STREAM)
        .agg(F.min("position").alias("position"), F.min_by("version", "position").alias("version"))
        .where("version > 0")
        .join(excused.select("stream").distinct(), "stream", "left_anti")
    )
    return first.select(*defect("beginning_missing", said("its first version is %s", "version")))


def _numbers(offset: Column) -> tuple[Column, Column]:
    """The two numbers of an offset: messages and payload bytes before it."""
    parts = F.split(offset, "_")
    return parts.getItem(0).cast("long"), parts.getItem(1).cast("long")


def end_of(offset: Column, size: Column) -> Column:
    """Where a message ends that starts at an offset."""
    messages, size_before = _numbers(offset)
    return F.format_string("%016d_%016d", messages + 1, size_before + size)


# Producers

_OF_PRODUCER = (*_OF_STREAM, "producer_id")
_OF_EPOCH = (*_OF_PRODUCER, "producer_epoch")


def batches_of(facts: DataFrame) -> DataFrame:
    """The batches of producers: each stretch of messages under one number of one epoch."""
    return (
        messages_of(facts)
        .where("producer_id is not null")
        .groupBy(*_OF_EPOCH, "producer_seq")
        .agg(
            F.count("*").alias("messages"),
            F.min("version").alias("first"),
            F.max("version").alias("last"),
            F.min("position").alias("position"),
            F.countDistinct("timestamp").alias("times"),
        )
    )


def producers(batches: DataFrame, excused: DataFrame) -> DataFrame:
    """For every producer and epoch: numbers are contiguous from 0, in order, none of them twice.

    `excused` names streams whose first messages are not there, so that numbers may begin later.
    """
    order = Window.partitionBy(*_OF_EPOCH).orderBy("producer_seq")
    linked = (
        batches.withColumn("seq_before", F.lag("producer_seq").over(order))
        .withColumn("first_before", F.lag("first").over(order))
        .withColumn("who", said("%s in epoch %s", "producer_id", "producer_epoch"))
    )
    begun = linked.where("seq_before is null and producer_seq > 0").join(
        excused.select("stream").distinct(), "stream", "left_anti"
    )
    missing = F.format_string(
        "%s: number %d follows %s",
        F.col("who"),
        F.col("producer_seq"),
        F.coalesce(F.col("seq_before").cast("string"), F.lit("nothing")),
    )
    torn = "messages != last - first + 1 or times > 1"
    return union_of(
        [
            linked.where("producer_seq > seq_before + 1").select(*defect("seq_gap", missing)),
            begun.select(*defect("seq_gap", missing)),
            linked.where(torn).select(
                *defect("seq_repeated", said("%s: number %s", "who", "producer_seq"))
            ),
            linked.where(f"first < first_before and not ({torn})").select(
                *defect(
                    "seq_disordered",
                    said(
                        "%s: number %s lies before number %s", "who", "producer_seq", "seq_before"
                    ),
                )
            ),
        ]
    )


def epochs(facts: DataFrame) -> DataFrame:
    """Once a producer has written in an epoch, nothing of a lower one is accepted."""
    before = (
        Window.partitionBy(*_OF_PRODUCER)
        .orderBy("position")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    sent = messages_of(facts).where("producer_id is not null")
    linked = sent.withColumn("raised", F.max("producer_epoch").over(before))
    return linked.where("producer_epoch < raised").select(
        *defect(
            "epoch_stale",
            said("%s wrote in epoch %s after %s", "producer_id", "producer_epoch", "raised"),
        )
    )


# Closures


def closures(facts: DataFrame) -> DataFrame:
    """A closed stream does not grow, and is closed once."""
    closed = (
        facts.where("marker = 'closed'")
        .groupBy(*_OF_STREAM)
        .agg(
            F.min("position").alias("closed_at"),
            F.max("position").alias("position"),
            F.count("*").alias("times"),
        )
    )
    later = (
        messages_of(facts)
        .join(closed.select(*_OF_STREAM, "closed_at"), [*_OF_STREAM])
        .where("position > closed_at")
    )
    return union_of(
        [
            later.select(
                *defect(
                    "written_after_close",
                    said("version %s came after the close at position %s", "version", "closed_at"),
                )
            ),
            closed.where("times > 1").select(
                *defect("closed_twice", said("%s markers say that it was closed", "times"))
            ),
        ]
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
