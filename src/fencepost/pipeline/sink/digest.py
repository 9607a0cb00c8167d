"""What a batch amounts to, whatever the order and the attempts its rows came in.

For each stream the count of its rows and the sum of their hashes: both are the same however Spark
divides, retries and orders a batch, and differ when a row is another one. The server keeps the text
of the newest batch of a writer, and a replay of that batch is compared with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

HASH_MASK = (1 << 64) - 1


class RowSum(NamedTuple):
    """Rows of one stream: how many, and the sum of their hashes modulo 2^64."""

    rows: int
    hashes: int

    def plus(self, other: RowSum) -> RowSum:
        return RowSum(self.rows + other.rows, (self.hashes + other.hashes) & HASH_MASK)


NOTHING = RowSum(0, 0)


def row_sum(payloads: pa.Array) -> RowSum:
    """The sum over an Arrow array of binary payloads."""
    if len(payloads) == 0:
        return NOTHING
    # Only tasks with rows need it. Spark starts processes for the rest of a write too,
    # and pandas would be half of what it takes to start them.
    import pandas as pd  # type: ignore[import-untyped]

    # Keyed SipHash in C: the fastest hash of many short texts that the pipeline's own
    # dependencies bring, and the same in every process and on every platform.
    objects = payloads.to_numpy(zero_copy_only=False)
    hashes = pd.util.hash_array(objects, categorize=False)
    return RowSum(len(payloads), int(hashes.sum()) & HASH_MASK)


def merged(sums: Iterable[Mapping[str, RowSum]]) -> dict[str, RowSum]:
    """The sums of several tasks as one."""
    total: dict[str, RowSum] = {}
    for one in sums:
        for stream, added in one.items():
            total[stream] = total.get(stream, NOTHING).plus(added)
    return total


def digest_text(sums: Mapping[str, RowSum]) -> str:
    """A batch as the text that the server keeps: readable counts, and one hash over all streams."""
    digest = hashlib.sha256()
    rows = 0
    present = {stream: one for stream, one in sums.items() if one.rows}
    for stream in sorted(present):
        one = present[stream]
        rows += one.rows
        # No path holds a NUL, so one stream's line cannot be read as another's.
        digest.update(f"{stream}\0{one.rows}\0{one.hashes}\0".encode())
    return f"v1 rows={rows} streams={len(present)} {digest.hexdigest()[:32]}"
