"""Leading: one of all nodes does the background work, and another takes over when it is gone.

A node that wants to lead needs a lock that belongs to a session of the database. The lock goes with
the session: when the node dies, when its connection breaks, and, because the database ends sessions
that stay silent, when the node merely stops. Then another node gets the lock, and takes over in a
turn, so that a change of leader is ordered with all that is written. The lock alone is no proof,
because a node may have lost it without knowing. The leader is the node that the row of counters
names (`term.py`).

Every node registers here, with the address at which other nodes reach it, and reads the database's
clock, which is the time of all decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import psycopg

from fencepost.clock import Clock
from fencepost.store.contract import Leader, LeaderDuty, StoreAwayError
from fencepost.store.postgres.cluster.term import DatabaseClock, Term
from fencepost.store.postgres.driver.connection import StandbyError, UnusableDatabaseError
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large.locks import LARGE_COMMITS
from fencepost.store.postgres.maintain import PostgresUpkeep
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.postgres.subscriptions import PostgresSubscriptions
from fencepost.store.write.decider import Decider

log = logging.getLogger(__name__)

LOCK = 0x6C656164
"""The number of the advisory lock; the lock of migrations has another."""
RECONNECT_S = 0.5
LEAVE_S_MAX = 5.0
"""How long a node that stops may take to let another lead; after that the lock does it."""


class Leading:
    """The part of one node in this. Set `url` and `subscribe`, then `run` it."""

    def __init__(self, store: PostgresStore, clock: Clock, *, simulated: bool = False) -> None:
        self._store = store
        self._simulated = simulated
        self._host_clock = clock
        self.clock = DatabaseClock(clock)
        self.node = store.node
        self.url = ""
        """Where other nodes reach this one."""
        self.subscribe: LeaderDuty | None = None
        self.leader: Leader | None = None
        """The node that leads, as far as this node knows."""
        self._changed = asyncio.Event()
        self.first_look = asyncio.Event()
        """Set when this node has begun to lead for the first time, or found that another does."""
        self._poked = asyncio.Event()
        self._reign: asyncio.Task[None] | None = None
        self._turns_watched_ms = -store.settings.turn_idle_ms

    @property
    def is_reigning(self) -> bool:
        """Whether this node leads, or is about to."""
        return self._reign is not None and not self._reign.done()

    async def changed(self) -> None:
        """Wait until another node leads, or none, as far as this node knows."""
        await self._changed.wait()

    def _found(self, leader: Leader | None) -> None:
        if leader != self.leader:
            self.leader = leader
            self._changed.set()
            self._changed = asyncio.Event()

    def poke(self) -> None:
        """Look at once which node leads: that has changed, or seems to have."""
        self._poked.set()

    async def run(self) -> None:
        """Take part until cancelled, whatever happens to the database."""
        while True:
            try:
                await self._take_part()
            except (psycopg.Error, StandbyError, UnusableDatabaseError) as error:
                log.warning("this node cannot take part in leading: %s", str(error).strip())
            except Exception:
                log.exception("taking part in leading failed and will be tried again")
            await asyncio.sleep(RECONNECT_S)

    async def _take_part(self) -> None:
        settings = self._store.settings
        # Often enough that the database does not take this node for silent.
        pause_s = min(settings.poll_interval_ms, settings.leader_silence_ms / 4) / 1000
        connection = await WritingConnection.connect(settings)
        holds_lock = False
        try:
            await connection.fetch("end_idle_session", (str(settings.leader_silence_ms),))
            while True:
                self._poked.clear()
                await self._look(connection)
                if not holds_lock:
                    [(holds_lock,)] = await connection.fetch("try_lead", (LOCK,))
                if not holds_lock:
                    self.first_look.set()
                elif not self.is_reigning:
                    # The look before it has shown that the session, and so the lock, is there.
                    self._reign = asyncio.create_task(self._lead())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._poked.wait()
        except asyncio.CancelledError:
            await self._leave(connection)
            raise
        finally:
            await self._step_down()
            await connection.close()

    async def _look(self, connection: WritingConnection) -> None:
        """Register this node, and read the time and which node leads.

        A node that stops in its turn keeps all others waiting, so this looks for one as well.
        """
        settings = self._store.settings
        await connection.fetch("register_node", (self.node, self.url))
        [(database_ms,)] = await connection.fetch("clock_ms")
        if not self._simulated:
            self.clock.set(database_ms)
        now_ms = self._host_clock.monotonic_ms()
        if now_ms >= self._turns_watched_ms + settings.turn_idle_ms // 4:
            self._turns_watched_ms = now_ms
            values = (settings.turn_idle_ms, LARGE_COMMITS)
            for pid, _ in await connection.fetch("end_stuck_turns", values):
                log.warning("a node stopped while it wrote: its session %d was ended", pid)
        found = await connection.fetch("find_leader")
        self._found(Leader(*found[0]) if found else None)

    # The time as the leader

    async def _lead(self) -> None:
        try:
            await self._store.decide(self._take, touches_all=False)
            self._found(Leader(self.node, self.url))
            log.info("this node leads")
            term = Term(self._store)
            subscriptions = PostgresSubscriptions(term, self.clock)
            upkeep = PostgresUpkeep(term, self.clock, subscriptions)
            async with asyncio.TaskGroup() as duties:
                working = [duties.create_task(upkeep.run())]
                if self.subscribe is None:
                    self.first_look.set()
                else:
                    working.append(duties.create_task(self.subscribe(subscriptions)))
                await term.over.wait()
                for duty in working:
                    duty.cancel()
        except* StoreAwayError as away:
            log.warning("this node cannot lead now: %s", away.exceptions[0])
        except* Exception:
            log.exception("leading failed and will be tried again")

    def _take(self, decider: Decider) -> None:
        decider.group.statements.append(("take_lead", (self.node,)))

    async def _step_down(self) -> None:
        reign, self._reign = self._reign, None
        if reign is not None:
            reign.cancel()
            await asyncio.gather(reign, return_exceptions=True)
        self._found(None)

    async def _leave(self, connection: WritingConnection) -> None:
        """This node stops: let another lead at once."""
        was_reigning = self.is_reigning
        await self._step_down()
        with contextlib.suppress(psycopg.Error, StoreAwayError, TimeoutError):
            async with asyncio.timeout(LEAVE_S_MAX):
                if was_reigning:
                    await self._store.decide(
                        lambda decider: decider.group.statements.append(
                            ("leave_lead", (self.node,))
                        ),
                        touches_all=False,
                    )
                await connection.fetch("forget_node", (self.node,))
