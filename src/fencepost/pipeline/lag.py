"""How far consumers are behind: queries by their checkpoints, tables by their commits, groups.

A query's checkpoint is a folder of small files: for each batch the positions where it ends, written
before the batch, and a note once the batch is done. The newest batch with such a note is what the
query has certainly done. Reading either needs no Spark, and the query need not run. The server then
says what is behind: the positions up to its head, and the messages among them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from fencepost.client.errors import BadRequestError, GroupNotFoundError
from fencepost.client.sync import Client
from fencepost.pipeline.backlog import Backlog
from fencepost.pipeline.errors import PipelineError
from fencepost.pipeline.options import Selection
from fencepost.pipeline.tables.files import DEFINITION, defined
from fencepost.pipeline.tables.manifests import ManifestBook

NOTHING_YET = -1


class CheckpointError(PipelineError):
    """A folder is neither a checkpoint of a query over Fencepost nor one of tables."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """How far a consumer is."""

    place: str
    kind: Literal["query", "table"]
    position: int
    """Everything up to here is done; -1 when nothing is."""
    batch: int | None = None
    query: str | None = None
    streams: tuple[str, ...] = ()
    match: str | None = None


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a consumer is behind the head of the log."""

    place: str
    kind: str
    position: int
    head: int
    messages: int
    """Messages of its selection that it has not done; of a group at most so many."""
    bytes: int
    """Their payload. Of a group only that of messages whose targets it does not know yet."""
    seconds: float | None = None
    """The age of the oldest of them, by this machine's clock; not known of a group."""
    batch: int | None = None
    query: str | None = None
    selection: str


def reached(place: Path) -> list[Reached]:
    """How far the consumer whose folder this is has come; of a query, for each of its sources."""
    if (place / DEFINITION).is_file():
        return [_table(place)]
    if (place / "offsets").is_dir():
        return list(_query(place))
    raise CheckpointError(
        f"{place} is no checkpoint of a query and no folder of tables: give the folder that is the"
        " option checkpointLocation of the query, or that a table was made in"
    )


def lag(client: Client, consumer: Reached, match: str | None = None) -> Lag:
    """Count the messages that a consumer has not done yet.

    A table knows its streams. A checkpoint does not say which ones its query reads: `match` does,
    or everything counts.
    """
    streams = consumer.streams
    pattern = None if streams else consumer.match or match or "**"
    head = client.log_head()
    if consumer.position > head:
        raise CheckpointError(
            f"{consumer.place} is at position {consumer.position}, and the log of this server ends"
            f" at {head}: it belongs to another server, or this one was restored from a backup"
        )
    behind = Backlog(Selection(consumer.streams, pattern), consumer.position, consumer.position)
    behind.count(client)
    return Lag(
        place=consumer.place,
        kind=consumer.kind,
        position=consumer.position,
        head=behind.until,
        messages=behind.rows,
        bytes=behind.bytes,
        seconds=round(behind.seconds(client), 3),
        batch=consumer.batch,
        query=consumer.query,
        selection=pattern or ", ".join(streams),
    )


def lags(client: Client, place: str, match: str | None = None) -> list[Lag]:
    """How far the consumer behind a folder, or the group of this name, is behind."""
    folder = Path(place)
    if folder.exists():
        return [lag(client, one, match) for one in reached(folder)]
    try:
        return [_group(client, place)]
    except (GroupNotFoundError, BadRequestError):
        raise CheckpointError(
            f"there is no folder {place} on this machine, and no group of this name on the server:"
            " give a folder of tables, the checkpoint of a query, or the name of a group"
        ) from None


def _group(client: Client, name: str) -> Lag:
    """What waits for a group's targets, and what it has not looked at yet."""
    group = client.group(name)
    info, stats = group.info(), group.stats()
    head = client.log_head()
    unseen = client.plan(after=min(info.correlated, head), until=head, match=info.sources)
    return Lag(
        place=name,
        kind="group",
        position=info.correlated,
        head=head,
        messages=stats["lag"] + unseen.rows,
        bytes=unseen.bytes,
        selection=", ".join(info.sources),
    )


def _table(place: Path) -> Reached:
    definition = defined(place)
    if definition["format"] == "parquet":
        contents = ManifestBook(place).load()
    else:
        from fencepost.pipeline.tables.delta import DeltaBook

        contents = DeltaBook(place).load()
    return Reached(
        place=str(place),
        kind="table",
        position=contents.position,
        batch=contents.batch,
        query=contents.query,
        streams=tuple(definition["streams"]),
        match=definition["match"],
    )


def _query(place: Path) -> Iterator[Reached]:
    done = _newest(place / "commits")
    query = _query_id(place)
    if done is None:
        yield Reached(place=str(place), kind="query", position=NOTHING_YET, query=query)
        return
    sources = list(_sources(place / "offsets" / str(done)))
    if not sources:
        raise CheckpointError(
            f"{place} is the checkpoint of a query that does not read Fencepost: there is no"
            " position in it"
        )
    for position in sources:
        yield Reached(place=str(place), kind="query", position=position, batch=done, query=query)


def _newest(folder: Path) -> int | None:
    """The number of the newest batch that a folder of a checkpoint has a file for."""
    if not folder.is_dir():
        return None
    return max((int(one.name) for one in folder.iterdir() if one.name.isdigit()), default=None)


def _sources(file: Path) -> Iterator[int]:
    """The positions in a file of offsets: a version, a line about the batch, a line per source."""
    try:
        lines = file.read_text().splitlines()[2:]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    for line in lines:
        try:
            offset: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(offset, dict) and isinstance(offset.get("position"), int):
            yield offset["position"]
        elif isinstance(offset, dict) and "start" in offset:
            yield NOTHING_YET


def _query_id(place: Path) -> str | None:
    try:
        found = json.loads((place / "metadata").read_text())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)
