"""The write methods of a store: hold a request back, or have it decided.

While a large commit is under way it holds the streams, staged parts and the writer that it names. A
request that touches one of them waits here until the commit is over; every other request is decided
at once. Both stores inherit these methods; each brings its own way to decide (`_decide`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from fencepost.protocol.appends import Append, AppendOutcome
from fencepost.protocol.commits import Commit, CommitOutcome, Part, UnstageOutcome
from fencepost.protocol.creates import Create, CreateOutcome
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import Cut, Uncut
from fencepost.protocol.sends import SendOutcome
from fencepost.protocol.writers import WriterForgetOutcome, WriterOpen, WriterOpenOutcome
from fencepost.store.contract import (
    BadOffset,
    Bundle,
    Deleted,
    Failure,
    Missing,
    SoftDeleted,
    StageOutcome,
    Upload,
    Watcher,
)
from fencepost.store.group_contract import GroupOutcome, GroupRequest
from fencepost.store.large.commits import LargeCommits, is_large
from fencepost.store.mesh_contract import (
    DropName,
    MakeName,
    MeshOutcome,
    MeshRequest,
    SendRequest,
)
from fencepost.store.settings import StoreSettings
from fencepost.store.write.decider import Decider


class Paths(NamedTuple):
    """The streams that a request touches."""

    paths: tuple[str, ...]


class WriterName(NamedTuple):
    """The writer that a request touches."""

    name: str


Touched = Commit | Upload | Bundle | Part | Paths | WriterName | GroupRequest | SendRequest
"""What a request is about: its streams, staged parts, keys, writer, or group."""


class WriteFront(ABC):
    """Takes the write requests of one store."""

    def __init__(self, settings: StoreSettings, decider: Decider, large: LargeCommits) -> None:
        self._slice_appends = settings.commit_slice_appends
        self.decider = decider
        self._large = large
        self._holds = decider.holds
        self._held = decider.holds.all

    @abstractmethod
    def _decide(
        self,
        work: Callable[[Decider], Any],
        done: Callable[[Any], None],
        touched: Touched,
        size: int = 0,
        /,
    ) -> None:
        """Have `work` decide a request, and call `done` with its outcome once that is durable.

        `size` is how many bytes of messages the request brings.
        """

    @abstractmethod
    def _accepts_large(self, done: Callable[[Failure], None]) -> bool:
        """Whether a large commit may begin; if not, `done` has been told so."""

    def _reshaping(self, _path: str, done: Callable[[Any], None], /) -> Callable[[Any], None]:
        """The stream at a path is about to be made or ended; what to call instead of `done`."""
        return done

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` change its own state in the commits that make and end streams."""
        self.decider.watchers.append(watcher)

    @abstractmethod
    def append(
        self,
        request: Append,
        done: Callable[[AppendOutcome | Missing | SoftDeleted | Failure], None],
    ) -> None:
        """Each store brings its own: most requests are appends, and they go the shortest way."""

    def _holds_append(self, request: Append, done: Callable[[Any], None]) -> bool:
        """Whether an append waits for a large commit that has hold of its stream."""
        return self._holds.keeps_path(request.path, lambda: self.append(request, done))

    def commit(self, request: Commit, done: Callable[[CommitOutcome | Failure], None]) -> None:
        if is_large(request, self._slice_appends):
            if self._accepts_large(done):
                self._large.add(request, done)
            return
        if self._held and self._holds.keeps_commit(request, lambda: self.commit(request, done)):
            return
        self._decide(lambda decider: decider.commit(request), done, request)

    def stage(self, upload: Upload, done: Callable[[StageOutcome | Failure], None]) -> None:
        if self._held and self._holds.keeps_part(upload.part, lambda: self.stage(upload, done)):
            return
        self._decide(lambda decider: decider.stage(upload), done, upload, upload.batch.size)

    def stage_all(
        self, bundle: Bundle, done: Callable[[list[StageOutcome] | Failure], None]
    ) -> None:
        uploads = bundle.uploads
        if self._held:
            parts = {upload.part for upload in uploads}
            if self._holds.keeps_parts(parts, lambda: self.stage_all(bundle, done)):
                return
        size = sum(upload.batch.size for upload in uploads)
        self._decide(lambda decider: decider.stage_all(uploads), done, bundle, size)

    def unstage(self, part: Part, done: Callable[[UnstageOutcome | Failure], None]) -> None:
        if self._held and self._holds.keeps_part(part, lambda: self.unstage(part, done)):
            return
        self._decide(lambda decider: decider.unstage(part), done, part)

    def open_writer(
        self, request: WriterOpen, done: Callable[[WriterOpenOutcome | Failure], None]
    ) -> None:
        name = request.name
        if self._held and self._holds.keeps_writer(name, lambda: self.open_writer(request, done)):
            return
        self._decide(lambda decider: decider.open_writer(request), done, WriterName(name))

    def forget_writer(
        self, name: str, owner: str | None, done: Callable[[WriterForgetOutcome | Failure], None]
    ) -> None:
        holds = self._holds
        if self._held and holds.keeps_writer(name, lambda: self.forget_writer(name, owner, done)):
            return
        self._decide(lambda decider: decider.forget_writer(name, owner), done, WriterName(name))

    def create(self, request: Create, done: Callable[[CreateOutcome | Failure], None]) -> None:
        source = request.fork_from
        paths = (request.path,) if source is None else (request.path, source.path)
        for path in paths if self._held else ():
            if self._holds.keeps_path(path, lambda: self.create(request, done)):
                return
        size = 0 if request.batch is None else request.batch.size
        told = self._reshaping(request.path, done)
        self._decide(lambda decider: decider.create(request), told, Paths(paths), size)

    def delete(
        self, path: str, done: Callable[[Deleted | Missing | SoftDeleted | Failure], None]
    ) -> None:
        if self._held and self._holds.keeps_path(path, lambda: self.delete(path, done)):
            return
        told = self._reshaping(path, done)
        self._decide(lambda decider: decider.delete(path), told, Paths((path,)))

    def truncate(
        self,
        path: str,
        before: Offset | None,
        done: Callable[[Cut | Uncut | BadOffset | Missing | SoftDeleted | Failure], None],
    ) -> None:
        holds = self._holds
        if self._held and holds.keeps_path(path, lambda: self.truncate(path, before, done)):
            return
        self._decide(lambda decider: decider.truncate(path, before), done, Paths((path,)))

    def work(self, request: GroupRequest, done: Callable[[GroupOutcome | Failure], None]) -> None:
        self._decide(lambda decider: decider.groups.decide(request), done, request)

    # No large commit holds a stream of a mesh: only sends write to those. It may hold a part.

    def mesh(self, request: MeshRequest, done: Callable[[MeshOutcome | Failure], None]) -> None:
        told: Callable[[Any], None] = done
        paths: tuple[str, ...] = ()
        if isinstance(request, MakeName | DropName):
            paths = (request.path,)
            told = self._reshaping(request.path, done)
        self._decide(lambda decider: decider.meshes.decide(request), told, Paths(paths))

    def send(self, request: SendRequest, done: Callable[[SendOutcome | Failure], None]) -> None:
        body = request.send.body
        for part in body.parts if self._held else ():
            if self._holds.keeps_part(part, lambda: self.send(request, done)):
                return
        size = 0 if body.parts else body.size
        self._decide(lambda decider: decider.meshes.send(request), done, request, size)
