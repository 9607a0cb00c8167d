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

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from fencepost.protocol.appends import Append, AppendOutcome
from fencepost.protocol.creates import Create, CreateOutcome
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Lifetime


class Missing(NamedTuple):
    """There is no stream at the path: never was, deleted, or expired."""


class SoftDeleted(NamedTuple):
    """The stream was deleted, and only its forks can still read it."""


class Deleted(NamedTuple):
    """The stream is gone, and its path is free unless forks still hold it."""


class Failed(NamedTuple):
    """The request changed nothing. `full` when the disk has no room; else see the server's log."""

    full: bool


class Unknown(NamedTuple):
    """The commit may or may not be on disk: the same request, sent again, finds out."""


Failure = Failed | Unknown


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

    def delete(
        self, path: str, done: Callable[[Deleted | Missing | SoftDeleted | Failure], None]
    ) -> None:
        """Remove a stream. After the answer no restart brings it back."""
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
