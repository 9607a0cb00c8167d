"""Metrics of a relay for Prometheus: what it did, and what the table holds.

docs/guides/outbox-table.md lists them with what to do when they move. Rows and their ages are read
from the table when they are asked for, so every relay shows the same. While the database is away,
the last figures are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fencepost.outbox.database import Depth, OutboxDatabase
from fencepost.outbox.relay import Counts

log = logging.getLogger(__name__)

COUNTERS = {
    "delivered": ("delivered", "Sends that the server has."),
    "retries": ("retries", "Attempts that failed and are made again."),
    "dead": ("dead", "Rows that died."),
    "duplicate": ("duplicates", "Sends that the server had already."),
    "history_pruned": ("history_pruned", "Duplicates whose message is gone from its stream."),
    "retries_after_expiry": (
        "retries_after_expiry",
        "Retries after the server may have forgotten.",
    ),
    "late": ("late", "Answers for rows that were dead or dropped."),
    "lost": ("lost", "Outcomes that came after the lease."),
    "database_failures": ("database_failures", "Turns that failed."),
}
"""What a relay counts, with the name and the help of its metric."""


class RelayMetrics:
    """A collector over the counts of a relay and the table."""

    def __init__(self, database: OutboxDatabase, counts: Counts) -> None:
        self._database = database
        self._counts = counts
        self._last: tuple[list[Depth], int] = ([], 0)

    def describe(self) -> list[Any]:
        """Nothing: the registry must not read the database when the collector is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics, as Prometheus asks for them."""
        for what, (name, text) in COUNTERS.items():
            family = CounterMetricFamily(f"fencepost_outbox_{name}", text)
            family.add_metric([], self._counts[what])
            yield family
        try:
            self._last = self._database.depths()
        except Exception as error:
            log.warning("the rows cannot be counted: %s", str(error).strip())
        depths, now_ms = self._last
        labels = ["mesh", "status"]
        rows = GaugeMetricFamily("fencepost_outbox_rows", "Rows that are not done.", labels=labels)
        ages = GaugeMetricFamily(
            "fencepost_outbox_oldest_seconds", "Age of the oldest of them.", labels=labels
        )
        for depth in depths:
            rows.add_metric([depth.mesh, depth.status], depth.rows)
            age_ms = max(0, now_ms - depth.oldest_ms)
            ages.add_metric([depth.mesh, depth.status], age_ms / 1000)
        yield rows
        yield ages


def serve(metrics: RelayMetrics, port: int, address: str = "127.0.0.1") -> int:
    """Serve the metrics at `/metrics` from a thread; the port, also when it was 0."""
    registry = CollectorRegistry()
    registry.register(metrics)
    server, _ = start_http_server(port, addr=address, registry=registry)
    return int(server.server_port)
