"""Subscriptions in the embedded store: rows written into the same group commit as the streams.

Nothing is decided here and nothing is cached: the engine (`server/subscriptions`) holds the decided
state, and hands over what changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fencepost.protocol.appends import Append
from fencepost.protocol.batches import Malformed, bytes_batch, json_batch
from fencepost.protocol.logs import next_text
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import JSON
from fencepost.protocol.subscriptions import Config, Link, Seen, Subscription, Wake
from fencepost.store.contract import Failure, LiveStream, Published, StreamInfo, Watcher
from fencepost.store.engine.database import Connection, Row
from fencepost.store.engine.ledger import LedgerGroup
from fencepost.store.sqlite.store import SqliteStore

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

    def load(self) -> tuple[list[Subscription], int]:
        found = {row[0]: _subscription(row) for row in self._fetch("load_subscriptions")}
        for subscription_id, *columns in self._fetch("load_links"):
            subscription = found[subscription_id]
            link = _link(*columns)
            # Removing the row is left to whoever writes next: a load must not cause a commit.
            if link.stream_id is not None or link.explicit:
                subscription.links[link.path] = link
                subscription.note(link)
        last = self._fetch("last_subscription")
        return list(found.values()), (last[0][0] + 1 if last else 1)

    async def expect(self, paths: Iterable[str]) -> None:
        """The ledger finds every stream at once."""

    def find_stream(self, path: str) -> LiveStream | None:
        entry = self._store.ledger.find(path)
        if entry is None or entry.stream.soft_deleted:
            return None
        held = self._store.decider.holds.held
        if held is not None and path in held.views:
            # What a large commit adds to it is to be seen later.
            view = held.views[path]
            tail = view.tail if isinstance(view, StreamInfo) else START
            return LiveStream(path, entry.stream.id, tail)
        return LiveStream(path, entry.stream.id, entry.stream.tail)

    async def live_streams(
        self, prefix: tuple[str, ...], matches: Callable[[str], bool]
    ) -> list[LiveStream]:
        folder = "/".join(prefix)

        def work(connection: Connection) -> list[LiveStream]:
            bounds: list[tuple[str, str | None]] = [("", None)]
            if folder:
                # The path itself, and what is below it: "0" is the character after "/".
                bounds = [(folder, next_text(folder)), (folder + "/", folder + "0")]
            return [
                LiveStream(path, stream_id, Offset(messages, size))
                for bound in bounds
                for path, stream_id, messages, size in connection.fetch("live_streams", bound)
                if matches(path)
            ]

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
        self._write(
            "insert_subscription",
            subscription.id,
            subscription.name,
            subscription.config.canonical().decode(),
            subscription.base_url,
            subscription.created_ms,
            *_wake_columns(subscription.wake),
            subscription.owner,
        )
        for link in subscription.links.values():
            self.save_link(subscription, link)

    def save_wake(self, subscription: Subscription) -> None:
        self._write("save_wake", *_wake_columns(subscription.wake), subscription.id)

    def delete(self, subscription: Subscription) -> None:
        self._write("delete_subscription", subscription.id)
        self._write("delete_links", subscription.id)

    def save_link(self, subscription: Subscription, link: Link) -> None:
        self._write(
            "save_link",
            subscription.id,
            link.path,
            link.explicit,
            link.glob,
            link.stream_id,
            *link.acked,
        )

    def delete_link(self, subscription: Subscription, path: str) -> None:
        self._write("delete_link", subscription.id, path)

    def announce(self, path: str, event: bytes) -> bool:
        entry = self._store.ledger.find(path)
        if entry is None or entry.stream.soft_deleted or entry.stream.closed:
            return False
        held = self._store.decider.holds.held
        if held is not None and path in held.paths:
            return False  # the event belongs in this commit, not in a later one
        stream = entry.stream
        if stream.expired(self._store.tick()):
            return False
        # Any kind of stream can carry wakes; one that is not JSON gets one event a line.
        batch = json_batch(event) if stream.media_type == JSON else bytes_batch(event + b"\n")
        assert batch is not None
        assert not isinstance(batch, Malformed)
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


def _wake_columns(wake: Wake) -> Row:
    *columns, snapshot = wake
    seen = [(path, stream_id, *tail) for path, stream_id, tail in snapshot]
    return (*columns, json.dumps(seen, separators=(",", ":")))


def _subscription(row: Row) -> Subscription:
    subscription_id, name, config, base_url, created_ms = row[:5]
    generation, wake_id, holder, lease_until_ms, attempts, next_attempt_ms, snapshot = row[5:12]
    fields = json.loads(config)
    return Subscription(
        subscription_id,
        name,
        Config(**{**fields, "streams": tuple(fields["streams"])}),
        base_url=base_url,
        created_ms=created_ms,
        wake=Wake(
            generation,
            wake_id,
            holder,
            lease_until_ms,
            attempts,
            next_attempt_ms,
            _snapshot(snapshot),
        ),
        owner=row[12],
    )


def _snapshot(text: str) -> tuple[Seen, ...]:
    return tuple(
        Seen(path, stream_id, Offset(messages, size))
        for path, stream_id, messages, size in json.loads(text)
    )


def _link(
    path: str,
    explicit: int,
    glob: int,
    acked_messages: int,
    acked_bytes: int,
    stream_id: int | None,
    tail_messages: int | None,
    tail_bytes: int | None,
) -> Link:
    link = Link(path, explicit=bool(explicit), glob=bool(glob), stream_id=stream_id)
    if tail_messages is not None and tail_bytes is not None:
        link.acked = Offset(acked_messages, acked_bytes)
        link.tail = Offset(tail_messages, tail_bytes)
    return link
