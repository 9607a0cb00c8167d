"""The sweep that gives stale claims back: every coordination stream, in bulk.

A claim is stale when its holder has been silent for longer than a time, by the server's clock. It
is raised to the next epoch through `fencepost.coordination`, over the very move that was seen
(Producer-If): a holder that speaks up in between keeps its task, and any number of sweeps may run
at once. What was reclaimed is available again and no longer stale, so a sweep that was stopped is
resumed by running it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from pyspark.sql import SparkSession

from fencepost.client.sync import Client
from fencepost.coordination import TaskClaims
from fencepost.coordination.rules.claims import Kind
from fencepost.pipeline.connection import connection_of
from fencepost.pipeline.jobs.sweeps.sweeps import Work, now_ms, on_executors
from fencepost.pipeline.options import Options

STALE_SECONDS = 60.0
OWNER = "fencepost-reclaim"
KINDS: tuple[Kind, ...] = get_args(Kind)

_GIVEN = "stream string, kind string"
_MADE = (
    "stream string, kind string, task string, owner string, epoch long, silent_seconds double,"
    " outcome string, error string"
)
Outcome = Literal["stale", "reclaimed", "kept", "failed"]


class StaleClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim whose holder was silent, and what became of it.

    `stale` is what a dry run says; `kept` that its holder or another actor was faster, or that the
    server's rules do not take the holder for gone yet; `failed` that the stream refused, in which
    case there may be no task.
    """

    stream: str
    kind: Kind
    outcome: Outcome
    task: str | None = None
    owner: str | None = None
    epoch: int | None = None
    silent_seconds: float | None = None
    error: str | None = None


def reclaim(
    spark: SparkSession,
    *,
    match: str = "**",
    kinds: Sequence[Kind] = KINDS,
    timeout: float = STALE_SECONDS,
    owner: str = OWNER,
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[StaleClaim]:
    """Make tasks available again whose holders have been silent; what was found, by stream.

    Args:
        match: Which streams, by pattern.
        kinds: `task`, `tool`, or both.
        timeout: How many seconds of silence make a claim stale.
        owner: Who we are, for those who read the stream.
        dry_run: Only find out.
        options: How to reach the server: url, token and the like.
    """
    connection = connection_of(Options({key: str(one) for key, one in (options or {}).items()}))
    with connection.client() as client:
        candidates = _candidates(client, match, kinds, timeout)
    work = _working(timeout, owner, dry_run)
    made = on_executors(spark, connection, candidates, _GIVEN, _MADE, work)
    found = [
        StaleClaim(**{**row, "outcome": row["outcome"] or "failed"})
        for row in made
        if row["task"] is not None or row["error"] is not None
    ]
    return sorted(found, key=lambda one: (one.stream, one.kind, one.task or ""))


def _candidates(
    client: Client, match: str, kinds: Sequence[Kind], timeout: float
) -> list[tuple[str, Kind]]:
    """Streams with a claim that nobody has moved for so long, which says nothing of its state."""
    latest = now_ms(client) - timeout * 1000
    found = {
        (one.stream, kind)
        for kind in kinds
        for one in client.producers(stream=match, match=f"{kind}:*")
        if timeout <= 0 or one.updated is None or one.updated.timestamp() * 1000 <= latest
    }
    return sorted(found)


def _working(timeout: float, owner: str, dry_run: bool) -> Work:
    def work(client: Client, row: dict[str, Any]) -> list[dict[str, Any]]:
        claims = TaskClaims(client.stream(row["stream"]), owner, kind=row["kind"])
        stale = claims.stale(timeout)
        if not stale:
            return []
        now = now_ms(client) / 1000
        taken = set() if dry_run else set(claims.reclaim_stale(timeout))
        missed: Outcome = "stale" if dry_run else "kept"
        return [
            {
                **row,
                "task": one.task,
                "owner": one.owner,
                "epoch": one.epoch,
                "silent_seconds": max(0.0, now - one.updated.timestamp()),
                "outcome": "reclaimed" if one.task in taken else missed,
            }
            for one in stale
        ]

    return work
