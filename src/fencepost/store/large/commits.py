"""Large commits: decided as a whole, written down, then carried out a slice at a time.

A commit of many appends in one transaction would hold all other requests up for as long as it
takes. So beyond a size it goes another way, in which other requests come in between at every step:

1. It takes hold of what it names (`locks`); one such commit at a time.
2. It takes its positions in the log at once. From here until its end readers of the log do not see
   positions beyond them, so that positions become visible in order.
3. Its appends are decided on a copy of the state (`copies`), and what each slice of them will write
   goes to disk as it is decided (`slices`). One refused append ends it here: nothing has happened.
4. One small write makes it certain. A crash from here on is made up for at the next start.
5. Each slice is carried out in a group commit, beside other requests.
6. With the last one, which holds the commit's key and its writer, all of it becomes visible.

How far it came is always read from disk, so a failed group is tried again from there. What happens
when a store opens is in `recovery`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from fencepost.memory import dissolve, paused_collector
from fencepost.protocol.commits import Commit, CommitItem, CommitOutcome, CommittedInSlices
from fencepost.store.contract import Failed, Failure, Missing, Published, SoftDeleted, Unknown
from fencepost.store.large.copies import streams_at
from fencepost.store.large.decider import Decided, LargeDecision, SlicedDecision
from fencepost.store.large.locks import Held, Holds
from fencepost.store.large.slices import CERTAIN, Slice, decode_slice, tell_made
from fencepost.store.sql import Connection
from fencepost.store.write.behind import Behind
from fencepost.store.write.decider import Admitted, Decider
from fencepost.store.write.ledger import view_of
from fencepost.store.write.staging import ROW_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
Done = Callable[[CommitOutcome | Failure], None]
Durable = asyncio.Future[Failure | None]

PATHS_PER_TURN = 128
"""Streams that are looked at, or told of, in one turn of the loop."""
SLICES_PER_TURN = 8
"""Slices of a refused commit that are forgotten at once."""
RETRY_S = 0.5
"""How long to wait before a slice that could not be written is tried again."""


class Host(Protocol):
    """The store that large commits are carried out in."""

    @property
    def decider(self) -> Decider: ...

    @property
    def committed_state(self) -> Connection:
        """A connection that shows what is on disk, for use on the event loop."""
        ...

    @property
    def behind(self) -> Behind:
        """Rows of streams and producers that are written behind the commits, and wait for it."""
        ...

    def after(self, done: Callable[[Any], None], outcome: object = None) -> None:
        """Call `done` with `outcome` once everything decided so far is durable, or void."""
        ...

    def publish(self, changes: list[Published]) -> None:
        """Tell those who listen what is visible now."""
        ...

    def is_broken(self) -> bool:
        """Whether nothing can be written any more."""
        ...

    def give_up(self, error: BaseException) -> None:
        """A commit that is certain cannot be carried out: stop, and let the next start do it."""
        ...


def is_large(request: Commit, weight_max: int) -> bool:
    """Whether a commit is better carried out in slices."""
    if len(request.items) > weight_max:
        return True
    return sum(map(_weight, request.items)) > 2 * weight_max


def cut(items: Iterable[CommitItem], weight_max: int) -> Iterator[list[CommitItem]]:
    """The items in slices, each of about so many appends and parts, at least one append."""
    piece: list[CommitItem] = []
    weight = 0
    for item in items:
        piece.append(item)
        weight += _weight(item)
        if len(piece) >= weight_max or weight >= 2 * weight_max:
            yield piece
            piece, weight = [], 0
    if piece:
        yield piece


def _weight(item: CommitItem) -> int:
    return 1 + len(item.parts)


class Carried(Protocol):
    """A large commit that waits for its turn."""

    async def run(self) -> None:
        """Carry it out, answer, and let those go on who waited."""
        ...


class LargeCommits:
    """The large commits of one store, one after the other."""

    def __init__(
        self, holds: Holds, make: Callable[[Commit, Done, LargeCommits, Held], Carried]
    ) -> None:
        self._holds = holds
        self._make = make
        self._queue: deque[Carried] = deque()
        self._task: asyncio.Task[None] | None = None
        self.closing = False

    def add(self, request: Commit, done: Done) -> None:
        """Carry out a commit when those before it are over; from now on it holds what it names."""
        held = self._holds.take(request)
        self._queue.append(self._make(request, done, self, held))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop between two slices: what is certain is finished at the next start."""
        self.closing = True
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        try:
            with paused_collector():
                while self._queue:
                    await self._queue.popleft().run()
        finally:
            self._task = None


class LargeCommit:
    """One large commit on its way, in the embedded store."""

    def __init__(
        self, host: Host, request: Commit, done: Done, owner: LargeCommits, held: Held
    ) -> None:
        self._host = host
        self._decider = host.decider
        self._request = request
        self._done: Done | None = done
        self._owner = owner
        self._held = held
        self._first = -1
        self._undoing = False
        self._new_streams = 0

    async def run(self) -> None:
        """Carry it out, answer, and let those go on who waited."""
        holds = self._decider.holds
        holds.begin(self._held)
        try:
            outcome = await self._decided()
            if isinstance(outcome, Decided):
                outcome = await self._carried_out(outcome)
            await self._tell()
            self._answer(outcome)
            await self._undo()
        except Exception as error:
            # What is on disk is either nothing, or certain and finished at the next start.
            log.exception("a large commit failed")
            self._host.give_up(error)
            self._answer(Unknown())
        finally:
            await holds.release(self._held)
            await dissolve(self._held.views, self._held.paths, self._held.parts)

    def _answer(self, outcome: CommitOutcome | Failure) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(outcome)

    # Deciding

    async def _decided(self) -> Decided | CommitOutcome | Failure:
        """What the commit comes to, with its slices on disk if it is to be carried out."""
        if self._is_stopping():
            return Failed(full=False)
        # What is held is on disk after this, and stays as it is there.
        if (failure := await self._wait()) is not None:
            return failure
        admitted = self._decider.admit(self._request, self._decider.tick())
        if not isinstance(admitted, Admitted):
            return await self._durable(admitted)
        failure = await self._look()
        if failure is not None:
            return failure
        decision = SlicedDecision(
            self._decider,
            self._host.committed_state,
            self._host.behind,
            self._request,
            lambda: cut(self._request.items, self._decider.settings.commit_slice_appends),
            new_streams=self._new_streams,
            writer=admitted.writer,
        )
        for _ in decision.weigh():
            await asyncio.sleep(0)
        self._first = decision.begin()
        self._undoing = True
        if (failure := await self._wait()) is not None:
            return failure
        before: Durable | None = None
        for _ in decision.slices():
            # The next slice is decided while this one is written.
            written = self._durability()
            if (failure := await self._settled(before)) is not None:
                return failure
            if self._is_stopping():
                return Failed(full=False)
            before = written
        if (failure := await self._settled(before)) is not None:
            return failure
        concluded = await self._concluded(decision)
        await dissolve(*decision.leftovers())
        return concluded

    async def _concluded(self, decision: LargeDecision) -> Decided | CommitOutcome | Failure:
        """The outcome, once it is on disk. Nothing may come between deciding and waiting:
        the group that is open at one must be the one that the other waits for."""
        outcome = decision.conclude()
        if not isinstance(outcome, Decided):
            # The log goes on with the answer; the slices take longer to forget.
            self._decider.group.statements.append(("end_large", (self._first,)))
            return await self._durable(outcome)
        failure = await self._wait()
        if failure is None or self._is_certain():
            self._undoing = False
            return outcome
        return failure

    async def _look(self) -> Failure | None:
        """Note what readers see of the streams, and end those whose time is over."""
        unseen = list(self._held.paths)
        while unseen:
            sources = []
            for paths in _batches(unseen, PATHS_PER_TURN):
                sources += self._look_at(paths)
                await asyncio.sleep(0)
            # The end of a fork changes what it was forked from, so forks are held as well.
            rows = self._host.committed_state.fetch("forks_of", {"streams": json.dumps(sources)})
            unseen = [path for (path,) in rows if path not in self._held.paths]
            self._held.paths.update(unseen)
            if (failure := await self._wait()) is not None:
                return failure
        return None

    def _look_at(self, paths: list[str]) -> list[int]:
        """Note what readers see of some streams; those of them that others were forked from."""
        decider, views = self._decider, self._held.views
        now_ms = decider.tick()
        state = self._host.committed_state
        found = {stream.path: stream for stream in streams_at(state, paths)}
        for path in paths:
            stream = found.get(path)
            entry = decider.ledger.cached(path)
            if entry is not None or (stream is not None and stream.expired(now_ms)):
                entry = decider.alive(path, now_ms)
                stream = None if entry is None else entry.stream
            if stream is None:
                views[path] = Missing()
                self._new_streams += 1
            else:
                views[path] = SoftDeleted() if stream.soft_deleted else view_of(stream)
        return [stream.id for stream in found.values() if stream.forks_count]

    async def _undo(self) -> None:
        """Forget what was written down of a commit that comes to nothing, some at a time."""
        first, state = self._first, self._host.committed_state
        left = self._undoing
        while left and not self._is_stopping():
            found = state.fetch("some_slices", (first, SLICES_PER_TURN))
            statements = self._decider.group.statements
            statements.append(("end_large", (first,)))
            statements += [("drop_slice", (first, number)) for (number,) in found]
            failure = await self._wait()
            if failure is not None:
                await asyncio.sleep(RETRY_S)
            left = failure is not None or bool(found)

    def _is_certain(self) -> bool:
        if self._host.is_broken():
            return False
        found = self._host.committed_state.fetch("large_state", (self._first,))
        return bool(found) and found[0][0] == CERTAIN

    # Carrying out

    async def _carried_out(self, decided: Decided) -> CommitOutcome | Failure:
        """Bring the slices into the tables; the last one makes them visible."""
        state = self._host.committed_state
        self._held.carrying = True
        while found := state.fetch("next_slice", (self._first, 0)):
            [(number, _)] = found
            failure = await self._carry_all(range(number, decided.last_slice + 1))
            if self._is_stopping():
                return Unknown()
            if failure is not None and not self._host.is_broken():
                log.error("a slice of a large commit could not be written and is tried again")
                await asyncio.sleep(RETRY_S)
        if not self._held.was_shown:
            self._show()  # the last commit was said to be in doubt, and is on disk
        self._decider.counts.add_all(decided.counts)
        return CommittedInSlices(decided.answer, acks=decided.acks)

    async def _carry_all(self, numbers: range) -> Failure | None:
        """Carry slices out, each while the one before is written, up to one that fails."""
        before: Durable | None = None
        for number in numbers:
            [(content,)] = self._host.committed_state.fetch("slice_at", (self._first, number))
            piece = decode_slice(content)
            # After a slice that failed, none may be carried out before it was tried again. What is
            # decided while one is written is void with it.
            has_failed = before is not None and before.done() and before.result() is not None
            if has_failed or self._is_stopping():
                break
            self._carry(number, piece)
            written = self._durability(self._show if piece.is_last else None)
            if (failure := await self._settled(before)) is not None:
                return failure
            before = written
        return await self._settled(before)

    def _carry(self, number: int, piece: Slice) -> None:
        group = self._decider.group
        group.carried.append(piece)
        group.bytes += ROW_BYTES * piece.rows_count
        group.statements.append(("drop_slice", (self._first, number)))
        if piece.is_last:
            group.statements.append(("end_large", (self._first,)))
        for watcher in self._decider.watchers:
            tell_made(watcher, piece)

    def _show(self) -> None:
        """Let readers see all of it, in the turn in which its last slice is found to be durable."""
        self._decider.ledger.drop_all(self._held.paths)
        self._decider.holds.shown()

    async def _tell(self) -> None:
        """Wake those who wait for the streams; they may all be read by now."""
        held = self._held
        if self._is_stopping() or not held.was_shown:
            return
        # Readers of the log did not get to see these when they were appended to.
        others = [Published(info, info.tail, ()) for info in held.appended_meanwhile.values()]
        for changes in _batches(others, PATHS_PER_TURN):
            self._host.publish(changes)
            await asyncio.sleep(0)
        for paths in _batches(list(held.paths), PATHS_PER_TURN):
            streams = streams_at(self._host.committed_state, paths)
            infos = [view_of(stream) for stream in streams]
            self._host.publish([Published(info, info.tail, None) for info in infos])
            await asyncio.sleep(0)

    # Waiting

    def _is_stopping(self) -> bool:
        """Whether the store goes down: what is certain by now is finished at the next start."""
        return self._owner.closing or self._host.is_broken()

    async def _wait(self, then: Callable[[], None] | None = None) -> Failure | None:
        """Wait until what was decided so far is on disk; do something in the turn it is known."""
        return await self._durability(then)

    async def _settled(self, before: Durable | None) -> Failure | None:
        """Wait for a slice, and let the group of the next one begin: each has a group of its own,
        so that other requests do not wait for two in one."""
        failure = None if before is None else await before
        await asyncio.sleep(0)
        return failure

    def _durability(self, then: Callable[[], None] | None = None) -> Durable:
        """What is done when that which was decided so far is on disk, or void."""
        waited: Durable = asyncio.get_running_loop().create_future()

        def done(failure: Failure | None) -> None:
            if failure is None and then is not None:
                then()
            waited.set_result(failure)

        self._host.after(done)
        return waited

    async def _durable(self, outcome: CommitOutcome) -> CommitOutcome | Failure:
        """An outcome, once nothing can take it back."""
        failure = await self._wait()
        return outcome if failure is None else failure


def _batches(whole: list[T], count: int) -> Iterator[list[T]]:
    return (whole[at : at + count] for at in range(0, len(whole), count))
