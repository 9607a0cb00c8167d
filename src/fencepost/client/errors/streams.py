"""Refusals of reads and writes: streams, the log, producers and their numbers, commits, writers."""

from __future__ import annotations

from fencepost.client.errors.refusals import (
    ConflictError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    PreconditionFailedError,
    RateLimitedError,
    ResponseError,
)


class ProducerHeldError(ForbiddenError):
    """Another principal opened this epoch of the producer id, and only it may go on in it.

    For a claim: it is another principal's. Wait until it ends, or take over what is stale.
    """


class EpochGuardedError(ForbiddenError):
    """The server lets you not raise this epoch, or not yet: see `retry_after`.

    The rule for the producer id says when an epoch may be raised (`raising`, `stale_after_s`). Wait
    for at least as long, or have an administrator do it, with a reason.
    """


class StreamNotFoundError(NotFoundError):
    """There is no such stream, or it expired. Create it first, or append with auto_create."""


class StreamDeletedError(GoneError):
    """The stream was deleted and only its forks remain. Use another path."""


class OffsetTruncatedError(GoneError):
    """The stream begins later now. Read from `first_offset`."""

    @property
    def first_offset(self) -> str | None:
        return self._text("stream-first-offset")


class LogPrunedError(GoneError):
    """Rows of this selection left the log after its retention. Go on after `pruned`, or skip."""

    @property
    def pruned(self) -> int | None:
        return self._integer("log-pruned")


class StreamExistsError(ConflictError):
    """A stream with another configuration is at this path. Use it as it is, or another path."""


class PathBlockedError(ConflictError):
    """A deleted stream whose forks still use it holds this path. Use another one."""


class ContentTypeMismatchError(ConflictError):
    """The stream holds another content type. Open it with that one."""


class StreamClosedError(ConflictError):
    """The stream takes no more appends; it ends at `next_offset`. Write to another one."""

    @property
    def next_offset(self) -> str | None:
        return self._text("stream-next-offset")


class BooksClosedError(ConflictError):
    """The books of the stream are closed: it takes no messages until a commit opens them again.

    That is an append with `books="open"` and `if_match` at the tail, which is `next_offset`.
    """

    @property
    def next_offset(self) -> str | None:
        return self._text("stream-next-offset")


class BooksPendingError(ConflictError):
    """The `group` has work left on the stream. Let its workers finish, then send it again."""

    @property
    def group(self) -> str | None:
        return self.problem.get("group")


class ClaimCompletedError(ConflictError):
    """The producer id is a claim that its holder completed: nothing more is accepted under it."""


class SequenceGapError(ConflictError):
    """A request of this producer is missing before this one: the server expects `expected`."""

    @property
    def expected(self) -> int | None:
        return self._integer("producer-expected-seq")

    @property
    def received(self) -> int | None:
        return self._integer("producer-received-seq")


class ContentMismatchError(ConflictError):
    """This sequence number was used for other bytes. Another program writes as this producer."""

    @property
    def offset(self) -> str | None:
        return self._text("stream-offset")


class StreamSeqError(ConflictError):
    """Stream-Seq did not grow. Another writer was here: read, then decide again."""


class KeyReusedError(ConflictError):
    """The Idempotency-Key was used for another request. Use a new key for new content."""


class KeyConflictError(ConflictError):
    """The key and the producer headers disagree. One of them was used for another request."""


class CommitPartialError(ConflictError):
    """Some appends of the commit were made before and others not; nothing was done now."""


class PartError(ConflictError):
    """A staged part is missing, incomplete, used or other than before; the code says which."""


class WriterNotFoundError(ResponseError):
    """There is no such writer: no program opened it, or it was forgotten. Open a run of it."""


class WriterQueryChangedError(ConflictError):
    """The name is the writer of `query`, which came to `batch`, and your batches count anew.

    Go on with that query, use another name, or open with `allow_new` if what it wrote may stay
    as it is and everything of yours is to be written.
    """

    @property
    def query(self) -> str | None:
        return self.problem.get("query")

    @property
    def batch(self) -> int | None:
        return self.problem.get("batch")


class WriterFencedError(ConflictError):
    """A newer run of this writer has begun, in `epoch`. Stop: the other one writes now."""

    @property
    def epoch(self) -> int | None:
        return self.problem.get("epoch")


class CorrelationMovedError(ConflictError):
    """Another worker correlated meanwhile, up to `watermark`. Go on from there."""

    @property
    def watermark(self) -> int | None:
        return self.problem.get("watermark")


class WriterRangeMismatchError(ConflictError):
    """The number `batch` was published from other positions than yours; nothing was written.

    Your record of progress is older than what was published. Go on with the newest one, or read
    from where the published batches end, under another name: `writer_history` shows it.
    """

    @property
    def batch(self) -> int | None:
        return self.problem.get("batch")

    @property
    def published(self) -> dict[str, int | None] | None:
        return self.problem.get("published")

    @property
    def sent(self) -> dict[str, int | None] | None:
        return self.problem.get("sent")


class WriterHistoryGoneError(ConflictError):
    """The writer came to `batch`, and no longer knows what it published under your number.

    Nothing was written. Go on with the newest record of progress.
    """

    @property
    def batch(self) -> int | None:
        return self.problem.get("batch")


class TailMovedError(PreconditionFailedError):
    """Another append came first: the tail is `next_offset`. Read up to it, then decide again."""

    @property
    def next_offset(self) -> str | None:
        return self._text("stream-next-offset")

    @property
    def version(self) -> int | None:
        return self._integer("stream-version")


class ProducerMovedError(PreconditionFailedError):
    """The producer is at `epoch` and `seq`, not where Producer-If said; None: it is unknown."""

    @property
    def epoch(self) -> int | None:
        return self._integer("producer-epoch")

    @property
    def seq(self) -> int | None:
        return self._integer("producer-seq")


class StaleEpochError(ForbiddenError):
    """A newer session of this producer has begun, in `epoch`. Stop: the other one writes now."""

    @property
    def epoch(self) -> int | None:
        return self._integer("producer-epoch")


class WriterHeldError(ForbiddenError):
    """The writer is another principal's. Use another name."""


class OpenClaimsError(RateLimitedError):
    """You hold as many claims as you may (`open_claims_max`). End one before you claim another.

    It is not waited for: only you can end your claims.
    """
