"""Loading in bulk: what requests name is in the ledger before they are decided."""

from __future__ import annotations

import json

from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.ledger import Needs, TurnLedger


async def load(
    connection: WritingConnection, ledger: TurnLedger, needs: Needs, *, locking: bool = False
) -> None:
    """Have everything at hand that is needed; `locking` it when this is not a turn."""
    paths = ledger.unknown_paths(needs)
    if paths:
        query = "lock_streams" if locking else "find_streams"
        ledger.take_streams(paths, await connection.fetch(query, (paths,)))
    producers = ledger.unknown_producers(needs)
    keys = ledger.unknown_keys(needs)
    if producers:
        columns = [list(column) for column in zip(*producers, strict=True)]
        ledger.take_producers(producers, await connection.fetch("find_producers", columns))
    if keys:
        columns = [list(column) for column in zip(*keys, strict=True)]
        ledger.take_keys(keys, await connection.fetch("find_keys", columns))
    await _load_parts(connection, ledger, needs, locking=locking)


async def _load_parts(
    connection: WritingConnection, ledger: TurnLedger, needs: Needs, *, locking: bool
) -> None:
    staged = ledger.parts
    parts = needs.parts | {part for part, _ in needs.chunks}
    if parts:
        named = {"parts": json.dumps(list(parts))}
        query = "lock_parts" if locking else "find_parts"
        staged.take_parts(parts, await connection.fetch(query, named))
    if needs.parts:
        named = {"parts": json.dumps(list(needs.parts))}
        staged.take_chunks(needs.parts, await connection.fetch("chunks_of_parts", named))
    if needs.chunks:
        rows = [(*part, ordinal) for part, ordinal in needs.chunks]
        columns = [list(column) for column in zip(*rows, strict=True)]
        staged.take_digests(needs.chunks, await connection.fetch("find_chunks", columns))
