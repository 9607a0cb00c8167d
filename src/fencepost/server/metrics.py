"""Metrics: plain integers on the hot path, turned into Prometheus's format by a scrape.

Nothing here is called for each request. Counters live where the work is done; a scrape reads them.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import fields
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from fencepost.http.front import HttpCounters
from fencepost.protocol.shares import Amounts, Shares
from fencepost.server.audit import Audit
from fencepost.server.auth import Auth
from fencepost.server.groups.gauges import Gauges
from fencepost.server.groups.working import Working
from fencepost.server.mesh.sending import Sending
from fencepost.server.mesh.sessions import Sessions
from fencepost.server.subscriptions.registry import Counts, Registry
from fencepost.server.tails import Tails
from fencepost.server.waiters import Waiters
from fencepost.store.contract import Counters, StoreAwayError
from fencepost.store.opener import Opened

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
ANSWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts of values below fixed bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        buckets, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(seen)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Subscribed(Protocol):
    """Subscriptions as far as they are counted."""

    @property
    def registry(self) -> Registry: ...

    @property
    def counts(self) -> Counts: ...

    @property
    def deliveries_count(self) -> int: ...


class Metrics:
    """What `/metrics` shows."""

    def __init__(self, opened: Opened) -> None:
        self._stats = opened.stats
        self._counters = opened.counters
        self._tails: Tails | None = None
        self._damaged: Callable[[], int] | None = None
        self._log_waiters: Waiters | None = None
        self._subscriptions: Subscribed | None = None
        self._groups: Working | None = None
        self._gauges: Gauges | None = None
        self._meshes: Sending | None = None
        self._sessions: Sessions | None = None
        self._http: HttpCounters | None = None
        self._usage: UsageGauges | None = None
        self.worker: int | None = None
        """Which of several workers this is; each has metrics of its own."""
        self._auth: tuple[Auth, Audit] | None = None
        self._commit = Histogram(SECONDS)
        self._fsync = Histogram(SECONDS)
        self._answers = Histogram(ANSWERS)
        opened.measure(self._committed)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def watch(self, tails: Tails, log_waiters: Waiters) -> None:
        self._tails = tails
        self._log_waiters = log_waiters

    def watch_damage(self, count: Callable[[], int]) -> None:
        self._damaged = count

    def watch_subscriptions(self, subscriptions: Subscribed) -> None:
        self._subscriptions = subscriptions

    def watch_groups(self, groups: Working, gauges: Gauges) -> None:
        self._groups = groups
        self._gauges = gauges

    def watch_meshes(self, meshes: Sending, sessions: Sessions) -> None:
        self._meshes = meshes
        self._sessions = sessions

    def watch_usage(
        self,
        read: Callable[[], Awaitable[list[tuple[str, str, int]]]],
        at_once: Callable[[], Mapping[str, Amounts]],
        shares: Shares,
    ) -> None:
        self._usage = UsageGauges(read, at_once, shares)

    def watch_auth(self, auth: Auth, audit: Audit) -> None:
        self._auth = (auth, audit)

    def count(self, counters: HttpCounters) -> None:
        self._http = counters

    def _committed(self, answers: int, commit_ns: int, fsync_ns: int) -> None:
        self._commit.add(commit_ns / 1e9)
        self._fsync.add(fsync_ns / 1e9)
        self._answers.add(answers)

    async def render(self) -> bytes:
        """All metrics as text. While the database is away, groups show the figures of before."""
        if self._gauges is not None:
            with contextlib.suppress(StoreAwayError):
                await self._gauges.refresh()
        if self._usage is not None:
            with contextlib.suppress(StoreAwayError):
                await self._usage.refresh()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        counts = self._counters()
        yield _counter("fencepost_appends", "Appends stored", counts.appends)
        yield _counter("fencepost_messages", "Messages stored", counts.messages)
        yield _counter("fencepost_append_bytes", "Payload bytes stored", counts.bytes)
        yield _counter("fencepost_duplicates", "Appends recognised as repeated", counts.duplicates)
        yield _counter("fencepost_writer_replays", "Batches that came again", counts.replays)
        yield _counter(
            "fencepost_writer_mismatches",
            "Batches that came again with other rows than those published",
            counts.mismatches,
        )
        yield _counter(
            "fencepost_epochs_raised", "Epochs of producer ids raised", counts.epochs_raised
        )
        yield _gauge("fencepost_streams_open", "Streams in memory", counts.streams_cached)
        yield _gauge("fencepost_log_position", "The next position", counts.next_position)
        yield self._answers.family(
            "fencepost_commit_answers", "Requests answered by one group commit"
        )
        yield self._commit.family(
            "fencepost_commit_seconds", "Time of a group commit, from its first statement on"
        )
        yield self._fsync.family(
            "fencepost_fsync_seconds", "Time of its COMMIT alone, which is the fsync of the log"
        )
        for name, value in self._stats().items():
            text = f"The store's {name.removesuffix('_total').replace('_', ' ')}"
            kind = _counter if name.endswith("_total") else _gauge
            yield kind(f"fencepost_store_{name}", text, value)
        if self._damaged is not None:
            yield _counter(
                "fencepost_data_damaged", "Reads that found damaged data", self._damaged()
            )
        if self.worker is not None:
            info = GaugeMetricFamily("fencepost_worker_info", "Which worker", labels=("worker",))
            info.add_metric((str(self.worker),), 1)
            yield info
        if self._tails is not None:
            yield _gauge(
                "fencepost_waiters", "Long-polls and SSE readers", self._tails.readers_count
            )
        if self._log_waiters is not None:
            yield _gauge(
                "fencepost_log_waiters", "Live readers of the log", self._log_waiters.count
            )
            yield _gauge(
                "fencepost_log_streams_uncompared",
                "Streams written to and not compared with all live readers of the log yet",
                self._log_waiters.uncompared_count,
            )
        if self._subscriptions is not None:
            yield from _subscription_families(self._subscriptions)
        if self._groups is not None:
            yield from _group_families(self._groups)
        if self._gauges is not None:
            yield from _gauge_families(self._gauges)
        if self._meshes is not None:
            yield from _mesh_families(self._meshes)
        if self._sessions is not None:
            yield from _session_families(self._sessions)
        if self._http is not None:
            yield from _http_families(self._http)
        if self._usage is not None:
            yield from self._usage.families(counts.past_shares)
        if self._auth is not None:
            yield from _auth_families(*self._auth, counts)


class UsageGauges:
    """What principals hold, and what each may."""

    def __init__(
        self,
        read: Callable[[], Awaitable[list[tuple[str, str, int]]]],
        at_once: Callable[[], Mapping[str, Amounts]],
        shares: Shares,
    ) -> None:
        self._read = read
        self._at_once = at_once
        self._shares = shares
        self._stored: list[tuple[str, str, int]] = []

    async def refresh(self) -> None:
        self._stored = await self._read()

    def families(self, refused: int) -> Iterator[Metric]:
        usage = GaugeMetricFamily(
            "fencepost_principal_usage",
            "What a principal holds",
            labels=("principal", "resource"),
        )
        for principal, resource, amount in self._stored:
            usage.add_metric((principal, resource), amount)
        for resource, amounts in self._at_once().items():
            for principal, amount in amounts.items():
                usage.add_metric((principal, resource), amount)
        yield usage
        shares = GaugeMetricFamily(
            "fencepost_principal_share", "What each principal may hold; 0: any", labels=("limit",)
        )
        for field in fields(self._shares):
            shares.add_metric((field.name,), getattr(self._shares, field.name))
        yield shares
        yield _counter("fencepost_past_shares", "Writes refused for going past a share", refused)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _subscription_families(subscriptions: Subscribed) -> Iterator[Metric]:
    yield _gauge("fencepost_subscriptions", "Subscriptions", len(subscriptions.registry))
    counts = subscriptions.counts
    yield _counter("fencepost_subscription_wakes", "Wakes issued", counts.wakes)
    under_way = subscriptions.deliveries_count
    yield _gauge("fencepost_webhooks_under_way", "Webhooks waited for", under_way)
    yield _counter("fencepost_webhook_deliveries", "Webhooks that took a wake", counts.delivered)
    yield _counter("fencepost_webhook_failures", "Webhook attempts that failed", counts.undelivered)
    yield _counter("fencepost_subscription_claims", "Leases given to workers", counts.claims)
    yield _counter("fencepost_subscription_acks", "Callbacks and acks applied", counts.acks)
    yield _counter("fencepost_subscription_fenced", "Workers told they are late", counts.fenced)
    yield _counter("fencepost_subscription_expired", "Leases that ran out", counts.expired)
    yield _counter(
        "fencepost_subscription_streams_unfollowed",
        "Streams that a subscription does not follow, its principal being past its share",
        counts.unfollowed,
    )


def _group_families(groups: Working) -> Iterator[Metric]:
    yield _gauge("fencepost_group_claims_waiting", "Claims that wait", groups.waiters_count)
    for name, text in (
        ("claims", "Leases given to workers"),
        ("acks", "Leases that were acked"),
        ("retries", "Failures that are tried again"),
        ("blocked", "Targets that were blocked"),
        ("parked", "Events that were set aside"),
        ("lost", "Workers that let a lease expire"),
        ("pruned", "Leases whose events were gone from the log"),
    ):
        family = CounterMetricFamily(f"fencepost_group_{name}", text, labels=("group", "lane"))
        for group, known in groups.known.items():
            for lane, counted in known.counted.items():
                family.add_metric((group, lane), getattr(counted, name))
        yield family


def _gauge_families(gauges: Gauges) -> Iterator[Metric]:
    labels = ("group", "lane")
    targets = GaugeMetricFamily(
        "fencepost_group_targets", "Targets by state", labels=(*labels, "state")
    )
    lag = GaugeMetricFamily(
        "fencepost_group_lag_events", "Events that wait, at most", labels=labels
    )
    seconds = GaugeMetricFamily(
        "fencepost_group_lag_seconds", "Age of the oldest event that waits", labels=labels
    )
    oldest = GaugeMetricFamily(
        "fencepost_group_oldest_position", "Position of the oldest event that waits", labels=labels
    )
    aside = GaugeMetricFamily(
        "fencepost_group_parked_events", "Events that are set aside", labels=("group",)
    )
    told = GaugeMetricFamily(
        "fencepost_group_told_events",
        "Events that computed targets were told of and have not got past",
        labels=("group",),
    )
    behind = GaugeMetricFamily(
        "fencepost_group_uncorrelated_positions",
        "Positions of the log that the group has not looked at",
        labels=("group",),
    )
    for name, counted in gauges.lags.items():
        aside.add_metric((name,), counted.group.parked_count)
        told.add_metric((name,), counted.told)
        behind.add_metric((name,), max(0, counted.head - counted.group.watermark))
        for lane in counted.lanes:
            place = (name, lane.lane)
            for state in ("idle", "ready", "leased", "deferred", "blocked"):
                targets.add_metric((*place, state), getattr(lane, state))
            lag.add_metric(place, lane.lag)
            written_ms = counted.at_ms if lane.oldest_ms is None else lane.oldest_ms
            seconds.add_metric(place, max(0, counted.at_ms - written_ms) / 1000)
            if lane.oldest is not None:
                oldest.add_metric(place, lane.oldest)
    yield from (targets, lag, seconds, oldest, aside, told, behind)


def _mesh_families(meshes: Sending) -> Iterator[Metric]:
    for name, text, field in (
        ("sends", "Sends stored", "sends"),
        ("deliveries", "Messages delivered to inboxes and queues", "deliveries"),
        ("duplicates", "Sends that came again", "duplicates"),
        ("fingerprint_mismatches", "Other messages under a used id", "mismatches"),
    ):
        family = CounterMetricFamily(f"fencepost_mesh_{name}", text, labels=("mesh",))
        for mesh, counted in meshes.counted.items():
            family.add_metric((mesh,), getattr(counted, field))
        yield family
    yield _counter(
        "fencepost_mesh_orphan_checks", "Orphan checks that came to an end", meshes.orphan_checks
    )
    orphans = GaugeMetricFamily(
        "fencepost_mesh_orphans", "What the last orphan check found", labels=("mesh",)
    )
    for mesh, counted in meshes.counted.items():
        if counted.orphans is not None:
            orphans.add_metric((mesh,), counted.orphans)
    yield orphans


def _session_families(sessions: Sessions) -> Iterator[Metric]:
    yield _gauge("fencepost_sessions_open", "Sessions that are open", sessions.count)
    yield _counter("fencepost_sessions", "Sessions that began", sessions.opened)
    closed = CounterMetricFamily(
        "fencepost_sessions_closed", "Sessions that ended", labels=("kind",)
    )
    for kind, count in sessions.closed.items():
        closed.add_metric((kind,), count)
    yield closed
    yield _counter("fencepost_session_frames", "Frames of clients", sessions.frames)
    yield _counter(
        "fencepost_session_deliveries", "Entries of inboxes delivered", sessions.delivered
    )


def _auth_families(auth: Auth, audit: Audit, counts: Counters) -> Iterator[Metric]:
    yield _counter("fencepost_auth_rejected", "Requests without a good token", auth.rejected)
    yield _counter("fencepost_auth_too_fast", "Appends past a limit", counts.appends_too_fast)
    yield _counter("fencepost_audit_events", "Events in the audit stream", audit.events)
    yield _counter(
        "fencepost_audit_suppressed", "Refusals that the audit stream leaves out", audit.suppressed
    )
    named = ("principal",)
    open_claims = GaugeMetricFamily("fencepost_claims_open", "Open claims", labels=named)
    ratio = GaugeMetricFamily(
        "fencepost_claims_abandon_ratio",
        "Share of recent claims that were taken away",
        labels=named,
    )
    for principal, open_count, abandon_ratio in counts.claims:
        open_claims.add_metric((principal,), open_count)
        ratio.add_metric((principal,), abandon_ratio)
    yield open_claims
    yield ratio


def _http_families(http: HttpCounters) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "fencepost_http_requests", "Requests answered", labels=("method", "status")
    )
    for method, classes in http.requests.items():
        for digit, count in enumerate(classes):
            if count:
                requests.add_metric((method, f"{digit}xx"), count)
    yield requests
    refusals = CounterMetricFamily(
        "fencepost_http_refusals", "Requests refused by the front end", labels=("code",)
    )
    for code, count in http.refusals.items():
        refusals.add_metric((code,), count)
    yield refusals
    yield _counter(
        "fencepost_http_heads_repeated",
        "Requests read by the head that they have in common with the one before",
        http.heads_repeated,
    )
    yield _gauge("fencepost_http_bodies_bytes", "Bodies of open requests", http.bodies_bytes)
    yield _counter("fencepost_http_received_bytes", "Bytes received", http.bytes_in)
    yield _counter("fencepost_http_sent_bytes", "Bytes sent", http.bytes_out)
    yield _counter("fencepost_http_connections", "Connections accepted", http.connections_total)
    yield _gauge("fencepost_http_connections_open", "Connections open", http.connections_open)
