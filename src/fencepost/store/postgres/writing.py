"""What a turn writes: a handful of statements over arrays, whatever the number of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from fencepost.store.database import Row
from fencepost.store.records import producer_columns
from fencepost.store.write.ledger import LedgerGroup


def statements(sealed: LedgerGroup) -> Iterator[tuple[str, Sequence[Row]]]:
    """The statements of a sealed group by name, each with all its rows, in the order to write."""
    # Updates first: a deleted stream gives its path up before a new one takes it.
    if sealed.updates:
        yield "update_stream", sealed.updates
    if sealed.inserts:
        yield "insert_stream", sealed.inserts
    if sealed.rows:
        yield "insert_log", sealed.rows
    if sealed.producers:
        yield (
            "save_producer",
            [
                (*producer_columns(stream_id, producer), producer.recent)
                for (stream_id, _), producer in sealed.producers.items()
            ],
        )
    if sealed.key_rows:
        yield "save_key", sealed.key_rows
    yield from _gathered(sealed.statements)


_STAGING = ("save_part", "save_chunk", "commit_part")
"""Statements that may be gathered as long as none of the others comes between, in this order: a
chunk belongs to a part, and a part is committed after it was made."""


def _gathered(
    statements: Iterable[tuple[str, tuple[object, ...]]],
) -> Iterator[tuple[str, Sequence[Row]]]:
    """The same statements in fewer, each with more rows."""
    for is_staging, stretch in groupby(statements, key=lambda pair: pair[0] in _STAGING):
        if is_staging:
            rows: dict[str, list[Row]] = {name: [] for name in _STAGING}
            for name, values in stretch:
                rows[name].append(values)
            yield from ((name, found) for name, found in rows.items() if found)
        else:
            for name, run in groupby(stretch, key=itemgetter(0)):
                yield name, [values for _, values in run]
