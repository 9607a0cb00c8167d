"""The contract of a store: what each method promises, before and after a crash.

A store decides (with the rules of `protocol`), makes the decision durable, and only then answers.
Its answers to writes come through callbacks, on the event loop, because a write is answered from a
commit that it shares with others; reads are awaited. One suite (tests/contract) runs against every
engine.

Three promises hold for every method:

* **An answer follows the disk.** When `done` is called, or an await returns, whatever the answer
  says is durable, refusals and duplicates included.
* **All or nothing.** A crash at any instant leaves a request done completely or not at all.
* **A failure is said.** `Failed` means that nothing of the request happened; `Unknown` that it may
  have, and that sending the same request again finds out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from fencepost.clock import Clock
from fencepost.protocol.appends import Append, AppendOutcome
from fencepost.protocol.batches import Batch
from fencepost.protocol.commits import Commit, CommitOutcome, Part, UnstageOutcome
from fencepost.protocol.creates import Create, CreateOutcome
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import KEEP_ALL, Cut, Retention, Uncut
from fencepost.protocol.sends import SendOutcome
from fencepost.protocol.streams import Lifetime, Segment
from fencepost.protocol.subscriptions import Link, Subscription
from fencepost.protocol.writers import (
    Writer,
    WriterForgetOutcome,
    WriterMissing,
    WriterOpen,
    WriterOpenOutcome,
)
from fencepost.store.group_contract import GroupOutcome, GroupRequest
from fencepost.store.mesh_contract import MeshOutcome, MeshRequest, SendRequest


class Missing(NamedTuple):
    """There is no stream at the path: never was, deleted, or expired."""


class SoftDeleted(NamedTuple):
    """The stream was deleted, and only its forks can still read it."""


class Deleted(NamedTuple):
    """The stream is gone, and its path is free unless forks still hold it."""


class Staged(NamedTuple):
    """The chunk waits for its commit; `repeated` when it had been uploaded before."""

    messages: int
    bytes: int
    repeated: bool


class ChunkConflict(NamedTuple):
    """Another content was uploaded as this chunk before, or the part has another type."""

    detail: str


class PartClosed(NamedTuple):
    """The part was committed: nothing can be added to it."""

    position: int


class TooManyParts(NamedTuple):
    """The limit of parts that wait for their commit is reached."""

    parts_max: int


StageOutcome = Staged | ChunkConflict | PartClosed | TooManyParts | LimitExceeded


class Upload(NamedTuple):
    """A chunk of a part that is to be committed later."""

    part: Part
    ordinal: int
    media_type: str
    batch: Batch
    digest: bytes


class Bundle(NamedTuple):
    """Chunks that came in one request; each is decided for itself."""

    uploads: Sequence[Upload]


class Failed(NamedTuple):
    """The request changed nothing. `full` when the disk has no room; else see the server's log."""

    full: bool


class Unknown(NamedTuple):
    """The commit may or may not be on disk: the same request, sent again, finds out."""


Failure = Failed | Unknown


class StoreAwayError(Exception):
    """The database cannot be reached: come back when it can.

    Reads raise it, of streams, of the log and of lists, on stores that are on another machine.
    Nothing was changed and nothing is lost; a write says the same with `Failed`.
    """


class DataDamagedError(Exception):
    """What a read would have to give is not there, or is not as long as it was: it gives nothing.

    Nothing that a request does causes this, and asking again does not help.
    """


class DamagedRowError(DataDamagedError):
    """The same of a row of the log: before `position` it can be read, and after `behind`."""

    def __init__(self, detail: str, position: int, behind: int, stream_id: int) -> None:
        super().__init__(detail)
        self.position = position
        self.behind = behind
        self.stream_id = stream_id
        self.stream = ""
        """Its path, as far as that is known."""


class StreamInfo(NamedTuple):
    """A stream as committed: what HEAD tells."""

    id: int
    path: str
    content_type: str
    is_json: bool
    tail: Offset
    first: Offset
    closed: bool
    lifetime: Lifetime
    created_ms: int
    retention: Retention = KEEP_ALL
    segments: tuple[Segment, ...] = ()
    """What a fork has inherited, so that reading needs no second look at the stream."""
    books_closed: bool = False


class Chunk(NamedTuple):
    """Part of a stream: `data` from `start` up to `next`, as it goes on the wire."""

    info: StreamInfo
    start: Offset
    next: Offset
    data: bytes

    @property
    def at_tail(self) -> bool:
        """Whether this was all there is."""
        return self.next == self.info.tail


class BadOffset(NamedTuple):
    """The stream has no such place: the offset was made up, or belongs to another stream."""


class Truncated(NamedTuple):
    """The place is below the first offset still kept."""

    first: Offset


class Published(NamedTuple):
    """What a commit changed in one stream, told to listeners after it is durable.

    `parts` is the new data from `start` to `info.tail`; None when the engine does not have it at
    hand and the reader must ask. A stream that went away has `gone` set.
    """

    info: StreamInfo
    start: Offset
    parts: Sequence[bytes] | None
    gone: bool = False


class Watcher(Protocol):
    """A part of the server whose own state must change in the same commit as the streams.

    Called on the event loop while a request is being decided: what a watcher writes in the call
    joins the request's commit.
    """

    def created(self, stream_id: int, path: str, start: Offset) -> None:
        """A stream comes to be; its first messages of its own, if any, begin at `start`."""
        ...

    def removed(self, stream_id: int, path: str) -> None:
        """A stream goes, deleted or expired; forks may still read it."""
        ...

    def reset(self) -> None:
        """A commit failed: everything since the last one on disk is void, load again from there."""
        ...


class LiveStream(NamedTuple):
    """A stream that a subscription may watch."""

    path: str
    id: int
    tail: Offset


class StoredSubscriptions(NamedTuple):
    """What a store has of subscriptions."""

    subscriptions: list[Subscription]
    next_id: int
    partial: list[int]
    """Those of which only links are there: they never came to be, or are gone."""


class SubscriptionStore(Protocol):
    """Subscriptions, their wakes and their cursors, kept beside the streams they watch.

    Writes join the open commit without an answer of their own: the caller waits with `after` or
    `durable` before it answers a request. A crash leaves all of what was written in one stretch on
    the event loop, or none of it.
    """

    def watch(self, watcher: Watcher, published: Callable[[Sequence[Published]], None]) -> None:
        """Tell `watcher` of what is being decided, and `published` of what is durable."""
        ...

    def load(self) -> StoredSubscriptions:
        """All subscriptions as on disk, with their streams' tails.

        A cursor whose stream is gone is left out, or at its start when the link is explicit.
        """
        ...

    def begin(self, subscription_id: int) -> None:
        """Note that links of a subscription come, or are left, without itself."""
        ...

    def end(self, subscription_id: int) -> None:
        """Note that this is over: it is there with its links, or none of them is left."""
        ...

    def insert(self, subscription: Subscription) -> None:
        """Write a new subscription without its links."""
        ...

    def save_wake(self, subscription: Subscription) -> None:
        """Write where the delivery stands: generation, lease, retry schedule, snapshot."""
        ...

    def delete(self, subscription: Subscription) -> None:
        """Remove a subscription without its links."""
        ...

    def save_link(self, subscription: Subscription, link: Link) -> None:
        """Write a link and its cursor."""
        ...

    def delete_link(self, subscription: Subscription, path: str) -> None:
        """Remove a link."""
        ...

    def delete_links(self, subscription_id: int, count: int | None = None) -> None:
        """Remove so many of its links, or all of them."""
        ...

    async def has_links(self, subscription_id: int) -> bool:
        """Whether any of its links is on disk."""
        ...

    async def expect(self, paths: Iterable[str]) -> None:
        """Get ready for `find_stream` of these paths, in the same stretch on the event loop."""
        ...

    def find_stream(self, path: str) -> LiveStream | None:
        """The stream at `path` as decided so far, or None; `expect` was told of it."""
        ...

    async def live_streams(
        self, prefix: tuple[str, ...], matches: Callable[[str], bool]
    ) -> list[LiveStream]:
        """The committed streams below `prefix`, itself included, whose path `matches` takes.

        `matches` is called in another thread, because there may be very many streams.
        """
        ...

    def announce(self, path: str, event: bytes) -> bool:
        """Append a JSON value to a stream in the open commit; False when it takes no appends."""
        ...

    async def secret(self, name: str, fresh: bytes) -> bytes:
        """The secret called `name`: the one on disk, else `fresh`, on disk before this returns."""
        ...

    def tick(self) -> int:
        """The time of a decision in milliseconds; it never goes back, not even over a restart."""
        ...

    def after(self, answer: Callable[[Failure | None], None]) -> None:
        """Call `answer` once everything decided so far is durable, or void."""
        ...

    async def durable(self) -> Failure | None:
        """Wait until everything decided so far is durable, or say what went wrong."""
        ...


class Store(Protocol):
    """Streams, kept."""

    def create(self, request: Create, done: Callable[[CreateOutcome | Failure], None]) -> None:
        """Make a stream, with its first messages, or say that it is there already."""
        ...

    def append(
        self,
        request: Append,
        done: Callable[[AppendOutcome | Missing | SoftDeleted | Failure], None],
    ) -> None:
        """Add a batch, close, or both: messages, producer state and closure in one commit."""
        ...

    def commit(self, request: Commit, done: Callable[[CommitOutcome | Failure], None]) -> None:
        """Make several appends to several streams, all of them or none, in one commit.

        As the batch of a writer it is decided by the writer first, and moves it in the same commit.
        """
        ...

    def stage(self, upload: Upload, done: Callable[[StageOutcome | Failure], None]) -> None:
        """Keep data for a later commit, invisible to readers; the same chunk again is no change."""
        ...

    def stage_all(
        self, bundle: Bundle, done: Callable[[list[StageOutcome] | Failure], None]
    ) -> None:
        """The same for all chunks of a bundle; the outcomes are in their order."""
        ...

    def unstage(self, part: Part, done: Callable[[UnstageOutcome | Failure], None]) -> None:
        """Drop a part that no commit used: from the answer on none will find it."""
        ...

    def open_writer(
        self, request: WriterOpen, done: Callable[[WriterOpenOutcome | Failure], None]
    ) -> None:
        """Begin a run of a writer. After the answer no commit of an earlier run is accepted."""
        ...

    def forget_writer(
        self, name: str, owner: str | None, done: Callable[[WriterForgetOutcome | Failure], None]
    ) -> None:
        """Remove a writer; if `owner` is given, only one of theirs is found."""
        ...

    async def find_writer(self, name: str) -> Writer | WriterMissing | Failure:
        """A writer as committed."""
        ...

    def work(self, request: GroupRequest, done: Callable[[GroupOutcome | Failure], None]) -> None:
        """Decide a request about a group: make it, claim, ack, operate on its targets."""
        ...

    def mesh(self, request: MeshRequest, done: Callable[[MeshOutcome | Failure], None]) -> None:
        """Decide a request about a mesh: make or end it, its topics, members and queues."""
        ...

    def send(self, request: SendRequest, done: Callable[[SendOutcome | Failure], None]) -> None:
        """Store a message with its dedupe row and its deliveries, all of them or none.

        The same send again is recognised as long as its row exists, also after a crash.
        """
        ...

    def delete(
        self, path: str, done: Callable[[Deleted | Missing | SoftDeleted | Failure], None]
    ) -> None:
        """Remove a stream. After the answer no restart brings it back."""
        ...

    def truncate(
        self,
        path: str,
        before: Offset | None,
        done: Callable[[Cut | Uncut | BadOffset | Missing | SoftDeleted | Failure], None],
    ) -> None:
        """Drop what a stream holds before an offset (None: all of it).

        Readers below it are told that it is gone from the answer on; the global log keeps the
        messages for its own retention. Forks keep what they inherited.
        """
        ...

    async def look(self, path: str, *, touch: bool) -> StreamInfo | Missing | SoftDeleted | Failure:
        """A stream as committed. `touch` counts as a use, which slides its time to live.

        A stream found expired is gone on disk before this returns.
        """
        ...

    async def read(
        self, info: StreamInfo, after: Offset, *, bytes_max: int
    ) -> Chunk | BadOffset | Truncated | Missing:
        """The messages after `after`, at most `bytes_max` of them but at least one if there is one.

        `info` comes from `look`: the chunk never reaches past its tail, whatever was appended
        since.
        """
        ...

    async def probe(self) -> Failure | None:
        """Write something of no consequence: None when the store can take writes."""
        ...

    def listen(self, listener: Callable[[Sequence[Published]], None]) -> None:
        """Call `listener` after every commit, on the event loop, in commit order."""
        ...


class ServedStore(Store, Protocol):
    """A store as the server that runs it sees it."""

    @property
    def failure(self) -> asyncio.Future[None]:
        """Resolved with the error when the store can no longer be trusted: the server stops."""
        ...

    async def close(self) -> None:
        """Commit what was decided, and let go of the data."""
        ...


class ClaimCounts(NamedTuple):
    """The claims of one principal, for the metrics."""

    principal: str
    open_claims: int
    abandon_ratio: float


class Counters(NamedTuple):
    """What a store counted since it was opened, and what it holds in memory, for the metrics."""

    appends: int
    messages: int
    bytes: int
    duplicates: int
    replays: int
    mismatches: int
    epochs_raised: int
    appends_too_fast: int
    past_shares: int
    streams_cached: int
    next_position: int
    claims: tuple[ClaimCounts, ...]


# Where several servers share a store, one of them leads: it has the subscriptions.


class Leader(NamedTuple):
    """The server that leads. `url` is where the others reach it; empty when it has not said."""

    node: str
    url: str


class SharedSubscriptionStore(SubscriptionStore, Protocol):
    """The subscriptions of a store that several servers share, for the time that one leads."""

    async def prepare(self) -> None:
        """Read everything that `load` returns."""
        ...

    async def follow(self) -> None:
        """Tell the watcher of what every server writes, in order, until cancelled."""
        ...

    async def caught_up(self) -> Failure | None:
        """Wait until the watcher knows of everything that any server has written before this."""
        ...


LeaderDuty = Callable[[SharedSubscriptionStore], Coroutine[Any, Any, None]]
"""What the leader does with the subscriptions until it is cancelled."""


class Leadership(Protocol):
    """One server's part in choosing a leader. The server sets `url` and `subscribe`."""

    url: str
    """Where other servers reach this one."""
    subscribe: LeaderDuty | None
    """Called with the subscriptions whenever this server begins to lead."""
    leader: Leader | None
    """The server that leads, as far as this one knows."""

    @property
    def node(self) -> str:
        """The name by which the other servers know this one."""
        ...

    @property
    def clock(self) -> Clock:
        """A clock that agrees with the database's."""
        ...

    @property
    def first_look(self) -> asyncio.Event:
        """Set when this server has begun to lead for the first time, or found that another does."""
        ...

    async def changed(self) -> None:
        """Wait until `leader` changes."""
        ...

    def poke(self) -> None:
        """Find out at once which server leads."""
        ...
