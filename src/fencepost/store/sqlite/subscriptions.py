"""Subscriptions in the embedded store: rows written into the same group commit as the streams.

Nothing is decided here and nothing is cached: the engine (`server/subscriptions`) holds the decided
state, and hands over what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fencepost.protocol.appends import Append
from fencepost.protocol.offsets import START
from fencepost.protocol.subscriptions import Link, Subscription
from fencepost.store import records
from fencepost.store.contract import (
    Failure,
    LiveStream,
    Published,
    StoredSubscriptions,
    StreamInfo,
    Watcher,
)
from fencepost.store.sql import Row
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write.ledger_group import LedgerGroup

ROW_BYTES = 128
"""What a row of ours weighs in a commit, roughly."""


class SecretNotStoredError(Exception):
    """A secret could not be written: the store cannot take writes, look at the disk."""


class SqliteSubscriptions:
    """The `SubscriptionStore` of the embedded store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def watch(self, watcher: Watcher, published: Callable[[Sequence[Published]], None]) -> None:
        self._store.watch(watcher)
        self._store.listen(published)
        self._store.tell_redone(watcher, published)

    # Reading

    def load(self) -> StoredSubscriptions:
        found = records.subscriptions_from_rows(
            self._fetch("load_subscriptions"), self._fetch("load_links")
        )
        last = self._fetch("last_subscription")
        partial = [row[0] for row in self._fetch("load_partial")]
        return StoredSubscriptions(
            found, max([0, *(last[0] if last else ()), *partial]) + 1, partial
        )

    async def expect(self, paths: Iterable[str]) -> None:
        """The ledger finds every stream at once."""

    def find_stream(self, path: str) -> LiveStream | None:
        entry = self._store.ledger.find(path)
        if entry is None or entry.stream.soft_deleted:
            return None
        held = self._store.decider.holds.held
        if held is not None and path in held.views and not held.was_shown:
            # What a large commit adds to it is to be seen later.
            view = held.views[path]
            tail = view.tail if isinstance(view, StreamInfo) else START
            return LiveStream(path, entry.stream.id, tail)
        return LiveStream(path, entry.stream.id, entry.stream.tail)

    async def live_streams(
        self, prefix: tuple[str, ...], matches: Callable[[str], bool]
    ) -> list[LiveStream]:
        work = partial(records.live_streams, prefix=prefix, matches=matches)
        return await self._store.decider.holds.whole(
            lambda: self._store.readers.run(work), lambda found: [one.path for one in found]
        )

    def _fetch(self, query: str) -> list[Row]:
        return self._store.lookup(query)

    # Writing: all of it joins the open group

    @property
    def _group(self) -> LedgerGroup:
        return self._store.commits.group

    def _write(self, query: str, *values: object) -> None:
        group = self._group
        group.statements.append((query, values))
        # A commit with very many rows belongs in the writer thread, as one with much data does.
        group.bytes += ROW_BYTES

    def insert(self, subscription: Subscription) -> None:
        self._write("insert_subscription", *records.subscription_columns(subscription))

    def begin(self, subscription_id: int) -> None:
        self._write("begin_partial", subscription_id)

    def end(self, subscription_id: int) -> None:
        self._write("end_partial", subscription_id)

    def save_wake(self, subscription: Subscription) -> None:
        self._write("save_wake", *records.wake_columns(subscription.wake), subscription.id)

    def delete(self, subscription: Subscription) -> None:
        self._write("delete_subscription", subscription.id)

    def delete_links(self, subscription_id: int, count: int | None = None) -> None:
        if count is None:
            self._write("delete_links", subscription_id)
        else:
            self._write("delete_some_links", subscription_id, count)
            self._group.bytes += count * ROW_BYTES

    async def has_links(self, subscription_id: int) -> bool:
        return bool(
            await self._store.readers.run(
                lambda connection: connection.fetch("has_links", (subscription_id,))
            )
        )

    def save_link(self, subscription: Subscription, link: Link) -> None:
        self._write("save_link", *records.link_columns(subscription, link))

    def delete_link(self, subscription: Subscription, path: str) -> None:
        self._write("delete_link", subscription.id, path)

    def announce(self, path: str, event: bytes) -> bool:
        entry = self._store.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or entry.stream.closed:
            return False
        if entry.stream.books_closed:
            return False
        held = self._store.decider.holds.held
        if held is not None and path in held.paths:
            return False  # the event belongs in this commit, not in a later one
        stream = entry.stream
        if stream.expired(self._store.tick()):
            return False
        batch = records.event_batch(stream, event)
        self._store.append(Append(path, batch, stream.media_type), _ignore)
        return True

    async def secret(self, name: str, fresh: bytes) -> bytes:
        query = "find_secret"
        if not self._store.lookup(query, (name,)):
            values = (name, fresh, self._store.tick())
            self._group.statements.append(("save_secret", values))
            failure = await self._store.durable()
            if failure is not None:
                raise SecretNotStoredError(f"the secret {name!r} could not be stored: {failure}")
        [(value,)] = self._store.lookup(query, (name,))
        return bytes(value)

    def tick(self) -> int:
        return self._store.tick()

    def after(self, answer: Callable[[Failure | None], None]) -> None:
        self._store.commits.after(answer)

    async def durable(self) -> Failure | None:
        return await self._store.durable()


def _ignore(outcome: Any) -> None:
    """The wake itself is in the same commit, so a failed append fails it too."""
