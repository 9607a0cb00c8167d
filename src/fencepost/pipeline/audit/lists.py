"""Rules that compare the log with the server's lists of streams, producers and keys.

The lists are read while the server goes on writing, each between two looks at the head of the log:
messages at or below `settled` were there before the list, messages above `until` came after it. A
list may say anything between the two, and nothing else.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from fencepost.pipeline.audit.rules import Case, defects_in, end_of, flagged, said

STREAM_LIST = "stream string, version long, tail string, closed boolean, forked boolean"
PRODUCER_LIST = "stream string, producer_id string, epoch long, seq long"
KEY_LIST = "stream string, incarnation long, key string, offset string, position long"


def streams(facts: DataFrame, listed: DataFrame, cut: DataFrame, settled: int) -> DataFrame:
    """Every stream is listed as long as it is, begins at its beginning, is as closed as it is.

    `cut` names streams of which messages were purged: then only what is there is compared.
    """
    early = F.col("position") <= settled
    closes = F.col("marker") == "closed"
    last = F.struct("version", end_of(F.col("offset"), F.col("size")).alias("end"))
    is_message = F.col("marker").isNull()
    log = (
        facts.where("live")
        .groupBy("stream")
        .agg(
            F.max("position").alias("position"),
            F.min("version").alias("first"),
            F.max(F.when(is_message & early, last)).alias("before"),
            F.max(F.when(is_message, last)).alias("after"),
            F.max(F.when(closes & early, True)).alias("closed_before"),
            F.max(F.when(closes, True)).alias("closed_after"),
        )
    )
    both = listed.withColumn("listed", F.lit(True)).join(log, "stream", "full")
    both = flagged(both, cut, "cut").withColumn(
        "newest", F.coalesce(F.col("after.version"), F.lit(-1))
    )
    version, there = F.col("version"), F.col("listed")
    whole = there & ~F.col("cut")
    ended = F.when(version == F.col("newest"), F.col("after.end")).otherwise(
        F.when(version == F.col("before.version"), F.col("before.end"))
    )
    both = both.withColumn("ended", ended)
    return defects_in(
        both,
        Case(
            "beginning_missing",
            whole & ~F.col("forked") & (F.col("first") > 0),
            said("its first version is %s", "first"),
        ),
        Case(
            "stream_lost",
            there.isNull() & F.col("before").isNotNull(),
            said("its last version is %s", "before.version"),
        ),
        Case(
            "tail_missing",
            whole & (version > F.col("newest")) & ~(F.col("forked") & (F.col("newest") < 0)),
            said("version %s is listed, %s is the last one", "version", "newest"),
        ),
        Case(
            "tail_behind",
            there & (version < F.col("before.version")),
            said("version %s is listed, %s is in the log", "version", "before.version"),
        ),
        Case(
            "tail_wrong",
            there & (F.col("tail") != F.col("ended")),
            said("%s, its last message ends at %s", "tail", "ended"),
        ),
        Case(
            "closure_lost",
            there & F.col("closed_before") & ~F.col("closed"),
            F.lit("it was closed, and is listed as open"),
        ),
        Case(
            "closure_unmarked",
            whole & F.col("closed") & F.col("closed_after").isNull(),
            F.lit("it is listed as closed, and no marker says so"),
        ),
    )


def producers(
    facts: DataFrame,
    batches: DataFrame,
    listed: DataFrame,
    cut: DataFrame,
    settled: int,
    *,
    forgetting: bool,
) -> DataFrame:
    """Every producer is listed where its newest batch is.

    With `forgetting` the server lets producers go that are long silent, so that one which is not
    listed is no defect.
    """
    place = F.struct("producer_epoch", "producer_seq")
    log = (
        batches.where("live")
        .groupBy("stream", "producer_id")
        .agg(
            F.max(F.when(F.col("position") <= settled, place)).alias("before"),
            F.max(place).alias("after"),
            F.max("position").alias("position"),
        )
    )
    told = listed.withColumn("listed", F.lit(True)).withColumn(
        "place",
        F.struct(F.col("epoch").alias("producer_epoch"), F.col("seq").alias("producer_seq")),
    )
    both = log.join(told, ["stream", "producer_id"], "full")
    closed = facts.where("live and marker = 'closed'")
    both = flagged(flagged(both, cut, "cut"), closed, "closed")
    # A bare close takes a number and leaves no message; it may be the first of its epoch.
    bare = F.col("closed") & (
        (F.col("seq") == 0)
        | (
            (F.col("epoch") == F.col("after.producer_epoch"))
            & (F.col("seq") == F.col("after.producer_seq") + 1)
        )
    )
    ahead = F.col("after").isNull() | (F.col("place") > F.col("after"))
    where = said(
        "%s is listed at %s.%s, its newest batch is %s.%s",
        *("producer_id", "epoch", "seq", "after.producer_epoch", "after.producer_seq"),
    )
    lost = F.col("listed").isNull() & F.col("before").isNotNull() & F.lit(not forgetting)
    return defects_in(
        both,
        Case("producer_ahead", F.col("listed") & ahead & ~bare & ~F.col("cut"), where),
        Case("producer_behind", F.col("listed") & (F.col("place") < F.col("before")), where),
        Case("producer_lost", lost, said("%s is not listed", "producer_id")),
    )


def keys(facts: DataFrame, listed: DataFrame, pruned: int) -> DataFrame:
    """Every key of a stream stands for one append of it, and no two for the same.

    A key points at the last message of its append, or at a marker when it only closed. What lies
    at or below `pruned` may be gone, with right.
    """
    same = Window.partitionBy("stream", "incarnation", "position")
    asked = listed.withColumn("keys", F.count("*").over(same))
    places = facts.select("stream", "position", F.col("offset").alias("found"))
    linked = asked.join(places, ["stream", "position"], "left")
    kept = F.col("position") > pruned
    return defects_in(
        linked,
        Case("key_without_message", kept & F.col("found").isNull(), said("key %s", "key")),
        Case(
            "key_offset_wrong",
            kept & (F.col("offset") > F.col("found")),
            said("key %s tells %s, its message starts at %s", "key", "offset", "found"),
        ),
        Case("key_repeated", F.col("keys") > 1, said("key %s is one of %s", "key", "keys")),
    )
