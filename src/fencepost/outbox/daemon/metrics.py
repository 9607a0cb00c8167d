"""The metrics of the daemon, rendered when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fencepost.outbox.daemon.daemon import Daemon
from fencepost.outbox.states import STATUSES


def render(daemon: Daemon, oldest_ms: int | None) -> bytes:
    """All of them, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Collector(daemon, oldest_ms))
    found: bytes = generate_latest(registry)
    return found


class _Collector:
    def __init__(self, daemon: Daemon, oldest_ms: int | None) -> None:
        self._daemon = daemon
        self._oldest_ms = oldest_ms

    def collect(self) -> Iterator[Metric]:
        daemon = self._daemon
        depth = GaugeMetricFamily(
            "fencepost_outbox_rows", "Rows of the outbox by status.", labels=["status"]
        )
        for status in STATUSES:
            depth.add_metric([status], daemon.counts[status])
        yield depth
        age_s = 0.0
        if self._oldest_ms is not None:
            age_s = max(0.0, (daemon.clock.now_ms() - self._oldest_ms) / 1000)
        yield _gauge("oldest_row_age_seconds", "Age of the oldest row that waits.", age_s)
        yield _gauge("event_readers", "Readers of /v1/events.", daemon.feed.readers)
        yield _counter("accepted", "Sends that were accepted and are new.", daemon.accepted)
        yield _counter("commits", "Transactions of outbox.db.", daemon.writer.commits)
        yield _counter("jobs", "Changes that these transactions held.", daemon.writer.jobs)
        counters = daemon.deliveries.counters
        attempts = CounterMetricFamily(
            "fencepost_outbox_attempts", "Attempts by what came of them.", labels=["outcome"]
        )
        for outcome in ("stored", "failed", "rejected"):
            attempts.add_metric([outcome], counters.events[outcome])
        yield attempts
        yield _counter(
            "history_pruned",
            "Sends that were stored before, and whose stream no longer holds them.",
            counters.history_pruned,
        )
        yield _counter(
            "retries_after_expiry",
            "Rows that were sent again later than their mesh remembers.",
            counters.retries_after_expiry,
        )
        yield _counter("late_answers", "Answers for rows that were given up.", counters.late)
        yield _counter("inbox_stored", "Messages that came in.", daemon.inbox.stored)
        yield _counter(
            "inbox_duplicates", "Deliveries that were known already.", daemon.inbox.duplicates
        )
        connected = GaugeMetricFamily(
            "fencepost_outbox_connected", "Whether a mesh is in reach.", labels=["mesh"]
        )
        reconnects = CounterMetricFamily(
            "fencepost_outbox_reconnects", "How often a mesh came back.", labels=["mesh"]
        )
        sessions = GaugeMetricFamily(
            "fencepost_outbox_session",
            "Whether a mesh is reached through a session; 0: over plain HTTP, or not at all.",
            labels=["mesh"],
        )
        for link in daemon.links:
            connected.add_metric([link.mesh], link.state == "connected")
            sessions.add_metric([link.mesh], link.has_session)
            reconnects.add_metric([link.mesh], link.reconnects)
        yield connected
        yield sessions
        yield reconnects
        runs = CounterMetricFamily("fencepost_outbox_hook_runs", "Runs of hooks.", labels=["hook"])
        failures = CounterMetricFamily(
            "fencepost_outbox_hook_failures", "Events that a hook gave up on.", labels=["hook"]
        )
        for hook in daemon.hooks:
            runs.add_metric([hook.settings.name], hook.runs)
            failures.add_metric([hook.settings.name], hook.failures)
        yield runs
        yield failures


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fencepost_outbox_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"fencepost_outbox_{name}", text, value=value)
