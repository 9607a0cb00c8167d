"""Following the turns of all nodes, in their order and without a gap, for the subscriptions.

The feed tells of turns as they come, with the streams that they changed. Turns that it does not
tell of, from before it began or while its connection was lost, are read from the database. Each
turn is told once, by the first of the two. The caller stores how far it has followed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from fencepost.store.contract import Failed, Failure, StoreAwayError
from fencepost.store.database import Row
from fencepost.store.postgres.cluster.feed import STREAMS_PER_LOOK_MAX, TURNS_PER_LOOK_MAX, Turn
from fencepost.store.postgres.cluster.term import Term
from fencepost.store.postgres.driver.connection import PostgresConnection

log = logging.getLogger(__name__)

CATCH_UP_S_MAX = 10.0
"""How long a request may wait until what was written before it has been told."""

Tell = Callable[[Turn, dict[int, Row]], None]
"""Takes a turn, and the rows by now of its streams."""


class Following:
    """Tells of every turn after `turn`, while it runs."""

    def __init__(self, term: Term, tell: Tell) -> None:
        self._term = term
        self._store = term.store
        self._told = tell
        self.turn = -1
        """The newest turn that was told."""
        self._behind = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def poke(self) -> None:
        """Look at once for what there is to do."""
        self._behind.set()

    async def run(self, besides: Callable[[], Awaitable[None]]) -> None:
        """Follow until cancelled, and do what else there is to do after every look."""
        feed = self._store.feed
        poll_s = self._term.settings.poll_interval_ms / 1000
        feed.on_turn = self._turned
        try:
            while True:
                self._behind.clear()
                try:
                    await self._catch_up()
                    await besides()
                except StoreAwayError as error:
                    log.warning("the turns cannot be followed: %s", error)
                try:
                    async with asyncio.timeout(poll_s):
                        await self._behind.wait()
                except TimeoutError:
                    pass
        finally:
            if feed.on_turn == self._turned:
                feed.on_turn = _ignore_turn
            for _, waiting in self._waiting:
                waiting.cancel()

    async def caught_up(self) -> Failure | None:
        """Wait until everything has been told that any node has written before this."""
        [(turn, _)] = await self._store.readers.run(
            lambda connection: connection.fetch("last_turn")
        )
        if self.turn >= turn:
            return None
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, waiting))
        self._waiting.sort(key=lambda pair: pair[0])
        try:
            async with asyncio.timeout(CATCH_UP_S_MAX):
                await asyncio.wait([waiting])
        except TimeoutError:
            return Failed(full=False)
        return Failed(full=False) if waiting.cancelled() else None

    async def _catch_up(self) -> None:
        """Read the turns that the feed will not tell."""
        while True:
            turns, rows = await self._store.readers.run(partial(_turns, self.turn))
            by_id = {row[0]: row for row in rows}
            if turns and turns[0].turn > self.turn + 1:
                log.error("turns %d to %d are gone", self.turn + 1, turns[0].turn - 1)
                self.turn = turns[0].turn - 1
            for turn in turns:
                # The feed may have told of this turn meanwhile.
                if turn.turn == self.turn + 1:
                    self._tell(turn, by_id)
            if not turns or self._term.over.is_set():
                return

    def _turned(self, turn: Turn, rows: Sequence[Row]) -> None:
        if turn.turn == self.turn + 1:
            self._tell(turn, {row[0]: row for row in rows})
        elif turn.turn > self.turn:
            self._behind.set()

    def _tell(self, turn: Turn, by_id: dict[int, Row]) -> None:
        if self._term.over.is_set():
            return
        try:
            self._told(turn, by_id)
        except Exception:
            log.exception("a turn could not be followed")
            self._term.end("a turn could not be followed")
            return
        self.turn = turn.turn
        while self._waiting and self._waiting[0][0] <= self.turn:
            _, waiting = self._waiting.pop(0)
            if not waiting.done():
                waiting.set_result(None)


def _turns(after: int, connection: PostgresConnection) -> tuple[list[Turn], list[Row]]:
    """The next turns, and their streams as they are by now."""
    limits = (TURNS_PER_LOOK_MAX, STREAMS_PER_LOOK_MAX)
    turns = [Turn(*row) for row in connection.fetch("turns_after", (after, *limits))]
    ids = list({stream for turn in turns for stream in turn.streams})
    return turns, connection.fetch("streams_of_turns", (ids,)) if ids else []


def _ignore_turn(_turn: Turn, _rows: Sequence[Row]) -> None:
    """The default of the feed: turns are not followed any more."""
