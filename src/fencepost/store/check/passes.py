"""The passes of `fencepost check`, which are the same for every store.

A pass reads its tables once and in order, and reports every broken invariant that it sees. A check
writes and repairs nothing: a finding says what is wrong and where, and the way back is a backup.

Each store brings the queries, under the same names and with the same columns. A table or a column
that an older database does not have, or that a store does without, is passed over. Memory is
bounded by the number of streams, not by their messages: what has to be sorted is sorted by the
database.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import msgspec

from fencepost.protocol.batches import message_lengths
from fencepost.protocol.checksums import payload_checksum
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import Retention
from fencepost.protocol.streams import JSON, PACKED_BYTES, Segment, media_type
from fencepost.store.check.groups import GroupCheck
from fencepost.store.check.meshes import MeshCheck
from fencepost.store.check.report import Progress, Report, Rows, StreamState
from fencepost.store.check.rows import ProducerCheck, RowCheck, json_wrong, lengths_wrong
from fencepost.store.large.slices import CERTAIN, REDONE, UNDECIDED, Slice, decode_slice
from fencepost.store.maintain.purge import unpack_runs
from fencepost.store.read.log_selection import WIDTH
from fencepost.store.records import DELETED, LIVE, TRUNCATED
from fencepost.store.sql import Row


class Checker:
    """The passes over one database."""

    def __init__(self, rows: Rows, report: Report, progress: Progress) -> None:
        self._rows = rows
        self._report = report
        self._progress = progress
        self._tables = {name for (name,) in rows("tables")}
        self._streams: dict[int, StreamState] = {}
        self._purged: dict[int, int] = {}
        self._counters: Row = (0, 0, 0)
        self._writes_behind = "behind" in self._tables

    def streams_and_log(self) -> None:
        """Everything that must agree with the messages."""
        [self._counters] = self._rows("counters")
        if "purges" in self._tables:
            self._purged = dict(self._rows("purges"))
        self._load_streams()
        [(total,)] = self._rows("log_count")
        walk = RowCheck(self._report, self._streams, self._purged, self._progress)
        has_checksums = self._has_column("log", "checksum")
        walk.run(self._rows("log_with_checksums" if has_checksums else "log"), total)
        if has_checksums:
            self._check_waiting_chunks()
        groups = GroupCheck(self._report, self._rows, self._counters[0], self._counters[2])
        if "groups" in self._tables:
            groups.run()
            if self._has_column("groups", "token_floor"):
                groups.floors()
            if "told" in self._tables:
                groups.told()
        meshes = MeshCheck(self._report, self._rows, self._streams, self._counters)
        if "meshes" in self._tables:
            meshes.run()
        if "send_places" in self._tables:
            meshes.index()
        self._check_counters(walk, max(groups.newest, meshes.newest))
        self._check_purges()
        self._check_retention()
        self._check_forks()
        self._progress("producers", 0, 1)
        forgotten_ms: int | None = None
        if "forgetting" in self._tables:
            [(forgotten_ms,)] = self._rows("forgetting")
        producers = ProducerCheck(self._report, self._streams, self._purged, forgotten_ms)
        producers.run(self._rows("producer_rows"), self._producers())
        self._check_remembered()
        self._progress("producers", 1, 1)
        self._check_chunks()
        self._check_keys()
        self._check_commits()
        self._check_usage()

    def _has_column(self, table: str, column: str) -> bool:
        """Whether this database has a column that came later than its table."""
        return (column,) in list(self._rows("columns_of", table))

    # Streams

    def _load_streams(self) -> None:
        paths: set[str] = set()
        for row in self._rows("streams"):
            stream = self._load_stream(row)
            self._streams[stream.id] = stream
            if stream.state != DELETED:
                if stream.path in paths:
                    self._report.add("path_taken_twice", stream.name, "another stream has it too")
                paths.add(stream.path)
        self._report.counts["streams"] = len(self._streams)
        if self._has_column("streams", "books_closed_at"):
            self._load_books()
        for stream_id, tail in self._tails_behind().items():
            found = self._streams.get(stream_id)
            if found is not None:
                found.tail = max(found.tail, tail, key=lambda at: at.bytes)

    def _tails_behind(self) -> dict[int, Offset]:
        """Where streams end by rows of the log that their own rows may not say yet."""
        if not self._writes_behind:
            return {}
        return {stream: Offset(*tail) for stream, *tail in self._rows("tails_behind")}

    def _producers(self) -> Iterator[Row]:
        """The rows of producers, with the newest batches that only the log has."""
        newest = {}
        if self._writes_behind:
            newest = {row[:2]: row[2:] for row in self._rows("batches_behind")}
        for row in self._rows("producers"):
            epoch, seq, position, at_ms = newest.get(row[:2], (None, 0, 0, 0))
            if epoch == row[2] and seq > row[3]:
                yield (*row[:3], seq, row[4], position, at_ms, *row[7:])
            else:
                yield row

    def _load_books(self) -> None:
        for stream_id, closed_at in self._rows("closed_books"):
            stream = self._streams[stream_id]
            stream.books_closed_at = closed_at
            if not 0 <= closed_at <= self._counters[0]:
                detail = f"closed at {closed_at}, the log goes on at {self._counters[0]}"
                self._report.add("books_wrong", stream.name, detail)

    def _load_stream(self, row: Row) -> StreamState:
        stream_id, path, state, content_type, created_ms, updated_ms = row[:6]
        tail, first = Offset(*row[9:11]), Offset(*row[11:13])
        closed, closed_by, fork, segments = row[13:17]
        stream = StreamState(stream_id, path, state, tail, first, START)
        stream.is_json = media_type(content_type) == JSON
        stream.closed = bool(closed)
        stream.purged = self._purged.get(stream_id, -1)
        try:
            if fork is not None:
                stream.forked_from, _, _, messages, size = json.loads(fork)
                stream.base = Offset(messages, size)
                stream.segments = tuple(
                    Segment(inherited, Offset(*end)) for inherited, end in json.loads(segments)
                )
            if closed_by is not None:
                _, _, _ = json.loads(closed_by)
        except (ValueError, TypeError) as error:
            self._report.add("stream_unreadable", stream.name, f"its row cannot be read: {error}")
        self._check_times(stream, created_ms, updated_ms, row)
        return stream

    def _check_times(self, stream: StreamState, created_ms: int, updated_ms: int, row: Row) -> None:
        ttl_s, expires_at_ms, deadline_ms = row[6:9]
        ended_ms = row[18]
        add = self._report.add
        last_ms = self._counters[2]
        if not created_ms <= updated_ms <= last_ms:
            add("time_wrong", stream.name, f"made {created_ms}, used {updated_ms}, now {last_ms}")
        if (ended_ms is not None) != (stream.state == DELETED):
            add("state_wrong", stream.name, f"state {stream.state}, ended at {ended_ms}")
        if ttl_s is not None:
            if expires_at_ms is not None:
                add("deadline_wrong", stream.name, "a time to live and a fixed end")
            if deadline_ms is None or deadline_ms < created_ms + ttl_s * 1000:
                add("deadline_wrong", stream.name, f"{deadline_ms}, with a TTL of {ttl_s} s")
        elif deadline_ms != expires_at_ms:
            add("deadline_wrong", stream.name, f"{deadline_ms}, it expires at {expires_at_ms}")

    def _check_counters(self, walk: RowCheck, newest_named: int) -> None:
        next_position, next_stream, last_ms = self._counters
        if next_position < walk.end:
            self._report.add(
                "counter_behind", "next_position", f"{next_position}, the log ends at {walk.end}"
            )
        if self._writes_behind:
            [(written_to,)] = self._rows("written_to")
            if not 0 <= written_to <= next_position:
                detail = f"{next_position}, and rows are written up to {written_to}"
                self._report.add("counter_behind", "next_position", detail)
        newest = max([*self._streams, *self._purged, newest_named])
        if next_stream <= newest:
            self._report.add(
                "counter_behind", "next_stream", f"{next_stream}, and number {newest} was used"
            )
        if last_ms < walk.last_ms:
            self._report.add(
                "counter_behind", "last_ms", f"{last_ms}, the log's last row is of {walk.last_ms}"
            )

    # What is gone on purpose

    def _check_purges(self) -> None:
        if "purges" not in self._tables:
            return
        for record, stream, first, last, packed in self._rows("purge_records"):
            where = f"purge {record} of stream {stream}"
            try:
                runs = list(unpack_runs(packed))
            except (ValueError, zlib.error) as error:
                self._report.add("purge_record_wrong", where, f"it cannot be read: {error}")
                continue
            ends = [position + count for position, count in runs]
            if not runs or (runs[0][0], ends[-1] - 1) != (first, last):
                self._report.add(
                    "purge_record_wrong", where, f"not the positions {first} to {last}"
                )
            gone = json.dumps([(run[0], end) for run, end in zip(runs, ends, strict=True)])
            for (found,) in self._rows("rows_in_runs", stream, gone):
                self._report.add(
                    "purge_record_wrong", where, f"the row at {found} is said to be gone"
                )
        weights = self._rows("weights_wrong", WIDTH)
        for bucket, rows, size, rows_found, size_found in weights:
            self._report.add(
                "weight_wrong",
                f"positions from {bucket * WIDTH} to {(bucket + 1) * WIDTH - 1}",
                f"written down {rows} of {size} bytes, found {rows_found} of {size_found}",
            )

    def _check_retention(self) -> None:
        if "truncations" not in self._tables:
            return
        for position, stream, kind, marked in self._rows("truncations"):
            if kind is None and position <= self._purged.get(stream, -1):
                continue  # its stream was deleted, and is being purged with its markers
            if kind != TRUNCATED or marked != stream:
                self._report.add(
                    "truncation_wrong", f"stream {stream}", f"no marker at position {position}"
                )
        for stream, path, text in self._rows("retentions"):
            try:
                bounds = Retention(*json.loads(text))
                is_right = all(bound is None or bound > 0 for bound in bounds)
            except (ValueError, TypeError):
                is_right = False
            if not is_right:
                self._report.add("retention_wrong", f"stream {stream} ({path})", text)

    # Forks

    def _check_forks(self) -> None:
        counted: Counter[int] = Counter()
        forks_counts = {row[0]: row[17] for row in self._rows("streams")}
        for stream in self._streams.values():
            if stream.forked_from is None or stream.state == DELETED:
                continue
            counted[stream.forked_from] += 1
            source = self._streams.get(stream.forked_from)
            if source is None or source.state == DELETED:
                self._report.add(
                    "fork_source_missing", stream.name, f"its source is {stream.forked_from}"
                )
            self._check_segments(stream)
        for stream in self._streams.values():
            said = forks_counts[stream.id]
            if stream.state == DELETED and said == 0:
                continue
            if said != counted[stream.id]:
                self._report.add(
                    "forks_count_wrong", stream.name, f"says {said}, there are {counted[stream.id]}"
                )

    def _check_segments(self, fork: StreamState) -> None:
        start_bytes = 0
        for source_id, end in fork.segments:
            if end.bytes <= start_bytes or end.bytes > fork.base.bytes:
                self._report.add("segments_wrong", fork.name, f"a segment that ends at {end}")
                return
            lowest = max(start_bytes, fork.first.bytes)
            if lowest < end.bytes:
                self._check_segment(fork, source_id, lowest, end)
            start_bytes = end.bytes
        if start_bytes != fork.base.bytes:
            self._report.add(
                "segments_wrong", fork.name, f"forked at {fork.base}, inherits up to {start_bytes}"
            )

    def _check_segment(self, fork: StreamState, source_id: int, lowest: int, end: Offset) -> None:
        source = self._streams.get(source_id)
        if (
            source is None
            or source.own_first is None
            or source.next is None
            or source.own_first.bytes > lowest
            or source.next.bytes < end.bytes
        ):
            self._report.add(
                "fork_rows_missing",
                fork.name,
                f"it needs the bytes {lowest} to {end.bytes} of stream {source_id}",
            )
            return
        rows = list(self._rows("row_before", source_id, end.bytes))
        if not rows or not _is_place(rows[0], end, is_json=fork.is_json):
            self._report.add(
                "fork_point_wrong", fork.name, f"stream {source_id} has no such place as {end}"
            )

    # What hangs on the messages

    def _check_remembered(self) -> None:
        if "remembered" not in self._tables:
            return
        for stream, producer, epoch, seq, size, known_epoch, known_seq in self._rows("remembered"):
            where = f"producer {producer} of stream {stream}"
            if known_epoch is None:
                self._report.add("remembered_wrong", where, "batches of an unknown producer")
            elif size % PACKED_BYTES or (epoch, seq) > (known_epoch, known_seq):
                self._report.add("remembered_wrong", where, f"{size} bytes up to {epoch}.{seq}")

    def _check_chunks(self) -> None:
        for chunk, txn, part, ordinal, count, size, lengths, data in self._rows("chunks"):
            where = f"staged chunk {chunk} ({txn}/{part}/{ordinal})"
            detail = lengths_wrong(count, size, lengths, data)
            if detail is None and lengths is not None:
                detail = json_wrong(lengths, data)
            if detail is not None:
                self._report.add("chunk_wrong", where, detail)
        if "parts" not in self._tables:
            return
        for chunk, txn, part, count, committed in self._rows("chunks_used"):
            where = f"staged chunk {chunk} ({txn}/{part})"
            if count > 1:
                self._report.add("chunk_used_twice", where, f"{count} rows of the log refer to it")
            if committed is None:
                self._report.add("part_wrong", where, "messages of a part that was not committed")
        for chunk, txn, part in self._rows("chunks_emptied"):
            where = f"staged chunk {chunk} ({txn}/{part})"
            self._report.add("chunk_wrong", where, "its data is gone, and no commit used it")
        for txn, part, chunk in self._rows("parts_without_rows"):
            self._report.add(
                "part_wrong", f"staged part {txn}/{part}", f"committed without its chunk {chunk}"
            )

    def _check_commits(self) -> None:
        next_position, _, last_ms = self._counters
        if "writers" in self._tables:
            check_writers(self._report, self._rows("writers"), last_ms)
        if "writer_history" in self._tables:
            check_writer_history(self._report, self._rows("writer_history"), last_ms)
            for name, batch in self._rows("writers_without_history"):
                detail = f"it published batch {batch}, which is not in its history"
                self._report.add("writer_history_wrong", f"writer {name}", detail)
        if "large_commits" in self._tables:
            LargeCommitCheck(self._report, self._rows).run(next_position)

    def _check_waiting_chunks(self) -> None:
        for chunk, txn, part, lengths, data, checksum in self._rows("chunks_waiting"):
            if checksum != payload_checksum(lengths, data):
                where = f"staged chunk {chunk} ({txn}/{part})"
                self._report.add("checksum_wrong", where, "its content is not what was written")

    def _check_usage(self) -> None:
        if "principal_usage" not in self._tables:
            return
        for principal, resource, noted, found in self._rows("usage_wrong"):
            detail = f"written down {noted} {resource}, found {found}"
            self._report.add("usage_wrong", f"principal {principal}", detail)

    def _check_keys(self) -> None:
        keys = KeyCheck(self._report, self._rows, self._streams)
        if "keys" in self._tables:
            keys.messages()
        if "key_places" in self._tables:
            keys.index()

    # Subscriptions

    def subscriptions(self) -> None:
        """Cursors against subscriptions and streams; secrets."""
        if "subscriptions" not in self._tables:
            return
        count = 0
        for subscription, name, config, snapshot in self._rows("subscriptions"):
            count += 1
            try:
                json.loads(config), json.loads(snapshot)
            except ValueError as error:
                self._report.add(
                    "subscription_unreadable", f"subscription {subscription} ({name})", str(error)
                )
        self._report.counts["subscriptions"] = count
        tails = self._tails_behind()
        partial: set[object] = set()
        if "partial_subscriptions" in self._tables:
            partial = {row[0] for row in self._rows("partial_subscriptions")}
        for row in self._rows("links"):
            if row[0] not in partial:
                self._check_link(row, tails.get(row[3]))
        for name, size in self._rows("secrets"):
            if size == 0:
                self._report.add("secret_empty", f"secret {name}", "it has no value")

    def _check_link(self, row: Row, behind: Offset | None) -> None:
        subscription, known, path, stream, state, stream_path = row[:6]
        acked_messages, acked_bytes, tail_messages, tail_bytes = row[6:]
        if behind is not None and behind.bytes > tail_bytes:
            tail_messages, tail_bytes = behind
        where = f"subscription {subscription}, {path}"
        if known is None:
            self._report.add("link_without_subscription", where, "its subscription does not exist")
        if stream is None:
            return
        if state != LIVE:
            self._report.add("link_without_stream", where, f"stream {stream} is gone")
        elif stream_path != path:
            self._report.add("link_wrong", where, f"stream {stream} is at {stream_path}")
        elif acked_bytes > tail_bytes or acked_messages > tail_messages:
            self._report.add(
                "cursor_wrong",
                where,
                f"at {acked_messages}/{acked_bytes}, the tail is {tail_messages}/{tail_bytes}",
            )


def _is_place(row: Row, at: Offset, *, is_json: bool) -> bool:
    """Whether `at` lies in or at the end of a row, where a stream may be cut."""
    version, start, count, size, lengths = row
    if not start < at.bytes <= start + size:
        return False
    if not is_json:
        return bool(at.messages == version + 1)
    if (lengths is None) != (count == 1):
        return False
    ends = accumulate(message_lengths(count, size, lengths), initial=start)
    return (at.messages, at.bytes) in enumerate(ends, start=version)


def check_writers(report: Report, writers: Iterable[Row], last_ms: int) -> None:
    """Writers agree with themselves: what they published is in the same row as who they are."""
    for name, query, epoch, batch, digest, opened_ms, updated_ms in writers:
        report.counts["writers"] += 1
        where = f"writer {name}"
        if not name or not query or epoch < 1 or (batch is not None and batch < 0):
            detail = f"query {query!r}, epoch {epoch}, batch {batch}"
            report.add("writer_wrong", where, detail)
        elif batch is None and digest is not None:
            report.add("writer_wrong", where, "the digest of a batch that was never published")
        if not opened_ms <= updated_ms <= last_ms:
            detail = f"opened {opened_ms}, used {updated_ms}, now {last_ms}"
            report.add("writer_time_wrong", where, detail)


def check_writer_history(report: Report, history: Iterable[Row], last_ms: int) -> None:
    """What writers published agrees with the writers, and with itself."""
    for name, batch, after, until, digest, published_ms, writer, last, last_digest in history:
        report.counts["writer_batches"] += 1
        where = f"batch {batch} of writer {name}"
        if writer is None:
            report.add("writer_history_wrong", where, "there is no such writer")
        elif last is None or batch > last:
            report.add("writer_history_wrong", where, f"the writer says that it came to {last}")
        elif batch == last and digest != last_digest:
            detail = f"its digest is {digest!r}, and the writer says {last_digest!r}"
            report.add("writer_history_wrong", where, detail)
        if batch < 0 or published_ms > last_ms:
            detail = f"published {published_ms}, now {last_ms}"
            report.add("writer_history_wrong", where, detail)
        if until is None and after is None:
            continue
        if until is None or not -1 <= (-1 if after is None else after) <= until:
            detail = f"read from the positions after {after} up to {until}"
            report.add("writer_history_wrong", where, detail)


class LargeCommitCheck:
    """The commits that wait to be finished."""

    def __init__(self, report: Report, rows: Rows) -> None:
        self._report = report
        self._rows = rows

    def run(self, next_position: int) -> None:
        """Look at all of them."""
        under_way = 0
        for first, last, state in self._rows("large_commits"):
            where = f"large commit at {first}"
            under_way += state < REDONE
            if state not in (UNDECIDED, CERTAIN, REDONE) or not first <= last < next_position:
                detail = f"state {state}, positions {first} to {last} of {next_position}"
                self._report.add("large_commit_wrong", where, detail)
            elif state == CERTAIN:
                self._check_slices(where, first)
        if under_way > 1:
            detail = f"{under_way} of them, where one is under way at a time"
            self._report.add("large_commit_wrong", "large commits", detail)

    def _check_slices(self, where: str, first: int) -> None:
        expected: int | None = None
        ended = False
        for number, carried, content in self._rows("slices_of", first):
            if carried:
                continue
            if number != (number if expected is None else expected):
                self._report.add("slice_missing", where, f"no slice {expected}, but {number}")
            expected = number + 1
            try:
                piece = decode_slice(content)
            except msgspec.DecodeError as error:
                detail = f"slice {number} cannot be read: {error}"
                self._report.add("slice_unreadable", where, detail)
                continue
            ended = piece.is_last
            self._check_uncarried(where, number, piece)
        if expected is None or not ended:
            self._report.add("slice_missing", where, "its last slice is not there")

    def _check_uncarried(self, where: str, number: int, piece: Slice) -> None:
        positions = json.dumps([row[0] for row in piece.log])
        [(found,)] = self._rows("rows_at", positions)
        if found:
            detail = f"{found} rows of slice {number} are in the log, and the slice is not done"
            self._report.add("slice_half_carried", where, detail)


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
