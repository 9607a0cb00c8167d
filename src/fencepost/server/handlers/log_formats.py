"""The global log in its two formats: JSON lines and an Arrow IPC stream.

JSON lines are built from bytes, one object for each message or marker. JSON payloads go out as they
were stored; only line ends between their tokens become spaces, because a line end here ends the
object. Other payloads travel as base64.

Arrow takes columns and gives columns, without a Python object per message. Columns that the store
gathered are handed to Arrow as buffers; where an append holds several messages, Arrow's own kernels
repeat its columns. Strings are plain, not dictionaries, and times are microseconds in UTC: Spark
declares these types, so its workers can pass a batch on as it came. `pyarrow` is an extra of this
project (`fencepost[arrow]`): without it `require_arrow` raises.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import msgspec

from fencepost.protocol.batches import split
from fencepost.protocol.logs import MARKERS
from fencepost.protocol.streams import JSON, media_type
from fencepost.store.log_contract import Integers, LogRows, Named

if TYPE_CHECKING:
    import pyarrow as pa

ARROW = b"application/vnd.apache.arrow.stream"


class ArrowMissingError(Exception):
    """`pyarrow` is not installed: install fencepost[arrow], or read JSON lines."""


@cache
def require_arrow() -> Any:
    """The module `pyarrow` with its kernels, loaded at the first request for Arrow."""
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise ArrowMissingError from None
    return pyarrow


@cache
def schema() -> pa.Schema:
    """The columns of the log."""
    pa = require_arrow()
    return pa.schema(
        [
            pa.field("stream", pa.string()),
            pa.field("offset", pa.string()),
            pa.field("version", pa.int64()),
            pa.field("position", pa.int64()),
            pa.field("timestamp", pa.timestamp("us", tz="UTC")),
            pa.field("content_type", pa.string()),
            pa.field("producer_id", pa.string()),
            pa.field("producer_epoch", pa.int64()),
            pa.field("producer_seq", pa.int64()),
            pa.field("value", pa.binary()),
            pa.field("marker", pa.string()),
        ]
    )


def log_stream(rows: LogRows | None) -> bytes:
    """The asked messages of `rows` as one stream of one batch; an empty stream has no batch."""
    pa = require_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema()) as writer:
        if rows is not None:
            writer.write_batch(log_batch(rows))
    buffer: bytes = sink.getvalue().to_pybytes()
    return buffer


def log_batch(rows: LogRows) -> pa.RecordBatch:
    """The asked messages of `rows`."""
    pa = require_arrow()
    pc = pa.compute
    streams = pc.index_in(_parsed(rows.streams), pa.array(list(rows.names), pa.int64()))
    count = len(rows.positions)
    columns: dict[str, Any] = {
        "stream": _strings(streams, [named.path for named in rows.names.values()]),
        "version": _parsed(rows.versions),
        "position": _integers("q", rows.positions),
        "timestamp": pc.multiply(_parsed(rows.times_ms), 1000).view(
            schema().field("timestamp").type
        ),
        "content_type": _strings(streams, [named.content_type for named in rows.names.values()]),
        "producer_id": pa.array(rows.producers, pa.string()) if rows.producers else None,
        "producer_epoch": _parsed(rows.epochs) if rows.epochs else None,
        "producer_seq": _parsed(rows.seqs) if rows.seqs else None,
        "marker": None,
    }
    for name, column in columns.items():
        if column is None:
            columns[name] = pa.nulls(count, schema().field(name).type)
    starts = _parsed(rows.starts)
    if rows.batches is None:
        columns["value"] = _values(rows.joined, _integers("q", rows.sizes))
    else:
        columns, starts = _repeated(columns, starts, rows)
    columns["offset"] = _offsets(columns["version"], starts)
    if rows.kinds is not None:
        _mark(columns, rows)
    batch = pa.record_batch([columns[name] for name in schema().names], schema=schema())
    if rows.skip == 0 and rows.take == batch.num_rows:
        return batch
    # A mere slice would send what it leaves out, too.
    return batch.take(_integers("q", range(rows.skip, rows.skip + rows.take)))


def _parsed(column: Integers) -> pa.Array:
    """A column of numbers, from its text."""
    pa = require_arrow()
    if column.has_nulls:
        return pa.array(column.values_or_nulls(), pa.int64())
    # As buffers, because making an array of one Python string looks for numpy each time.
    text = column.text[1:-1].encode()
    ends = pa.py_buffer(array("i", (0, len(text))))
    whole = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(text)])
    pc = pa.compute
    return pc.cast(pc.list_flatten(pc.split_pattern(whole, ",")), pa.int64())


def _integers(code: str, numbers: Iterable[int]) -> pa.Array:
    pa = require_arrow()
    packed = array(code, numbers)
    kind = pa.int64() if code == "q" else pa.int32()
    return pa.Array.from_buffers(kind, len(packed), [None, pa.py_buffer(packed)])


def _strings(indices: pa.Array, values: list[str]) -> pa.Array:
    pa = require_arrow()
    return pa.DictionaryArray.from_arrays(
        indices, pa.array(values, pa.string())
    ).dictionary_decode()


def _offsets(versions: pa.Array, starts: pa.Array) -> pa.Array:
    """Offset tokens: both numbers with leading zeros, and a line between them."""
    pc = require_arrow().compute
    digits = [
        pc.ascii_lpad(pc.cast(numbers, require_arrow().string()), 16, "0")
        for numbers in (versions, starts)
    ]
    return pc.binary_join_element_wise(*digits, "_")


def _values(joined: bytes, sizes: pa.Array) -> pa.Array:
    """Payloads that lie one behind the other."""
    pa = require_arrow()
    ends = pa.compute.cumulative_sum(pa.concat_arrays([pa.array([0], pa.int64()), sizes]))
    offsets = ends.cast(pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, offsets, pa.py_buffer(joined)])


def _repeated(
    columns: dict[str, Any], starts: pa.Array, rows: LogRows
) -> tuple[dict[str, Any], pa.Array]:
    """Columns with an entry for each message instead of each row, and each message's start."""
    pa = require_arrow()
    pc = pa.compute
    assert rows.counts is not None
    assert rows.batches is not None
    firsts = array("i", accumulate(rows.counts, initial=0))
    total = firsts[-1]
    numbers = _integers("q", range(total))
    lists = pa.ListArray.from_arrays(
        pa.Array.from_buffers(pa.int32(), len(firsts), [None, pa.py_buffer(firsts)]), numbers
    )
    parents = pc.list_parent_indices(lists)
    repeated = {name: pc.take(column, parents) for name, column in columns.items()}
    within = pc.subtract(numbers, pc.take(_integers("q", firsts[:-1]), parents))
    repeated["position"] = pc.add(repeated["position"], within)
    repeated["version"] = pc.add(repeated["version"], within)
    sizes, joined = _messages(rows)
    # Each is followed by the byte that lay between them, which is then cut off.
    padded = _values(joined, pc.add(_integers("q", sizes), 1))
    repeated["value"] = pc.binary_slice(padded, 0, -1)
    # A message starts where its row does, and as many bytes on as those before it in the row take.
    before = array("q", accumulate(sizes, initial=0))
    offset_in_rows = _integers("q", before[:-1])
    row_bases = pc.take(_integers("q", (before[first] for first in firsts[:-1])), parents)
    return repeated, pc.add(pc.take(starts, parents), pc.subtract(offset_in_rows, row_bases))


def _messages(rows: LogRows) -> tuple[array[int], bytes]:
    """The length of every message, and all of them with one byte after each."""
    assert rows.batches is not None
    sizes = array("I")
    parts = []
    for lengths, data in rows.batches:
        if lengths is None:
            sizes.append(len(data))
            parts.append(data)
            continue
        own = array("I", lengths)
        sizes.extend(own)
        separated = len(data) > sum(own)
        parts.append(data if separated else b",".join(split(lengths, data)))
    return sizes, b",".join((*parts, b""))


def _mark(columns: dict[str, Any], rows: LogRows) -> None:
    """Say of markers what they are: they have an offset, but no version and no value."""
    pa = require_arrow()
    pc = pa.compute
    assert rows.kinds is not None
    counts = rows.counts or (1,) * len(rows.kinds)
    kinds = [kind for kind, count in zip(rows.kinds, counts, strict=True) for _ in range(count)]
    columns["marker"] = pa.array([MARKERS.get(kind) for kind in kinds], pa.string())
    is_marker = pc.is_valid(columns["marker"])
    for name in ("value", "version"):
        column = columns[name]
        columns[name] = pc.if_else(is_marker, pa.nulls(len(column), column.type), column)


_MESSAGE = b'{"position":%d,%b,"offset":"%016d_%016d","version":%d,"timestamp_ms":%d,%b%b,%b}\n'
_MARKER = b'{"position":%d,%b,"marker":"%b","offset":"%016d_%016d","timestamp_ms":%d%b}\n'
_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def log_lines(rows: LogRows) -> bytes:
    """The asked messages of `rows`, each as a line."""
    return b"".join(islice(_lines(rows), rows.skip, rows.skip + rows.take))


def _lines(rows: LogRows) -> Iterator[bytes]:
    heads = {stream: _Head(stream, named) for stream, named in rows.names.items()}
    producers = _producers(rows)
    payloads = rows.payloads()
    columns = zip(
        rows.positions,
        rows.streams.values(),
        rows.versions.values(),
        rows.starts.values(),
        rows.times_ms.values(),
        payloads,
        strict=True,
    )
    for index, (position, stream, version, start, time_ms, messages) in enumerate(columns):
        head = heads[stream]
        sent = producers(index)
        if rows.kinds is not None and rows.kinds[index]:
            marker = MARKERS[rows.kinds[index]].encode()
            yield _MARKER % (position, head.stream, marker, version, start, time_ms, sent)
            continue
        for data in messages:
            fields = (position, head.stream, version, start, version, time_ms)
            yield _MESSAGE % (*fields, head.content_type, sent, head.field(data))
            position += 1
            version += 1
            start += len(data)


class _Head:
    """What is the same in all lines of an incarnation."""

    __slots__ = ("content_type", "field", "is_json", "stream")

    def __init__(self, stream: int, named: Named) -> None:
        self.stream = b'"stream":%b,"incarnation":%d' % (_text(named.path), stream)
        self.content_type = b'"content_type":%b' % _text(named.content_type)
        self.is_json = media_type(named.content_type) == JSON
        self.field: Callable[[bytes], bytes] = _json_field if self.is_json else _base64_field


def _json_field(data: bytes) -> bytes:
    if b"\n" in data or b"\r" in data:
        data = data.translate(_BREAKS)
    return b'"data":' + data


def _base64_field(data: bytes) -> bytes:
    return b'"data_base64":"%b"' % b64encode(data)


def _producers(rows: LogRows) -> Callable[[int], bytes]:
    if rows.producers is None or rows.epochs is None or rows.seqs is None:
        return lambda _: b""
    ids = rows.producers
    epochs, seqs = rows.epochs.values_or_nulls(), rows.seqs.values_or_nulls()

    def sent(index: int) -> bytes:
        producer_id, epoch, seq = ids[index], epochs[index], seqs[index]
        if producer_id is None or epoch is None or seq is None:
            return b""
        return b',"producer":{"id":%b,"epoch":%d,"seq":%d}' % (_text(producer_id), epoch, seq)

    return sent


@lru_cache(maxsize=16_384)
def _text(text: str) -> bytes:
    return msgspec.json.encode(text)
