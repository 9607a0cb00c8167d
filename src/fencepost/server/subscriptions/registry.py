"""All subscriptions in memory, found by name, by the streams they watch and by what they match.

Every commit asks who watches the streams it changed, and every new stream whose pattern it fits, so
both answers are kept ready: links by path, and patterns by their first segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from fencepost.protocol.subscriptions import Link, Subscription

K = TypeVar("K")


class Registry:
    """The decided state of all subscriptions."""

    def __init__(self) -> None:
        self._by_name: dict[str, Subscription] = {}
        self._by_id: dict[int, Subscription] = {}
        self._by_path: dict[str, tuple[Subscription, ...]] = {}
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

    def watching(self, path: str) -> tuple[Subscription, ...]:
        """Those linked to the stream at `path`."""
        return self._by_path.get(path, ())

    def matching(self, path: str) -> list[Subscription]:
        """Those whose pattern takes `path` in."""
        if not self._by_segment:
            return []
        first = path.partition("/")[0]
        candidates = (*self._by_segment.get(first, ()), *self._by_segment.get(None, ()))
        return [subscription for subscription in candidates if subscription.matches(path)]

    def announced_in(self, path: str) -> Iterable[Subscription]:
        """Those that write their wakes to the stream at `path`."""
        return self._by_wake_stream.get(path, ())

    def add(self, subscription: Subscription) -> None:
        """Take in a subscription with all its links."""
        self._by_name[subscription.name] = subscription
        self._by_id[subscription.id] = subscription
        if subscription.glob is not None:
            self._by_segment.setdefault(_segment(subscription), []).append(subscription)
        wake_stream = subscription.config.wake_stream
        if wake_stream is not None:
            self._by_wake_stream.setdefault(wake_stream, []).append(subscription)
        for path in subscription.links:
            self._by_path[path] = (*self.watching(path), subscription)

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription."""
        del self._by_name[subscription.name]
        del self._by_id[subscription.id]
        if subscription.glob is not None:
            _take(self._by_segment, _segment(subscription), subscription)
        wake_stream = subscription.config.wake_stream
        if wake_stream is not None:
            _take(self._by_wake_stream, wake_stream, subscription)
        for path in subscription.links:
            self._unwatch(subscription, path)

    def link(self, subscription: Subscription, link: Link) -> None:
        """Add a link, or put one in the place of the old."""
        if link.path not in subscription.links:
            self._by_path[link.path] = (*self.watching(link.path), subscription)
        subscription.links[link.path] = link
        subscription.note(link)

    def unlink(self, subscription: Subscription, path: str) -> None:
        """Remove a link."""
        del subscription.links[path]
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
