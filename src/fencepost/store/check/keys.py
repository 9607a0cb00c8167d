"""Checks of keys: against the messages that they stand for, and against their index.

A key that its index does not show could be used a second time, so the two must agree up to the
number to which the index is written; the keys after that have nothing but their rows. Where the
database itself keeps keys apart there is no such index.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.store.check.report import Report, Rows, StreamState
from fencepost.store.database import Row


class KeyCheck:
    """The keys of one database."""

    def __init__(self, report: Report, rows: Rows, streams: Mapping[int, StreamState]) -> None:
        self._report = report
        self._rows = rows
        self._streams = streams

    def messages(self) -> None:
        """Each stands for an append that is there, and for one of its own."""
        for row in self._rows("keys"):
            self._report.counts["keys"] += 1
            self._check(row)
        for stream, start_bytes, count in self._rows("keys_sharing_messages"):
            self._report.add(
                "keys_share_messages",
                f"stream {stream}",
                f"{count} keys stand for the append at byte {start_bytes}",
            )

    def _check(self, row: Row) -> None:
        stream_id, key, messages, size, tail_messages, tail_bytes, closed, position = row[:8]
        first_position, version, last_position, end_messages, end_bytes = row[8:]
        where = f"key {key} of stream {stream_id}"
        stream = self._streams.get(stream_id)
        if stream is None:
            self._report.add("key_without_stream", where, "its stream does not exist")
            return
        if tail_bytes == size:
            if closed and (stream.closed_at is None or position > stream.closed_at):
                self._report.add("key_without_messages", where, "it closed a stream that is open")
            return
        if position - (tail_messages - messages) < stream.purged:
            return  # its first message is gone
        if first_position is None or last_position is None:
            self._report.add("key_without_messages", where, f"nothing begins at byte {size}")
        elif (version, end_messages, end_bytes) != (messages, tail_messages, tail_bytes):
            self._report.add(
                "key_wrong",
                where,
                f"says {messages}..{tail_messages} up to byte {tail_bytes}, the log"
                f" {version}..{end_messages} up to {end_bytes}",
            )
        elif position != last_position:
            self._report.add("key_wrong", where, f"says {position}, the log {last_position}")

    def index(self) -> None:
        """Each is found where it is looked for, and only once."""
        for stream, key, count in self._rows("keys_used_twice"):
            where = f"key {key} of stream {stream}"
            self._report.add("key_used_twice", where, f"it has {count} rows")
        for stream, key in self._rows("keys_without_place"):
            where = f"key {key} of stream {stream}"
            self._report.add("key_not_indexed", where, "its index does not show it")
        for stream, key, number in self._rows("places_without_key"):
            where = f"key {key} of stream {stream}"
            detail = f"its index shows row {number}, which is not its own"
            self._report.add("key_index_wrong", where, detail)
