"""What happens to streams while a new subscription looks for the ones that exist."""

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

    def _now(self, live: LiveStream) -> LiveStream:
        tail = self.tails.get(live.id)
        return live if tail is None else live._replace(tail=tail)
