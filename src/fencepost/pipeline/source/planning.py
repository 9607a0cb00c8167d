"""How a range of the log becomes tasks: few and large, even in cost. Pure.

A task costs Spark tens of milliseconds whatever it does, and a hundred of them seconds, so a range
is divided only when it is worth it. The server splits by weight (payload and 100 bytes a row); it
is asked for a number that is guessed from positions, which are never fewer than rows, and what
comes back too small is put together again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fencepost.client.results import Split

ROW_BYTES = 100
"""What a row is taken to cost beside its payload; the server's plans count the same."""
TASK_BYTES = 16 << 20
"""The weight that is worth a task: 80,000 messages of 100 bytes."""
TASK_ROWS = TASK_BYTES // (2 * ROW_BYTES)
PARTS_MAX = 64
"""Tasks that a read is divided into when nobody asks for more."""


class Range(NamedTuple):
    """Positions above `after` up to `until`."""

    after: int
    until: int


def parts_to_ask(positions: int, partitions_min: int) -> int:
    """How many parts to ask the server for, before it is known how many rows there are."""
    guess = math.ceil(positions / TASK_ROWS)
    return max(partitions_min, min(guess, PARTS_MAX), 1)


def parts_by_weight(weight: int, partitions_min: int) -> int:
    """How many parts rows of this weight are worth."""
    return max(partitions_min, min(math.ceil(weight / TASK_BYTES), PARTS_MAX), 1)


def weight_of(splits: Iterable[Split]) -> int:
    """What ranges cost to read."""
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
