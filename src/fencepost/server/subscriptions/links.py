"""Which streams the subscriptions follow: made, ended, linked and unlinked as clients ask.

A subscription by a pattern follows the streams that are there already, which may be very many. Then
its links come a part at a time, each part in a commit of its own with other requests in between,
and it has its own row with the last part: before that no reader and no restart sees anything of it.
In the same way it ends: first its row goes, then its links, a part at a time. The store notes
which subscriptions there are links of alone (`begin`, `end`); `sweep` removes those links, also
after a crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from fencepost.protocol.shares import LINKS, SUBSCRIPTIONS, Shares, decide_shares
from fencepost.protocol.subscriptions import Config, Link, Subscription
from fencepost.server.subscriptions.registry import ConfigConflict, Made, Registry, Scan, TooMany
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.contract import Failed, Failure, LiveStream, SubscriptionStore

log = logging.getLogger(__name__)

LINKS_AT_ONCE = 256
"""Links that one commit adds or removes: some milliseconds, which other requests wait."""
SWEEP_AGAIN_S = 1.0
"""How long to wait after links could not be removed."""

Readers = Callable[[str], Callable[[str], bool]]
"""What the owner of a subscription may read, by its name."""


class Owner(Protocol):
    """The engine, as its links see it."""

    registry: Registry

    def woken(self, subscription: Subscription) -> None:
        """Wake a subscription that has come to be, if there is work."""
        ...


class Links:
    """The links of all subscriptions."""

    def __init__(
        self,
        owner: Owner,
        store: SubscriptionStore,
        settings: SubscriptionSettings,
        *,
        readers: Readers | None,
        shares: Shares,
    ) -> None:
        self._owner = owner
        self._store = store
        self._settings = settings
        self._readers = readers
        self._shares = shares
        self.scans: list[Scan] = []
        """Looks at the streams that exist, which are told of every change meanwhile."""
        self._next_id = 1
        self._leaving: deque[tuple[int, Subscription | None]] = deque()
        """Subscriptions whose links are to be removed, with those that are in the registry."""
        self._has_work = asyncio.Event()

    def loaded(self, next_id: int, partial: Iterable[int]) -> None:
        """This is what the store has: looks under way are void, links alone are to go."""
        for scan in self.scans:
            scan.void = True
        self._next_id = next_id
        self._leaving = deque((subscription_id, None) for subscription_id in partial)
        self._has_work.set()

    # Making a subscription

    async def create(
        self, name: str, config: Config, base_url: str, owner: str = ""
    ) -> Made | ConfigConflict | TooMany | Failure:
        """Make a subscription that follows the streams there are from their tails on."""
        draft = Subscription(
            0, name, config, base_url=base_url, created_ms=self._store.tick(), owner=owner
        )
        if self._readers is not None:
            draft.restrict(self._readers(owner))
        scan = Scan()
        self.scans.append(scan)
        try:
            return await self._create(draft, scan)
        finally:
            self.scans.remove(scan)
            if draft.id and not self._owner.registry.holds(draft) and not scan.void:
                self._leave(draft)

    async def _create(
        self, draft: Subscription, scan: Scan
    ) -> Made | ConfigConflict | TooMany | Failure:
        # What was decided before is on disk after this, what is decided from now on is in
        # `scan`: between them no stream is missed.
        failure = await self._store.durable()
        if failure is not None:
            return failure
        draft.created_ms = self._store.tick()
        found: Sequence[LiveStream] = ()
        if draft.glob is not None and self._owner.registry.find(draft.name) is None:
            found = await self._store.live_streams(draft.glob.prefix, draft.matches)
        if len(found) > LINKS_AT_ONCE:
            rest = await self._follow_most(draft, scan, found)
            if not isinstance(rest, list):
                return rest
            found = rest
        config = draft.config
        await self._store.expect(filter(None, (*config.streams, config.wake_stream)))
        if (failure := scan.failure()) is not None:
            return failure
        streams = list(scan.streams(found, draft.matches))
        outcome = self._refusal(draft, links=len(streams) + len(config.streams))
        if outcome is not None:
            return outcome
        self._finish(draft, scan, streams)
        return Made(draft, created=True)

    def _refusal(
        self, draft: Subscription, *, links: int
    ) -> Made | ConfigConflict | TooMany | None:
        """The answer to a request for a subscription that is not made; None if it may be made."""
        registry = self._owner.registry
        existing = registry.find(draft.name)
        if existing is not None:
            same = existing.config.digest() == draft.config.digest()
            if same and existing.owner == draft.owner:
                return Made(existing, created=False)
            return ConfigConflict()
        if len(registry) >= self._settings.subscriptions_max:
            return TooMany("subscriptions_max", self._settings.subscriptions_max)
        return self.past_share(draft.owner, subscriptions=1, links=links)

    async def _follow_most(
        self, draft: Subscription, scan: Scan, found: Sequence[LiveStream]
    ) -> list[LiveStream] | Made | ConfigConflict | TooMany | Failure:
        """Follow all but the last of the streams that were found, a part in each commit."""
        refused = scan.failure() or self._refusal(draft, links=len(found))
        if refused is not None:
            return refused
        self._number(draft)
        self._store.begin(draft.id)
        last = (len(found) - 1) // LINKS_AT_ONCE * LINKS_AT_ONCE
        for first in range(0, last, LINKS_AT_ONCE):
            for live in scan.now(found[first : first + LINKS_AT_ONCE]):
                self._follow(draft, live)
            failure = await self._store.durable() or scan.failure()
            left = len(found) - first - LINKS_AT_ONCE
            refused = failure or self.past_share(draft.owner, links=min(left, LINKS_AT_ONCE))
            if refused is not None:
                return refused
        return list(found[last:])

    def _number(self, draft: Subscription) -> None:
        draft.id = self._next_id
        self._next_id += 1

    def _follow(self, draft: Subscription, live: LiveStream) -> None:
        """Link a stream that the pattern takes in."""
        link = Link(
            live.path,
            explicit=False,
            glob=True,
            stream_id=live.id,
            acked=live.tail,
            tail=live.tail,
        )
        self._owner.registry.link(draft, link)
        self._store.save_link(draft, link)

    def _finish(self, draft: Subscription, scan: Scan, streams: Iterable[LiveStream]) -> None:
        """Write the subscription with its last links."""
        is_partial = bool(draft.id)
        if not is_partial:
            self._number(draft)
        for live in streams:
            link = draft.links.get(live.path)
            # A part of before may have it, told of the same stream.
            if link is None or link.stream_id is None or link.stream_id < live.id:
                self._follow(draft, live)
        for path in draft.config.streams:
            link = self._explicit(draft, scan, path)
            self._owner.registry.link(draft, link)
            self._store.save_link(draft, link)
        self._owner.registry.enter(draft)
        self._store.insert(draft)
        if is_partial:
            self._store.end(draft.id)
            self._owner.woken(draft)

    def past_share(self, owner: str, *, links: int, subscriptions: int = 0) -> TooMany | None:
        """Why a principal may not take so much more; None when it may."""
        if not owner:
            return None
        registry = self._owner.registry
        used = {SUBSCRIPTIONS: registry.owned[owner], LINKS: registry.followed[owner]}
        more = {SUBSCRIPTIONS: subscriptions, LINKS: links}
        refused = decide_shares(self._shares, used, more)
        return None if refused is None else TooMany(*refused)

    def _explicit(self, subscription: Subscription, scan: Scan, path: str) -> Link:
        """An explicit link to `path`, which takes over the cursor of one by pattern."""
        link = subscription.links.get(path)
        if link is not None:
            link.explicit = True
            return link
        live = scan.at(path, self._store.find_stream(path))
        link = Link(path, explicit=True, glob=subscription.matches(path))
        if live is not None:
            link.stream_id = live.id
            link.acked = link.tail = live.tail
        return link

    # Ending one

    def delete(self, subscription: Subscription) -> None:
        """End a subscription; its workers are refused from now on."""
        self._owner.registry.leave(subscription)
        self._store.delete(subscription)
        if len(subscription.links) > LINKS_AT_ONCE:
            self._store.begin(subscription.id)
            self._leave(subscription)
            return
        self._store.delete_links(subscription.id)
        self._owner.registry.drop(subscription, subscription.links)

    def _leave(self, subscription: Subscription) -> None:
        self._leaving.append((subscription.id, subscription))
        self._has_work.set()

    async def sweep(self) -> None:
        """Remove the links of subscriptions that are gone or never came to be, until cancelled."""
        while True:
            self._has_work.clear()
            while self._leaving:
                subscription_id, subscription = self._leaving.popleft()
                try:
                    await self._remove_links(subscription_id, subscription)
                except Exception:
                    log.exception("the links of a subscription that is gone could not be removed")
                    self._leaving.append((subscription_id, subscription))
                    await asyncio.sleep(SWEEP_AGAIN_S)
            await self._has_work.wait()

    async def _remove_links(self, subscription_id: int, subscription: Subscription | None) -> None:
        paths = [] if subscription is None else list(subscription.links)
        for first in range(0, len(paths), LINKS_AT_ONCE):
            assert subscription is not None
            self._owner.registry.drop(subscription, paths[first : first + LINKS_AT_ONCE])
            await asyncio.sleep(0)
        # What was written of it is on disk before there is a look at what is left.
        while await self._store.durable() is None:
            if not await self._store.has_links(subscription_id):
                break
            self._store.delete_links(subscription_id, LINKS_AT_ONCE)
        else:
            return  # a failure loads what is on disk
        self._store.end(subscription_id)
        await self._store.durable()

    # Streams that are named one by one

    async def link(
        self, subscription: Subscription, paths: Iterable[str]
    ) -> TooMany | Failed | None:
        """Watch more streams, from their tails on."""
        wanted = dict.fromkeys(paths)
        scan = Scan()
        self.scans.append(scan)
        try:
            await self._store.expect(wanted)
        finally:
            self.scans.remove(scan)
        if scan.void or not self._owner.registry.holds(subscription):
            return Failed(full=False)
        explicit = sum(link.explicit for link in subscription.links.values())
        added = [
            path
            for path in wanted
            if path not in subscription.links or not subscription.links[path].explicit
        ]
        if explicit + len(added) > self._settings.explicit_streams_max:
            return TooMany("explicit_streams_max", self._settings.explicit_streams_max)
        more = sum(path not in subscription.links for path in added)
        refused = self.past_share(subscription.owner, links=more)
        if refused is not None:
            return refused
        for path in added:
            link = self._explicit(subscription, scan, path)
            self._owner.registry.link(subscription, link)
            self._store.save_link(subscription, link)
        return None

    def unlink(self, subscription: Subscription, path: str) -> None:
        """No longer watch a stream by name; a pattern that matches it still does."""
        link = subscription.links.get(path)
        if link is None or not link.explicit:
            return
        link.explicit = False
        link.glob = link.stream_id is not None and subscription.matches(path)
        if link.glob:
            self._store.save_link(subscription, link)
        else:
            self._owner.registry.unlink(subscription, path)
            self._store.delete_link(subscription, path)
