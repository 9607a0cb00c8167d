"""The driver's half of a write: one commit of the parts that the winning tasks uploaded.

The server decides by the writer's name, query, epoch and batch whether a commit is new, before it
looks at parts. This module does what surrounds that decision: it takes the epoch of the run, puts
the parts in order, checks the bounds, and explains each refusal.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from pyspark.sql.datasource import WriterCommitMessage

from fencepost.client.errors import (
    ConnectionFailedError,
    PartError,
    ResponseError,
    StreamNotFoundError,
    TooLargeError,
    WriterFencedError,
    WriterHistoryGoneError,
    WriterNotFoundError,
    WriterQueryChangedError,
    WriterRangeMismatchError,
)
from fencepost.client.operations import CommitAppend, WriterBatch
from fencepost.client.results import Committed, WriterInfo
from fencepost.client.sync import Client
from fencepost.pipeline.checkpoints import batch_range
from fencepost.pipeline.errors import (
    CommitTooLargeError,
    ForgottenWriterError,
    MissingStreamError,
    OldCheckpointError,
    ReplayMismatchError,
    SinkError,
    SinkNameUsedError,
    StagingExpiredError,
)
from fencepost.pipeline.sink.chunks import RowSum, digest_text, merged
from fencepost.pipeline.sink.identity import (
    JOB_PREFIX,
    Identity,
    Note,
    RunFile,
    Start,
    checkpoint_query,
    fenced_run,
    new_checkpoint,
    notes_folder,
    own_folder,
    run_file,
    start_file,
)
from fencepost.pipeline.sink.options import SinkOptions
from fencepost.pipeline.sink.upload import COMMIT_STREAMS_MAX, SMALLER, StagedPart, drop

log = logging.getLogger("fencepost.pipeline.sink")

COMMIT_PARTS_MAX = 100_000
"""Parts of one batch: tasks times the streams each of them writes to."""
COMMIT_BYTES_MAX = 64 << 30
"""Payload bytes of one batch."""
RECOVER = (
    "Start the query with its newest checkpoint. If that is lost, `fencepost pipeline recover`"
    " shows the options from which nothing is lost or written twice"
)


@dataclass(slots=True)
class TaskWritten(WriterCommitMessage):
    """The message of one task to the driver."""

    partition: int
    identity: Identity | None
    parts: list[StagedPart]
    sums: dict[str, RowSum]
    payload_bytes: int
    start: Start
    published: bool
    """The batch was known to be published when it was planned, so that nothing was uploaded."""


def commit_written(
    options: SinkOptions, messages: Sequence[TaskWritten], *, write: str, batch: int | None = None
) -> None:
    """Publish what the tasks wrote, or find that it was published before."""
    ordered = sorted(messages, key=lambda message: message.partition)
    sums = merged(message.sums for message in ordered)
    appends = appends_of(options, [part for message in ordered for part in message.parts])
    check_bounds(appends, sum(message.payload_bytes for message in ordered))
    identity = ordered[0].identity if ordered else None
    if any(message.identity != identity for message in ordered):
        raise SinkError("the tasks of one write belong to different queries: report this")
    if identity is not None and batch is not None and identity.batch != batch:
        raise SinkError(f"tasks wrote batch {identity.batch} and Spark commits batch {batch}")
    with options.connection.client() as client:
        try:
            if identity is None:
                if appends:
                    client.commit(appends)
                return
            new = _commit_as(
                client,
                options,
                identity,
                appends,
                sums,
                write=write,
                start=ordered[0].start,
                published=any(message.published for message in ordered),
            )
            if not new:
                abort_written(options, ordered)  # the uploads are not needed
        except ResponseError as error:
            raise _explained(error, identity, appends) from error


def abort_written(options: SinkOptions, messages: Sequence[TaskWritten | None]) -> None:
    """Drop the uploads of a write that failed. What was published after all stays: see `drop`."""
    drop(
        options.connection,
        [part for message in messages if message is not None for part in message.parts],
    )


def appends_of(options: SinkOptions, parts: Sequence[StagedPart]) -> list[CommitAppend]:
    """One append for each stream, its parts in the order in which they are given."""
    by_stream: dict[str, list[tuple[str, str] | tuple[str, str, int]]] = {}
    for part in parts:
        by_stream.setdefault(part.stream, []).append((part.txn, part.part, part.chunks))
    return [
        CommitAppend(
            stream=stream,
            content_type=options.content_type,
            parts=found,
            auto_create=options.auto_create,
        )
        for stream, found in by_stream.items()
    ]


def check_bounds(appends: Sequence[CommitAppend], payload_bytes: int) -> None:
    """Refuse a batch that is more than one commit may hold."""
    parts = sum(len(append.parts) for append in appends)
    bounds = (
        ("streams", len(appends), "COMMIT_STREAMS_MAX", COMMIT_STREAMS_MAX),
        ("parts", parts, "COMMIT_PARTS_MAX", COMMIT_PARTS_MAX),
        ("bytes", payload_bytes, "COMMIT_BYTES_MAX", COMMIT_BYTES_MAX),
    )
    for what, count, name, most in bounds:
        if count > most:
            raise CommitTooLargeError(
                f"the batch has {count} {what}, and one commit takes {most} ({name}): {SMALLER}"
            )


def _commit_as(
    client: Client,
    options: SinkOptions,
    identity: Identity,
    appends: Sequence[CommitAppend],
    sums: Mapping[str, RowSum],
    *,
    write: str,
    start: Start,
    published: bool,
) -> bool:
    """Whether the batch was published now, and not before."""
    new = False
    with run_file(notes_folder(), options.connection.url, identity) as file:
        note = file.note
        if note.batch == identity.batch and note.write != write:
            raise SinkNameUsedError(
                f"the sinkName {identity.name!r} was used before in batch {identity.batch}: two"
                " writes of one foreachBatch need two names, or the second would be taken for a"
                " repetition of the first"
            )
        if note.epoch is None:
            _take_epoch(client, options, identity, file, start)
        assert note.epoch is not None
        batch = WriterBatch(
            name=identity.name,
            query=identity.query,
            epoch=note.epoch,
            batch=identity.batch,
            digest=digest_text(sums),
            range=batch_range(options.checkpoint, identity.batch),
        )
        done = (
            _replay(client, options, batch, sums)
            if published
            else client.commit(appends, writer=batch)
        )
        new = not done.duplicate
        if not new:
            is_known = batch.range is not None and done.range is not None
            _report_replay(options, identity, done.match, file, is_range_known=is_known)
        note.batch, note.write = identity.batch, write
        file.save()
    return new


def start_run(options: SinkOptions, known: WriterInfo | None, epoch: int | None) -> Start:
    """Take the epoch of a run before its first tasks begin, which ends every run before it.

    Spark does not tell the driver's side of a sink which query and run it plans for. The query id
    is in the checkpoint, if that is a folder of this machine; where it is not, the first commit
    takes the epoch, provided that no other run has begun since this moment. `epoch` is that of
    `known`, 0 without a writer, None when the server did not answer.
    """
    name = options.sink_name or options.stream
    query, folder = checkpoint_query(options.checkpoint), own_folder()
    batch = known.batch if known is not None and known.query == query else None
    start = Start(epoch, batch)
    if name is None or epoch is None or query is None or folder is None:
        return start
    if known is not None and known.query != query and not options.allow_new:
        return start  # the tasks refuse the new checkpoint
    with (
        start_file(folder, options.connection.url, name) as file,
        options.connection.client() as client,
    ):
        note = file.note
        if note.epoch is not None and note.query == query:
            if note.run is not None and note.epoch < epoch:
                return replace(start, ended_run=note.run)
            if note.run is not None or note.epoch == epoch:
                return start
        try:
            opened = client.open_writer(name, query, allow_new=options.allow_new, after=epoch)
        except WriterFencedError as error:
            return replace(start, fenced_by=error.epoch)
        except (ConnectionFailedError, ResponseError) as error:
            log.debug("the first commit will take the epoch: %s", error)
            return start
        file.note = Note(epoch=opened.epoch, query=query)
        file.save()
        return replace(start, epoch=opened.epoch)


def _take_epoch(
    client: Client, options: SinkOptions, identity: Identity, file: RunFile, start: Start
) -> None:
    """The epoch of a run that commits for the first time: the one of its start, or a new one."""
    folder = own_folder()
    taken, reached = None, start.batch
    with (
        start_file(folder, options.connection.url, identity.name)
        if folder is not None
        else nullcontext()
    ) as first:
        if first is not None and _is_start(first.note, identity, start):
            taken = first.note.epoch
        if taken is None:
            # A job has one batch, which is published once: there is nothing to fence.
            after = None if identity.name.startswith(JOB_PREFIX) else start.epoch
            opened = client.open_writer(
                identity.name, identity.query, allow_new=options.allow_new, after=after
            )
            taken, reached = opened.epoch, opened.batch
        if first is not None:
            first.note = Note(epoch=taken, query=identity.query, run=identity.run)
            first.save()
    file.note.epoch = taken
    file.save()
    if reached is not None and identity.batch < reached:
        log.warning(
            "the checkpoint of query %s is behind: it goes on with batch %d, and sink %r has"
            " published up to batch %d. Batches up to that one are compared with what was"
            " published, and fail the query if they were read from other positions",
            identity.query,
            identity.batch,
            identity.name,
            reached,
        )


def _is_start(note: Note, identity: Identity, start: Start) -> bool:
    """Whether a note is of the start that this batch was planned in, and no run has used it."""
    return note.query == identity.query and note.run is None and note.epoch == start.epoch


def _replay(
    client: Client, options: SinkOptions, batch: WriterBatch, sums: Mapping[str, RowSum]
) -> Committed:
    """Have the server compare, and count, a batch that it was known to have.

    Nothing was uploaded, so nothing may be published even if the record changed since: the commit
    names a part that does not exist, and the server looks for parts only if the batch is new to it.
    """
    unstaged = [
        CommitAppend(
            stream=stream,
            content_type=options.content_type,
            parts=[(f"replay-{secrets.token_hex(8)}", "none")],
            auto_create=options.auto_create,
        )
        for stream in [stream for stream, one in sums.items() if one.rows][:1]
    ]
    try:
        return client.commit(unstaged, writer=batch)
    except (PartError, StreamNotFoundError):
        raise ForgottenWriterError(
            f"the record of sink {batch.name!r} changed while batch {batch.batch} was on:"
            " start the query again, and the batch is written"
        ) from None


def _report_replay(
    options: SinkOptions,
    identity: Identity,
    match: bool | None,
    file: RunFile,
    *,
    is_range_known: bool,
) -> None:
    if match is None or match:
        log.info("batch %d of sink %r was published before", identity.batch, identity.name)
        return
    file.note.mismatches += 1
    file.save()
    what = (
        f"batch {identity.batch} of sink {identity.name!r} came again with other rows than those"
        f" that were published (mismatch {file.note.mismatches} of this run). The published ones"
        " stay. A query whose batches are not the same when they are repeated loses the"
        " difference: look for rand(), now(), or a changed transformation"
    )
    if options.on_mismatch == "fail" or (options.on_mismatch == "auto" and not is_range_known):
        raise ReplayMismatchError(f"{what}. Is the checkpoint an old one? {RECOVER}")
    log.warning(what)


def _explained(
    error: ResponseError,
    identity: Identity | None,
    appends: Sequence[CommitAppend],
) -> Exception:
    """A refusal of the server, in words for the person who runs the query."""
    # A replay was sent without the batch's own appends.
    stream = None if error.item is None or not appends else appends[error.item].stream
    match error:
        case WriterQueryChangedError() if identity is not None:
            return new_checkpoint(identity, error.query, error.batch)
        case WriterFencedError() if identity is not None:
            return fenced_run(identity, error.epoch)
        case WriterRangeMismatchError() if identity is not None:
            return OldCheckpointError(
                f"the checkpoint of query {identity.query} is older than what sink"
                f" {identity.name!r} has published (writer_range_mismatch): batch {identity.batch}"
                f" was published from the positions {_said(error.published)}, and the checkpoint"
                f" cuts it from {_said(error.sent)}. Nothing was written. {RECOVER}"
            )
        case WriterHistoryGoneError() if identity is not None:
            return OldCheckpointError(
                f"the checkpoint of query {identity.query} is older than the history of sink"
                f" {identity.name!r} (writer_history_gone): it goes on with batch"
                f" {identity.batch}, and batch {error.batch} was published. Nothing was written."
                f" {RECOVER}"
            )
        case WriterNotFoundError() if identity is not None:
            return ForgottenWriterError(
                f"the record of sink {identity.name!r} was removed while the query ran: nothing of"
                " this batch was written; start the query again"
            )
        case PartError() if error.code in ("part_missing", "part_incomplete"):
            return StagingExpiredError(
                "what the tasks uploaded is no longer there: the server keeps uploads for"
                " staging_ttl_s seconds, and the driver came later. Nothing of this batch was"
                f" written; start the query again, and {SMALLER}, or raise staging_ttl_s"
            )
        case TooLargeError() if error.code != "path_too_long":
            return CommitTooLargeError(f"the server refuses the commit: {error.detail}; {SMALLER}")
        case StreamNotFoundError():
            return MissingStreamError(
                f"there is no stream {stream!r}: make it, or set the option autoCreate to true"
            )
        case _:
            return error if stream is None else SinkError(f"stream {stream!r}: {error}")


def _said(read: Mapping[str, int | None] | None) -> str:
    found = read or {}
    after = found.get("after")
    return f"after {'its start' if after is None else after} up to {found.get('until')}"
