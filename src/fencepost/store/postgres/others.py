"""What other nodes did between two turns of this one, so that it need not forget everything.

A ledger is true as long as nobody else had a turn. When somebody had one, it is made true again by
dropping what those turns changed, which their rows in `turns` tell: the streams. Producers hang on
streams, and of those only the ones changed that wrote something, which the log tells. All of it is
read under the lock of this turn, so nothing can come in between.

A turn that changed more than that does not say that it has listed everything. If there is one among
the turns, or one is missing, or there were too many of them, the ledger is dropped as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fencepost.store.database import Row
from fencepost.store.write.ledger import LedgerGroup

TURNS_MAX = 64
PRODUCERS_MAX = 4_000
STREAMS_MAX = 256
"""How many of the changed streams are fetched at once; others are loaded when they are needed."""

_NOT_KEPT = frozenset(
    {
        # Staged data, writers and whole commits: a ledger forgets them whenever another node wrote.
        *("save_part", "save_chunk", "commit_part", "drop_part", "drop_chunks"),
        *("save_writer", "forget_writer"),
        # Nothing of these is in a ledger.
        *("stir", "take_lead", "leave_lead", "save_secret", "save_followed", "save_bucket"),
        *("insert_subscription", "save_wake", "delete_subscription"),
        *("delete_links", "save_link", "delete_link"),
    }
)
"""Statements beside the rows of streams, producers, keys and the log that no ledger is about."""


class Seen(NamedTuple):
    """Where a node's ledger stands: its last turn, and the first position after that."""

    turn: int
    position: int


class Others(NamedTuple):
    """What was written since."""

    turns: Sequence[Row]  # number, whether it lists all, streams
    producers: Sequence[Row]  # stream and id
    streams: Sequence[Row]

    def list_all(self, seen: Seen, turn: int) -> bool:
        """Whether these are all changes after a turn, up to another one."""
        numbers = [number for number, _, _ in self.turns]
        return (
            numbers == list(range(seen.turn + 1, turn + 1))
            and all(is_listed for _, is_listed, _ in self.turns)
            and len(self.producers) < PRODUCERS_MAX
        )

    def changed(self) -> set[int]:
        """The streams that changed."""
        return {stream for _, _, streams in self.turns for stream in streams}


def queries(seen: Seen) -> Iterable[tuple[str, Row]]:
    """What to ask, in the order of `Others`."""
    yield "others_turns", (seen.turn, TURNS_MAX + 1)
    yield "others_producers", (seen.position, PRODUCERS_MAX)
    yield "others_streams", (seen.turn, TURNS_MAX, STREAMS_MAX)


def is_listed(group: LedgerGroup) -> bool:
    """Whether a turn changed its streams, and the producers in its rows of the log, and no more."""
    if group.carried or not _NOT_KEPT.issuperset([name for name, _ in group.statements]):
        return False
    return group.producers.keys() <= {(row[1], row[8]) for row in group.rows}
