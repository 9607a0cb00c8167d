"""Rules about writers: what the server says of them, held against their histories and the log.

A writer's own row says which batch was published last; its history has a row for each batch; and
what a batch published are messages of the log, all of one moment. Where these disagree, a batch
that comes again would be taken for published although it was not, or be published twice.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from fencepost.client.results import PublishedBatch, WriterInfo
from fencepost.client.sync import Client
from fencepost.pipeline.audit.rules import Case, defects_in, messages_of, said

BATCHES_MAX = 1_000
"""Batches of each writer that are compared with the log: the newest ones."""
WRITER_LIST = (
    "stream string, position long, batch long, newest long, digest string, newest_digest string"
)
BATCH_LIST = (
    "stream string, position long, batch long, published_ms long, rows long, head long, until long"
)
_ROWS = re.compile(r"v1 rows=(\d+) ")


class WriterRow(NamedTuple):
    """A writer, and the newest batch of its history."""

    name: str
    position: None
    batch: int | None
    newest: int | None
    digest: str | None
    newest_digest: str | None


class BatchRow(NamedTuple):
    """A batch of a writer; `rows` is what its digest says, None of a digest of another kind."""

    name: str
    position: None
    batch: int
    published_ms: int
    rows: int | None
    head: int
    until: int | None


class ListedWriters(NamedTuple):
    """Every writer, and the newest batches of each."""

    writers: list[WriterRow]
    batches: list[BatchRow]


NO_WRITERS = ListedWriters([], [])


def listed(client: Client) -> ListedWriters:
    """What the server says of writers. One that publishes meanwhile is asked for again."""
    writers: list[WriterRow] = []
    batches: list[BatchRow] = []
    for known in client.writers():
        writer, history = _settled(client, known)
        newest = history[0] if history else None
        writers.append(
            WriterRow(
                writer.name,
                None,
                writer.batch,
                None if newest is None else newest.batch,
                writer.digest,
                None if newest is None else newest.digest,
            )
        )
        head = client.log_head()
        for one in history:
            rows = _ROWS.match(one.digest or "")
            until = None if one.range is None else one.range.until
            batches.append(
                BatchRow(
                    writer.name,
                    None,
                    one.batch,
                    one.published_ms,
                    int(rows[1]) if rows else None,
                    head,
                    until,
                )
            )
    return ListedWriters(writers, batches)


def _settled(client: Client, known: WriterInfo) -> tuple[WriterInfo, list[PublishedBatch]]:
    """A writer and its history, from between two batches of it."""
    while True:
        history = _newest(client, known.name)
        again = client.writer(known.name)
        if (again.epoch, again.batch) == (known.epoch, known.batch):
            return again, history
        known = again


def _newest(client: Client, name: str) -> list[PublishedBatch]:
    found: list[PublishedBatch] = []
    for one in client.writer_history(name):
        found.append(one)
        if len(found) == BATCHES_MAX:
            break
    return found


def writers(listed_writers: DataFrame) -> DataFrame:
    """Every writer came to the newest batch of its history, with its digest."""
    batch, newest = F.coalesce("batch", F.lit(-1)), F.coalesce("newest", F.lit(-1))
    return defects_in(
        listed_writers,
        Case(
            "writer_ahead",
            batch > newest,
            said("it says that it came to batch %s, and its history to %s", "batch", "newest"),
        ),
        Case(
            "writer_behind",
            batch < newest,
            said("it says that it came to batch %s, and its history to %s", "batch", "newest"),
        ),
        Case(
            "writer_digest_wrong",
            (batch == newest) & ~F.col("digest").eqNullSafe(F.col("newest_digest")),
            said("batch %s is %s, and in its history %s", "batch", "digest", "newest_digest"),
        ),
    )


def batches(facts: DataFrame, listed_batches: DataFrame, *, pruned: bool) -> DataFrame:
    """What a batch published is in the log: so many messages of its moment, or more by others.

    With `pruned` messages left the log with right, and nothing can be said of how many there were.
    """
    at = F.unix_millis("timestamp").alias("published_ms")
    there = messages_of(facts).groupBy(at).agg(F.count("*").alias("there"))
    both = listed_batches.join(there, "published_ms", "left").withColumn(
        "there", F.coalesce("there", F.lit(0))
    )
    return defects_in(
        both,
        Case(
            "writer_rows_missing",
            F.lit(not pruned) & (F.col("there") < F.col("rows")),
            said("batch %s published %s rows, the log has %s", "batch", "rows", "there"),
        ),
        Case(
            "writer_range_ahead",
            F.col("until") > F.col("head"),
            said("batch %s was read up to %s, the log ends at %s", "batch", "until", "head"),
        ),
    )
