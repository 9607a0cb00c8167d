"""The global log as an Arrow IPC stream: columns of the store become columns of Arrow.

There is no Python object per message: what the store gathered is handed to Arrow as buffers, and
where an append holds several messages, Arrow's own kernels spread its columns over them. Only the
columns that were asked for are made. Strings are plain, not dictionaries, and times are
microseconds in UTC: Spark declares these types, so its workers can pass a batch on as it came.
`pyarrow` is an extra of this project (`fencepost[arrow]`): without it `require_arrow` raises.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fencepost.protocol.batches import split
from fencepost.protocol.logs import MARKERS
from fencepost.store.log_contract import Integers, LogRows

if TYPE_CHECKING:
    import pyarrow as pa

ARROW = b"application/vnd.apache.arrow.stream"
SCHEMAS_KEPT = 256
LENGTH = "I"
"""How the store packs the length of a message."""


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


@lru_cache(SCHEMAS_KEPT)
def schema(columns: frozenset[str]) -> pa.Schema:
    """These columns of the log, in the order in which they always come."""
    pa = require_arrow()
    every = (
        ("stream", pa.string()),
        ("offset", pa.string()),
        ("version", pa.int64()),
        ("position", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("content_type", pa.string()),
        ("producer_id", pa.string()),
        ("producer_epoch", pa.int64()),
        ("producer_seq", pa.int64()),
        ("value", pa.binary()),
        ("size", pa.int64()),
        ("marker", pa.string()),
    )
    return pa.schema([field for field in every if field[0] in columns])


def log_stream(rows: LogRows | None, columns: frozenset[str]) -> bytes:
    """The asked messages of `rows` as one stream of one batch; an empty stream has no batch."""
    pa = require_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema(columns)) as writer:
        if rows is not None:
            writer.write_batch(log_batch(rows, columns))
    buffer: bytes = sink.getvalue().to_pybytes()
    return buffer


def log_batch(rows: LogRows, columns: frozenset[str]) -> pa.RecordBatch:
    """The asked messages of `rows`. What a slice leaves out is not sent."""
    pa = require_arrow()
    made = _Columns(rows)
    wanted = schema(columns)
    arrays = [getattr(made, name)() for name in wanted.names]
    return pa.record_batch(arrays, schema=wanted).slice(rows.skip, rows.take)


class _Columns:
    """Every column, by its name, with an entry for each message of some rows."""

    def __init__(self, rows: LogRows) -> None:
        self._rows = rows
        self._spread = _Spread(rows.counts, len(rows.positions))

    def stream(self) -> pa.Array:
        return self._named([named.path for named in self._rows.names.values()])

    def content_type(self) -> pa.Array:
        return self._named([named.content_type for named in self._rows.names.values()])

    def offset(self) -> pa.Array:
        """Tokens: the version and the bytes before, with leading zeros, and a line between them."""
        pa = require_arrow()
        pc = pa.compute
        sizes = self._sizes
        behind = pc.cumulative_sum(sizes)
        # A message starts where its row does, and behind those that come before it in the row.
        bytes_before = self._spread.within(pc.subtract(behind, sizes))
        starts = pc.add(self._spread.over(_parsed(self._rows.starts)), bytes_before)
        digits = [
            pc.ascii_lpad(pc.cast(numbers, pa.string()), 16, "0")
            for numbers in (self._versions, starts)
        ]
        return pc.binary_join_element_wise(*digits, "_")

    def version(self) -> pa.Array:
        return self._unless_marker(self._versions)

    def position(self) -> pa.Array:
        return self._counted(_integers(self._rows.positions))

    def timestamp(self) -> pa.Array:
        times = require_arrow().compute.multiply(_parsed(self._rows.times_ms), 1000)
        return self._spread.over(times.view(schema(frozenset(("timestamp",))).types[0]))

    def producer_id(self) -> pa.Array:
        pa = require_arrow()
        ids = self._rows.producers
        return self._spread.over(None if ids is None else pa.array(ids, pa.string()), pa.string())

    def producer_epoch(self) -> pa.Array:
        return self._sent(self._rows.epochs)

    def producer_seq(self) -> pa.Array:
        return self._sent(self._rows.seqs)

    def value(self) -> pa.Array:
        """Payloads; a marker has none."""
        pa = require_arrow()
        rows = self._rows
        if rows.batches is None:
            return self._unless_marker(_values(rows.joined, self._sizes))
        # Each is followed by the byte that lay between them, which is then cut off.
        parts = map(_separated, rows.batches, rows.sizes)
        joined = b",".join((*parts, b""))
        padded = _values(joined, pa.compute.add(self._sizes, 1))
        return self._unless_marker(pa.compute.binary_slice(padded, 0, -1))

    def size(self) -> pa.Array:
        return self._unless_marker(self._sizes)

    def marker(self) -> pa.Array:
        """What a row is that is not messages."""
        pa = require_arrow()
        kinds = self._rows.kinds
        words = None if kinds is None else pa.array([MARKERS.get(kind) for kind in kinds])
        return self._spread.over(words, pa.string())

    def _named(self, names: Sequence[str]) -> pa.Array:
        """A column that says the same of all rows of a stream."""
        pa = require_arrow()
        if len(names) == 1:
            return pa.repeat(pa.scalar(names[0], pa.string()), self._spread.total)
        ids = pa.array(list(self._rows.names), pa.int64())
        indices = pa.compute.index_in(_parsed(self._rows.streams), ids)
        values = pa.array(names, pa.string())
        return pa.DictionaryArray.from_arrays(
            self._spread.over(indices), values
        ).dictionary_decode()

    @cached_property
    def _versions(self) -> pa.Array:
        return self._counted(_parsed(self._rows.versions))

    def _counted(self, firsts: pa.Array) -> pa.Array:
        """What the first message of each row has, and one more for each that follows in it."""
        if self._spread.is_even:
            return firsts
        pc = require_arrow().compute
        return pc.add(self._spread.over(firsts), self._spread.within(_run(0, self._spread.total)))

    def _sent(self, numbers: Integers | None) -> pa.Array:
        kind = require_arrow().int64()
        return self._spread.over(None if numbers is None else _parsed(numbers), kind)

    @cached_property
    def _sizes(self) -> pa.Array:
        """The payload bytes of each message."""
        pa = require_arrow()
        if self._rows.batches is None:
            return _integers(self._rows.sizes)
        packed = b"".join(
            lengths or array(LENGTH, (len(data),)).tobytes() for lengths, data in self._rows.batches
        )
        sizes = pa.Array.from_buffers(pa.uint32(), self._spread.total, [None, pa.py_buffer(packed)])
        return sizes.cast(pa.int64())

    def _unless_marker(self, column: pa.Array) -> pa.Array:
        """A column with nulls for markers: they have an offset, but no version and no value."""
        if self._rows.kinds is None:
            return column
        pa = require_arrow()
        is_message = self._spread.over(pa.array([kind not in MARKERS for kind in self._rows.kinds]))
        return pa.compute.if_else(is_message, column, pa.scalar(None, column.type))


class _Spread:
    """How columns with an entry for each row become columns with one for each message."""

    def __init__(self, counts: Sequence[int] | None, rows: int) -> None:
        self.is_even = counts is None
        """Whether each row is one message."""
        self.total = rows if counts is None else sum(counts)
        self._counts = counts
        self._parents: Any = None

    def over(self, column: pa.Array | None, kind: pa.DataType | None = None) -> pa.Array:
        """What is said of a row, of each of its messages; without a column nulls of a type."""
        pa = require_arrow()
        if column is None:
            return pa.nulls(self.total, kind)
        if self._counts is None:
            return column
        if len(column) == 1:
            return pa.repeat(column[0], self.total)
        return pa.compute.take(column, self._row_of_each())

    def within(self, sums: pa.Array) -> pa.Array:
        """Numbers of messages, each less the number of the first message of its row."""
        pc = require_arrow().compute
        if self._counts is None:
            return pc.subtract(sums, sums)
        firsts = _integers(list(accumulate(self._counts, initial=0))[:-1])
        return pc.subtract(sums, self.over(pc.take(sums, firsts)))

    def _row_of_each(self) -> pa.Array:
        pa = require_arrow()
        if self._parents is None:
            assert self._counts is not None
            ends = array("i", accumulate(self._counts, initial=0))
            offsets = pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])
            lists = pa.ListArray.from_arrays(offsets, pa.nulls(self.total))
            self._parents = pa.compute.list_parent_indices(lists)
        return self._parents


def _separated(row: tuple[bytes | None, bytes], size: int) -> bytes:
    """The messages of a row with one byte between them."""
    lengths, data = row
    if lengths is None or len(data) > size:
        return data
    return b",".join(split(lengths, data))


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


def _integers(numbers: Iterable[int]) -> pa.Array:
    pa = require_arrow()
    if isinstance(numbers, range):
        return _run(numbers.start, len(numbers))
    packed = array("q", numbers)
    return pa.Array.from_buffers(pa.int64(), len(packed), [None, pa.py_buffer(packed)])


def _run(first: int, count: int) -> pa.Array:
    """Numbers in a row."""
    pa = require_arrow()
    return pa.compute.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), first - 1)


def _values(joined: bytes, sizes: pa.Array) -> pa.Array:
    """Payloads that lie one behind the other."""
    pa = require_arrow()
    ends = pa.compute.cumulative_sum(pa.concat_arrays([pa.array([0], pa.int64()), sizes]))
    offsets = ends.cast(pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, offsets, pa.py_buffer(joined)])
