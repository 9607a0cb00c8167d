"""What happens to streams while a new subscription looks for the ones that exist."""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.protocol.offsets import Offset
from fencepost.store.contract import LiveStream


class Scan:
    """A look at all streams takes a while, off the event loop; this holds what it cannot see."""

    def __init__(self) -> None:
        self.created: dict[int, LiveStream] = {}
        self.removed: set[int] = set()
        self.tails: dict[int, Offset] = {}
        self.void = False  # a commit failed meanwhile: what was seen may not have happened

    def streams(self, found: Iterable[LiveStream]) -> Iterable[LiveStream]:
        """The streams there are now, with their tails now."""
        by_id = {live.id: live for live in (*found, *self.created.values())}
        for live in by_id.values():
            if live.id not in self.removed:
                yield live._replace(tail=self.tails.get(live.id, live.tail))
