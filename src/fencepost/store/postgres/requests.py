"""Requests: something to decide in a turn, and everything that it names.

What a request names is written down when it is submitted, once. The turn loads it in bulk before it
decides the request, and compares it with what a large commit holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from fencepost.protocol.appends import Append
from fencepost.protocol.books import BooksRequest
from fencepost.protocol.commits import Commit, Part
from fencepost.protocol.leases import LeaseRef
from fencepost.protocol.offsets import Offset
from fencepost.store.contract import Bundle, Upload
from fencepost.store.group_contract import GroupRequest
from fencepost.store.mesh_contract import SendRequest
from fencepost.store.postgres.books import BooksNeed
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large.locks import (
    mark_of_key,
    mark_of_lane,
    mark_of_part,
    mark_of_path,
    mark_of_writer,
)
from fencepost.store.write.decider import Decider
from fencepost.store.write.front import Paths, WriterName

Done = Callable[[Any], None]

WAIT = object()
"""The answer of a request that waits when a large commit holds what it names."""


class Needs(NamedTuple):
    """Everything that requests name: their rows are loaded before the requests are decided."""

    paths: Collection[str] = ()
    producers: Collection[tuple[str, str]] = ()
    """Path and id."""
    keys: Collection[tuple[str, str, str]] = ()
    """Path, principal and key."""
    parts: Collection[Part] = ()
    """Each with all its chunks."""
    chunks: Collection[tuple[Part, int]] = ()
    """Single chunks, by their part and number."""
    leases: Collection[LeaseRef] = ()
    """Leases that appends and commits rest on."""
    books: Collection[BooksNeed] = ()
    """Streams whose books change, each with the place where it is to be cut."""

    # These are not loaded, but a large commit may hold them:
    writers: Collection[str] = ()
    commit_keys: Collection[tuple[str, str]] = ()
    """Principal and key."""
    lanes: Collection[str] = ()
    """Names shared by requests that must keep their order."""

    def marks(self) -> set[int]:
        """The marks by which large commits hold these."""
        return {
            *map(mark_of_path, self.paths),
            *map(mark_of_part, self.parts),
            *(mark_of_part(part) for part, _ in self.chunks),
            *map(mark_of_writer, self.writers),
            *(mark_of_key(*key) for key in self.commit_keys),
            *map(mark_of_lane, self.lanes),
        }


NOTHING = Needs()


class Request(msgspec.Struct, frozen=True, eq=False):
    """Something to decide, and the function that is told of the outcome."""

    work: Callable[[Decider], object]
    done: Done
    needs: Needs = NOTHING
    size: int = 0
    """Bytes of payload."""
    tries: int = 0
    """Turns that it was in while the database went away."""
    alone: bool = False
    """Whether it gets a turn of its own, because one that it shared was refused."""
    touches_all: bool = False
    """Whether it may touch more than it needs, so that it waits for any large commit."""
    if_held: object = WAIT
    """What to answer when a large commit holds what it names, if it is not to wait."""
    large_commit: int | None = None
    """The number of the large commit that it is part of, and does not wait for."""
    connection: WritingConnection | None = None
    """The connection whose open transaction it is decided in, and ends."""
    repeatable: bool = False
    """Whether `Decider.undo` takes back all that deciding it does, so that it can be done again."""
    about_group: GroupRequest | None = None
    """The request about a group that it is, whose rows the turn loads."""
    about_send: SendRequest | None = None
    """The send that it is, for which the turn loads its dedupe row and its streams."""


def needs_of(touched: Commit | Upload | Bundle | Part | Paths | WriterName) -> Needs:
    """What a write request names, unless it is an append or about a group."""
    match touched:
        case Commit():
            return needs_of_commit(touched)
        case Upload():
            return Needs(chunks=((touched.part, touched.ordinal),))
        case Bundle():
            return Needs(chunks=[(upload.part, upload.ordinal) for upload in touched.uploads])
        case Part():
            return Needs(parts=(touched,))
        case Paths():
            return Needs(touched.paths)
        case WriterName():
            return Needs(writers=(touched.name,))


def needs_of_append(append: Append) -> Needs:
    """What an append names."""
    path, producer, conditions = append.path, append.producer, append.conditions
    if producer is None and conditions is None:
        return Needs((path,))
    needs = Needs((path,), () if producer is None else ((path, producer.id),))
    if conditions is None:
        return needs
    key, lease, books = conditions.key, conditions.lease, conditions.books
    return needs._replace(
        keys=() if key is None else ((path, append.principal, key),),
        leases=() if lease is None else (lease,),
        books=() if books is None else ((path, _cut_of(books)),),
    )


def _cut_of(books: BooksRequest) -> Offset | None:
    before = books.truncate_before
    return None if books.state == "close" or not isinstance(before, Offset) else before


def needs_of_commit(request: Commit) -> Needs:
    """What a commit names."""
    needs = together(needs_of_append(item.append) for item in request.items)
    return needs._replace(
        parts={part for item in request.items for part in item.parts},
        leases={*needs.leases, *(ref for ref, _ in request.leases)},
        writers=() if request.writer is None else (request.writer.name,),
        commit_keys=() if request.key is None else ((request.principal, request.key),),
    )


def needs_at_the_end(request: Commit) -> Needs:
    """What is asked of groups when a large commit is about to happen."""
    leases = {ref for ref, _ in request.leases}
    books: set[BooksNeed] = set()
    for item in request.items:
        conditions = item.append.conditions
        if conditions is not None and conditions.lease is not None:
            leases.add(conditions.lease)
        if conditions is not None and conditions.books is not None:
            books.add((item.append.path, _cut_of(conditions.books)))
    return Needs(leases=leases, books=books)


def together(all_needs: Iterable[Needs]) -> Needs:
    """The needs of several requests as those of one, each thing once."""
    columns: Iterable[Sequence[Collection[Any]]] = zip(*all_needs, strict=True)
    return Needs(*[set(chain.from_iterable(column)) for column in columns])
