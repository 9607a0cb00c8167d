"""A streaming read: one position of the log is the whole offset, however many streams there are.

Spark asks on the driver, in a process that lives as long as the query, how far there is something
to read (`latestOffset`) and how to divide it (`partitions`). While the query is idle,
`latestOffset` waits for the server to report something new, for `waitMs` at most, instead of asking
all the time.

| offset | |
|---|---|
| `{"position": 17}` | everything up to position 17 has been read |
| `{"start": "latest"}` | nothing yet: the first `latestOffset` finds the head |
| `{"start": 1763300000000}` | nothing yet: the query begins at this time |

Spark does not store where its first batch began; it asks for the initial offset again after a
restart. So the initial offset must not contain anything that is found out at the start.

Spark lets a source in Python add nothing to the progress of a query but what it says is the latest
offset. So `reportLatestOffset` gives the head of the log and, beside it, all that there is to say:

| in `latestOffset` | |
|---|---|
| `position` | the head of the log |
| `url`, `streams` or `match` | what is read, and where |
| `batch_rows`, `batch_bytes` | messages of the batch, and their payload |
| `behind_rows`, `behind_bytes` | messages of the selection that lie above the batch |
| `behind_seconds` | the age of the oldest of them, by the driver's clock |
| `retries` | attempts of the driver's requests that failed, since the query was started |
| `losses` | rows that had left the log unread, since the query was started |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from fencepost.client.errors import (
    BadRequestError,
    ConnectionFailedError,
    FencepostError,
    ResponseError,
)
from fencepost.client.results import Plan
from fencepost.client.retry import REPEATED
from fencepost.client.settings import NO_RETRIES
from fencepost.client.sync import Client
from fencepost.pipeline.backlog import Backlog
from fencepost.pipeline.connection import access_explained, check_readable, say_if_away
from fencepost.pipeline.errors import rows_without_traceback, without_traceback
from fencepost.pipeline.source.batch import RangePartition, plan_partitions, position_at
from fencepost.pipeline.source.options import LATEST, SourceOptions
from fencepost.pipeline.source.reader import (
    Range,
    beyond_head_error,
    pruned_error,
    read_range,
    skipped,
)

if TYPE_CHECKING:
    import pyarrow as pa

Offset = dict[str, Any]

MOVE_SECONDS = 300.0
"""How long the offset stands still while only messages of other streams come."""

log = logging.getLogger(__name__)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read of the log."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client: Client | None = None
        self._waiting: Client | None = None
        self._target: int | None = None
        """With Trigger.AvailableNow: where the log ended when the query began."""
        self._empty = Range(-1, -1)
        """Positions that are known to hold nothing of the selection."""
        self._head = -1
        self._checked = False
        self._losses = 0
        self._losses_until = -1
        """Losses are counted up to here: a range may be planned more than once."""
        self._retries = 0
        self._backlog: Backlog | None = None
        """None until the first batch is planned."""
        self._batch: tuple[int, int] | None = None
        """Messages and bytes of the batch, where this run has planned it."""
        self._moved_seconds = time.monotonic()
        self._few_since: float | None = None
        """Since when there have been rows, but fewer than `minRowsPerTrigger`."""

    def __getstate__(self) -> dict[str, Any]:
        # Executors read with clients of their own.
        return {"_options": self._options}

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a new query begins."""
        start = self._options.start
        if start.position is not None:
            return {"position": start.position}
        return {"start": LATEST if start.timestamp_ms is None else start.timestamp_ms}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit on a batch that the options set."""
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    @without_traceback
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note where the log ends now: the query reads to there and stops."""
        say_if_away(self._options.connection)
        with access_explained():
            self._target = self._asking().log_head()

    @without_traceback
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Where the next batch ends; `start` itself when there is nothing to read."""
        with access_explained():
            if not self._checked:
                say_if_away(self._options.connection)
                check_readable(self._asking(), self._options.selection)
                self._checked = True
            return self._latest(start, limit)

    def _latest(self, start: Offset, limit: ReadLimit) -> Offset:
        after = self._resolved(start)
        if after is None:
            if self._target is None:
                self._wait(self._head)
            return start
        if start.get("start") == LATEST:
            begun = after if self._target is None else min(after, self._target)
            self._backlog = Backlog(self._options.selection, begun, begun)
            return {"position": begun}
        if self._target is not None and after >= self._target:
            if after > self._target:
                raise beyond_head_error(after, self._target)
            return start
        plan = self._plan(after, limit)
        if plan.rows == 0 and self._target is None:
            self._wait(self._empty.until)
            plan = self._plan(after, limit)
        if self._is_too_few(plan):
            self._wait(plan.until)
            plan = self._plan(after, limit)
            if self._is_too_few(plan):
                self._begin(after, None)
                return start
        self._few_since = None
        self._begin(after, plan)
        if plan.rows == 0 and not self._is_time_to_move(plan.until - after):
            return start
        self._moved_seconds = time.monotonic()
        return {"position": plan.until}

    def _begin(self, after: int, plan: Plan | None) -> None:
        """Note what the batch takes; without a plan, nothing."""
        if self._backlog is None:
            self._backlog = Backlog(self._options.selection, after, after)
        self._batch = (0, 0) if plan is None else (plan.rows, plan.bytes)
        if plan is not None:
            self._backlog.take(plan)

    def _is_too_few(self, plan: Plan) -> bool:
        """Whether rows should wait for more of them (`minRowsPerTrigger`, `maxTriggerDelay`)."""
        rows_min = self._options.rows_min
        # A plan that ends before the head was cut by a limit: there is more than it holds.
        is_all = plan.until >= plan.head
        if rows_min is None or self._target is not None or not is_all:
            return False
        if not 0 < plan.rows < rows_min:
            return False
        now = time.monotonic()
        self._few_since = now if self._few_since is None else self._few_since
        return now - self._few_since < self._options.delay_seconds_max

    def _is_time_to_move(self, positions: int) -> bool:
        """Whether an empty batch is worth it: a restart then skips these positions."""
        idle_seconds = time.monotonic() - self._moved_seconds
        return self._target is None and positions > 0 and idle_seconds > MOVE_SECONDS

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Where the log ends now, and what else there is to say for the query's progress."""
        selection, backlog = self._options.selection, self._backlog
        report: Offset = {"position": self._head, "url": self._options.connection.url}
        report |= (
            {"streams": [*selection.streams]} if selection.streams else {"match": selection.match}
        )
        report |= {"retries": self._retries, "losses": self._losses}
        if self._batch is not None:
            report["batch_rows"], report["batch_bytes"] = self._batch
        try:
            client = self._asking_once()
            self._head = report["position"] = max(self._head, client.log_head())
            if backlog is not None:
                backlog.count(client)
                seconds = backlog.seconds(client)
                report |= {"behind_rows": backlog.rows, "behind_bytes": backlog.bytes}
                report["behind_seconds"] = round(seconds, 3)
        except (ConnectionFailedError, ResponseError) as failure:
            log.debug("how far the query is behind is not known right now: %s", failure)
        return report

    @without_traceback
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks of a batch; its first one may end where it begins."""
        if start == end or start.get("start") == LATEST:
            return []
        after = self._resolved(start)
        if after is None:
            return []
        asked = Range(self._past_empty(after), end["position"])
        planned = plan_partitions(self._asking(), self._options, self._options.selection, asked)
        if planned.pruned is not None:
            self._note_loss(planned.pruned, planned.pruned_rows, asked.until)
        return planned.partitions

    @rows_without_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        assert isinstance(partition, RangePartition)
        asked = Range(partition.after, partition.until)
        return read_range(self._options, self._options.selection, asked)

    def commit(self, end: Offset) -> None:
        """Nothing to do: reading takes nothing away."""

    def stop(self) -> None:
        """Close the connections."""
        for client in (self._client, self._waiting):
            if client is not None:
                client.close()
        self._client = self._waiting = None

    def _resolved(self, start: Offset) -> int | None:
        """The position to read after, or None while a start in the future has not come."""
        if "position" in start:
            after: int = start["position"]
            return after
        client = self._asking()
        if start["start"] == LATEST:
            return client.log_head()
        after = position_at(client, start["start"])
        self._head = client.log_head()
        # Once something has come at this time or later, what lies before it is settled for good.
        return after if after < self._head else None

    def _plan(self, after: int, limit: ReadLimit) -> Plan:
        client = self._asking()
        begin = self._past_empty(after)
        rows_max, bytes_max = self._limits(limit)
        try:
            plan = client.plan(
                after=begin,
                until=self._target,
                rows_max=rows_max,
                bytes_max=bytes_max,
                **self._options.selection.asked(),
            )
        except BadRequestError as error:
            if error.code != "after_beyond_head":
                raise
            raise beyond_head_error(begin, error.headers.get("log-head", "?")) from error
        self._head = plan.head
        if plan.rows == 0:
            if plan.pruned is not None:
                self._note_loss(plan.pruned, plan.pruned_rows, plan.until)
            self._empty = Range(after, max(begin, plan.until))
        return plan

    def _past_empty(self, after: int) -> int:
        """Where to go on looking, past positions that are known to hold nothing.

        What held nothing while the query ran cannot be lost later: a marker that is pruned there is
        not a message.
        """
        return self._empty.until if self._empty.after <= after <= self._empty.until else after

    def _note_loss(self, position: int, rows: int, until: int) -> None:
        """Rows up to a position are gone: count them, or fail."""
        if self._options.fail_on_data_loss:
            raise pruned_error(self._options.selection, position)
        if until > self._losses_until:
            self._losses += rows
            self._losses_until = until
            log.warning("%s", skipped(self._options.selection, position))

    def _note_failure(self, failure: FencepostError) -> None:
        is_refusal = isinstance(failure, ResponseError) and failure.status not in REPEATED
        self._retries += not is_refusal

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        match limit:
            case ReadAllAvailable():
                return None, None
            case ReadMaxRows(max_rows=rows):
                return rows, self._options.bytes_max
            case ReadMaxBytes(max_bytes=size):
                return self._options.rows_max, size
            case _:
                return self._options.rows_max, self._options.bytes_max

    def _wait(self, after: int) -> None:
        """Wait until a message of the selection comes, or `waitMs` are over."""
        try:
            self._asking_once().log_arrow(
                after=after,
                page_rows=1,
                columns=("position",),
                wait=True,
                skip_pruned=True,
                **self._options.selection.asked(),
            )
        except (ConnectionFailedError, ResponseError) as failure:
            # Nothing came in time, or the server is away: the next plan finds out, with retries.
            log.debug("waiting for news ended: %s", failure)

    def _asking(self) -> Client:
        if self._client is None:
            self._client = self._options.connection.client(on_error=self._note_failure)
        return self._client

    def _asking_once(self) -> Client:
        if self._waiting is None:
            self._waiting = self._options.connection.client(
                live_seconds=self._options.wait_seconds, retries=NO_RETRIES
            )
        return self._waiting
