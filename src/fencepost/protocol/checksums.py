"""Checksums of rows of the log: a number by which bytes that rotted on disk are noticed.

Each row has one, made when the row is made. Its lower 32 bits are a CRC-32 of the payload, its
messages' lengths included; the 31 bits above are one of everything else that the row says. So a
reader that has nothing but payloads can check those, and `fencepost check` checks all of it. The
payload of a staged chunk has a checksum with the chunk, and a row that refers to it has 0 there.

A CRC finds every flipped byte, and is no proof against someone who changes the file on purpose.
Rows that were written before there were checksums have none, and are taken as they are.
"""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

PAYLOAD_MASK = 0xFFFF_FFFF
_HEAD_MASK = 0x7FFF_FFFF
_pack = struct.Struct("<12q").pack


def payload_checksum(lengths: bytes | None, data: bytes) -> int:
    """Of the messages of a row or of a staged chunk."""
    return crc32(data) if lengths is None else crc32(lengths, crc32(data))


def head_checksum(
    position: int,
    stream: int,
    kind: int,
    start_bytes: int | None,
    version: int | None,
    count: int,
    size: int,
    at_ms: int,
    producer: str | None,
    epoch: int | None,
    seq: int | None,
    previous: int | None,
    digest: bytes | None,
    chunk: int | None,
) -> int:
    """Of everything else in a row."""
    row = (
        *(position, stream, kind, start_bytes, version, count, size, at_ms),
        *(producer, epoch, seq, previous, digest, chunk, None, None),
    )
    checksum: int = with_checksum(row)[-1]
    return checksum >> 32


def with_checksum(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row of the log, in the order of `insert_log`, with its checksum behind it.

    One call for all of it: every append pays for it.
    """
    (
        position,
        stream,
        kind,
        start_bytes,
        version,
        count,
        size,
        at_ms,
        producer,
        epoch,
        seq,
        previous,
        digest,
        chunk,
        lengths,
        data,
    ) = row
    head = crc32(
        _pack(
            position,
            stream,
            kind,
            -1 if start_bytes is None else start_bytes,
            -1 if version is None else version,
            count,
            size,
            at_ms,
            -1 if epoch is None else epoch,
            -1 if seq is None else seq,
            -1 if previous is None else previous,
            -1 if chunk is None else chunk,
        )
    )
    if producer is not None:
        head = crc32(producer.encode(), head)
    if digest is not None:
        head = crc32(digest, head)
    payload = 0
    if data is not None:
        payload = crc32(data) if lengths is None else crc32(lengths, crc32(data))
    return (*row, (head & _HEAD_MASK) << 32 | payload)
