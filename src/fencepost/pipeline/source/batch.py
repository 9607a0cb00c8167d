"""A batch read: the driver fixes and divides its range when it plans, and executors read the parts.

A task costs Spark tens of milliseconds whatever it does, and a hundred tasks cost seconds, so a
range becomes few, large tasks of even cost. The server splits by weight (payload plus 100 bytes a
row). The driver asks it for a number of parts that it guesses from the positions, which are never
fewer than the rows, and joins parts that turn out too small. Streaming reads plan in the same way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition

from fencepost.client.errors import BadRequestError
from fencepost.client.results import Split
from fencepost.client.sync import Client
from fencepost.pipeline.connection import access_explained, check_readable, say_if_away
from fencepost.pipeline.errors import OptionError, rows_without_traceback, without_traceback
from fencepost.pipeline.options import Selection
from fencepost.pipeline.source.options import Bound, SourceOptions
from fencepost.pipeline.source.reader import (
    Range,
    beyond_head_error,
    pruned_error,
    read_range,
    skipped,
)

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


class RangePartition(InputPartition):
    """One task: a range of positions."""

    def __init__(self, after: int, until: int) -> None:
        self.after = after
        self.until = until


class Reader(DataSourceReader):
    """A batch read. It takes no filters, although Spark would push them down.

    Spark 4.3 keeps what a reader planned with a filter, and gives it to every other use of the same
    DataFrame: a count of all rows after a count of some was the count of some.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    @without_traceback
    def partitions(self) -> list[InputPartition]:
        """The tasks of the read; none when there is nothing to read."""
        selection = self._options.selection
        say_if_away(self._options.connection)
        with self._options.connection.client() as client, access_explained():
            check_readable(client, selection)
            planned = plan_partitions(client, self._options, selection, self._range(client))
        if planned.pruned is not None:
            log.warning("%s", skipped(selection, planned.pruned))
        return planned.partitions

    @rows_without_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        # Spark replaces an empty list of partitions by a partition of its own.
        if not isinstance(partition, RangePartition):
            return iter(())
        asked = Range(partition.after, partition.until)
        return read_range(self._options, self._options.selection, asked)

    def _range(self, client: Client) -> Range:
        head = client.plan(until=0).head
        start, end = self._options.start, self._options.end
        if start.position is not None and start.position > head:
            raise OptionError(
                f"startingPosition is {start.position + 1}, but the server's log ends at {head}"
            )
        if end.position is not None and end.position > head:
            raise OptionError(
                f"endingPosition is {end.position}, but the server's log ends at {head}"
            )
        return Range(resolve(client, start, head), resolve(client, end, head))


def resolve(client: Client, bound: Bound, head: int) -> int:
    """The position that a bound stands for."""
    if bound.position is not None:
        return bound.position
    return head if bound.timestamp_ms is None else position_at(client, bound.timestamp_ms)


def position_at(client: Client, timestamp_ms: int) -> int:
    """The newest position before a time."""
    found = client.plan(at=timestamp_ms, until=0).at
    assert found is not None
    return -1 if found.after is None else found.after


class Planned(NamedTuple):
    """The tasks for a range, the newest position in it whose row is gone, and how many are."""

    partitions: list[InputPartition]
    pruned: int | None
    pruned_rows: int


def plan_partitions(
    client: Client, options: SourceOptions, selection: Selection, asked: Range
) -> Planned:
    """The tasks for a range, none without rows."""
    if asked.until <= asked.after:
        return Planned([], None, 0)
    parts = parts_to_ask(asked.until - asked.after, options.partitions_min)
    try:
        plan = client.plan(after=asked.after, until=asked.until, parts=parts, **selection.asked())
    except BadRequestError as error:
        if error.code != "after_beyond_head":
            raise
        raise beyond_head_error(asked.after, error.headers.get("log-head", "?")) from error
    if plan.head < asked.until:
        raise beyond_head_error(asked.until, plan.head)
    if plan.pruned is not None and options.fail_on_data_loss:
        raise pruned_error(selection, plan.pruned)
    splits = plan.splits
    wanted = parts_by_weight(weight_of(splits), options.partitions_min)
    if wanted > parts:
        splits = client.plan(
            after=asked.after, until=asked.until, parts=wanted, **selection.asked()
        ).splits
    partitions: list[InputPartition] = [RangePartition(*one) for one in joined(splits, wanted)]
    return Planned(partitions, plan.pruned, plan.pruned_rows)


ROW_BYTES = 100
"""What a row is taken to cost beside its payload; the server's plans count the same."""
TASK_BYTES = 32 << 20
"""The weight that is worth a task: 160,000 messages of 100 bytes. A worker of PySpark looks for
garbage after every task, which alone takes as long as to read some ten thousand of them."""
TASK_ROWS = TASK_BYTES // (2 * ROW_BYTES)
PARTS_MAX = 64
"""Tasks of a read at most, unless `minPartitions` asks for more."""


def parts_to_ask(positions: int, partitions_min: int) -> int:
    """How many parts to ask the server for, before it is known how many rows there are."""
    guess = math.ceil(positions / TASK_ROWS)
    return max(partitions_min, min(guess, PARTS_MAX), 1)


def parts_by_weight(weight: int, partitions_min: int) -> int:
    """How many parts rows of this weight are worth."""
    return max(partitions_min, min(math.ceil(weight / TASK_BYTES), PARTS_MAX), 1)


def weight_of(splits: Iterable[Split]) -> int:
    """The cost of reading ranges: payload bytes plus 100 for each row."""
    return sum(split.bytes + ROW_BYTES * split.rows for split in splits)


def joined(splits: Sequence[Split], parts: int) -> list[Range]:
    """Neighbouring splits put together until there are about `parts` of them, none without rows."""
    target = weight_of(splits) / max(parts, 1)
    ranges: list[Range] = []
    after: int | None = None
    until = 0
    held = 0
    for split in splits:
        after = split.after if after is None else after
        until = split.until
        held += weight_of((split,))
        # Half a part too few is better than a small one at the end.
        if held and held >= target * 0.75:
            ranges.append(Range(after, until))
            after, held = None, 0
    if after is not None and held:
        ranges.append(Range(after, until))
    return ranges
