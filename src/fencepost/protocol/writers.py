"""Writers: who publishes numbered batches by commits, in which run, and how far it came.

A writer is a name that outlives the processes behind it. Opening a run raises its epoch, which ends
every run before; a commit says which batch it publishes, and that number is stored with the
messages. So a batch that is sent again changes nothing, however often, by whomever and whatever has
become of its parts since; and a process that was replaced without noticing is refused. A name is
bound to one query, because another one counts its batches anew: with numbers that begin again,
silence would take new batches for old ones.

What a writer published is kept as its history, a row per batch. A batch that comes again is
compared with its row. When the positions that it was read from are others, the process behind it
goes on from an old record of its progress: to call the batch done would lose the rows that only the
new one has.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.protocol.groups import LimitExceeded


class Writer(NamedTuple):
    """A writer as it is kept: it stays until a request forgets it."""

    name: str
    principal: str
    """The principal that opened the writer first, and owns it."""
    query: str
    epoch: int
    batch: int | None
    """The last batch that was published; None before the first."""
    digest: str | None
    """The digest of that batch's content, as its publisher gave it."""
    opened_ms: int
    updated_ms: int


class PositionRange(NamedTuple):
    """Positions of the log that a batch was read from: those after `after`, up to `until`."""

    after: int | None
    """None when the publisher does not know where its first batch began."""
    until: int


class PublishedBatch(NamedTuple):
    """A batch in the history of a writer."""

    batch: int
    range: PositionRange | None
    digest: str | None
    published_ms: int


class WriterOpen(NamedTuple):
    """A run of a writer begins."""

    name: str
    query: str
    allow_new: bool = False
    """Whether another query than the known one may take the name over."""
    principal: str = ""
    overrides: bool = False
    """Sent by an administrator: the writer need not be theirs."""
    after: int | None = None
    """Begin only if the writer still has this epoch, 0 if there was no writer: a process that was
    asleep since it asked for the epoch must not end a run that began meanwhile."""


class WriterBatch(NamedTuple):
    """The batch that a commit publishes, and its principal."""

    name: str
    query: str
    epoch: int
    batch: int
    digest: str | None = None
    principal: str = ""
    overrides: bool = False
    range: PositionRange | None = None
    """The positions that the batch was read from, if its publisher knows them."""


class NextBatch(NamedTuple):
    """The batch is new: the writer, and the row of its history, once the batch is published."""

    writer: Writer
    published: PublishedBatch


class WriterOpened(NamedTuple):
    """The run may begin, behind the batch that the writer came to."""

    writer: Writer


class WriterMissing(NamedTuple):
    """No writer of this name was opened, or it was forgotten."""


class WriterHeld(NamedTuple):
    """The writer is another principal's."""


class WriterQueryChanged(NamedTuple):
    """The name belongs to another query, which came to this batch."""

    query: str
    batch: int | None


class WriterFenced(NamedTuple):
    """A newer run of this writer has begun; or this one never did."""

    epoch: int


class WritersFull(NamedTuple):
    """There are as many writers as there may be."""

    writers_max: int


class BatchDone(NamedTuple):
    """The batch was published before. The writer came to `batch`.

    `matches` compares the digests when both of them are known. `range` are the positions that the
    published batch was read from, if they are known.
    """

    batch: int
    matches: bool | None
    range: PositionRange | None = None


class WriterRangeMismatch(NamedTuple):
    """A batch of this number was published, and it was read from other positions."""

    batch: int
    published: PositionRange
    sent: PositionRange


class WriterHistoryGone(NamedTuple):
    """The batch is not new, and no row of the history tells what was published under its number.

    Its row was dropped, or its number was left out. The writer came to `batch`.
    """

    batch: int


class WriterForgotten(NamedTuple):
    """The writer is no more."""


WriterRefusal = WriterMissing | WriterHeld | WriterQueryChanged | WriterFenced
BatchRefusal = WriterRefusal | WriterRangeMismatch | WriterHistoryGone
WriterOpenOutcome = WriterOpened | WriterRefusal | WritersFull | LimitExceeded
WriterForgetOutcome = WriterForgotten | WriterMissing


def decide_writer_open(
    current: Writer | None, request: WriterOpen, *, now_ms: int
) -> WriterOpened | WriterRefusal:
    """What becomes of a writer when a run is opened. Every run has an epoch of its own."""
    if current is None:
        if request.after:
            return WriterMissing()
        return WriterOpened(
            Writer(request.name, request.principal, request.query, 1, None, None, now_ms, now_ms)
        )
    if not may_use(current, request.principal, overrides=request.overrides):
        return WriterHeld()
    opened = current._replace(epoch=current.epoch + 1, opened_ms=now_ms, updated_ms=now_ms)
    if current.query != request.query and not request.allow_new:
        return WriterQueryChanged(current.query, current.batch)
    if request.after is not None and request.after != current.epoch:
        return WriterFenced(current.epoch)
    if current.query == request.query:
        return WriterOpened(opened)
    return WriterOpened(opened._replace(query=request.query, batch=None, digest=None))


def decide_writer_batch(
    current: Writer | None,
    request: WriterBatch,
    *,
    published: PublishedBatch | None,
    now_ms: int,
) -> NextBatch | BatchDone | BatchRefusal:
    """What is to be published; or why there is nothing to publish.

    `published` is the row of the history for the number of this batch, if there is one.
    """
    if current is None:
        return WriterMissing()
    if not may_use(current, request.principal, overrides=request.overrides):
        return WriterHeld()
    if current.query != request.query:
        return WriterQueryChanged(current.query, current.batch)
    if current.epoch != request.epoch:
        return WriterFenced(current.epoch)
    if current.batch is None or request.batch > current.batch:
        return NextBatch(
            current._replace(batch=request.batch, digest=request.digest, updated_ms=now_ms),
            PublishedBatch(request.batch, request.range, request.digest, now_ms),
        )
    if published is None:
        if request.batch < current.batch:
            return WriterHistoryGone(current.batch)
        # A node of an older release published it, and wrote no history.
        published = PublishedBatch(current.batch, None, current.digest, current.updated_ms)
    return _decide_replay(published, request, last=current.batch)


def _decide_replay(
    published: PublishedBatch, request: WriterBatch, *, last: int
) -> BatchDone | WriterRangeMismatch:
    before, now = published.range, request.range
    if before is not None and now is not None and before != now:
        return WriterRangeMismatch(request.batch, before, now)
    digests = (published.digest, request.digest)
    matches = None if None in digests else digests[0] == digests[1]
    return BatchDone(last, matches, published.range)


def may_use(writer: Writer, principal: str, *, overrides: bool) -> bool:
    """Whether a principal may open, show, use and forget a writer."""
    return overrides or writer.principal == principal
