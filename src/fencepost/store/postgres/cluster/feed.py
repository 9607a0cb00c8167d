"""The feed: what other nodes have written, told to the readers of this one.

Every turn leaves a row that says which streams it changed. After a commit a node notifies the
others, on a connection of its own and once for all commits since the last notification. A node that
is notified reads the rows of the turns that it has not seen. A lost notification costs only time,
because every node also looks for new rows once a second. Each session that follows holds a lock
that shows it, so that a node that follows alone notifies none, and looks at its own turns.

After it lost its connection a node reads some turns again: a failover to a standby that was behind
takes turns back, and their numbers are given anew. Telling readers of a stream twice does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg

from fencepost.store import records
from fencepost.store.contract import Published
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.sql import Row
from fencepost.store.write.ledger import view_of

log = logging.getLogger(__name__)

CHANNEL = "fencepost"
FOLLOWS = 0x66656564
"""The class of the advisory lock by which sessions show that they follow the turns."""
TURNS_PER_LOOK_MAX = 1_000
STREAMS_PER_LOOK_MAX = 500
"""Streams of the turns that are looked at at once: a large commit changes more."""
TURNS_AGAIN = TURNS_PER_LOOK_MAX
"""Turns that are looked at again after a connection was lost."""
RECONNECT_S = 0.5
OWN_TURNS_S = 0.02
"""How soon a node looks at its own turns again: its readers know of them already."""


class Turn(NamedTuple):
    """The row of a turn: which node wrote, when, and which streams it changed."""

    turn: int
    node: str
    at_ms: int
    head: int
    streams: list[int]
    created: list[int]
    removed: list[int]
    since: int | None
    """Set in the turn that ends a large commit: the turn in which that took its positions. What was
    appended since then can be read in the log from now on."""


class Feed:
    """Follows the turns of all nodes, on the event loop."""

    def __init__(
        self,
        node: str,
        connect: Callable[[], Any],
        *,
        poll_interval_s: float,
        published: Callable[[Sequence[Published]], None],
        lost: Callable[[], None],
    ) -> None:
        self._node = node
        self._connect = connect
        self._poll_interval_s = poll_interval_s
        self._published = published
        self._lost = lost
        self.is_alone = False
        """Whether no other node was following the turns at the last look."""
        self._looked_at = 0.0  # for other nodes
        self._written = asyncio.Event()
        self.seen = -1
        """The newest turn that this node's readers were told of."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.on_turn: Callable[[Turn, Sequence[Row]], None] = _ignore
        """Told of every turn, this node's included, with the rows of its streams."""

    async def run(self) -> None:
        """Follow until cancelled, whatever happens to the database."""
        while True:
            connection: WritingConnection | None = None
            try:
                connection = await self._connect()
                await connection.listen(CHANNEL)
                await connection.fetch("follow_turns", (FOLLOWS,))
                self._looked_at = 0.0
                [(turn, _)] = await connection.fetch("last_turn")
                self.seen = turn if self.seen < 0 else max(0, min(self.seen, turn) - TURNS_AGAIN)
                await self._follow(connection)
            except psycopg.Error as error:
                log.warning("the feed of turns is interrupted: %s", str(error).strip())
            except Exception:
                log.exception("the feed of turns failed and will be tried again")
            finally:
                self.is_alone = False
                self._lost()
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(RECONNECT_S)

    def poke(self) -> None:
        """This node has written."""
        self._written.set()

    async def reach(self, turn: int, wait_s_max: float) -> None:
        """Wait until the readers of this node were told of a turn; for so long at most."""
        if self.seen >= turn:
            return
        waiting = (turn, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await asyncio.wait([waiting[1]], timeout=wait_s_max)
        finally:
            self._waiting.remove(waiting)

    async def _follow(self, connection: WritingConnection) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._written.clear()
            await self._catch_up(connection)
            caught_up_at = clock()
            if caught_up_at - self._looked_at >= self._poll_interval_s:
                [(is_followed,)] = await connection.fetch("another_follows", (FOLLOWS,))
                self.is_alone, self._looked_at = not is_followed, caught_up_at
            if self.is_alone:
                await self._wait_for_own(caught_up_at)
            else:
                await self._wait_for_any(connection, caught_up_at)

    async def _wait_for_own(self, caught_up_at: float) -> None:
        """Wait until this node has written, and for a while after the last look."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(caught_up_at + self._poll_interval_s):
                await self._written.wait()
        await asyncio.sleep(caught_up_at + OWN_TURNS_S - loop.time())

    async def _wait_for_any(self, connection: WritingConnection, caught_up_at: float) -> None:
        """Wait until another node has written; for own turns only a while after the last look."""
        loop = asyncio.get_running_loop()
        said = await connection.wait_for_notification(self._poll_interval_s)
        while said and all(map(self._is_own, said)):
            left_s = caught_up_at + OWN_TURNS_S - loop.time()
            if left_s <= 0:
                break
            said = await connection.wait_for_notification(left_s)

    def _is_own(self, notification: bytes) -> bool:
        return notification.endswith(self._node.encode())

    async def _catch_up(self, connection: WritingConnection) -> None:
        while True:
            limits = (TURNS_PER_LOOK_MAX, STREAMS_PER_LOOK_MAX)
            rows = await connection.fetch("turns_after", (self.seen, *limits))
            if not rows:
                return
            turns = [Turn(*row) for row in rows]
            await self._tell(connection, turns)
            for turn in turns:
                if turn.since is not None:
                    await self._show(connection, turn.since, turn.turn)
            self.seen = turns[-1].turn
            for until, waiting in self._waiting:
                if until <= self.seen and not waiting.done():
                    waiting.set_result(None)
            # Turns that came since have sent a notification that was not looked at yet.
            streams_count = sum(len(turn.streams) for turn in turns)
            if len(turns) < TURNS_PER_LOOK_MAX and streams_count < STREAMS_PER_LOOK_MAX:
                return

    async def _tell(self, connection: WritingConnection, turns: Sequence[Turn]) -> None:
        ids = {stream for turn in turns for stream in turn.streams}
        rows = await connection.fetch("streams_of_turns", (list(ids),)) if ids else []
        by_id = {row[0]: row for row in rows}
        others = {stream for turn in turns if turn.node != self._node for stream in turn.streams}
        changes = [_published(by_id[stream]) for stream in others if stream in by_id]
        if changes:
            self._published(changes)
        for turn in turns:
            self.on_turn(turn, [by_id[stream] for stream in turn.streams if stream in by_id])

    async def _show(self, connection: WritingConnection, since: int, until: int) -> None:
        """Tell again of what was appended while the log stood still: now it can be read there."""
        ids = [stream for (stream,) in await connection.fetch("streams_since", (since, until))]
        for at in range(0, len(ids), STREAMS_PER_LOOK_MAX):
            some = ids[at : at + STREAMS_PER_LOOK_MAX]
            rows = await connection.fetch("streams_of_turns", (some,))
            self._published([_published(row) for row in rows])


def _published(row: Row) -> Published:
    stream, _ = records.stream_from_row(row)
    info = view_of(stream)
    return Published(info, info.tail, None, gone=row[2] != records.LIVE)


class Notifier:
    """Wakes the feeds after this node has written: its own, or those of all nodes."""

    def __init__(self, node: str, connect: Callable[[], Any], feed: Feed) -> None:
        self._node = node
        self._connect = connect
        self._feed = feed
        self._written = asyncio.Event()
        self._turn = 0

    def poke(self, turn: int) -> None:
        """There is a new turn."""
        if self._feed.is_alone:
            self._feed.poke()
            return
        self._turn = turn
        self._written.set()

    async def run(self) -> None:
        """Notify until cancelled; turns that come meanwhile share the next notification."""
        connection: WritingConnection | None = None
        try:
            while True:
                await self._written.wait()
                self._written.clear()
                try:
                    if connection is None:
                        connection = await self._connect()
                    await connection.fetch("notify", (CHANNEL, f"{self._turn} {self._node}"))
                except psycopg.Error:
                    # The other nodes look for new turns by themselves before long.
                    if connection is not None:
                        await connection.close()
                        connection = None
                    await asyncio.sleep(RECONNECT_S)
        finally:
            if connection is not None:
                with contextlib.suppress(psycopg.Error):
                    await connection.close()


def _ignore(_turn: Turn, _rows: Sequence[Row]) -> None:
    """The default of `on_turn`."""
