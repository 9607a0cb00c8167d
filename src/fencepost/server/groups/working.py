"""Workers' requests: correlate what the server can, claim, read the events, wait for work.

A claim of a group whose targets are streams or messages first has a piece of the log correlated;
the correlation and the claim are decided in one commit. When there is nothing to claim, a request
that may wait does so until something is appended, a lease or a wait ends, or its time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fencepost.clock import Clock
from fencepost.protocol.acks import AckItem
from fencepost.protocol.globs import Glob
from fencepost.protocol.grants import NarrowedSelection, Principal
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import SHARE_AT_FIRST, CorrelationMoved, next_share
from fencepost.protocol.logs import Selection
from fencepost.server import access
from fencepost.server.groups.feed import Feed
from fencepost.server.groups.waiting import Lines, Place, Watch
from fencepost.server.waiters import Waiters
from fencepost.store.contract import Failure, Published, Store
from fencepost.store.group_contract import (
    AckDone,
    Aside,
    ClaimDone,
    ClaimTargets,
    Correlate,
    CorrelationDone,
    EventSpan,
    ForgetReplays,
    GroupMissing,
    GroupOutcome,
    GroupReads,
    GroupRequest,
    SpanEvents,
)

LOOK_AGAIN_S = 1.0
"""How often a claim that waits looks for changes that other servers made, if few wait."""
LOOKS_AGAIN_PER_S = 10
"""So many such looks the claims of a server take in a second, however many groups they wait at: a
look holds up what else is decided, by some milliseconds on a database that is far or busy."""
CATCH_UP_S = 0.25
"""How long a claim that does not wait looks through the log for work, piece by piece."""


NO_LANE = ""
"""Stands for every lane that a group has no targets in."""


class Counted:
    """What happened in one lane of a group, for the metrics."""

    __slots__ = ("acks", "blocked", "claims", "lost", "parked", "pruned", "retries")

    def __init__(self) -> None:
        self.claims = self.acks = self.retries = self.blocked = 0
        self.parked = self.lost = self.pruned = 0


class Known:
    """What this server remembers of a group that is in use: hints, never decisions."""

    __slots__ = ("counted", "cycle", "group", "looked_at", "share", "waiting", "watches")

    def __init__(self, group: Group) -> None:
        self.share = SHARE_AT_FIRST
        self.cycle = 0
        self.looked_at = -1
        self.waiting = Lines()
        self.watches: dict[str, Watch] = {}
        """By the name of the principal."""
        self.counted: dict[str, Counted] = {}
        """By lane."""
        self.group = group

    def line_of(self, lane: str | None) -> str | None:
        """The lane that a claim waits for. Those that the group does not have wait as one."""
        return lane if lane is None or lane in self.group.lanes else NO_LANE

    def count(self, lane: str) -> Counted:
        """The counts of a lane."""
        return self.counted.setdefault(lane, Counted())


class Working:
    """Carries the requests of workers to the store."""

    def __init__(
        self, store: Store, reads: GroupReads, clock: Clock, feed: Feed, *, is_shared: bool
    ) -> None:
        self._store = store
        self._reads = reads
        self._clock = clock
        self._feed = feed
        self._is_shared = is_shared
        self._news = 0
        self._waiters = Waiters()
        self._stopping = False
        self.known: dict[str, Known] = {}
        store.listen(self._published)

    @property
    def waiters_count(self) -> int:
        """Claims that wait."""
        return sum(known.waiting.count for known in self.known.values())

    def _look_again_s(self) -> float:
        """How long a group of which this server hears nothing is left alone."""
        lines = sum(known.waiting.lines_count for known in self.known.values())
        return max(LOOK_AGAIN_S, lines / LOOKS_AGAIN_PER_S)

    def stop_waiting(self) -> None:
        """Answer every claim that waits: the server is going down."""
        self._stopping = True
        for known in self.known.values():
            known.waiting.wake_all()

    def _published(self, changes: Sequence[Published]) -> None:
        if not changes:
            return  # Commits of claims and acks alone leave the log as it is.
        self._news += 1
        self._waiters.published(changes)

    async def work(self, request: GroupRequest) -> GroupOutcome | Failure:
        """Have a request decided."""
        done: asyncio.Future[GroupOutcome | Failure] = asyncio.get_running_loop().create_future()
        self.ask(request, lambda outcome: _resolve(done, outcome))
        return await done

    def ask(self, request: GroupRequest, told: Callable[[GroupOutcome | Failure], None]) -> None:
        """Have a request decided, and tell what came of it once that is durable."""

        def note(outcome: GroupOutcome | Failure) -> None:
            self._note(request.group, outcome)
            told(outcome)

        self._store.work(request, note)

    async def find(self, name: str) -> Known | None:
        """What is known of a group; None when it does not exist."""
        known = self.known.get(name)
        if known is None:
            group = await self._reads.find(name)
            if group is None:
                return None
            known = self.known.setdefault(name, Known(group))
        return known

    def forget(self, name: str) -> None:
        """A group is gone."""
        known = self.known.pop(name, None)
        if known is not None:
            known.waiting.wake_all()

    async def correlate(self, known: Known) -> bool:
        """Have the next piece of the log correlated, without waiting; whether there was one."""
        group = known.group
        if group.settings.targets == "computed" or known.looked_at == self._news:
            return False
        news = self._news
        piece = await self._reads.correlation(group)
        if piece is None:
            known.looked_at = news
            return False
        request = Correlate(group.name, piece.after, piece.until, piece.found, group.id)
        is_work = bool(piece.found)
        self._store.work(request, lambda outcome: self._correlated(known, outcome, is_work))
        return True

    def _correlated(self, known: Known, outcome: object, is_work: bool) -> None:
        if isinstance(outcome, CorrelationDone):
            self._take(known, outcome.group)
            if is_work:
                known.waiting.wake()
        elif isinstance(outcome, CorrelationMoved):
            # What moved it may have made work, and may have told another server only.
            self._take(known, known.group._replace(watermark=outcome.watermark))
            known.waiting.wake()

    def _take(self, known: Known, group: Group) -> None:
        """A group as it is by now."""
        if group.id != known.group.id:
            self.forget(group.name)  # Another server made it anew, with sources of its own.
            return
        has_new_lanes = group.lanes != known.group.lanes
        known.group = group
        if has_new_lanes:
            for principal in known.watches:  # Some of them belong into another line now.
                known.waiting.wake_line((principal, NO_LANE))

    async def claim(
        self, request: ClaimTargets, *, wait_ms: int, principal: Principal | None = None
    ) -> ClaimDone | GroupOutcome | Failure:
        """Claim, and wait for work if there is none.

        Where the log was not looked through to its end, `due_ms` of the answer is 0: claim again.
        """
        ends_at = asyncio.get_running_loop().time() + wait_ms / 1000
        while True:
            known = await self.find(request.group)
            if known is None:
                return await self.work(request)
            name, line = access.name_of(principal), known.line_of(request.claim.lane)
            with (
                self._watching(known, name, request, is_waiting=wait_ms > 0),
                known.waiting.join((name, line)) as place,
            ):
                outcome = await self._look(known, place, request, ends_at)
            if outcome is not None:
                return outcome

    @contextmanager
    def _watching(
        self, known: Known, principal: str, request: ClaimTargets, *, is_waiting: bool
    ) -> Iterator[None]:
        """Have commits wake a claim that waits, or another one in its place."""
        if not is_waiting:
            yield
            return
        watch = known.watches.get(principal)
        if watch is None:
            watch = known.watches[principal] = Watch(known.waiting, _selection(known, request))
            watch.audience = self._waiters.join(principal, watch)
        watch.claims += 1
        try:
            yield
        finally:
            watch.claims -= 1
            if not watch.claims:
                del known.watches[principal]
                assert watch.audience is not None
                self._waiters.leave(principal, watch.audience, watch)

    async def _look(
        self, known: Known, place: Place, request: ClaimTargets, ends_at: float
    ) -> ClaimDone | GroupOutcome | Failure | None:
        """Look for work until there is some or the time is up.

        None when the group is gone, or the claim belongs into another line by now.
        """
        loop = asyncio.get_running_loop()
        looks_until = max(ends_at, loop.time() + CATCH_UP_S)
        line = known.line_of(request.claim.lane)
        while self.known.get(request.group) is known and known.line_of(request.claim.lane) == line:
            place.begin()
            more = await self.correlate(known)
            outcome = await self.work(request)
            if not isinstance(outcome, ClaimDone) or outcome.leases:
                return outcome
            place.found_nothing()
            now = loop.time()
            if more or self.known.get(request.group) is not known:
                if now >= looks_until or self._stopping:
                    return outcome._replace(due_ms=0)
                continue
            if now >= ends_at or self._stopping:
                return outcome
            if outcome.due_ms is not None:
                known.waiting.wake_at(now + max(0, outcome.due_ms - outcome.now_ms) / 1000)
            if self._is_shared:
                known.waiting.wake_at(now + self._look_again_s())
            await place.wait(ends_at)
        return None

    async def events(self, done: ClaimDone, events_max: int, bytes_max: int) -> list[SpanEvents]:
        """The events of each lease."""
        spans: list[EventSpan] = []
        is_computed = done.group.settings.targets == "computed"
        for index, lease in enumerate(done.leases):
            row = lease.row
            aside = done.aside[index] if done.aside else Aside()
            after = max(row.at, row.waits_from - 1)
            until = row.work_to if aside.until is None else min(row.work_to, aside.until)
            replayed, notes = aside.replayed[:events_max], aside.notes
            told = (done.group.id, row.target) if is_computed else None
            span = EventSpan(row.source, after, until, aside.left_out, replayed, notes, told)
            spans.append(span)
        if events_max == 0 or not spans:
            return [SpanEvents((), span.after) for span in spans]
        names = done.group.settings.names
        found = await self._reads.events(spans, names, events_max=events_max, bytes_max=bytes_max)
        self._learn(done, found)
        self._forget_replays(done, found)
        return found

    def _forget_replays(self, done: ClaimDone, found: Sequence[SpanEvents]) -> None:
        """Let parked events go that are in the log no longer, or their targets never come to rest.

        The leases tell their workers of it (`pruned`).
        """
        gone = [
            (lease.row.target, position)
            for lease, span in zip(done.leases, found, strict=True)
            for position in span.not_replayed
        ]
        if gone:
            self.ask(ForgetReplays(done.group.name, done.group.id, gone), _ignore)

    def _learn(self, done: ClaimDone, found: Sequence[SpanEvents]) -> None:
        known = self.known.get(done.group.name)
        if known is None:
            return
        sums = {True: [0, 0], False: [0, 0]}
        for lease, span in zip(done.leases, found, strict=True):
            sums[lease.leading][0] += len(span.events)
            sums[lease.leading][1] += 1
            if span.pruned is not None:
                known.count(lease.row.lane).pruned += 1
        known.share = next_share(*sums[False], *sums[True])

    # What happened

    def _note(self, name: str, outcome: object) -> None:
        """Count an outcome, tell the feed, and wake claims that may now find work."""
        known = self.known.get(name)
        if isinstance(outcome, AckDone):
            self._note_acks(name, known, outcome.items)
            if outcome.claimed is not None:
                self._note(name, outcome.claimed)
        elif isinstance(outcome, ClaimDone):
            self._note_claim(name, known, outcome)
        elif isinstance(outcome, GroupMissing):
            self.forget(name)  # Another server may have deleted it.
        elif known is not None:
            # An operator's change, a release or a correlation may have made work.
            known.waiting.wake()
            if isinstance(outcome, CorrelationDone):
                self._take(known, outcome.group)

    def _note_claim(self, name: str, known: Known | None, done: ClaimDone) -> None:
        if known is not None:
            self._take(known, done.group)
        for lease in done.leases:
            row = lease.row
            if known is not None:
                counted = known.count(row.lane)
                counted.claims += 1
                counted.lost += lease.was_lost
            facts = {"target": row.target, "worker": row.worker, "at": row.at}
            self._feed.tell(name, "claimed", **facts, until=row.work_to)
        for row in done.blocked:
            if known is not None:
                counted = known.count(row.lane)
                counted.blocked += 1
                counted.lost += 1
            self._feed.tell(name, "blocked", target=row.target, error=row.error)

    def note_commit(self, groups: Sequence[str], acks: Sequence[AckItem]) -> None:
        """Count the acks of a commit, each of its group."""
        for name, item in zip(groups, acks, strict=True):
            self._note_acks(name, self.known.get(name), (item,))

    def _note_acks(self, name: str, known: Known | None, items: Sequence[AckItem]) -> None:
        wakes = False
        for item in items:
            self._feed.tell(name, item.outcome, target=item.target, at=item.at, failed=item.failed)
            wakes = wakes or item.has_work
            if known is None:
                continue
            counted = known.count(item.lane)
            counted.acks += item.outcome == "acked"
            counted.retries += item.outcome == "failed"
            counted.blocked += item.outcome == "blocked"
            counted.parked += item.outcome == "parked"
        if wakes and known is not None:
            known.waiting.wake()


def _selection(known: Known, request: ClaimTargets) -> Selection:
    globs = [Glob(source) for source in known.group.settings.sources]
    if request.may_read is None:
        return Selection((), globs)
    return NarrowedSelection((), globs, None, request.may_read)


def _ignore(outcome: object) -> None:
    """If it was not stored, the next claim finds it again."""


def _resolve(future: asyncio.Future[Any], outcome: object) -> None:
    # The client may be gone by the time that the commit is done.
    if not future.done():
        future.set_result(outcome)
