"""Breadcrumbs: what happens in a group, told as it happens to those who listen.

The feed is for looking on. It tells of what this server decided, keeps nothing, and a reader that
falls behind loses its connection rather than the server its memory. The truth is in the lists.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

QUEUE_MAX = 1_000
"""Breadcrumbs that wait for one reader; beyond them it is told so and ends."""
KEEP_ALIVE_S = 15.0


class Feed:
    """The listeners of all groups."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.Queue[bytes | None]]] = {}
        self.stopping = False

    @property
    def listeners_count(self) -> int:
        """Readers that listen now."""
        return sum(map(len, self._listeners.values()))

    def tell(self, group: str, kind: str, **facts: object) -> None:
        """Something happened in a group."""
        listeners = self._listeners.get(group)
        if not listeners:
            return
        crumb = b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(facts))
        for queue in list(listeners):
            if queue.full():
                listeners.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(crumb)

    def stop(self) -> None:
        """End every feed: the server is going down."""
        self.stopping = True
        for listeners in self._listeners.values():
            for queue in listeners:
                if not queue.full():
                    queue.put_nowait(None)

    async def follow(self, group: str, seconds_max: float) -> AsyncIterator[bytes]:
        """Breadcrumbs of a group as server-sent events, for so long at most."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_MAX)
        listeners = self._listeners.setdefault(group, set())
        listeners.add(queue)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds_max
        try:
            yield b": listening\n\n"
            while not self.stopping and (left_s := ends_at - loop.time()) > 0:
                try:
                    async with asyncio.timeout(min(left_s, KEEP_ALIVE_S)):
                        crumb = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if crumb is None:
                    return
                yield crumb
        finally:
            listeners.discard(queue)
            if not listeners and self._listeners.get(group) is listeners:
                del self._listeners[group]
