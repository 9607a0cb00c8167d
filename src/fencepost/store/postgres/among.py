"""A ledger among other nodes' turns: made true by what they say they did, in the turn itself."""

from __future__ import annotations

from fencepost.store.database import Row
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.ledger import TurnLedger
from fencepost.store.postgres.others import Others, Seen, queries
from fencepost.store.write.decider import Decider

ALONE_TURNS = 100
"""After so many turns without another node's in between, a node no longer asks with each turn."""


class Among:
    """Begins the turns of one node, and makes its ledger true in them."""

    def __init__(self, decider: Decider) -> None:
        assert isinstance(decider.ledger, TurnLedger)
        self._ledger = decider.ledger
        self._claims = decider.claims
        self._asks = 0  # turns for which it is still asked at once what others did
        self._others: Others | None = None

    async def begin(self, connection: WritingConnection, last_turn: int) -> Row:
        """Wait for the turn: the counters. Up to `last_turn` the ledger is true."""
        self._others = None
        if self._asks == 0 or last_turn == -1:
            return await connection.begin()
        seen = Seen(last_turn, self._ledger.next_position)
        counters, found = await connection.begin_and_fetch(queries(seen))
        self._others = Others(*found)
        return counters

    async def catch_up(self, connection: WritingConnection, counters: Row, last_turn: int) -> bool:
        """Make the ledger true when somebody else has written; whether it was dropped for that."""
        turn, next_position, next_stream, last_ms, *_ = counters
        if turn == last_turn:
            self._asks = max(0, self._asks - 1)
            return False
        others, self._others, self._asks = self._others, None, ALONE_TURNS
        now = (next_position, next_stream, last_ms)
        self._claims.reset()
        if last_turn == -1:
            self._ledger.reset(now)
            return False
        seen = Seen(last_turn, self._ledger.next_position)
        if others is None:
            others = Others(*await connection.fetch_all(queries(seen)))
        if not others.list_all(seen, turn):
            self._ledger.reset(now)
            return True
        self._ledger.follow(now, others)
        return False
