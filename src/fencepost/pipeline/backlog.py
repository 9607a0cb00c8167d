"""What lies between a query and the head of the log: messages of its selection, and their age.

The positions between the two belong to all streams, so their number says little of a query that
reads a few. `Backlog` counts the messages of the selection. It weighs each position once, when the
head comes past it, and takes off what a batch takes; a query that is far behind so costs the server
one plan over what is new, and not one over everything for each batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fencepost.client.results import Plan
from fencepost.client.sync import Client
from fencepost.pipeline.options import Selection


@dataclass(slots=True)
class Backlog:
    """Messages above `after` up to `until`, where the head was when they were counted."""

    selection: Selection
    after: int
    until: int
    rows: int = 0
    bytes: int = 0

    def take(self, plan: Plan) -> None:
        """Take off what a batch takes: the query will stand where its plan ends."""
        is_all = plan.until >= self.until
        self.rows = 0 if is_all else max(0, self.rows - plan.rows)
        self.bytes = 0 if is_all else max(0, self.bytes - plan.bytes)
        self.after, self.until = plan.until, max(plan.until, self.until)

    def count(self, client: Client) -> None:
        """Count what has come since the last time."""
        plan = client.plan(after=self.until, **self.selection.asked())
        self.rows += plan.rows
        self.bytes += plan.bytes
        self.until = max(self.until, plan.until)

    def seconds(self, client: Client) -> float:
        """The age of the oldest of the messages, by this machine's clock; 0 without any."""
        if not self.rows:
            return 0.0
        asked = self.selection.asked()
        for entry in client.log(
            after=self.after, until=self.until, page_rows=1, skip_pruned=True, **asked
        ):
            if entry.marker is None:
                return max(0.0, time.time() - entry.timestamp_ms / 1000)
        return 0.0
