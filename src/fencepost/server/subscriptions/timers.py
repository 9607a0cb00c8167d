"""Who has to be looked at when: a heap of due times with at most one live entry for each key."""

from __future__ import annotations

import heapq


class Timers:
    """Due times by key. An earlier time replaces a later one; a later one waits for the look."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}

    def set(self, key: int, due_ms: int) -> bool:
        """Have `key` come up at `due_ms`; true when that is sooner than what was set before."""
        before_ms = self._live.get(key)
        if before_ms is not None and before_ms <= due_ms:
            # Whoever comes up early looks again, and sets the timer that is then right. Otherwise
            # every heartbeat of a lease would leave an entry behind.
            return False
        self._live[key] = due_ms
        heapq.heappush(self._heap, (due_ms, key))
        return True

    def take_due(self, now_ms: int) -> list[int]:
        """The keys whose time has come, each once; their timers are gone."""
        taken = []
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, key = heapq.heappop(self._heap)
            if self._live.get(key) == due_ms:
                del self._live[key]
                taken.append(key)
        return taken

    def next_ms(self) -> int | None:
        """When to look again, or None."""
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self._heap.clear()
        self._live.clear()
