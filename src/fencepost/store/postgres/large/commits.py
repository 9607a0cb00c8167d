"""Large commits on the shared store: written by a transaction of their own, beside all turns.

A commit of many appends in one turn would hold every writer of every node up for as long as it
takes. Beyond a size it goes another way:

1. What it names goes into a table, as marks; a session of its own holds a lock as a sign of life.
2. A small turn makes it the one large commit that is under way. From then on all nodes keep back
   the requests that name what it holds (`Turns._hold_back`). Expired streams among those are ended,
   and their forks are held as well.
3. Another turn takes its positions. Until its end no reader of the log gets beyond them.
4. Its appends are decided on a copy of the state, a slice at a time, and each slice is written in
   one open transaction, which no other session sees. One refused append undoes all of it.
5. The transaction takes a turn like any node, tells which streams it changed, and commits.

If anything goes wrong on the way, the transaction is undone and the session ends. The next turn of
any node finds the sign of life gone, and decides the requests that waited.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol, TypeVar

import psycopg
from msgspec.structs import replace

from fencepost.memory import dissolve
from fencepost.protocol.commits import Commit, CommitOutcome, CommittedInSlices
from fencepost.store.contract import Failed, Failure
from fencepost.store.large.commits import Done, LargeCommits, cut
from fencepost.store.large.decider import Decided, LargeDecision, messages_of
from fencepost.store.large.locks import Held
from fencepost.store.postgres.cache import BulkLoader
from fencepost.store.postgres.cluster.feed import Feed
from fencepost.store.postgres.driver.connection import is_full
from fencepost.store.postgres.large.locks import (
    ROWS_MAX,
    LargeSession,
    mark_of_path,
    marks_of_commit,
)
from fencepost.store.postgres.requests import (
    NOTHING,
    Needs,
    Request,
    needs_at_the_end,
    needs_of_append,
    together,
)
from fencepost.store.postgres.turns import TRIES_MAX, Turns, statements
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Connection
from fencepost.store.write.decider import Admitted, Decider

log = logging.getLogger(__name__)

T = TypeVar("T")

STREAMS_PER_TURN = 500
"""Streams that one row of turns tells of."""
ENDED_PER_TURN = 200
"""Expired streams that are ended in one turn."""
LOOK_S = 0.1
"""How often to look whether another large commit is over."""
LOOKS_MAX = 10
"""After so many looks its end is tried for: it may have died, which only a turn finds out."""

TELL_S_MAX = 5.0
"""How long the answer waits until the readers of this node were told; they will be in any case."""


class _Busy:
    """Another large commit is under way."""


_BUSY = _Busy()


class Host(Protocol):
    """The store that large commits belong to."""

    @property
    def settings(self) -> PostgresSettings: ...

    @property
    def decider(self) -> Decider: ...

    @property
    def turns(self) -> Turns: ...

    @property
    def feed(self) -> Feed: ...

    @property
    def lookups(self) -> Connection: ...


class LostHoldError(Exception):
    """A large commit is no longer the one that is under way: nothing of it may count."""


class _StoppedError(Exception):
    """A step could not be taken."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class TurnDecision(LargeDecision):
    """The decision of a large commit that is written beside the turns, and ends in one."""

    def _conclude(self) -> None:
        # The transaction that wrote the slices ends with the turn that is being decided.
        self._keep(self._decider.ledger, self._decider.group)


class LargeCommit:
    """One large commit on its way, on the shared store."""

    def __init__(
        self, host: Host, request: Commit, done: Done, owner: LargeCommits, held: Held
    ) -> None:
        self._host = host
        self._decider = host.decider
        self._turns = host.turns
        self._request = request
        self._done: Done | None = done
        self._owner = owner
        self._held = held
        self._session: LargeSession | None = None
        self._number = 0
        self._is_under_way = False
        self._now_ms = 0
        self._new_streams = 0
        self._streams: dict[int, None] = {}
        self._created: set[int] = set()
        self._told: list[tuple[list[int], list[int]]] = []
        self._last_turn = -1

    async def run(self) -> None:
        """Carry it out, answer, and let the requests go on that waited for it."""
        holds = self._decider.holds
        try:
            outcome = await self._attempted()
            await self._cleared(outcome)
            done, self._done = self._done, None
            assert done is not None
            done(outcome)
        except Exception:
            log.exception("a large commit could not be ended in order")
        finally:
            await holds.release(self._held)
            await self._cleaned()
            await dissolve(self._held.paths, self._held.parts, self._streams, self._created)

    async def _attempted(self) -> CommitOutcome | Failure:
        try:
            return await self._carried_out()
        except _StoppedError as stopped:
            return stopped.failure
        except psycopg.Error as error:
            log.warning("a large commit was undone: %s", str(error).strip())
            return Failed(full=is_full(error))
        except Exception:
            log.exception("a large commit was undone")
            return Failed(full=False)

    async def _carried_out(self) -> CommitOutcome | Failure:
        self._go_on()
        settings = self._host.settings
        session = self._session = await LargeSession.connect(settings)
        await session.live(settings.turn_idle_ms)
        self._number = session.number
        for piece in _batches(marks_of_commit(self._request), ROWS_MAX):
            await session.hold(piece)
            self._go_on()
        admitted = await self._admitted(session)
        if not isinstance(admitted, Admitted):
            return admitted
        await self._look(session)
        loader = BulkLoader(self._host.lookups)
        decision = TurnDecision(
            self._decider,
            loader,
            self._request,
            new_streams=self._new_streams,
            writer=admitted.writer,
            messages=await self._weighed(session),
        )
        await self._turn(partial(_begin, decision))
        await session.open()
        await self._write(session, decision, loader)
        outcome = await self._concluded(session, decision)
        await dissolve(*decision.leftovers())
        return outcome

    def _go_on(self) -> None:
        """Go no further when the store goes down."""
        if self._owner.closing:
            raise _StoppedError(Failed(full=False))

    async def _turn(
        self,
        work: Callable[[Decider], T],
        needs: Needs = NOTHING,
        *,
        ending: LargeSession | None = None,
    ) -> T:
        """Have something decided in the next turn, or in the one that ends a transaction."""
        answer: asyncio.Future[T | Failure] = asyncio.get_running_loop().create_future()
        request = Request(work, answer.set_result, needs, large_commit=self._number)
        if ending is not None:
            # It is not tried again, because its transaction is gone with its session.
            request = replace(request, connection=ending, alone=True, tries=TRIES_MAX)
        self._turns.submit(request)
        outcome = await answer
        if isinstance(outcome, Failure):
            raise _StoppedError(outcome)
        return outcome

    # Having hold of everything

    async def _admitted(self, session: LargeSession) -> Admitted | CommitOutcome:
        """Wait until no other large commit is under way, and be the one that is."""
        first = self._request.items[0]
        needs = needs_of_append(first.append)._replace(parts=first.parts)
        while True:
            self._is_under_way = True  # until it is certain that it is not
            found = await self._turn(self._admit, needs)
            self._is_under_way = isinstance(found, Admitted)
            if not isinstance(found, _Busy):
                return found
            for _ in range(LOOKS_MAX):
                await asyncio.sleep(LOOK_S)
                self._go_on()
                if await session.fetch("large_now") == [(None,)]:
                    break

    def _admit(self, decider: Decider) -> Admitted | CommitOutcome | _Busy:
        if self._turns.large is not None:
            return _BUSY
        self._now_ms = decider.tick()
        admitted = decider.admit(self._request, self._now_ms)
        if isinstance(admitted, Admitted):
            decider.group.statements.append(("hold_all", (self._number,)))
        return admitted

    async def _look(self, session: LargeSession) -> None:
        """End the streams whose time is over, and have hold of all forks."""
        named = self._held.paths
        self._new_streams = len(named)
        unseen: Iterable[str] = list(named)
        expired: list[str] = []
        while True:
            sources: list[int] = []
            for paths in _batches(unseen, ROWS_MAX):
                values = (paths, self._now_ms)
                [(_, over, forked)] = await session.fetch("look_at_held", values)
                expired += over
                sources += forked
                self._go_on()
            forks = []
            if sources:
                # The end of a fork changes what it was forked from, so forks are held as well.
                rows = await session.fetch("forks_of", {"streams": sources})
                forks = [path for (path,) in rows if path not in named]
            if not forks:
                break
            for paths in _batches(forks, ROWS_MAX):
                await session.hold([mark_of_path(path) for path in paths])
            named.update(forks)
            # After this, every turn that did not know of them yet is over.
            await self._turn(_nothing)
            unseen = forks
        for paths in _batches(expired, ENDED_PER_TURN):
            await self._turn(partial(_end_all, paths), Needs(paths))

    async def _weighed(self, session: LargeSession) -> int:
        """The positions that the commit may need."""
        messages = 0
        for items in _batches(self._request.items, ROWS_MAX):
            parts = [part for item in items for part in item.parts]
            if parts:
                columns = [list(column) for column in zip(*parts, strict=True)]
                [(count,)] = await session.fetch("count_staged_messages", columns)
                messages += count
            messages += sum(map(messages_of, items))
            await asyncio.sleep(0)
        return messages

    # Writing

    async def _write(
        self, session: LargeSession, decision: TurnDecision, loader: BulkLoader
    ) -> None:
        """Decide the appends and write what they come to, as far as none is refused."""
        ledger = decision.copy.ledger
        for items in cut(self._request.items, self._decider.settings.commit_slice_appends):
            self._go_on()
            needs = together([needs_of_append(item.append) for item in items])
            needs = needs._replace(parts={part for item in items for part in item.parts})
            await loader.load(session, ledger, needs, locking=True)
            sealed = decision.decide(items)
            loader.forget()
            if sealed is None:
                return
            self._streams.update(dict.fromkeys(sealed.entries))
            self._created |= sealed.created
            await session.write(statements(sealed))

    async def _concluded(
        self, session: LargeSession, decision: TurnDecision
    ) -> CommitOutcome | Failure:
        if not decision.comes_to_something:
            await session.rollback()
            outcome = await self._turn(partial(self._give_up, decision))
            self._is_under_way = False
            assert not isinstance(outcome, Decided)
            return outcome
        self._told = [
            (ids, [one for one in ids if one in self._created])
            for ids in _batches(self._streams, STREAMS_PER_TURN)
        ]
        needs = needs_at_the_end(self._request)
        outcome = await self._turn(partial(self._conclude, decision), needs, ending=session)
        if not isinstance(outcome, Decided):
            return outcome
        self._is_under_way = False
        self._decider.counts.add_all(outcome.counts)
        await self._host.feed.reach(self._last_turn, TELL_S_MAX)
        return CommittedInSlices(outcome.answer, acks=outcome.acks)

    def _give_up(self, decision: TurnDecision, _decider: Decider) -> Decided | CommitOutcome:
        """In a turn of this node, when its transaction is undone: it is over."""
        if self._turns.large == self._number:
            self._turns.ends_large = True
        return decision.conclude()

    def _conclude(self, decision: TurnDecision, decider: Decider) -> Decided | CommitOutcome:
        """In the turn that ends the transaction: all of it happens, unless it comes too fast."""
        turns = self._turns
        if turns.large != self._number:
            raise LostHoldError("another node took this large commit for dead")
        others = self._host.lookups.fetch("changed_in_spite")
        if any(stream in self._streams for (stream,) in others):
            raise LostHoldError("a server of the version before wrote to its streams")
        outcome = decision.conclude()
        if isinstance(outcome, Decided):
            turns.ends_large = True
            ledger = decider.ledger
            for turn, changed in enumerate(self._told, turns.turn + 1):
                # No node is named, so that the feed tells the readers of this node as well.
                values = (turn, "", ledger.last_ms, ledger.next_position - 1, *changed)
                decider.group.statements.append(("insert_turn", values))
            turns.more_turns = len(self._told)
            self._last_turn = turns.turn + turns.more_turns + 1
        return outcome

    # The end of it

    async def _cleared(self, outcome: CommitOutcome | Failure) -> None:
        """See to it that no request waits for a commit that failed."""
        if not self._is_under_way or self._session is None:
            return
        # What it has locked is free when its session is gone, and not before.
        await self._session.close()
        try:
            for _ in range(LOOKS_MAX):
                if await self._turn(self._is_over):
                    return
                await asyncio.sleep(LOOK_S)
        except _StoppedError:
            pass
        log.warning("a large commit was not cleared away after %s: others will", outcome)

    def _is_over(self, _decider: Decider) -> bool:
        return self._turns.ends_large or self._turns.large != self._number

    async def _cleaned(self) -> None:
        session = self._session
        if session is None:
            return
        try:
            if not session.raw.closed:
                await session.release()
        except psycopg.Error:
            log.warning("what a large commit held is left for the upkeep to forget")
        await session.close()


def _begin(decision: TurnDecision, decider: Decider) -> None:
    decision.begin()
    decider.group.statements.append(("note_large_turn", ()))


def _nothing(_decider: Decider) -> None:
    """Decide nothing: the answer shows that all turns before this one are over."""


def _end_all(paths: list[str], decider: Decider) -> None:
    now_ms = decider.tick()
    for path in paths:
        decider.alive(path, now_ms)


def _batches(whole: Iterable[T], count: int) -> Iterator[list[T]]:
    rest = iter(whole)
    while piece := list(itertools.islice(rest, count)):
        yield piece
