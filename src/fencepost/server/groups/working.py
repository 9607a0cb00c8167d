"""Workers' requests: correlate what the server can, claim, read the events, wait for work.

A claim of a group whose targets are streams or messages first has a piece of the log correlated;
the correlation and the claim are decided in one commit. When there is nothing to claim, a request
that may wait does so until something is appended, a lease or a wait ends, or its time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fencepost.clock import Clock
from fencepost.protocol.acks import AckItem
from fencepost.protocol.globs import Glob
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import SHARE_AT_FIRST, CorrelationMoved, next_share
from fencepost.server.groups.feed import Feed
from fencepost.server.groups.waiting import Lines, Place
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
"""How often a waiting claim looks again where other servers may have changed the group."""
CATCH_UP_S = 0.25
"""How long a claim that does not wait looks through the log for work, piece by piece."""


class Counted:
    """What happened in one lane of a group, for the metrics."""

    __slots__ = ("acks", "blocked", "claims", "lost", "parked", "pruned", "retries")

    def __init__(self) -> None:
        self.claims = self.acks = self.retries = self.blocked = 0
        self.parked = self.lost = self.pruned = 0


class Known:
    """What this server remembers of a group that is in use: hints, never decisions."""

    __slots__ = ("counted", "cycle", "globs", "group", "looked_at", "share", "waiting")

    def __init__(self, group: Group) -> None:
        self.share = SHARE_AT_FIRST
        self.cycle = 0
        self.looked_at = -1
        self.waiting = Lines()
        self.counted: dict[str, Counted] = {}
        """By lane."""
        self.group = group
        self.take(group)

    def take(self, group: Group) -> None:
        """The group as it is by now."""
        if group.id != self.group.id:
            self.looked_at = -1  # Another server made it anew, and it begins elsewhere.
        self.group = group
        self.globs = [Glob(source) for source in group.settings.sources]

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
        self._look_again_s = LOOK_AGAIN_S if is_shared else None
        self._news = 0
        self._stopping = False
        self.known: dict[str, Known] = {}
        store.listen(self._published)

    @property
    def waiters_count(self) -> int:
        """Claims that wait."""
        return sum(known.waiting.count for known in self.known.values())

    def stop_waiting(self) -> None:
        """Answer every claim that waits: the server is going down."""
        self._stopping = True
        for known in self.known.values():
            known.waiting.wake_all()

    def _published(self, changes: Sequence[Published]) -> None:
        if not changes:
            return  # Commits of claims and acks alone leave the log as it is.
        self._news += 1
        for known in self.known.values():
            if known.waiting.count and any(
                glob.matches(change.info.path) for glob in known.globs for change in changes
            ):
                known.waiting.wake()

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
        self._store.work(request, lambda outcome: self._correlated(known, outcome))
        return True

    def _correlated(self, known: Known, outcome: object) -> None:
        if isinstance(outcome, CorrelationDone):
            known.take(outcome.group)
        elif isinstance(outcome, CorrelationMoved):
            known.take(known.group._replace(watermark=outcome.watermark))

    async def claim(
        self, request: ClaimTargets, *, wait_ms: int
    ) -> ClaimDone | GroupOutcome | Failure:
        """Claim, and wait for work if there is none.

        Where the log was not looked through to its end, `due_ms` of the answer is 0: claim again.
        """
        ends_at = asyncio.get_running_loop().time() + wait_ms / 1000
        while True:
            known = await self.find(request.group)
            if known is None:
                return await self.work(request)
            with known.waiting.join((request.claim.lane, request.may_read)) as place:
                outcome = await self._look(known, place, request, ends_at)
            if outcome is not None:
                return outcome

    async def _look(
        self, known: Known, place: Place, request: ClaimTargets, ends_at: float
    ) -> ClaimDone | GroupOutcome | Failure | None:
        """Look for work until there is some or the time is up; None when the group is gone."""
        loop = asyncio.get_running_loop()
        looks_until = max(ends_at, loop.time() + CATCH_UP_S)
        while self.known.get(request.group) is known:
            place.begin()
            incarnation = known.group.id
            more = await self.correlate(known)
            outcome = await self.work(request)
            if not isinstance(outcome, ClaimDone) or outcome.leases:
                return outcome
            place.found_nothing()
            now = loop.time()
            if more or known.group.id != incarnation:
                if now >= looks_until or self._stopping:
                    return outcome._replace(due_ms=0)
                continue
            if now >= ends_at or self._stopping:
                return outcome
            if outcome.due_ms is not None:
                known.waiting.wake_at(now + max(0, outcome.due_ms - outcome.now_ms) / 1000)
            if self._look_again_s is not None:
                known.waiting.wake_at(now + self._look_again_s)
            await place.wait(ends_at)
        return None

    async def events(self, done: ClaimDone, events_max: int, bytes_max: int) -> list[SpanEvents]:
        """The events of each lease."""
        spans: list[EventSpan] = []
        for index, lease in enumerate(done.leases):
            row = lease.row
            aside = done.aside[index] if done.aside else Aside()
            after = max(row.at, row.waits_from - 1)
            until = row.work_to if aside.until is None else min(row.work_to, aside.until)
            replayed = aside.replayed[:events_max]
            spans.append(EventSpan(row.source, after, until, aside.left_out, replayed))
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
                known.take(outcome.group)

    def _note_claim(self, name: str, known: Known | None, done: ClaimDone) -> None:
        if known is not None:
            known.take(done.group)
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


def _ignore(outcome: object) -> None:
    """If it was not stored, the next claim finds it again."""


def _resolve(future: asyncio.Future[Any], outcome: object) -> None:
    # The client may be gone by the time that the commit is done.
    if not future.done():
        future.set_result(outcome)
