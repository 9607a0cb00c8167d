"""The columns of the rows that fit into an answer of the log, checked while they are gathered.

Every column that was asked for is gathered by one aggregate inside the database, without the
interpreter's lock, and no other. The stream and the place of each row are always gathered, because
a reader is told of rows that are missing, whichever columns it wants; payloads are compared with
their lengths and checksums whenever they are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from itertools import repeat
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from fencepost.protocol.checksums import PAYLOAD_MASK, payload_checksum
from fencepost.protocol.logs import ROW_BYTES
from fencepost.store.contract import DamagedRowError
from fencepost.store.log_contract import Integers, LogRows, Named
from fencepost.store.read.chunks import LENGTH_BYTES
from fencepost.store.read.log_selection import Source, run
from fencepost.store.sql import Connection, Row

_INTEGERS = msgspec.json.Decoder(list[int])
_TEXTS_OR_NOT = msgspec.json.Decoder(list[str | None])
_SENT = frozenset(("producer_id", "producer_epoch", "producer_seq"))
_VERSIONED = frozenset(("version", "offset"))
_PAYLOAD = frozenset(("value", "size"))
_LONG_AS = frozenset(("value", "size", "offset"))
"""Columns that need the length of each message of an append."""


class Measured:
    """The rows looked at so far, as far as it takes to say how many fit."""

    def __init__(self) -> None:
        self.positions: Sequence[int] = ()
        self.sizes: list[int] = []
        self.counts: list[int] | None = None
        self.kind = 0
        self.produced = 0
        self.messages = 0
        self.cost = 0

    def add(self, connection: Connection, source: Source) -> None:
        [(count, first, last, kind, most, produced, sizes)] = run(connection, "sizes", source)
        if not count:
            return
        before = len(self.sizes)
        more_sizes = _INTEGERS.decode(sizes)
        self.sizes += more_sizes
        self.kind = max(self.kind, kind)
        self.produced += produced
        if most == 1 and last - first + 1 == count:
            more: Sequence[int] = range(first, last + 1)
        else:
            more = _INTEGERS.decode(run(connection, "positions", source)[0][0])
        self.positions = _joined(self.positions, more)
        if most > 1 and self.counts is None:
            self.counts = [1] * before
        if self.counts is not None:
            counts = _INTEGERS.decode(run(connection, "counts", source)[0][0])
            self.counts += counts
            count = sum(counts)
        self.messages += count
        self.cost += sum(more_sizes) + ROW_BYTES * count


def _joined(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    """Two runs of positions as one; a range stays a range where it can."""
    if not left:
        return right
    if isinstance(left, range) and isinstance(right, range) and left.stop == right.start:
        return range(left.start, right.stop)
    return [*left, *right]


def gathered(
    connection: Connection,
    source: Source,
    measured: Measured,
    names: dict[int, Named],
    columns: frozenset[str],
    low: int,
    last: int,
) -> LogRows:
    """The measured rows; messages below `low` or above `last` are marked off.

    `names` are those of their streams, if they are known.
    """
    positions, counts = measured.positions, measured.counts
    is_sent = bool(measured.produced and columns & _SENT)
    asked = {
        "versions": bool(columns & _VERSIONED),
        "times": "timestamp" in columns,
        "sent": is_sent,
    }
    joined, batches = b"", None
    payload: _Payload | None = None
    if counts is None and columns & _PAYLOAD:
        [(*texts, joined, total, checked)] = run(connection, "columns_and_data", source, **asked)
        payload = _Payload(joined, None, total, checked)
    else:
        texts = list(run(connection, "columns", source, **asked)[0])
        if counts is not None and columns & _LONG_AS:
            rows = run(connection, "batches", source)
            batches = [(lengths, data) for lengths, data, _ in rows]
            payload = _Payload(b"", rows, 0, 0)
    ids = texts.pop(4)
    streams, starts, versions, times_ms, epochs, seqs = map(Integers, texts)
    kinds = _INTEGERS.decode(run(connection, "kinds", source)[0][0]) if measured.kind else None
    owners = streams.values()
    found = [_missing_row(owners, starts, measured, kinds)]
    if payload is not None:
        found.append(_damaged_payload(connection, source, measured, owners, payload))
        found.append(_rotten(connection, source, measured, owners, payload))
    names = names or _names(connection, set(owners))
    if damages := [one for one in found if one is not None]:
        first = min(damages, key=lambda one: one.position)
        if first.stream_id in names:
            first.stream = names[first.stream_id].path
        raise first
    skip = max(low - positions[0], 0)
    messages = len(positions) if counts is None else sum(counts)
    over = positions[-1] + (1 if counts is None else counts[-1]) - 1 - last
    return LogRows(
        positions=positions,
        sizes=measured.sizes,
        counts=counts,
        kinds=kinds,
        streams=streams,
        starts=starts,
        versions=versions,
        times_ms=times_ms,
        producers=_TEXTS_OR_NOT.decode(ids) if is_sent else None,
        epochs=epochs if is_sent else None,
        seqs=seqs if is_sent else None,
        joined=joined,
        batches=batches,
        names=names,
        skip=skip,
        take=messages - skip - max(over, 0),
    )


class _Payload(NamedTuple):
    """Payloads as they were read: joined, with the sum and number of their checksums, or rows."""

    joined: bytes
    rows: Sequence[Row] | None
    total: int
    checked: int


def _damaged_payload(
    connection: Connection,
    source: Source,
    measured: Measured,
    owners: Sequence[int],
    payload: _Payload,
) -> DamagedRowError | None:
    """The first row without a payload that is as long as the row says."""
    rows = payload.rows
    if rows is None:
        if len(payload.joined) == sum(measured.sizes):
            return None
        rows = run(connection, "batches", source)
    counts = measured.counts or repeat(1)
    for position, stream, count, size, (lengths, data, _) in zip(
        measured.positions, owners, counts, measured.sizes, rows, strict=False
    ):
        if lengths is None:
            whole = count == 1 and len(data) == size
        else:
            whole = len(lengths) == LENGTH_BYTES * count and len(data) - size in (0, count - 1)
        if not whole:
            detail = f"the payload at position {position} is not as long as it was"
            return DamagedRowError(detail, position, position + count - 1, stream)
    return None


def _rotten(
    connection: Connection,
    source: Source,
    measured: Measured,
    owners: Sequence[int],
    payload: _Payload,
) -> DamagedRowError | None:
    """The first row whose payload is not what was written; some rows may have no checksum.

    Those of rows of one message each come as their sum, because a number for each row would cost
    more than all else.
    """
    rows = payload.rows
    if rows is None:
        if not payload.checked:
            return None
        if payload.checked == len(measured.sizes):
            pieces = map(BytesIO(payload.joined).read, measured.sizes)
            if sum(map(crc32, pieces)) == payload.total:
                return None
        rows = run(connection, "batches", source)
    counts = measured.counts or repeat(1)
    for position, stream, count, (lengths, data, checksum) in zip(
        measured.positions, owners, counts, rows, strict=False
    ):
        if checksum is not None and checksum & PAYLOAD_MASK != payload_checksum(lengths, data):
            detail = f"the payload at position {position} is not what was written"
            return DamagedRowError(detail, position, position + count - 1, stream)
    return None


def _missing_row(
    owners: Sequence[int], starts: Integers, measured: Measured, kinds: Sequence[int] | None
) -> DamagedRowError | None:
    """The first place where the messages of a stream do not follow on each other."""
    sizes = measured.sizes
    places = starts.values_or_nulls() if starts.has_nulls else starts.values()
    if kinds is None and owners.count(owners[0]) == len(owners):
        first, last = places[0], places[-1]
        if first is not None and last is not None and last + sizes[-1] - first == sum(sizes):
            return None
    ends: dict[int, int] = {}
    for position, stream, start, size, kind in zip(
        measured.positions, owners, places, sizes, kinds or repeat(0), strict=False
    ):
        if kind:
            continue
        if start is None or ends.get(stream, start) != start:
            detail = f"messages of a stream are missing before position {position}"
            return DamagedRowError(detail, position, position - 1, stream)
        ends[stream] = start + size
    return None


def _names(connection: Connection, ids: set[int]) -> dict[int, Named]:
    found: list[Any] = run(connection, "names", streams=json.dumps(list(ids)))
    return {stream: Named(path, content_type) for stream, path, content_type in found}
