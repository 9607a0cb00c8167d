"""Deliver the inbox of a member to its session, and take the acks for what was delivered.

`LeasedInbox` holds the lease of the inbox's group, as a worker over HTTP does, and goes on with it
for as long as its session lasts: an ack keeps the lease. `SharedInbox` is that of a mesh with
`allow_concurrent`: it has no lease, and reads from the offset that its client names. What both
deliver is read from the log when a commit has touched the inbox, a bounded piece at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.protocol import sessions
from fencepost.protocol.acks import Ack as LeaseAck
from fencepost.protocol.acks import ReplayResult
from fencepost.protocol.leases import Claim, InboxHeld, LeaseRef
from fencepost.protocol.meshes import Member
from fencepost.protocol.sessions import Ack, Close, SessionLimits
from fencepost.server.groups.answers import event_json
from fencepost.server.groups.working import Known, Working
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.store.contract import Failed, Failure, Unknown
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    AckRefused,
    Aside,
    ClaimDone,
    ClaimTargets,
    EventSpan,
    GroupMissing,
    GroupOutcome,
    GroupReads,
    RenewDone,
    RenewLeases,
)

Answer = Callable[[int, dict[str, object] | None], None]
"""Takes the status and the body that answer an ack."""


class Behind(NamedTuple):
    """The parts of the server that inboxes use."""

    working: Working
    reads: GroupReads
    tokens: LeaseTokens
    clock: Clock
    limits: SessionLimits


class SharedInbox:
    """An inbox without a lease, read from an offset of the session's own."""

    def __init__(
        self, behind: Behind, member: Member, deliver: Callable[[bytes, int], bool], after: int
    ) -> None:
        """`deliver` sends a frame with so many entries; false when the client has to read first."""
        self._behind = behind
        self._member = member
        self._deliver = deliver
        self._read_to = after
        self._aside = Aside()
        self._replayed: tuple[int, ...] = ()
        self._replaying: tuple[int, ...] = ()
        """Parked entries that were given out again and wait for an ack."""
        self._open: deque[int] = deque()
        """The last position of each delivery that waits for its ack."""
        self._news = asyncio.Event()
        self._token = ""

    @property
    def path(self) -> str:
        """The stream that the inbox is."""
        return self._member.path

    def wake(self) -> None:
        """There may be entries to deliver, or room for them."""
        self._news.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            self._news.clear()
            if not await self._deliver_more():
                await self._look()
                await self._news.wait()

    async def _look(self) -> None:
        """Do what is due beside deliveries."""

    async def _deliver_more(self) -> bool:
        """Deliver the next entries; whether there may be more, and room for them."""
        limits = self._behind.limits
        if len(self._open) >= limits.deliveries_max:
            return False
        head = await self._behind.reads.head()
        if self._aside.until is not None:
            head = min(head, self._aside.until)
        if self._read_to >= head and not self._replayed:
            return False
        span = EventSpan(self.path, self._read_to, head, self._aside.left_out, self._replayed)
        [found] = await self._behind.reads.events(
            [span], (), events_max=limits.entries_max, bytes_max=limits.delivery_bytes_max
        )
        self._read_to = max(self._read_to, found.read_to)
        if self._replayed:
            again = [event.position for event in found.events if event.replayed]
            self._replaying = (*again, *found.not_replayed)
            self._replayed = ()
        if not found.events:
            return self._read_to < head
        self._open.append(found.events[-1].position)
        entries = [event_json(event) for event in found.events]
        frame = sessions.deliver_frame(self._token, entries)
        return self._deliver(frame, len(entries))

    def _passed(self, at: int) -> None:
        """Everything up to `at` is acknowledged."""
        while self._open and self._open[0] <= at:
            self._open.popleft()
        self.wake()

    def ack(self, ack: Ack, answer: Answer) -> None:
        """Note how far the client came: there is nothing to store."""
        if ack.at > self._read_to:
            answer(400, _beyond(self._read_to))
            return
        self._passed(ack.at)
        answer(200, None)

    def renew(self) -> None:
        """Keep what a session has; nothing is to be kept here."""

    def release(self) -> None:
        """Give back what the session had."""


class LeasedInbox(SharedInbox):
    """An inbox whose lease the session holds."""

    def __init__(
        self,
        behind: Behind,
        member: Member,
        deliver: Callable[[bytes, int], bool],
        known: Known,
        end: Callable[[Close], None],
    ) -> None:
        super().__init__(behind, member, deliver, -1)
        self._known = known
        self._end = end
        self._ref: LeaseRef | None = None
        self._is_due = False

    @property
    def group(self) -> str:
        """The group of the inbox."""
        return self._member.group

    async def take(self, worker: str) -> Close | None:
        """Take the lease; why it cannot be had."""
        behind = self._behind
        claim = Claim(worker, 1, behind.limits.lease_ms, take=True)
        outcome = await behind.working.work(ClaimTargets(self.group, claim))
        match outcome:
            case InboxHeld():
                return sessions.OCCUPIED
            case Failed() | Unknown():
                return sessions.AWAY
            case ClaimDone(leases=[lease]):
                row = lease.row
            case ClaimDone():
                return sessions.INBOX_BLOCKED
            case _:
                behind.working.forget(self.group)
                return sessions.member_missing(self._member.name)
        self._ref = LeaseRef(self.group, outcome.group.id, row.target, row.token)
        self._token = behind.tokens.make(self._ref)
        self._read_to = max(row.at, row.waits_from - 1)
        self._aside = outcome.aside[0] if outcome.aside else Aside()
        self._replayed = self._aside.replayed[: behind.limits.entries_max]
        return None

    def ack(self, ack: Ack, answer: Answer) -> None:
        """Store how far the client came, and go on with the lease."""
        if self._ref is None or ack.token != self._token:
            answer(409, _LOST)
            return
        if ack.at > self._read_to:
            answer(400, _beyond(self._read_to))
            return
        replayed = [ReplayResult(position) for position in self._replaying]
        self._replaying = ()
        behind = self._behind
        item = LeaseAck(self._ref.number, ack.at, None, replayed, behind.limits.lease_ms)
        request = AckLeases(self.group, [(self._ref, item)], behind.clock.random())

        def told(outcome: GroupOutcome | Failure) -> None:
            match outcome:
                case AckDone(items=[done]) if done.outcome == "acked":
                    self._passed(ack.at)
                    answer(200, None)
                case AckDone():
                    answer(409, _LOST)
                    self._lost(sessions.REPLACED)
                case AckRefused(detail=detail):
                    answer(400, {"code": "ack_invalid", "detail": detail})
                case Failed() | Unknown():
                    # The entries come again in another session, where they can be acknowledged.
                    answer(503, _AWAY)
                    self._end(sessions.AWAY)
                case _:
                    answer(409, _LOST)
                    self._lost(sessions.member_missing(self._member.name))

        behind.working.ask(request, told)

    def renew(self) -> None:
        """Go on with the lease; the session ends when another one has it."""
        if self._ref is None:
            return

        def told(outcome: GroupOutcome | Failure) -> None:
            match outcome:
                case RenewDone(until_ms=[None]):
                    self._lost(sessions.REPLACED)
                case GroupMissing():
                    self._lost(sessions.member_missing(self._member.name))
                case _:
                    pass  # a store that is away for a moment says nothing about the lease

        request = RenewLeases(self.group, [self._ref], self._behind.limits.lease_ms)
        self._behind.working.ask(request, told)
        self._is_due = True
        self.wake()

    async def _look(self) -> None:
        known_to = self._aside.until
        if known_to is not None and self._read_to >= known_to and not self._open:
            # The next lease tells what is parked behind.
            self._end(sessions.AWAY)
            return
        # The lag that the group shows is counted from what it has looked at.
        if self._is_due:
            self._is_due = False
            await self._behind.working.correlate(self._known)

    def release(self) -> None:
        """Let the next session have the inbox at once."""
        ref, self._ref = self._ref, None
        if ref is not None:
            request = RenewLeases(self.group, [ref], None)
            self._behind.working.ask(request, lambda _outcome: None)

    def _lost(self, close: Close) -> None:
        self._ref = None
        self._end(close)


_LOST: dict[str, object] = {
    "code": "lease_lost",
    "detail": "the token is not that of this session's lease: the entries come again",
}
_AWAY: dict[str, object] = {
    "code": "store_unavailable",
    "detail": "the ack may or may not be stored: the entries may come again",
}


def _beyond(read_to: int) -> dict[str, object]:
    detail = f"nothing behind {read_to} was delivered in this session"
    return {"code": "ack_invalid", "detail": detail}
