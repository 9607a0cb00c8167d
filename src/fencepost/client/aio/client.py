"""The async client: a server, and the way to its streams, lists, commits and log.

Every method builds an operation and runs it. What is in `client/aio` is written by hand, and
`just twins` generates `client/sync` from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar

from fencepost.client import operations, subscriptions, writers
from fencepost.client.aio.closing import AsyncClosing
from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.aio.groups import AsyncGroup
from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.aio.readings import AsyncListing, AsyncLogReading
from fencepost.client.aio.streams import AsyncStream
from fencepost.client.aio.subscriptions import AsyncSubscription
from fencepost.client.arrow_log import ArrowPage, arrow_page
from fencepost.client.groups import GroupInfo, LeaseAck
from fencepost.client.meshes import MeshInfo
from fencepost.client.operations import CommitAppend, Creation, WriterBatch, query_of
from fencepost.client.reading import LogReader, Pages
from fencepost.client.results import (
    Committed,
    KeyInfo,
    Plan,
    ProducerInfo,
    PublishedBatch,
    Staged,
    StreamInfo,
    WriterInfo,
)
from fencepost.client.settings import JSON, ClientSettings, Value
from fencepost.client.subscriptions import SubscriptionInfo

T = TypeVar("T")


class AsyncClient(AsyncClosing):
    """A server, and the way to its streams. Make it with `fencepost.connect_async`."""

    def __init__(self, settings: ClientSettings) -> None:
        self._driver = AsyncDriver(settings)

    def stream(
        self,
        path: str,
        *,
        content_type: str | None = None,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncStream:
        """A stream by its path, or by its full URL on this server, without asking for it.

        Without `content_type`, appends take it for JSON until the server says otherwise; then its
        type is asked for once, before bytes are sent. `headers` and
        `params` go with every request about this stream, as in `connect`.
        """
        return AsyncStream(self._driver, path, content_type, headers=headers, params=params)

    async def create(
        self,
        path: str,
        *,
        content_type: str = JSON,
        messages: Iterable[Any] = (),
        ttl_seconds: int | None = None,
        expires_at: datetime | str | None = None,
        closed: bool = False,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncStream:
        """Make a stream, perhaps with messages in it; fine if it exists as it would be made.

        `is_new` of the stream says whether this made it. `headers` and `params` go with this
        request and with every later one of the stream.
        """
        creation = Creation(
            content_type=content_type,
            ttl_seconds=ttl_seconds,
            expires_at=expires_at,
            closed=closed,
        )
        given = operations.listed(messages)
        body = operations.encode_messages(given, content_type) if given else b""
        operations.check_origin(self._driver.settings, path)
        settings = self._driver.settings.carrying(headers, params)
        made = await self._driver.run(operations.create(settings, path, creation, body))
        return AsyncStream(
            self._driver, path, content_type, made.is_new, headers=headers, params=params
        )

    def streams(
        self, *, match: str | None = None, after: str | None = None
    ) -> AsyncListing[StreamInfo]:
        """The streams whose paths match a pattern (`orders/*`, `**`), in the order of paths."""
        return self._pages("streams", StreamInfo, {"match": match, "after": after})

    def group(self, name: str) -> AsyncGroup:
        """A group of workers by its name, without asking for it."""
        return AsyncGroup(self._driver, name)

    def groups(self, *, match: str | None = None) -> AsyncListing[GroupInfo]:
        """The groups whose names match a pattern, in the order of names."""
        return self._pages("groups", GroupInfo, {"match": match})

    def subscription(self, name: str) -> AsyncSubscription:
        """A subscription by its id, without asking for it."""
        return AsyncSubscription(self._driver, name)

    def subscriptions(self) -> AsyncListing[SubscriptionInfo]:
        """The subscriptions that you own, in the order of their ids; all, for an administrator."""
        return self._pages("subscriptions", SubscriptionInfo, {})

    async def webhook_keys(self) -> dict[str, Any]:
        """The public keys that the server signs webhooks with, for `verify_webhook`."""
        return await self._driver.run(subscriptions.webhook_keys(self._driver.settings))

    def mesh(self, name: str) -> AsyncMesh:
        """A mesh by its name, without asking for it."""
        return AsyncMesh(self._driver, name)

    def meshes(self) -> AsyncListing[MeshInfo]:
        """The meshes of the server, in the order of their names."""
        pages = Pages(self._driver.settings, "/v1/mesh", "meshes", MeshInfo, [])
        return AsyncListing(self._driver, pages)

    def producers(
        self, *, stream: str | None = None, match: str | None = None
    ) -> AsyncListing[ProducerInfo]:
        """The producers of streams that match `stream`, whose ids match `match`."""
        return self._pages("producers", ProducerInfo, {"stream": stream, "match": match})

    def keys(self, *, as_of: datetime | str | None = None) -> AsyncListing[KeyInfo]:
        """The idempotency keys the server remembers, for audits."""
        return self._pages("keys", KeyInfo, {"as_of": as_of})

    def writers(self, *, match: str | None = None) -> AsyncListing[WriterInfo]:
        """The writers whose names match a pattern, in the order of names."""
        return self._pages("writers", WriterInfo, {"match": match})

    def writer_history(self, name: str) -> AsyncListing[PublishedBatch]:
        """What a writer published, the newest batch first."""
        settings = self._driver.settings
        pages = Pages(settings, f"/v1/writer-history/{name}", "batches", PublishedBatch, [])
        return AsyncListing(self._driver, pages)

    async def open_writer(
        self, name: str, query: str, *, allow_new: bool = False, after: int | None = None
    ) -> WriterInfo:
        """Begin a run of a writer, which ends every run before it, and learn how far it came.

        A name is bound to one query; with `allow_new` another one may take it over. With `after`,
        the run begins only if the writer still has this epoch (0: there is no writer yet), and is
        refused with `WriterFencedError` if another run began since.
        """
        return await self._driver.run(
            writers.open_writer(
                self._driver.settings, name, query, allow_new=allow_new, after=after
            )
        )

    async def writer(self, name: str) -> WriterInfo:
        """A writer as it stands, without beginning a run."""
        return await self._driver.run(writers.find_writer(self._driver.settings, name))

    async def forget_writer(self, name: str) -> None:
        """Remove a writer: what it published stays, and the same batches may come again."""
        await self._driver.run(writers.forget_writer(self._driver.settings, name))

    async def commit(
        self,
        appends: Iterable[CommitAppend],
        *,
        key: str | None = None,
        writer: WriterBatch | None = None,
        leases: Iterable[tuple[str, int] | LeaseAck] = (),
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> Committed:
        """Several appends to several streams, all of them or none; as a writer's batch, once.

        `leases` are tokens of groups with the position to ack each at, in the same transaction: if
        one is no longer current, nothing is stored (`LeaseLostError`). A `LeaseAck` can also say
        that the event behind that position failed.
        """
        settings = self._driver.settings.carrying(headers, params)
        return await self._driver.run(
            operations.commit(settings, appends, key, writer=writer, leases=leases)
        )

    async def stage(
        self,
        txn: str,
        part: str,
        messages: Iterable[Any],
        *,
        chunk: int = 0,
        content_type: str = JSON,
    ) -> Staged:
        """Upload a chunk of a part that a later commit makes visible; the same again is fine."""
        body = operations.encode_messages(messages, content_type)
        return await self._driver.run(
            operations.stage(self._driver.settings, txn, part, chunk, body, content_type)
        )

    async def unstage(self, txn: str, part: str) -> None:
        """Drop a part that no commit used; one that a commit used is refused."""
        await self._driver.run(writers.unstage(self._driver.settings, txn, part))

    def log(
        self,
        *,
        after: int | Literal["now"] = -1,
        until: int | None = None,
        streams: list[str] | None = None,
        match: str | list[str] | None = None,
        part: str | None = None,
        names: str | list[str] | None = None,
        correlation: str | None = None,
        order: Literal["asc", "desc"] = "asc",
        page_rows: int | None = None,
        follow: bool = False,
        skip_pruned: bool = False,
        headers: Mapping[str, Value] | None = None,
        params: Mapping[str, Value] | None = None,
    ) -> AsyncLogReading:
        """Every message of every selected stream in one order; with `follow` it waits for more.

        With `names` or `correlation` only such events; with `order="desc"` the newest first.
        """
        query = query_of(
            {
                "stream": streams,
                "match": match,
                "part": part,
                "name": names,
                "correlation": correlation,
                "order": None if order == "asc" else order,
                "limit": page_rows,
                "pruned": "skip" if skip_pruned else None,
            }
        )
        reader = LogReader(
            self._driver.settings.carrying(headers, params),
            query,
            after=after,
            until=until,
            live=follow,
            descending=order == "desc",
        )
        return AsyncLogReading(self._driver, reader)

    async def log_arrow(
        self,
        *,
        after: int | Literal["now"] = -1,
        until: int | None = None,
        streams: list[str] | None = None,
        match: str | list[str] | None = None,
        part: str | None = None,
        names: str | list[str] | None = None,
        correlation: str | None = None,
        order: Literal["asc", "desc"] = "asc",
        page_rows: int | None = None,
        columns: Iterable[str] | None = None,
        wait: bool = False,
        skip_pruned: bool = False,
    ) -> ArrowPage:
        """One page of the log as an Arrow IPC stream; with `wait`, as soon as there is news.

        With `order="desc"` it begins at `until`, and its `next` is the next `until`. `columns` are
        those that are wanted; the server neither reads nor sends any other.
        """
        query = query_of(
            {
                "until": until,
                "stream": streams,
                "match": match,
                "part": part,
                "name": names,
                "correlation": correlation,
                "order": None if order == "asc" else order,
                "limit": page_rows,
                "pruned": "skip" if skip_pruned else None,
                "columns": None if columns is None else ",".join(columns),
            }
        )
        return await self._driver.run(
            arrow_page(self._driver.settings, query, after=after, wait=wait)
        )

    async def log_head(self) -> int:
        """The newest position of the log; -1 when nothing was ever stored."""
        return await self._driver.run(operations.log_head(self._driver.settings))

    async def plan(
        self,
        *,
        after: int = -1,
        until: int | None = None,
        rows_max: int | None = None,
        bytes_max: int | None = None,
        parts: int | None = None,
        streams: list[str] | None = None,
        match: str | list[str] | None = None,
        part: str | None = None,
        at: datetime | str | int | None = None,
    ) -> Plan:
        """Where a read of the log bounded in rows or bytes ends, and how to split it evenly."""
        query = query_of(
            {
                "after": after,
                "until": until,
                "rows_max": rows_max,
                "bytes_max": bytes_max,
                "parts": parts,
                "stream": streams,
                "match": match,
                "part": part,
                "at": at,
            }
        )
        return await self._driver.run(operations.plan(self._driver.settings, query))

    async def close(self) -> None:
        """Hang up. Streams and readings of this client end with it."""
        await self._driver.close()

    def _pages(self, name: str, kind: type[T], query: dict[str, Any]) -> AsyncListing[T]:
        settings = self._driver.settings
        pages = Pages(settings, f"/v1/{name}", name, kind, query_of(query))
        return AsyncListing(self._driver, pages)
