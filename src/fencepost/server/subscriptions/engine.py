"""The engine: holds every subscription, wakes workers when there is work, and keeps time.

Everything here follows one pattern: a rule decides on the state in memory, what changed goes into
the open group commit in the same stretch on the event loop, and no client is told before it is on
disk. A webhook is called, and a request answered, only from there. A commit that fails takes the
state in memory with it: `reset` loads what is really on disk.

After a restart nothing is special: wakes that were due are due, leases run on, and a subscription
whose streams moved on meanwhile is woken, because pending work is a matter of cursors and
tails, both of them on disk.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Iterable, Sequence

import msgspec

from fencepost.clock import Clock
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.shares import Shares
from fencepost.protocol.subscriptions import (
    PULL_WAKE,
    WEBHOOK,
    Ack,
    AlreadyClaimed,
    BadAck,
    Claimed,
    Fenced,
    Link,
    NothingPending,
    Subscription,
    Wake,
    check_fence,
    decide_acks,
    decide_again,
    decide_announced,
    decide_claim,
    decide_delivered,
    decide_failed,
    decide_heartbeat,
    decide_wake,
    snapshot_acks,
)
from fencepost.server.subscriptions.links import Links, Readers
from fencepost.server.subscriptions.registry import Acked, Counts, Registry, Timers, WakeName
from fencepost.server.subscriptions.security import SigningKey, Token, Tokens
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.server.subscriptions.webhooks import (
    Delivered,
    Deliveries,
    Delivery,
    Undelivered,
    Webhooks,
    shown_streams,
)
from fencepost.store.contract import Failure, LiveStream, Published, SubscriptionStore

log = logging.getLogger(__name__)

WAKE_ID_BYTES = 12


class Engine:
    """All subscriptions of one server. Make it on the event loop, then `run` it."""

    def __init__(
        self,
        store: SubscriptionStore,
        clock: Clock,
        settings: SubscriptionSettings,
        *,
        webhooks: Webhooks,
        signing: SigningKey,
        tokens: Tokens,
        readers: Readers | None = None,
        counts: Counts | None = None,
        shares: Shares | None = None,
    ) -> None:
        self._store = store
        self._readers = readers
        self._clock = clock
        self._settings = settings
        self._tokens = tokens
        self.signing = signing
        self.counts = counts or Counts()
        self.registry = Registry()
        self._timers = Timers()
        self._changed = asyncio.Event()
        links = self._links = Links(
            self, store, settings, readers=readers, shares=shares or Shares()
        )
        self.create, self.delete = links.create, links.delete
        self.link, self.unlink = links.link, links.unlink
        self._deliveries = Deliveries(
            self, store, clock, settings, webhooks=webhooks, signing=signing
        )
        self._calm_until_ms = 0
        self._started_ms = store.tick()
        self._started_monotonic_ms = clock.monotonic_ms()
        self._load()
        store.watch(self, self._published)

    def _load(self) -> None:
        subscriptions, next_id, partial = self._store.load()
        self._links.loaded(next_id, partial)
        self.registry = Registry()
        self._timers.clear()
        self._deliveries.forget()
        for subscription in subscriptions:
            if self._readers is not None:
                subscription.restrict(self._readers(subscription.owner))
            self.registry.add(subscription)
            if self._consider(subscription):
                self._save(subscription)

    def now_ms(self) -> int:
        """The time for leases and retries.

        Decisions carry the store's time, which stands still while a wall clock that was set back
        catches up with what is on disk. A lease has to end all the same, so time goes on here.
        """
        elapsed_ms = self._clock.monotonic_ms() - self._started_monotonic_ms
        return max(self._store.tick(), self._started_ms + elapsed_ms)

    @property
    def is_restricted(self) -> bool:
        """Whether subscriptions have owners who may read some streams only."""
        return self._readers is not None

    @property
    def is_scanning(self) -> bool:
        """Whether a new subscription is looking for the streams that exist."""
        return bool(self._links.scans)

    @property
    def deliveries_count(self) -> int:
        """Webhook requests under way."""
        return self._deliveries.count

    # What clients ask

    def find(self, name: str) -> Subscription | None:
        return self.registry.find(name)

    async def durable(self) -> Failure | None:
        return await self._store.durable()

    def _has_room(self, subscription: Subscription) -> bool:
        """Whether a subscription may follow a stream that comes: its maker is not refused it."""
        if self._links.past_share(subscription.owner, links=1) is None:
            return True
        if not self.counts.unfollowed:
            log.warning(
                "%s is past links_per_principal_max: its subscription %s does not follow streams"
                " that come; fencepost_subscription_streams_unfollowed_total counts them",
                subscription.owner,
                subscription.name,
            )
        self.counts.unfollowed += 1
        return False

    def claim(
        self, subscription: Subscription, worker: str
    ) -> Claimed | AlreadyClaimed | NothingPending:
        """Give the lease to `worker`, if no other worker has it and there is work."""
        outcome = decide_claim(
            subscription.wake,
            worker=worker,
            wake_id=self._wake_id(),
            snapshot=subscription.snapshot(self._settings.wake_streams_max),
            lease_ttl_ms=subscription.config.lease_ttl_ms,
            now_ms=self.now_ms(),
        )
        if isinstance(outcome, Claimed):
            self.counts.claims += 1
            self.counts.wakes += outcome.fresh
            subscription.wake = outcome.wake
            self._save(subscription)
        elif isinstance(outcome, NothingPending) and not subscription.wake.is_idle:
            self._end(subscription)
        return outcome

    def ack(
        self, subscription: Subscription, wake: WakeName, acks: Iterable[Ack], *, done: bool
    ) -> Acked | Fenced | BadAck:
        """Move cursors for the worker that holds the wake; extend its lease, or end it."""
        fenced = self._fenced(subscription, wake)
        if fenced is not None:
            return fenced
        moved = decide_acks(subscription.links, subscription.wake.snapshot, acks)
        if isinstance(moved, BadAck):
            return moved
        self.counts.acks += 1
        self._move(subscription, moved)
        if done:
            self._end(subscription)
        else:
            subscription.wake = decide_heartbeat(
                subscription.wake,
                lease_ttl_ms=subscription.config.lease_ttl_ms,
                now_ms=self.now_ms(),
            )
            self._save(subscription)
        return Acked(next_wake=done and bool(subscription.pending))

    def release(self, subscription: Subscription, wake: WakeName) -> Fenced | None:
        """Give the work back undone."""
        fenced = self._fenced(subscription, wake)
        if fenced is None:
            self._end(subscription)
        return fenced

    def _fenced(self, subscription: Subscription, wake: WakeName) -> Fenced | None:
        fenced = check_fence(
            subscription.wake,
            token_generation=wake.token_generation,
            generation=wake.generation,
            wake_id=wake.wake_id,
            now_ms=self.now_ms(),
        )
        self.counts.fenced += fenced is not None
        return fenced

    def token(self, subscription: Subscription) -> str:
        """The token of the current wake."""
        generation = subscription.wake.generation
        return self._tokens.make(
            Token(subscription.name, subscription.id, generation), now_ms=self.now_ms()
        )

    # What the store tells: `created` and `removed` join the commit that makes or ends the stream

    def created(self, stream_id: int, path: str, start: Offset) -> None:
        for scan in self._links.scans:
            scan.created[stream_id] = LiveStream(path, stream_id, start)
        for subscription in self.registry.matching(path):
            if path not in subscription.links and self._has_room(subscription):
                link = Link(path, explicit=False, glob=True)
                self.registry.link(subscription, link)
        for subscription in self.registry.watching(path):
            link = subscription.links[path]
            if link.stream_id is not None and link.stream_id >= stream_id:
                continue  # a look at the streams that exist has found it first
            link.stream_id = stream_id
            link.acked = link.tail = start
            subscription.note(link)
            self._store.save_link(subscription, link)
        for subscription in self.registry.announced_in(path):
            # A wake that could not be announced, or whose announcement went with the old stream.
            if not subscription.wake.is_idle and subscription.wake.holder is None:
                subscription.wake = decide_again(subscription.wake, now_ms=self.now_ms())
                self._save(subscription)

    def removed(self, stream_id: int, path: str) -> None:
        for scan in self._links.scans:
            scan.removed.add(stream_id)
        for subscription in self.registry.watching(path):
            link = subscription.links[path]
            if link.stream_id != stream_id:
                continue
            if link.explicit:
                link.stream_id = None
                link.acked = link.tail = START
                subscription.note(link)
                self._store.save_link(subscription, link)
            else:
                self.registry.unlink(subscription, path)
                self._store.delete_link(subscription, path)

    def reset(self) -> None:
        log.warning("a commit failed: subscriptions are loaded again from disk")
        self._calm_until_ms = self.now_ms() + self._settings.calm_ms
        self._load()

    def _published(self, changes: Sequence[Published]) -> None:
        for scan in self._links.scans:
            scan.tails.update((info.id, info.tail) for info, *_ in changes)
        if not self.registry.has_links:
            return
        for info, _, _, gone in changes:
            if gone:
                continue
            for subscription in self.registry.watching(info.path):
                link = subscription.links[info.path]
                if link.stream_id != info.id or link.tail.bytes >= info.tail.bytes:
                    continue
                link.tail = info.tail
                if link.path not in subscription.pending:
                    subscription.note(link)
                if self._consider(subscription):
                    self._save(subscription)

    # Wakes

    def woken(self, subscription: Subscription) -> None:
        if self._consider(subscription):
            self._save(subscription)

    def _consider(self, subscription: Subscription) -> bool:
        """Wake an idle subscription that has pending work; true when that changed its wake."""
        if not self.registry.holds(subscription):
            return False  # it is not there yet, or not any more
        if not subscription.wake.is_idle or not subscription.pending:
            self.schedule(subscription)
            return False
        now_ms = self.now_ms()
        if now_ms < self._calm_until_ms:
            self.schedule(subscription)
            return False
        self.counts.wakes += 1
        subscription.wake = decide_wake(
            subscription.wake,
            wake_id=self._wake_id(),
            snapshot=subscription.snapshot(self._settings.wake_streams_max),
            now_ms=now_ms,
        )
        if subscription.config.type == PULL_WAKE:
            subscription.wake = self._announced(subscription, now_ms)
        return True

    def _announced(self, subscription: Subscription, now_ms: int) -> Wake:
        """Write the wake event into the commit of the wake, or schedule another try."""
        wake = subscription.wake
        assert subscription.config.wake_stream is not None
        event = {
            "type": "wake",
            "subscription_id": subscription.name,
            "stream": next(iter(subscription.pending)),
            "generation": wake.generation,
            "ts": now_ms,
        }
        if self._store.announce(subscription.config.wake_stream, msgspec.json.encode(event)):
            return decide_announced(wake)
        if wake.attempts == 0:
            log.warning(
                "subscription %s: the wake stream %s takes no appends; trying again",
                subscription.name,
                subscription.config.wake_stream,
            )
        return decide_failed(wake, now_ms=now_ms, random=self._clock.random())

    def _end(self, subscription: Subscription) -> None:
        """The wake is over; what is still pending gets the next one, in the same commit."""
        subscription.wake = subscription.wake.ended()
        self._consider(subscription)
        self._save(subscription)

    def _move(self, subscription: Subscription, moved: dict[str, Offset]) -> None:
        for path, offset in moved.items():
            link = subscription.links[path]
            link.acked = offset
            subscription.note(link)
            self._store.save_link(subscription, link)

    def _save(self, subscription: Subscription) -> None:
        self._store.save_wake(subscription)
        self._store.after(_ignore)
        self.schedule(subscription)

    def _wake_id(self) -> str:
        return "w_" + base64.urlsafe_b64encode(self._clock.token(WAKE_ID_BYTES)).decode()

    # Time

    def _due_ms(self, subscription: Subscription) -> int | None:
        wake = subscription.wake
        if wake.is_idle:
            return self._calm_until_ms if subscription.pending else None
        if self._deliveries.has(subscription):
            return None  # its end is bounded by a timeout, and looks again
        due_ms = wake.due_ms()
        return None if due_ms is None else max(due_ms, self._calm_until_ms)

    def schedule(self, subscription: Subscription) -> None:
        """Have a subscription looked at when there is something to do for it."""
        due_ms = self._due_ms(subscription)
        if due_ms is not None and self._timers.set(subscription.id, due_ms):
            self._changed.set()

    def fire(self) -> None:
        """Do what is due: deliver, announce, end leases."""
        now_ms = self.now_ms()
        for subscription_id in self._timers.take_due(now_ms):
            subscription = self.registry.find_id(subscription_id)
            if subscription is None:
                continue
            due_ms = self._due_ms(subscription)
            if due_ms is None:
                continue
            if due_ms > now_ms:
                self.schedule(subscription)
            else:
                self._act(subscription, now_ms)

    def _act(self, subscription: Subscription, now_ms: int) -> None:
        wake = subscription.wake
        if wake.is_idle:
            if self._consider(subscription):
                self._save(subscription)
        elif wake.next_attempt_ms is None:
            self.counts.expired += 1
            self._end(subscription)
        elif not shown_streams(subscription):
            # The streams that it was about are gone or done with; others may have come.
            self._end(subscription)
        elif subscription.config.type == WEBHOOK:
            self._deliveries.begin(subscription)
        else:
            subscription.wake = self._announced(subscription, now_ms)
            self._save(subscription)

    async def run(self) -> None:
        """Keep time and deliver until cancelled; deliveries under way end with it."""
        async with asyncio.TaskGroup() as group:
            sweeping = group.create_task(self._links.sweep())
            await self._deliveries.run(self._keep_time)
            sweeping.cancel()

    async def _keep_time(self) -> None:
        while True:
            self._changed.clear()
            try:
                self.fire()
            except Exception:
                log.exception("a subscription could not be looked after")
            next_ms = self._timers.next_ms()
            wait_s = None if next_ms is None else max(0, next_ms - self.now_ms()) / 1000
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def drain(self, seconds_max: float) -> None:
        """Start no more deliveries, and wait for those under way."""
        await self._deliveries.drain(seconds_max)

    def delivered(
        self, subscription: Subscription, wake: Wake, delivery: Delivery, started_ms: int
    ) -> None:
        """Note the result of a delivery, unless its wake is over by now."""
        self.counts.delivered += isinstance(delivery, Delivered)
        self.counts.undelivered += isinstance(delivery, Undelivered)
        now = subscription.wake
        if not self.registry.holds(subscription) or now.wake_id != wake.wake_id:
            return
        if isinstance(delivery, Undelivered):
            log.warning(
                "subscription %s: the webhook did not take wake %d: %s",
                subscription.name,
                wake.generation,
                delivery.reason,
            )
            subscription.wake = decide_failed(
                now, now_ms=self.now_ms(), random=self._clock.random()
            )
            self._save(subscription)
        elif delivery.done:
            moved = decide_acks(subscription.links, now.snapshot, snapshot_acks(now.snapshot))
            assert not isinstance(moved, BadAck), "a snapshot shows offsets that exist"
            self._move(subscription, moved)
            self._end(subscription)
        else:
            subscription.wake = decide_delivered(
                now, started_ms=started_ms, lease_ttl_ms=subscription.config.lease_ttl_ms
            )
            self._save(subscription)


def _ignore(failure: Failure | None) -> None:
    """No request waits for this change; it is committed all the same, and a failure is a reset."""
