"""All subscriptions in memory: what the engine looks up, notes and answers.

Every commit asks which subscriptions watch the streams that it changed, and every new stream asks
whose pattern it fits, so `Registry` keeps both answers ready: links by path, and patterns by their
first segment. `Scan` holds what changes while a new subscription reads the list of streams.
`Timers` says which subscription to look at when. The result types of the engine are at the end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from fencepost.protocol.offsets import Offset
from fencepost.protocol.subscriptions import Link, Subscription
from fencepost.store.contract import Failed, LiveStream

K = TypeVar("K")


class Registry:
    """The decided state of all subscriptions."""

    def __init__(self) -> None:
        self._by_name: dict[str, Subscription] = {}
        self._by_id: dict[int, Subscription] = {}
        self._by_path: dict[str, tuple[Subscription, ...]] = {}
        self.owned: Counter[str] = Counter()
        """How many each principal has."""
        self.followed: Counter[str] = Counter()
        """How many streams those of each principal follow, counted for each of them."""
        self._by_wake_stream: dict[str, list[Subscription]] = {}
        # Patterns whose first segment is a wildcard are under None.
        self._by_segment: dict[str | None, list[Subscription]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> Subscription | None:
        return self._by_name.get(name)

    def find_id(self, subscription_id: int) -> Subscription | None:
        return self._by_id.get(subscription_id)

    def holds(self, subscription: Subscription) -> bool:
        """Whether this very record is current: neither deleted nor loaded anew since."""
        return self._by_id.get(subscription.id) is subscription

    @property
    def has_links(self) -> bool:
        """Whether any stream is followed, also by one that is not made yet."""
        return bool(self._by_path)

    def watching(self, path: str) -> tuple[Subscription, ...]:
        """The subscriptions that are linked to the stream at `path`."""
        return self._by_path.get(path, ())

    def matching(self, path: str) -> list[Subscription]:
        """The subscriptions whose pattern matches `path`."""
        if not self._by_segment:
            return []
        first = path.partition("/")[0]
        candidates = (*self._by_segment.get(first, ()), *self._by_segment.get(None, ()))
        return [subscription for subscription in candidates if subscription.matches(path)]

    def announced_in(self, path: str) -> Iterable[Subscription]:
        """The subscriptions that write their wakes to the stream at `path`."""
        return self._by_wake_stream.get(path, ())

    def add(self, subscription: Subscription) -> None:
        """Take in a subscription with all its links."""
        self.enter(subscription)
        self.followed[subscription.owner] += len(subscription.links)
        for path in subscription.links:
            self._by_path[path] = (*self.watching(path), subscription)

    def enter(self, subscription: Subscription) -> None:
        """Take in a subscription, beside the links that are here already."""
        self._by_name[subscription.name] = subscription
        self._by_id[subscription.id] = subscription
        self.owned[subscription.owner] += 1
        if subscription.glob is not None:
            self._by_segment.setdefault(_segment(subscription), []).append(subscription)
        wake_stream = subscription.config.wake_stream
        if wake_stream is not None:
            self._by_wake_stream.setdefault(wake_stream, []).append(subscription)

    def leave(self, subscription: Subscription) -> None:
        """Forget a subscription; its links are still here, and mean nothing."""
        del self._by_name[subscription.name]
        del self._by_id[subscription.id]
        self.owned[subscription.owner] -= 1
        if subscription.glob is not None:
            _take(self._by_segment, _segment(subscription), subscription)
        wake_stream = subscription.config.wake_stream
        if wake_stream is not None:
            _take(self._by_wake_stream, wake_stream, subscription)

    def link(self, subscription: Subscription, link: Link) -> None:
        """Add a link, or put one in the place of the old."""
        if link.path not in subscription.links:
            self._by_path[link.path] = (*self.watching(link.path), subscription)
            self.followed[subscription.owner] += 1
        subscription.links[link.path] = link
        subscription.note(link)

    def drop(self, subscription: Subscription, paths: Iterable[str]) -> None:
        """Tell no more of these streams to a subscription that has left."""
        for path in paths:
            if subscription in self.watching(path):
                self.followed[subscription.owner] -= 1
                self._unwatch(subscription, path)

    def unlink(self, subscription: Subscription, path: str) -> None:
        """Remove a link."""
        del subscription.links[path]
        self.followed[subscription.owner] -= 1
        subscription.pending.pop(path, None)
        self._unwatch(subscription, path)

    def _unwatch(self, subscription: Subscription, path: str) -> None:
        left = tuple(other for other in self._by_path[path] if other is not subscription)
        if left:
            self._by_path[path] = left
        else:
            del self._by_path[path]


def _segment(subscription: Subscription) -> str | None:
    assert subscription.glob is not None
    prefix = subscription.glob.prefix
    return prefix[0] if prefix else None


def _take(lists: dict[K, list[Subscription]], key: K, subscription: Subscription) -> None:
    lists[key].remove(subscription)
    if not lists[key]:
        del lists[key]


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

    def failure(self) -> Failed | None:
        """Why nothing may stand on this look; None when it is good."""
        return Failed(full=False) if self.void else None

    def now(self, found: Iterable[LiveStream]) -> list[LiveStream]:
        """Those of the streams `found` that are there now, with their tails now."""
        return [self._now(live) for live in found if live.id not in self.removed]

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


class Timers:
    """Due times by key. An earlier time replaces a later one; a later one waits for the look."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}

    def set(self, key: int, due_ms: int) -> bool:
        """Have `key` come up at `due_ms`; true when that is sooner than what was set before."""
        before_ms = self._live.get(key)
        if before_ms is not None and before_ms <= due_ms:
            # A key that comes up early is looked at again, and its timer is then set right.
            # Otherwise every heartbeat of a lease would leave an entry behind.
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


class Made(NamedTuple):
    """The subscription exists as asked; `created` when it did not before."""

    subscription: Subscription
    created: bool


class ConfigConflict(NamedTuple):
    """The name is taken by a subscription with another configuration."""


class TooMany(NamedTuple):
    """A limit is reached; `limit` is its name, `allowed` its value."""

    limit: str
    allowed: int


class Acked(NamedTuple):
    """The acks are applied; `next_wake` when there is more to do."""

    next_wake: bool


class WakeName(NamedTuple):
    """The wake that a worker means: as its token says, and as its request says."""

    token_generation: int
    generation: int
    wake_id: str


class Counts:
    """What happened since the start, for the metrics."""

    __slots__ = (
        "acks",
        "claims",
        "delivered",
        "expired",
        "fenced",
        "undelivered",
        "unfollowed",
        "wakes",
    )

    def __init__(self) -> None:
        self.wakes = self.delivered = self.undelivered = 0
        self.claims = self.acks = self.fenced = self.expired = 0
        self.unfollowed = 0
        """Streams that a subscription does not follow because its owner is past its share."""
