"""A relay: it delivers the rows of an outbox table, beside as many other relays as there are.

One loop takes turns at the database, and each lane that it leased is delivered by a task of its
own: one row after the other, so that their order is kept, and lanes beside each other, so that a
destination that is slow or dead holds up its own rows only. A turn writes what has ended since the
one before, so under load one transaction carries the outcomes of many sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from fencepost.client.aio import AsyncMesh
from fencepost.client.errors import FeatureRefusedError, FencepostError, ResponseError
from fencepost.client.retry import REPEATED
from fencepost.clock import Clock
from fencepost.outbox.ages import HOUR_MS, AgeRefused, is_past_window, max_age_hours
from fencepost.outbox.database import (
    Finished,
    Lease,
    OutboxDatabase,
    PostgresOutbox,
    SqliteOutbox,
    Turn,
    Wanted,
)
from fencepost.outbox.delivery import attempt
from fencepost.outbox.errors import OutboxError
from fencepost.outbox.rows import CHANNEL
from fencepost.outbox.states import Event, Failed, Rejected, Row, Stored
from fencepost.protocol.features import CLOSE_CODES, DEDUPE, FeatureRefused, check
from fencepost.protocol.meshes import RETENTION_DAYS_MIN, DedupeMode

log = logging.getLogger(__name__)

WAKES_MS = 100
"""SQLite: how often a relay that has nothing to do looks whether a transaction has committed."""
UPKEEP_MS = 60_000
"""How often an idle relay prunes, and how often it asks what the server offers."""
LINGER_MS = 20
"""How long a relay that has become idle looks once more before it asks to be told of commits."""
FAR_MS = 1 << 62
AWAY_MS = 500
"""How long a relay waits for a database or a server that is away before it asks again."""
REQUIRED = {DEDUPE: {"version": 2, "dedupe_retention_days": RETENTION_DAYS_MIN}}


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a relay behaves."""

    lease_ms: int = 30_000
    """How long a relay may be silent before others take its rows."""
    attempt_ms: int = 15_000
    """How long one send may take."""
    sends_max: int = 32
    """Sends at the same time."""
    destination_max: int = 3
    """Of these, to one destination, counted over all relays: one for each priority."""
    rows_max: int = 20
    """Rows of one lane that are leased at once."""
    poll_ms: int = 1_000
    """How often a relay looks for rows that it was not told of."""
    keep_done_ms: int = 7 * 24 * HOUR_MS
    """How long a delivered row is kept."""
    max_age_hours: int | None = None
    """Overrides the age at which a row dies; the server's memory of ids bounds it."""


class Terms(msgspec.Struct, frozen=True):
    """For how long the server remembers ids, and how long a row is tried."""

    mode: DedupeMode
    retention_days: int
    max_age_ms: int


class TermsRefusedError(OutboxError):
    """The server cannot take sends from an outbox, or `max_age_hours` is above what it allows.

    `exit_code` is the one with which a relay and a daemon end.
    """

    def __init__(self, detail: str, exit_code: int) -> None:
        super().__init__(detail)
        self.exit_code = exit_code


class Counted(Protocol):
    """Interface of the metrics: a relay calls `count` for each thing that it does."""

    def count(self, what: str, number: int = 1) -> None: ...


class Counts(Counter[str]):
    """Counts in memory."""

    def count(self, what: str, number: int = 1) -> None:
        self[what] += number


async def terms_of(mesh: AsyncMesh, max_age: int | None) -> Terms:
    """Ask the server for its terms, and hold its answer against the same rules again."""
    try:
        answer = await mesh.negotiate(REQUIRED)
    except FeatureRefusedError as error:
        raise TermsRefusedError(
            f"the server refuses the mesh {mesh.name!r}: {error}", _exit_code(error.close_code)
        ) from error
    supported = {name: feature["params"] for name, feature in answer["supported"].items()}
    refused = check(DEDUPE, REQUIRED[DEDUPE], supported)
    if isinstance(refused, FeatureRefused):
        raise TermsRefusedError(
            f"the server's offer for the mesh {mesh.name!r} is not enough: {refused.detail}",
            _exit_code(refused.close_code),
        )
    offer = supported[DEDUPE]
    days = offer.get("dedupe_retention_days", RETENTION_DAYS_MIN)
    hours = max_age_hours(offer["mode"], days, override_hours=max_age)
    if isinstance(hours, AgeRefused):
        raise TermsRefusedError(f"{hours.code}: {hours.detail}", 2)
    return Terms(offer["mode"], days, hours * HOUR_MS)


def _exit_code(close_code: int | None) -> int:
    """4010, 4011 and 4012 end a process with 10, 11 and 12."""
    return close_code - 4000 if close_code in CLOSE_CODES.values() and close_code else 1


class _Held(msgspec.Struct):
    """A lease that this relay has, and until when by its own clock."""

    lease: Lease
    until_ms: int


class Relay:
    """Delivers the rows of some meshes. `run` is the whole of it."""

    def __init__(
        self,
        database: OutboxDatabase,
        meshes: Mapping[str, AsyncMesh],
        *,
        sender: str | None,
        clock: Clock,
        settings: RelaySettings | None = None,
        counted: Counted | None = None,
    ) -> None:
        self._database = database
        self._meshes = meshes
        self._sender = sender
        self._clock = clock
        self._settings = settings or RelaySettings()
        self._counted = Counts() if counted is None else counted
        self._terms: dict[str, Terms] = {}
        self._unanswered: set[str] = set()
        """Meshes whose server is away, which the log has said once."""
        self._held: dict[str, _Held] = {}
        self._finished: list[Finished] = []
        self._woken = asyncio.Event()
        self._stopping = False
        self._turned_ms: int | None = None
        self._is_lingering = False
        self._told_until_ms = 0
        """Until when callers tell of their commits, by the monotonic clock."""

    async def run(self, stop: asyncio.Event, *, once: bool = False) -> None:
        """Deliver until `stop` is set; with `once` until no row is due."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._pass_on(stop))]
            if once:
                await self._ask_for_terms(patient=False)
            else:
                beside += [
                    group.create_task(self._hear()),
                    group.create_task(self._keep_terms()),
                ]
            try:
                await self._work(group, once=once)
            finally:
                for task in beside:
                    task.cancel()

    async def _work(self, group: asyncio.TaskGroup, *, once: bool) -> None:
        while True:
            # Cleared first: what happens from here on wakes the wait below.
            self._woken.clear()
            turn = await self._turn(once=once)
            if turn is not None:
                for lease in turn.leases:
                    group.create_task(self._deliver(lease, self._held[lease.token]))
                is_over = not self._held and not self._finished
                if is_over and (self._stopping or (once and not turn.leases)):
                    return
            if self._stopping and not self._held and turn is None:
                log.warning("the database is away: %d outcomes are lost", len(self._finished))
                return
            is_idle = turn is not None and not turn.busy and not self._held and not self._finished
            if is_idle and not once and not self._stopping and await self._prepares_to_wait():
                continue
            await self._wait(turn)

    async def _prepares_to_wait(self) -> bool:
        """Whether there is to be another look first, because a commit may not have been told.

        To tell of a commit costs the caller more than it costs a relay to look again a little
        later. So callers do it only while a relay says that it waits, for some time in advance.
        """
        now_ms = self._clock.monotonic_ms()
        if not self._is_lingering:
            self._is_lingering = True
            await asyncio.sleep(LINGER_MS / 1000)
            return True
        if self._told_until_ms - now_ms > self._settings.poll_ms:
            return False
        wait_ms = 2 * self._settings.poll_ms
        try:
            told = await asyncio.to_thread(self._database.wait, wait_ms)
        except Exception as error:
            if not self._database.is_away(error):
                raise
            return False
        self._told_until_ms = now_ms + wait_ms if told else FAR_MS
        return told

    async def _pass_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stopping = True
        self._woken.set()

    # Turns at the database

    async def _turn(self, *, once: bool) -> Turn | None:
        """Take a turn, if there is anything to do in one; None if the database is away."""
        now_ms = self._clock.monotonic_ms()
        finished, self._finished = self._finished, []
        try:
            idle = not finished and not self._held and not self._upkeep_is_due(now_ms)
            if idle and not await asyncio.to_thread(self._database.has_work):
                return Turn([], [])
            turn = await asyncio.to_thread(
                self._database.turn,
                finished,
                self._renewed(now_ms),
                self._wanted(),
                lease_ms=self._settings.lease_ms,
                keep_done_ms=self._settings.keep_done_ms,
                stops_waiting=self._told_until_ms > 0,
            )
        except Exception as error:
            self._finished = finished + self._finished
            if once or not self._database.is_away(error):
                raise
            log.warning("the database is away: %s", str(error).strip())
            self._counted.count("database_failures")
            return None
        self._turned_ms = now_ms
        for held in self._held.values():
            if self._is_old(held, now_ms):
                held.until_ms = now_ms + self._settings.lease_ms
        if turn.leases:
            self._is_lingering, self._told_until_ms = False, 0
        for lease in turn.leases:
            self._held[lease.token] = _Held(lease, now_ms + self._settings.lease_ms)
        self._report(turn)
        return turn

    def _upkeep_is_due(self, now_ms: int) -> bool:
        return self._turned_ms is None or now_ms - self._turned_ms >= UPKEEP_MS

    def _is_old(self, held: _Held, now_ms: int) -> bool:
        """Whether the lease should be renewed. One that has run out may be another relay's."""
        return 0 < held.until_ms - now_ms < self._settings.lease_ms * 2 // 3

    def _renewed(self, now_ms: int) -> list[Lease]:
        return [held.lease for held in self._held.values() if self._is_old(held, now_ms)]

    def _wanted(self) -> Wanted:
        settings = self._settings
        room = 0 if self._stopping else max(0, settings.sends_max - len(self._held))
        return Wanted(
            {mesh: terms.max_age_ms for mesh, terms in self._terms.items()},
            room,
            settings.destination_max,
            settings.rows_max,
        )

    def _report(self, turn: Turn) -> None:
        levels = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        for row, notice in turn.notices:
            self._counted.count(notice.kind)
            log.log(levels[notice.level], "row %s: %s", row.id, notice.detail)
        if turn.lost:
            self._counted.count("lost", turn.lost)
            log.warning("%d outcomes came too late: other relays have the rows", turn.lost)

    async def _wait(self, turn: Turn | None) -> None:
        """Until a lane ends, a transaction commits, a retry or a renewal is due."""
        wait_ms = AWAY_MS if turn is None else self._settings.poll_ms
        if turn is not None and turn.wait_ms is not None:
            wait_ms = min(wait_ms, turn.wait_ms)
        if self._held:
            wait_ms = min(wait_ms, self._settings.lease_ms // 3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(wait_ms, 1) / 1000):
                await self._woken.wait()

    # Sending

    async def _deliver(self, lease: Lease, held: _Held) -> None:
        """Send the rows of a lane in their order, up to one that has to be tried again."""
        settings = self._settings
        for number, row in enumerate(lease.rows):
            # A relay that was frozen must not go on with rows that others may have by now.
            if self._stopping or self._clock.monotonic_ms() >= held.until_ms:
                self._end(lease, lease.rows[number:])
                return
            event = await self._attempt(row, settings.attempt_ms)
            self._count(row, event)
            self._finished.append(Finished(row, event, lease.token))
            if isinstance(event, Failed):
                self._end(lease, lease.rows[number + 1 :])
                return
        self._end(lease, [])

    async def _attempt(self, row: Row, limit_ms: int) -> Stored | Failed | Rejected:
        mesh = self._meshes[row.mesh]
        try:
            async with asyncio.timeout(limit_ms / 1000):
                return await attempt(mesh, row, sender=self._sender, clock=self._clock)
        except TimeoutError:
            return Failed(f"no answer within {limit_ms} ms", self._clock.random())

    def _end(self, lease: Lease, unsent: list[Row]) -> None:
        self._finished += [Finished(row, None, lease.token) for row in unsent]
        del self._held[lease.token]
        self._woken.set()

    def _count(self, row: Row, event: Event) -> None:
        terms = self._terms[row.mesh]
        if isinstance(event, Stored):
            self._counted.count("delivered")
        elif isinstance(event, Failed):
            self._counted.count("retries")
        late = is_past_window(
            row.enqueued_ms, self._clock.wall_ms(), terms.mode, terms.retention_days
        )
        if row.attempts > 1 and late:
            self._counted.count("retries_after_expiry")

    # What the server offers

    async def _keep_terms(self) -> None:
        """Ask the server now and then, beside the deliveries: it may take long to answer."""
        while True:
            have_all = await self._ask_for_terms(patient=True)
            self._woken.set()
            await asyncio.sleep((UPKEEP_MS if have_all else AWAY_MS) / 1000)

    async def _ask_for_terms(self, *, patient: bool) -> bool:
        """Ask each mesh for its terms; without them its rows stay where they are.

        False: some are not known. A server that is away is no error, if the relay is `patient`.
        """
        for name, mesh in self._meshes.items():
            try:
                async with asyncio.timeout(self._settings.attempt_ms / 1000):
                    self._terms[name] = await terms_of(mesh, self._settings.max_age_hours)
            except (FencepostError, TimeoutError) as error:
                refused = isinstance(error, ResponseError) and error.status not in REPEATED
                if isinstance(error, TermsRefusedError) or refused or not patient:
                    raise
                if name not in self._terms and name not in self._unanswered:
                    self._unanswered.add(name)
                    said = "the server cannot be asked for the mesh %r, and is asked again: %s"
                    log.warning(said, name, error)
            else:
                if name in self._unanswered:
                    self._unanswered.remove(name)
                    log.warning("the server answers for the mesh %r", name)
        return self._terms.keys() == self._meshes.keys()

    # Hearing of new rows

    async def _hear(self) -> None:
        """Wake the loop when a transaction with sends has committed."""
        if isinstance(self._database, PostgresOutbox):
            await self._listen(self._database.address)
        elif isinstance(self._database, SqliteOutbox):
            await self._watch(self._database)

    async def _listen(self, address: str) -> None:
        import psycopg

        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    address,
                    autocommit=True,
                    connect_timeout=10,
                    application_name="fencepost-relay",
                ) as connection:
                    await connection.execute(f"listen {CHANNEL}")
                    self._woken.set()
                    async for _ in connection.notifies():
                        self._woken.set()
            except psycopg.Error as error:
                # Until it can listen again the loop looks by itself, `poll_ms` apart.
                log.info("not listening: %s", str(error).strip())
            await asyncio.sleep(AWAY_MS / 1000)

    async def _watch(self, database: SqliteOutbox) -> None:
        version: Any = None
        while True:
            with contextlib.suppress(Exception):
                found = await asyncio.to_thread(database.version)
                if found != version:
                    version = found
                    self._woken.set()
            await asyncio.sleep(WAKES_MS / 1000)
