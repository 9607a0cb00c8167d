"""Group commit: requests decided while a commit is under way share the next one.

This is the write path's engine room and knows nothing of streams. A `Group` collects what a
transaction must write and who waits for it. At any time there is one open group, which decisions
join, and at most one group being committed. The rules it holds:

* An answer leaves only after the group that was open when it was decided is durable, together with
  all groups before it: refusals and duplicates describe states that must not be taken back.
* A group that fails takes everything decided on top of it along: the open group fails too, and the
  owner rebuilds its state from disk before the next decision.
* An error in COMMIT itself is an unknown outcome, and said so.

Statements run on the loop, where they cost microseconds. The COMMIT waits for the disk. Where that
takes a fraction of a millisecond, handing it to another thread and back costs more than it saves,
so it runs on the loop as well; after one slow commit the next ones run in a writer thread, so that
readers do not wait for the disk. A group with much data runs in the thread as a whole, so that
copying it does not hold up readers either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from fencepost.store.contract import Failed, Failure, Unknown

log = logging.getLogger(__name__)

THREAD_COMMITS_AFTER_SLOW = 64
"""How many commits run in the writer thread after a slow one, before the loop tries again."""

INLINE_BYTES_MAX = 256 * 1024
"""A group with more data than this is written by the writer thread, not on the loop."""


class Group(Protocol):
    """What one transaction writes. The owner fills it; this module only moves it along."""

    bytes: int

    def is_empty(self) -> bool: ...


GroupT = TypeVar("GroupT", bound=Group)

Done = Callable[[Any], None]
"""Called once, with the decided outcome when it is durable, else with a `Failure`."""


class DiskFullError(Exception):
    """The disk has no room for this transaction; it was rolled back."""


class BrokenError(Exception):
    """The disk failed earlier: nothing is written before a restart has looked at it."""


_SealedT = TypeVar("_SealedT", bound=Group, contravariant=True)


class Journal(Protocol[_SealedT]):
    """The database as this module sees it. All methods are called by one thread at a time."""

    def write(self, sealed: _SealedT) -> None:
        """Begin a transaction that holds the group."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class Owner(Protocol[GroupT]):
    """The owner of the state that groups are cut from: it decides."""

    def new_group(self) -> GroupT:
        """An empty group for the decisions to come."""
        ...

    def seal(self, group: GroupT) -> None:
        """Take down the state to write, now that nothing more will join `group`."""
        ...

    def committed(self, group: GroupT) -> None:
        """`group` is durable: make it visible and wake readers."""
        ...

    def reset(self) -> None:
        """Everything since the last commit is void: rebuild the state from disk."""
        ...

    def stir(self, group: GroupT) -> None:
        """Put a change of no consequence into `group`."""
        ...

    def broken(self, error: BaseException) -> None:
        """The disk cannot be trusted any more: stop."""
        ...


class GroupCommit(Generic[GroupT]):
    """The one place through which every change goes to disk."""

    def __init__(
        self,
        journal: Journal[GroupT],
        owner: Owner[GroupT],
        *,
        is_disk_error: Callable[[BaseException], bool],
        clock_ns: Callable[[], int],
        loop_commit_us_max: int = 1_000,
    ) -> None:
        self._journal = journal
        self._owner = owner
        self._is_disk_error = is_disk_error
        self._clock_ns = clock_ns
        self._loop_commit_ns_max = loop_commit_us_max * 1000
        # The first commits of a process run in the thread: how fast its disk is shows there.
        self._thread_commits_left = THREAD_COMMITS_AFTER_SLOW
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fencepost-writer")
        self._scheduled = False
        self._under_way = False
        self._closed = False
        self._broken = False
        self._started_ns = 0
        self._idle: asyncio.Future[None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._answers: list[tuple[Done, object]] = []
        self.group = owner.new_group()
        """The open group: a decision adds what it changes here, in the same breath."""
        self.groups_count = 0
        self.commit_ns_total = 0
        self.on_commit: Callable[[int, int, int], None] = _ignore
        """Told of every commit: how many answers it carried, how long it took from its first
        statement to its end, and how long of that the disk did."""

    def after(self, done: Done, outcome: object = None) -> None:
        """Call `done` with `outcome` once all that was decided so far is durable.

        If it turns out to be void instead, `done` gets the failure.
        """
        if not (self._under_way or self._scheduled):
            if self.group.is_empty():
                done(Failed(full=False) if self._broken else outcome)
                return
            self.flush()
        self._answers.append((done, outcome))

    def flush(self) -> None:
        """See to it that the open group is committed, without waiting for it."""
        if not self._scheduled and not self._under_way:
            self._scheduled = True
            # It begins in the next turn of the loop: requests parsed in this one still join.
            self._loop.call_soon(self._start)

    async def settled(self) -> None:
        """Wait until nothing is open or under way."""
        while self._under_way or self._scheduled:
            if self._idle is None:
                self._idle = self._loop.create_future()
            await asyncio.shield(self._idle)

    async def close(self) -> None:
        """Commit what was decided, then end the writer thread."""
        self.flush()
        await self.settled()
        self._closed = True
        self._thread.shutdown()

    async def exclusively(self, work: Callable[[], None]) -> None:
        """Run `work` in the writer thread while no transaction is open; groups wait meanwhile."""
        while self._under_way:
            await self.settled_group()
        if self._broken:
            raise BrokenError
        self._under_way = True
        working = self._loop.run_in_executor(self._thread, work)
        # Groups wait for the work itself: the task that asked may be cancelled, the thread cannot.
        working.add_done_callback(self._worked)
        await asyncio.shield(working)

    def _worked(self, working: asyncio.Future[None]) -> None:
        self._under_way = False
        error = working.exception()
        if error is not None:
            self.suspect(error)
        self._next()

    def suspect(self, error: BaseException) -> None:
        """Something beside the groups went wrong: stop writing if it was the disk's doing."""
        # After a sync that failed, another one that succeeds proves nothing.
        if self._is_disk_error(error) and not self._broken:
            self._break(error)
            _tell(self._emptied(), Failed(full=False))

    async def settled_group(self) -> None:
        """Wait until the group that is under way now is done."""
        if self._done is None:
            self._done = self._loop.create_future()
        await asyncio.shield(self._done)

    def _start(self) -> None:
        self._scheduled = False
        if self._under_way or self._closed:
            return
        if self._broken:
            _tell(self._emptied(), Failed(full=False))
        group, answers = self.group, self._answers
        is_empty = group.is_empty()
        if is_empty and not answers:
            self._rest()
            return
        self._owner.seal(group)
        self.group, self._answers = self._owner.new_group(), []
        self._under_way = True
        self._started_ns = self._clock_ns()
        if is_empty:
            # A group of refusals alone touches no disk, and so says nothing about it.
            self._end(group, answers)
            return
        inline = group.bytes <= INLINE_BYTES_MAX
        if inline:
            error = self._write(group)
            if error is not None:
                self._finish(group, answers, error, 0)
                return
        if inline and self._thread_commits_left == 0:
            error, elapsed_ns = self._commit()
            self._finish(group, answers, error, elapsed_ns)
        else:
            self._thread.submit(self._run, group, answers, inline)

    def _write(self, group: GroupT) -> BaseException | None:
        """BEGIN and the statements; an error here is rolled back and certain."""
        try:
            self._journal.write(group)
        except Exception as error:
            return self._undone(error)
        return None

    def _undone(self, error: BaseException) -> BaseException:
        try:
            self._journal.rollback()
        except Exception as second:
            second.__cause__ = error
            return _CommitError(second)
        return error

    def _run(self, group: GroupT, answers: list[tuple[Done, object]], written: bool) -> None:
        """In the writer thread: write if that is still to do, then commit."""
        elapsed_ns = 0
        error = None if written else self._write(group)
        if error is None:
            error, elapsed_ns = self._commit()
        self._loop.call_soon_threadsafe(self._finish, group, answers, error, elapsed_ns)

    def _commit(self) -> tuple[BaseException | None, int]:
        started_ns = self._clock_ns()
        error: BaseException | None = None
        try:
            self._journal.commit()
        except DiskFullError as full:
            error = self._undone(full)
        except Exception as failure:
            error = _CommitError(failure)
        return error, self._clock_ns() - started_ns

    def _learn(self, elapsed_ns: int) -> None:
        """Choose where the next commits run, after one that took this long."""
        if elapsed_ns >= self._loop_commit_ns_max:
            self._thread_commits_left = THREAD_COMMITS_AFTER_SLOW
        elif self._thread_commits_left:
            self._thread_commits_left -= 1

    def _finish(
        self,
        group: GroupT,
        answers: list[tuple[Done, object]],
        error: BaseException | None,
        elapsed_ns: int,
    ) -> None:
        if error is None:
            self._count(len(answers), elapsed_ns)
            self._end(group, answers)
            return
        self._under_way = False
        self._fail(answers, error)
        self._next()

    def _end(self, group: GroupT, answers: list[tuple[Done, object]]) -> None:
        """Nothing can take the group back any more: show it, and answer."""
        self._under_way = False
        self._owner.committed(group)
        _tell(answers, None)
        self._next()

    def _count(self, answers: int, elapsed_ns: int) -> None:
        self.groups_count += 1
        self.commit_ns_total += elapsed_ns
        self._learn(elapsed_ns)
        self.on_commit(answers, self._clock_ns() - self._started_ns, elapsed_ns)

    def _next(self) -> None:
        if self._done is not None:
            self._done.set_result(None)
            self._done = None
        if self._answers or not self.group.is_empty():
            self.flush()
        else:
            self._rest()

    def _fail(self, answers: list[tuple[Done, object]], error: BaseException) -> None:
        if isinstance(error, DiskFullError):
            # It comes again with each commit, and where in the code it was met helps no operator.
            log.error("a commit failed because the disk has no room: %s", error)
        else:
            log.error("a commit failed", exc_info=error)
        failure: Failure
        if isinstance(error, _CommitError):
            failure = Unknown()
        else:
            failure = Failed(full=isinstance(error, DiskFullError))
        cause = error.cause if isinstance(error, _CommitError) else error
        if self._is_disk_error(cause):
            self._break(cause)
        else:
            self._owner.reset()
        # What was decided since stands on what has just been lost, so it goes the same way. Its own
        # transaction never began: for those requests the outcome is certain.
        void = self._emptied()
        if isinstance(failure, Unknown) and not self._broken:
            # The commit may still be in the log, behind its end, and come back after a crash. What
            # is decided from here on does not know of it, so the log is written over first.
            self._owner.stir(self.group)
        _tell(answers, failure)
        _tell(void, Failed(full=isinstance(error, DiskFullError)))

    def _break(self, cause: BaseException) -> None:
        """The disk failed: from here on nothing reaches it any more."""
        self._broken = True
        self._owner.broken(cause)

    def _emptied(self) -> list[tuple[Done, object]]:
        """Drop the open group, after the owner was reset; who is to be told of it."""
        void, self._answers = self._answers, []
        self.group = self._owner.new_group()
        return void

    def _rest(self) -> None:
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None


class _CommitError(Exception):
    """COMMIT, or undoing a failed transaction, went wrong: what is on disk is not known."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _ignore(_answers: int, _commit_ns: int, _fsync_ns: int) -> None:
    """Measure nothing."""


def _tell(answers: list[tuple[Done, object]], failure: Failure | None) -> None:
    for done, outcome in answers:
        try:
            done(outcome if failure is None else failure)
        except Exception:
            log.exception("an answer could not be given")
