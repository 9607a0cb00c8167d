"""Where a query begins again whose checkpoint is lost or old, so that nothing is lost or doubled.

The history of a writer says which positions its last published batch was read from. A new query
that begins behind them, with a new checkpoint, under the same name, writes what was not written.
This holds for queries without state: what an aggregation or a join had gathered was in the
checkpoint, and is lost with it.
"""

from __future__ import annotations

import msgspec

from fencepost.client.sync import Client
from fencepost.pipeline.errors import PipelineError


class UnrecoverableError(PipelineError):
    """The server does not know where the query came to; the error says why."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sink came to, and the options to go on with."""

    sink: str
    query: str
    batch: int
    after: int | None
    """The last batch was read from the positions after this one; None if it began at the start."""
    until: int
    source_options: dict[str, str]
    sink_options: dict[str, str]


def recovery(client: Client, name: str) -> Recovery:
    """How to go on behind the last batch that the sink `name` published."""
    writer = client.writer(name)
    newest = next(iter(client.writer_history(name)), None)
    if newest is None or writer.batch is None:
        raise UnrecoverableError(
            f"sink {name!r} has published nothing: start the query with a new checkpoint and"
            " allowNewCheckpoint"
        )
    if newest.range is None:
        raise UnrecoverableError(
            f"batch {newest.batch} of sink {name!r} was published without the positions that it"
            " was read from: its checkpoint was no folder of the driver's machine, the write was"
            " inside foreachBatch, or the query had another source than one stream of Fencepost."
            " If the output carries position, start behind the newest one there"
        )
    return Recovery(
        sink=name,
        query=writer.query,
        batch=newest.batch,
        after=newest.range.after,
        until=newest.range.until,
        source_options={"startingPosition": str(newest.range.until + 1)},
        sink_options={"checkpointLocation": "a new folder", "allowNewCheckpoint": "true"},
    )
