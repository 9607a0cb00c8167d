"""The log against the server's lists: streams, producers and keys correspond to messages.

Lists are read while the server goes on writing, so each is taken between two looks at the head of
the log: what lies at or below `settled` was there before the list, what lies above `until` came
after it. A list may say anything between the two, and nothing else.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from fencepost.pipeline.audit_rules import batches_of, defect, end_of, messages_of, said, union_of

STREAM_LIST = "stream string, version long, tail string, closed boolean, forked boolean"
PRODUCER_LIST = "stream string, producer_id string, epoch long, seq long"
KEY_LIST = "stream string, incarnation long, key string, offset string, position long"


def live(facts: DataFrame) -> DataFrame:
    """The facts of incarnations that were not ended within the range."""
    last = facts.groupBy("stream").agg(
        F.max(
            F.col("incarnation")
            + F.when(F.col("marker").isin("deleted", "expired"), 1).otherwise(0)
        ).alias("incarnation")
    )
    return facts.join(last, ["stream", "incarnation"])


def streams(facts: DataFrame, listed: DataFrame, excused: DataFrame, settled: int) -> DataFrame:
    """Every stream is listed as long as it is, and as closed as it is.

    `excused` names streams of which messages were purged: then only what is there is compared.
    """
    present = live(facts)
    closed = F.col("marker") == "closed"
    log = present.groupBy("stream").agg(
        F.max(F.when(F.col("position") <= settled, F.col("version"))).alias("settled_version"),
        F.max("version").alias("newest_version"),
        F.max("position").alias("position"),
        F.max(F.when(closed & (F.col("position") <= settled), True)).alias("settled_closed"),
        F.max(F.when(closed, True)).alias("ever_closed"),
    )
    both = listed.withColumn("listed", F.lit(True)).join(log, "stream", "full")
    there = both.where("listed")
    partial = excused.select("stream").distinct()
    absent = both.where("listed is null and settled_version is not null")
    unseen = F.coalesce(F.col("newest_version"), F.lit(-1))
    longer = there.where((F.col("version") > unseen) & ~(F.col("forked") & (unseen < 0))).join(
        partial, "stream", "left_anti"
    )
    tails = messages_of(present).select(
        "stream", "version", end_of(F.col("offset"), F.col("size")).alias("end")
    )
    ends = there.join(tails, ["stream", "version"]).where("tail != end")
    return union_of(
        [
            absent.select(
                *defect("stream_lost", said("its last version is %s", "settled_version"))
            ),
            longer.select(
                *defect(
                    "tail_missing",
                    F.format_string(
                        "version %d is listed, %d is the last one", F.col("version"), unseen
                    ),
                )
            ),
            there.where("version < settled_version").select(
                *defect(
                    "tail_behind",
                    said("version %s is listed, %s is in the log", "version", "settled_version"),
                )
            ),
            ends.select(
                *defect("tail_wrong", said("%s, its last message ends at %s", "tail", "end"))
            ),
            there.where("settled_closed and not closed").select(
                *defect("closure_lost", F.lit("it was closed, and is listed as open"))
            ),
            there.where("closed and ever_closed is null")
            .join(partial, "stream", "left_anti")
            .select(*defect("closure_unmarked", F.lit("it is listed as closed"))),
        ]
    )


def producers(
    facts: DataFrame, listed: DataFrame, excused: DataFrame, settled: int, *, forgetting: bool
) -> DataFrame:
    """Every producer is listed where its newest batch is.

    With `forgetting` the server lets producers go that are long silent, so that one which is not
    listed is no defect.
    """
    present = live(facts)
    # A bare close takes a number and leaves no message, only the marker.
    ends = (
        present.where("marker = 'closed'")
        .select("stream")
        .distinct()
        .withColumn("closes", F.lit(1))
    )
    place = F.struct("producer_epoch", "producer_seq")
    log = (
        batches_of(present)
        .groupBy("stream", "producer_id")
        .agg(
            F.max(place).alias("newest"),
            F.max(F.when(F.col("position") <= settled, place)).alias("settled"),
            F.max("position").alias("position"),
        )
        .join(ends, "stream", "left")
    )
    names = ["stream", "producer_id"]
    both = log.join(listed.withColumn("listed", F.lit(True)), names, "full")
    where = F.struct(F.col("epoch").alias("producer_epoch"), F.col("seq").alias("producer_seq"))
    both = both.withColumn("place", where)
    closing = F.struct(
        F.col("newest.producer_epoch").alias("producer_epoch"),
        (F.col("newest.producer_seq") + F.col("closes")).alias("producer_seq"),
    )
    ahead = both.where(
        F.col("listed")
        & (F.col("newest").isNull() | (F.col("place") > F.col("newest")))
        & ~F.coalesce(F.col("place") == closing, F.lit(False))
        & ~(F.col("newest").isNull() & F.col("stream").isNull())
    ).join(ends.select("stream", F.lit(True).alias("ended")), "stream", "left")
    # A producer whose only request was a bare close has no message at all.
    ahead = ahead.where("not (newest is null and ended is not null and seq = 0)").join(
        excused.select("stream").distinct(), "stream", "left_anti"
    )
    shown = F.format_string(
        "%s is listed at %s.%s, its newest batch is %s.%s",
        F.col("producer_id"),
        *(
            F.coalesce(F.col(name).cast("string"), F.lit("-"))
            for name in ("epoch", "seq", "newest.producer_epoch", "newest.producer_seq")
        ),
    )
    found = [
        ahead.select(*defect("producer_ahead", shown)),
        both.where(F.col("listed") & (F.col("place") < F.col("settled"))).select(
            *defect("producer_behind", shown)
        ),
    ]
    if not forgetting:
        lost = both.where("listed is null and settled is not null")
        found.append(lost.select(*defect("producer_lost", said("%s is not listed", "producer_id"))))
    return union_of(found)


def keys(facts: DataFrame, listed: DataFrame, pruned: int) -> DataFrame:
    """Every key of a stream stands for one append of it, and no two for the same.

    A key points at the last message of its append, or at a marker when it only closed. What lies
    at or below `pruned` may be gone, with right.
    """
    asked = listed.where(F.col("stream").isNotNull())
    places = facts.select(
        "stream", "position", F.col("offset").alias("found"), F.lit(True).alias("there")
    )
    linked = asked.join(places, ["stream", "position"], "left")
    starts = facts.select("stream", "offset", F.lit(True).alias("starts")).distinct()
    wrong = (
        linked.where("there")
        .join(starts, ["stream", "offset"], "left")
        .where("starts is null or offset > found")
    )
    same = (
        asked.groupBy("stream", "incarnation", "position")
        .agg(F.count("*").alias("keys"), F.min("key").alias("one"), F.max("key").alias("other"))
        .where("keys > 1")
    )
    return union_of(
        [
            linked.where(F.col("there").isNull() & (F.col("position") > pruned)).select(
                *defect("key_without_message", said("key %s", "key"))
            ),
            wrong.where(F.col("position") > pruned).select(
                *defect(
                    "key_offset_wrong",
                    said("key %s tells %s, its message starts at %s", "key", "offset", "found"),
                )
            ),
            same.select(*defect("key_repeated", said("keys %s and %s", "one", "other"))),
        ]
    )
