# Generated from src/fencepost/client/aio/groups.py by `just twins`: change that file.
"""Groups through the sync client: make one, claim and ack, look at it, operate on it, work."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fencepost.client import groups
from fencepost.client.errors import require
from fencepost.client.group_threads import work
from fencepost.client.group_worker import Handler, Working
from fencepost.client.groups import (
    Acked,
    Changed,
    GroupInfo,
    LeaseAck,
    Leases,
    ParkedInfo,
    RenewedItem,
    TargetInfo,
    WorkerInfo,
)
from fencepost.client.operations import query_of
from fencepost.client.reading import Pages
from fencepost.client.sync.connections import Driver
from fencepost.client.sync.readings import Listing

T = TypeVar("T")


class Group:
    """A group by its name. `client.group(name)` makes this object, and asks nothing."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self.name = name

    def make(
        self,
        sources: Sequence[str],
        *,
        targets: str | None = None,
        names: Sequence[str] | None = None,
        lease_ms: int | None = None,
        retries_max: int | None = None,
        backoff: Mapping[str, Any] | None = None,
        on_exhausted: str | None = None,
        lost_max: int | None = None,
        start: int | str | None = None,
    ) -> GroupInfo:
        """Make the group; fine if it exists with these settings."""
        require(not isinstance(sources, str), "sources is a list of patterns, not one text")
        values = {
            "sources": list(sources),
            "targets": targets,
            "names": names,
            "lease_ms": lease_ms,
            "retries_max": retries_max,
            "backoff": backoff,
            "on_exhausted": on_exhausted,
            "lost_max": lost_max,
            "start": start,
        }
        return self._driver.run(groups.make_group(self._driver.settings, self.name, values))

    def info(self) -> GroupInfo:
        """The group as it stands."""
        return self._driver.run(groups.show_group(self._driver.settings, self.name))

    def delete(self) -> None:
        """Remove the group; its leases are lost."""
        self._driver.run(groups.delete_group(self._driver.settings, self.name))

    # Working

    def work(
        self,
        handler: Handler,
        *,
        worker: str,
        streams: int = 10,
        events: int = 10,
        lane: str | None = None,
        lease_ms: int | None = None,
        until_idle: bool = False,
        stopping: threading.Event | None = None,
    ) -> None:
        """Claim targets and hand their events to `handler`, until `stopping` is set.

        Targets are handled side by side, the events of each in order. Leases are renewed while a
        handler works. An event whose handler raises is a failure of that event, and is tried again
        as the group says. Handlers that run at the end finish first. With `until_idle` this returns
        when there is nothing to claim.
        """
        options = Working(
            worker=worker,
            streams=streams,
            events=events,
            lane=lane,
            lease_ms=lease_ms,
            until_idle=until_idle,
        )
        work(self, handler, options, stopping=stopping)

    def claim(
        self,
        worker: str,
        *,
        streams_max: int = 10,
        events_max: int = 10,
        lease_ms: int | None = None,
        lane: str | None = None,
        wait_ms: int = 0,
        take: bool = False,
    ) -> Leases:
        """Take leases; with `wait_ms` wait for work.

        `take` is for inboxes: the inbox is taken from the worker that has it, as its mesh allows.
        """
        asked: dict[str, Any] = {
            "worker": worker,
            "streams_max": streams_max,
            "events_max": events_max,
            "lease_ms": lease_ms,
            "lane": lane,
            "wait_ms": wait_ms,
        }
        if take:
            asked["take"] = True
        return self._driver.run(groups.claim(self._driver.settings, self.name, asked))

    def ack(self, *items: LeaseAck) -> Acked:
        """End leases. Every one has its outcome; a lost lease is one of them."""
        return self._driver.run(groups.ack(self._driver.settings, self.name, items, None))

    def ack_and_claim(
        self,
        items: Iterable[LeaseAck],
        worker: str,
        *,
        streams_max: int = 10,
        events_max: int = 10,
        lease_ms: int | None = None,
        lane: str | None = None,
        wait_ms: int = 0,
    ) -> Acked:
        """End leases and take the next ones, in one request."""
        asked = {
            "worker": worker,
            "streams_max": streams_max,
            "events_max": events_max,
            "lease_ms": lease_ms,
            "lane": lane,
            "wait_ms": wait_ms,
        }
        return self._driver.run(groups.ack(self._driver.settings, self.name, items, asked))

    def renew(self, tokens: Iterable[str], *, lease_ms: int | None = None) -> list[RenewedItem]:
        """Keep leases for longer."""
        return self._driver.run(groups.renew(self._driver.settings, self.name, tokens, lease_ms))

    def release(self, tokens: Iterable[str]) -> list[RenewedItem]:
        """Give leases back, so that other workers need not wait for their end."""
        return self._driver.run(groups.release(self._driver.settings, self.name, tokens))

    def correlate(self, *, after: int, until: int, targets: Iterable[Mapping[str, Any]]) -> int:
        """Note which targets the events of a piece of the log concern; the new watermark."""
        return self._driver.run(
            groups.correlate(self._driver.settings, self.name, after, until, targets)
        )

    # Looking

    def stats(self) -> dict[str, Any]:
        """Counts and lag, in all and lane by lane."""
        return self._driver.run(groups.stats_of(self._driver.settings, self.name))

    def streams(
        self, *, match: str | None = None, state: str | None = None, lane: str | None = None
    ) -> Listing[TargetInfo]:
        """The targets, in the order of their names."""
        query = {"match": match, "state": state, "lane": lane}
        return self._pages("streams", TargetInfo, query)

    def parked(self, *, match: str | None = None) -> Listing[ParkedInfo]:
        """The events that were set aside."""
        return self._pages("parked", ParkedInfo, {"match": match})

    def workers(self) -> Listing[WorkerInfo]:
        """The workers that hold leases."""
        return self._pages("workers", WorkerInfo, {})

    def _pages(self, what: str, kind: type[T], query: dict[str, Any]) -> Listing[T]:
        settings = self._driver.settings
        path = f"/v1/groups/{self.name}/{what}"
        return Listing(self._driver, Pages(settings, path, what, kind, query_of(query)))

    # Operating. Each takes the names of targets, or a filter of globs; `{}` matches all of them.

    def unblock(
        self,
        targets: Sequence[str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
    ) -> int:
        """Let blocked targets go on where they stopped; how many were."""
        return self._operate("unblock", {"targets": targets, "filter": filter})

    def reset(
        self,
        targets: Sequence[str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        at: int | None = None,
    ) -> int:
        """Send targets back to the beginning, or to a position."""
        return self._operate("reset", {"targets": targets, "filter": filter, "at": at})

    def skip(
        self,
        targets: Sequence[str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        at: int | None = None,
    ) -> int:
        """Move targets past the event that failed, or past a position."""
        return self._operate("skip", {"targets": targets, "filter": filter, "at": at})

    def defer(
        self,
        until_ms: int,
        targets: Sequence[str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
    ) -> int:
        """Keep targets from claims until a time."""
        body = {"targets": targets, "filter": filter, "until_ms": until_ms}
        return self._operate("defer", body)

    def prioritize(
        self,
        priority: int,
        targets: Sequence[str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
    ) -> int:
        """Give targets a priority."""
        body = {"targets": targets, "filter": filter, "priority": priority}
        return self._operate("prioritize", body)

    def park(self, events: Iterable[tuple[str, int]]) -> int:
        """Set events aside, each named by target and position; how many were."""
        given = [{"target": target, "position": position} for target, position in events]
        return self._set_aside("park", {"events": given})

    def replay(
        self,
        events: Iterable[tuple[str, int]] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> int:
        """Have parked events given out again: those named, or up to `limit` of a filter's."""
        given = None
        if events is not None:
            given = [{"target": target, "position": position} for target, position in events]
        return self._set_aside("replay", {"events": given, "filter": filter}, limit)

    def _operate(self, operation: str, body: dict[str, Any]) -> int:
        changed: Changed = self._driver.run(
            groups.operate(self._driver.settings, self.name, operation, body)
        )
        return changed.changed

    def _set_aside(self, operation: str, body: dict[str, Any], limit: int | None = None) -> int:
        changed: Changed = self._driver.run(
            groups.set_aside(self._driver.settings, self.name, operation, body, limit)
        )
        return changed.changed
