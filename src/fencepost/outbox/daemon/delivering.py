"""Delivering: which lane is next, and the attempts under way.

A lane is what has an order: a destination of a mesh and a priority. One worker at a time serves a
lane, oldest row first, so the order holds; a lane whose oldest row waits for its next attempt does
not hold up the others. What is in memory is one entry for each lane; rows are read when their turn
comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from fencepost.clock import Clock
from fencepost.outbox.ages import is_past_window
from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.database import WriteFailedError, Writer
from fencepost.outbox.daemon.rows import Change, Lane, Settled
from fencepost.outbox.daemon.settings import DAY_MS, OutboxSettings
from fencepost.outbox.delivery import Sends, attempt
from fencepost.outbox.states import Failed, Notice, Rejected, Row, Stored
from fencepost.protocol.fingerprints import PRIORITIES
from fencepost.protocol.meshes import DedupeMode

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""How often rows are looked for whose time is over."""
RETRY_WRITE_SECONDS = 1.0
"""After a transaction that failed, for want of room for instance."""
RANKS: dict[str, int] = {priority: rank for rank, priority in enumerate(PRIORITIES)}

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Failpoint = Callable[[str], None]


def no_failpoint(_name: str) -> None:
    """What a normal start has at each point where a test ends the process."""


class Road(Protocol):
    """The way to a mesh, as far as delivering needs it."""

    mesh: str
    sender: str | None
    mode: DedupeMode | None
    retention_days: int

    @property
    def max_age_ms(self) -> int: ...
    @property
    def sends(self) -> Sends | None:
        """The way to send (HTTP or a session); None while the mesh is out of reach."""
        ...

    def failed(self) -> None:
        """An attempt failed in a way that may pass: is the mesh still there?"""
        ...

    def shut(self) -> None:
        """The server does not know our token: nothing more is sent until it does.

        The message is refused for good, as the contract has it; those behind it need not be.
        """
        ...


class DeliveryCounters:
    """What was delivered since the start, for the metrics."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        """Attempts by what came of them."""
        self.history_pruned = 0
        self.retries_after_expiry = 0
        self.late = 0


class Deliveries:
    """Delivers rows until it is cancelled."""

    def __init__(
        self,
        writer: Writer,
        roads: dict[str, Road],
        settings: OutboxSettings,
        clock: Clock,
        changed: Callable[[Iterable[Change]], None],
        swept: Callable[[int], None],
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """`changed` and `swept` are told of rows that have another status, or are gone."""
        self._writer = writer
        self._roads = roads
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._swept = swept
        self._failpoint = failpoint
        self._due: dict[Lane, int] = {}
        """Lanes that have rows and no worker, each with the time at which its oldest row is due."""
        self._timed: list[tuple[int, Lane]] = []
        """The same as a heap; entries that `_due` no longer has are passed over."""
        self._ready: dict[str, list[tuple[int, int, Lane]]] = {}
        """Lanes that are due, by mesh, as heaps by priority and age."""
        self._busy: set[Lane] = set()
        self._again: set[Lane] = set()
        """Lanes that got a row while a worker was leaving them."""
        self._places: Counter[tuple[str, str]] = Counter()
        self._wake = asyncio.Event()
        self.counters = DeliveryCounters()

    @property
    def under_way(self) -> int:
        return len(self._busy)

    def wakes(self, lane: Lane, due_ms: int = 0) -> None:
        """A lane has a row that is due at a time, or now."""
        if lane in self._busy:
            self._again.add(lane)
            return
        before = self._due.get(lane)
        if before is None or due_ms < before:
            self._due[lane] = due_ms
            heappush(self._timed, (due_ms, lane))
            self._wake.set()

    def look(self) -> None:
        """A mesh can be reached again, or no longer: see what may be sent."""
        self._wake.set()

    async def run(self) -> None:
        """Start attempts as lanes become due; never returns."""
        async with asyncio.TaskGroup() as group:
            _ = group.create_task(self._look_for_old_rows())
            while True:
                wait_seconds = self._start(group)
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_seconds):
                        await self._wake.wait()

    def _start(self, group: asyncio.TaskGroup) -> float | None:
        """Start what may be; how long until the next lane is due."""
        self._note_due()
        crowded: list[tuple[int, int, Lane]] = []
        while len(self._busy) < self._settings.deliveries_max:
            heap = self._most_urgent()
            if heap is None:
                break
            entry = heappop(heap)
            lane = entry[2]
            if lane not in self._due or lane in self._busy:
                continue
            if self._places[lane[:2]] >= self._settings.destination_deliveries_max:
                crowded.append(entry)
                continue
            del self._due[lane]
            self._busy.add(lane)
            self._places[lane[:2]] += 1
            _ = group.create_task(self._serve(lane))
        for entry in crowded:
            heappush(self._ready[entry[2][0]], entry)
        if not self._timed:
            return None
        return max(0.001, (self._timed[0][0] - self._clock.now_ms()) / 1000)

    def _note_due(self) -> None:
        now_ms = self._clock.now_ms()
        while self._timed and self._timed[0][0] <= now_ms:
            due_ms, lane = heappop(self._timed)
            if self._due.get(lane) == due_ms:
                ready = self._ready.setdefault(lane[0], [])
                heappush(ready, (RANKS[lane[2]], due_ms, lane))

    def _most_urgent(self) -> list[tuple[int, int, Lane]] | None:
        """The heap of the mesh, among those in reach, whose first lane comes first."""
        heaps = [
            heap
            for mesh, heap in self._ready.items()
            if heap and (road := self._roads.get(mesh)) is not None and road.sends is not None
        ]
        return min(heaps, key=lambda heap: heap[0], default=None)

    async def _serve(self, lane: Lane) -> None:
        """Deliver the rows of a lane one after the other, until one is not due or all are done."""
        due_ms: int | None = None
        try:
            due_ms = await self._deliver(lane)
        except WriteFailedError as error:
            log.error("the outbox cannot write, and waits: %s", error)
            due_ms = self._clock.now_ms() + int(RETRY_WRITE_SECONDS * 1000)
        finally:
            self._busy.discard(lane)
            self._places[lane[:2]] -= 1
            if not self._places[lane[:2]]:
                del self._places[lane[:2]]
            if lane in self._again:
                self._again.discard(lane)
                due_ms = 0 if due_ms is None else due_ms
            if due_ms is not None:
                self.wakes(lane, due_ms)
            self._wake.set()

    async def _deliver(self, lane: Lane) -> int | None:
        road = self._roads[lane[0]]
        take = partial(rows.do_take, lane=lane)
        settled = await self._write(take, road)
        while settled.taken is not None:
            row = settled.taken
            sends = road.sends
            if row.attempts > 1 and self._is_past_window(road, row):
                self.counters.retries_after_expiry += 1
                log.warning("%r is sent again later than its mesh remembers", row.client_message_id)
            event = await self._attempt(sends, row, road.sender)
            self._failpoint("answered")
            self.counters.events[type(event).__name__.lower()] += 1
            if isinstance(event, Failed):
                road.failed()
            elif isinstance(event, Rejected) and event.error.startswith("401 "):
                road.shut()
            goes_on = road.sends is not None and not self._others_wait()
            settle = partial(rows.do_settle, row=row, event=event, goes_on=goes_on)
            settled = await self._settle(settle, road)
        return settled.due_ms

    async def _attempt(
        self, sends: Sends | None, row: Row, sender: str | None
    ) -> Stored | Failed | Rejected:
        if sends is None:
            return Failed("the mesh cannot be reached", self._clock.random())
        try:
            return await attempt(sends, row, sender=sender, clock=self._clock)
        except Exception as error:
            # One answer that cannot be understood must not end the deliveries of all others.
            log.exception("an attempt of %r failed", row.client_message_id)
            return Failed(f"{type(error).__name__}: {error}", self._clock.random())

    async def _settle(self, job: Callable[..., Settled], road: Road) -> Settled:
        """Note what came of an attempt, as soon as that can be written.

        The row is in flight until then, and only what is known here brings it out of that.
        """
        while True:
            try:
                return await self._write(job, road)
            except WriteFailedError as error:
                log.error("what came of an attempt cannot be written, and waits: %s", error)
                await asyncio.sleep(RETRY_WRITE_SECONDS)

    async def _write(self, job: Callable[..., Settled], road: Road) -> Settled:
        now_ms, max_age_ms = self._clock.now_ms(), road.max_age_ms
        settled = await self._writer.write(
            lambda file: job(file, now_ms=now_ms, max_age_ms=max_age_ms)
        )
        self._changed(settled.changes)
        for notice in settled.step.notices:
            self._tell(notice)
        return settled

    def _tell(self, notice: Notice) -> None:
        if notice.kind != "dead":  # dead rows are changes, and told as such
            log.log(_LEVELS[notice.level], "%s", notice.detail)
        if notice.kind == "history_pruned":
            self.counters.history_pruned += 1
        elif notice.kind == "late":
            self.counters.late += 1

    def _is_past_window(self, road: Road, row: Row) -> bool:
        if road.mode is None:
            return False
        now_ms = self._clock.now_ms()
        return is_past_window(row.enqueued_ms, now_ms, road.mode, road.retention_days)

    def _others_wait(self) -> bool:
        """Whether a lane is due that has no place because of those that are served."""
        if len(self._busy) < self._settings.deliveries_max:
            return False
        self._note_due()
        return self._most_urgent() is not None

    async def _look_for_old_rows(self) -> None:
        """Let rows die whose time is over while nothing is sent, and forget what was delivered."""
        while True:
            for road in list(self._roads.values()):
                await self._look(road)
            await self._sweep()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, road: Road) -> None:
        max_age_ms = road.max_age_ms
        if max_age_ms >= rows.NEVER_MS:
            return
        with contextlib.suppress(WriteFailedError):
            while True:
                now_ms = self._clock.now_ms()
                look = partial(rows.do_look, mesh=road.mesh, now_ms=now_ms, max_age_ms=max_age_ms)
                changes = await self._writer.write(look)
                self._changed(changes)
                if len(changes) < rows.AGED_MAX:
                    return

    async def _sweep(self) -> None:
        with contextlib.suppress(WriteFailedError):
            while True:
                now_ms = self._clock.now_ms()
                sweep = partial(
                    rows.do_sweep,
                    done_before_ms=now_ms - self._settings.done_days * DAY_MS,
                    events_before_ms=now_ms - self._settings.inbox_days * DAY_MS,
                )
                swept = await self._writer.write(sweep)
                self._swept(swept)
                if swept < rows.SWEPT_MAX:
                    return
