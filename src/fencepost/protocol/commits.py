"""Deciding a commit: several appends to several streams, all of them or none.

Each append is decided by `decide_append` on top of those before it; what their outcomes come to as
a whole is decided here. A commit that was done before is a duplicate as a whole; one that was done
in part is none, and refused: another writer uses the same producer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fencepost.protocol.acks import Ack, AckItem
from fencepost.protocol.appends import (
    AlreadyClosed,
    Append,
    Appended,
    AppendOutcome,
    Duplicate,
    Replayed,
)
from fencepost.protocol.leases import AckInvalid, GroupGone, LeaseLost, LeaseRef
from fencepost.protocol.writers import BatchDone, BatchRefusal, WriterBatch


class Part(NamedTuple):
    """Staged data, named as it was uploaded."""

    txn: str
    part: str


SCOPE_END = "\x1f"
"""Stands between a principal's name and the name of its transaction; neither contains it."""


def owner_of(part: Part) -> str:
    """The principal that stages a part; empty without authorization."""
    return part.txn.rpartition(SCOPE_END)[0]


class CommitItem(NamedTuple):
    """One append of a commit: what it carries itself, or the staged parts it is made of."""

    append: Append
    parts: tuple[Part, ...] = ()
    chunks: tuple[int | None, ...] = ()
    """How many chunks each part must have, as `parts` are ordered; None where it does not say."""


class Named(NamedTuple):
    """Everything that a commit names: its streams and its parts."""

    paths: set[str]
    parts: set[Part]


class Commit(NamedTuple):
    """Appends to be made together. `digest` tells a repeated request from another one."""

    items: Sequence[CommitItem]
    key: str | None = None
    digest: bytes = b""
    principal: str = ""
    """The principal that sent the commit; the idempotency key belongs to it."""
    writer: WriterBatch | None = None
    """The batch of a writer that the commit publishes."""
    named: Named | None = None
    """The result of `names`, if the parser has collected it already, since that takes time for many
    items. The store that carries the commit out empties it."""

    leases: Sequence[tuple[LeaseRef, Ack]] = ()
    """Leases that must be current. The commit acks them: effects and ack are one."""
    random: float = 0.0
    """A random number from 0 to 1, for the retry delays of events that failed."""

    def names(self) -> Named:
        """The streams and the staged parts that its items name."""
        return self.named or Named(
            {item.append.path for item in self.items},
            {part for item in self.items for part in item.parts},
        )


class ItemMissing(NamedTuple):
    """The item's stream does not exist."""


class ItemDeleted(NamedTuple):
    """The item's stream was deleted, and only its forks can still read it."""


class PartMissing(NamedTuple):
    """No such part is staged: it was never uploaded, or it expired."""

    part: Part


class PartUsed(NamedTuple):
    """The part was committed before."""

    part: Part
    position: int


class PartIncomplete(NamedTuple):
    """Some of the part's chunks are missing: the next one expected is `ordinal`."""

    part: Part
    ordinal: int


class PartOverfull(NamedTuple):
    """The part has more chunks than the commit says: another uploader uses its name."""

    part: Part
    chunks: int
    expected: int


class PartTwice(NamedTuple):
    """The commit names the same part twice."""

    part: Part


class PartDropped(NamedTuple):
    """The part is no more: no commit will find it."""


class PartMismatch(NamedTuple):
    """The part holds another type than the append says, or than the parts before it."""

    part: Part
    media_type: str
    expected: str


PartRefusal = PartMissing | PartUsed | PartIncomplete | PartOverfull | PartTwice | PartMismatch
ItemOutcome = AppendOutcome | ItemMissing | ItemDeleted | PartRefusal
UnstageOutcome = PartDropped | PartMissing | PartUsed


class Committed(NamedTuple):
    """All items were appended."""

    outcomes: tuple[Appended, ...]
    acks: tuple[AckItem, ...] = ()
    """The outcome of each ack, in the order of `leases`."""


class CommittedInSlices(NamedTuple):
    """All items were appended, of a commit so large that its answer came together on the way.

    As a duplicate they had all been appended before.
    """

    answer: bytes
    duplicate: bool = False
    acks: tuple[AckItem, ...] = ()


class CommitDuplicate(NamedTuple):
    """All items had been appended before."""

    outcomes: tuple[Duplicate | Replayed | AlreadyClosed, ...]


class CommitReplayed(NamedTuple):
    """The commit's key was used before for the same commit: `answer` is what was said then."""

    answer: bytes


class CommitKeyReused(NamedTuple):
    """The commit's key was used before for another commit."""

    first_used_ms: int


class CommitRefused(NamedTuple):
    """One item was refused, so none was done."""

    item: int
    outcome: ItemOutcome


class CommitPartial(NamedTuple):
    """Some items were appended before and others not: nothing was done."""

    duplicates: tuple[int, ...]


class CommitLeaseLost(NamedTuple):
    """A lease of the commit is not current, or says what cannot be; nothing was done."""

    lease: int
    reason: LeaseLost | GroupGone | AckInvalid


CommitOutcome = (
    Committed
    | CommittedInSlices
    | CommitDuplicate
    | CommitReplayed
    | CommitKeyReused
    | CommitRefused
    | CommitPartial
    | CommitLeaseLost
    | BatchDone
    | BatchRefusal
)


def decide_commit(
    outcomes: Sequence[ItemOutcome],
) -> Committed | CommitDuplicate | CommitRefused | CommitPartial:
    """Decide a commit from the outcomes of its items, each decided on top of those before it."""
    done: list[Appended] = []
    repeated: list[Duplicate | Replayed | AlreadyClosed] = []
    duplicates: list[int] = []
    for index, outcome in enumerate(outcomes):
        match outcome:
            case Appended():
                done.append(outcome)
            case Duplicate() | Replayed() | AlreadyClosed():
                repeated.append(outcome)
                duplicates.append(index)
            case _:
                return CommitRefused(index, outcome)
    if not repeated:
        return Committed(tuple(done))
    if not done:
        return CommitDuplicate(tuple(repeated))
    return CommitPartial(tuple(duplicates))


def describe_commit(request: Commit, outcome: Committed | CommitDuplicate) -> bytes:
    """The body that answers a commit: where each of its appends went."""
    acks = outcome.acks if isinstance(outcome, Committed) else ()
    return join_described([describe_items(request.items, outcome.outcomes)], acks)


def describe_items(
    items: Sequence[CommitItem],
    outcomes: Sequence[Appended | Duplicate | Replayed | AlreadyClosed],
) -> bytes:
    """Where some appends of a commit went, as a piece of its answer."""
    appends = [
        {"stream": item.append.path, **_where(decided)}
        for item, decided in zip(items, outcomes, strict=True)
    ]
    return msgspec.json.encode(appends)[1:-1]


def join_described(pieces: Sequence[bytes], acks: Sequence[AckItem] = ()) -> bytes:
    """The body that answers a commit, put together from its pieces."""
    return b'{"appends":[%b%b' % (b",".join(filter(None, pieces)), end_described(acks))


def end_described(acks: Sequence[AckItem]) -> bytes:
    """The end of the body, behind the appends: what the acks came to, if there are any."""
    shown = [{"target": ack.target, "outcome": ack.outcome, "at": ack.at} for ack in acks]
    return b'],"leases":%b}' % msgspec.json.encode(shown) if shown else b"]}"


def _where(outcome: Appended | Duplicate | Replayed | AlreadyClosed) -> dict[str, object]:
    match outcome:
        case Appended():
            return {
                "offset": str(outcome.start),
                "next_offset": str(outcome.tail),
                "version": outcome.tail.messages - 1,
                "position": outcome.position,
                "closed": outcome.closed,
                **_books(outcome.books is not None and outcome.books.closed),
            }
        case Replayed(original, books_closed):
            return {
                "offset": str(original.start),
                "next_offset": str(original.tail),
                "version": original.tail.messages - 1,
                "position": original.position,
                "closed": original.closed,
                **_books(books_closed),
            }
        case Duplicate():
            start = outcome.original
            return {
                "offset": None if start is None else str(start.offset),
                "matches": outcome.matches,
                "closed": outcome.closed,
                **_books(outcome.books_closed),
            }
        case AlreadyClosed(tail):
            return {"next_offset": str(tail), "closed": True}


def _books(closed: bool) -> dict[str, object]:
    return {"books": "closed"} if closed else {}
