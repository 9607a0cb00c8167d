"""What happens to streams while a subscription looks for the ones that exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fencepost.protocol.offsets import Offset
from fencepost.store.contract import LiveStream


class Scan:
    """A look at all streams takes a while, off the event loop; this holds what it cannot see."""

    def __init__(self) -> None:
        self.created: dict[int, LiveStream] = {}
        self.removed: set[int] = set()
        self.tails: dict[int, Offset] = {}
        self.void = False  # a commit failed meanwhile: what was seen may not have happened

    def streams(
        self, found: Iterable[LiveStream], matches: Callable[[str], bool]
    ) -> Iterator[LiveStream]:
        """The streams there are now, with their tails now, given those `found` on disk."""
        created = {key: live for key, live in self.created.items() if matches(live.path)}
        for live in found:
            created.pop(live.id, None)
            if live.id not in self.removed:
                yield self._now(live)
        for live in created.values():
            if live.id not in self.removed:
                yield self._now(live)

    def at(self, path: str, live: LiveStream | None) -> LiveStream | None:
        """The stream at `path` now, given the one that was found there."""
        newest = live
        for one in self.created.values():
            # Incarnations are numbered in order.
            if one.path == path and (newest is None or one.id > newest.id):
                newest = one
        return None if newest is None or newest.id in self.removed else self._now(newest)

    def _now(self, live: LiveStream) -> LiveStream:
        tail = self.tails.get(live.id)
        # A look at the database may see more than was told by then.
        if tail is None or tail.bytes <= live.tail.bytes:
            return live
        return live._replace(tail=tail)
