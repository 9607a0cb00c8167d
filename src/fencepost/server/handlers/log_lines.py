"""The global log as JSON lines: one object for each message or marker, built from bytes.

JSON payloads go out as they were stored; only line ends between their tokens become spaces, because
a line end here ends the object. Other payloads travel as base64.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import msgspec

from fencepost.protocol.logs import MARKERS
from fencepost.protocol.streams import JSON, media_type
from fencepost.store.log_contract import LogRows, Named

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
