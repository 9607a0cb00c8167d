"""Damage to plant in streams, the log, keys, writers and subscriptions: see `damages`."""

from __future__ import annotations

from fencepost.store.large.slices import Slice

STREAM = "(SELECT id FROM streams WHERE path = '{}')"
_ROWS = [(position, *[None] * 16) for position in range(400)]
SLICE = Slice([], [], _ROWS, [], [], [], True).encode()
"""One that writes positions where there are rows."""


def of(path: str) -> str:
    return STREAM.format(path)


def first_row(path: str, order: str = "position") -> str:
    """The position of the first row of a stream's messages, or with `position DESC` the last."""
    return (
        f"(SELECT position FROM log WHERE stream = {of(path)}"
        f" AND kind = 0 ORDER BY {order} LIMIT 1)"
    )


PLANTED_IN_STREAMS: dict[str, tuple[str, list[str]]] = {
    "a lost append": (
        "messages_missing",
        [f"DELETE FROM log WHERE stream = {of('bytes')} AND epoch = 1 AND producer_seq = 1"],
    ),
    "a lost first append": (
        "messages_missing",
        [f"DELETE FROM log WHERE position = {first_row('keyed')}"],
    ),
    "a lost last append": (
        "tail_wrong",
        [f"DELETE FROM log WHERE position = {first_row('keyed', 'position DESC')}"],
    ),
    "a tail that is ahead": (
        "tail_wrong",
        ["UPDATE streams SET tail_messages = tail_messages + 1 WHERE path = 'json'"],
    ),
    "a wrong version": (
        "version_wrong",
        [f"UPDATE log SET version = version + 1 WHERE position = {first_row('json')} + 3"],
    ),
    "appends that overlap": (
        "messages_overlap",
        [
            "UPDATE log SET size = size + 1, data = CAST(data || 'x' AS BLOB)"
            f" WHERE position = {first_row('bytes')}"
        ],
    ),
    "positions that overlap": (
        "positions_overlap",
        [
            f"UPDATE log SET count = 4, lengths = NULL WHERE position = {first_row('json')}",
        ],
    ),
    "a time that runs back": (
        "time_backwards",
        ["UPDATE log SET at_ms = at_ms - 60000 WHERE position = (SELECT max(position) FROM log)"],
    ),
    "a position counter that would give numbers out again": (
        "counter_behind",
        ["UPDATE counters SET next_position = next_position - 2"],
    ),
    "a stream counter that would give numbers out again": (
        "counter_behind",
        ["UPDATE counters SET next_stream = 2"],
    ),
    "data cut short": (
        "lengths_wrong",
        [f"UPDATE log SET data = substr(data, 1, 2) WHERE position = {first_row('bytes')}"],
    ),
    "wrong lengths": (
        "lengths_wrong",
        [
            "UPDATE log SET lengths = x'010000000100000001000000'"
            f" WHERE position = {first_row('json')}"
        ],
    ),
    "lengths of other messages": (
        "json_wrong",
        [
            "UPDATE log SET lengths = x'02000000040000000b000000'"
            f" WHERE position = {first_row('json')}"
        ],
    ),
    "broken JSON": (
        "json_wrong",
        [f"UPDATE log SET data = CAST('}}' AS BLOB) WHERE position = {first_row('closed')}"],
    ),
    "no data at all": (
        "data_missing",
        [f"UPDATE log SET data = NULL WHERE position = {first_row('bytes')}"],
    ),
    "messages of no stream": (
        "row_without_stream",
        [f"UPDATE log SET stream = 4711 WHERE position = {first_row('json')}"],
    ),
    "an unknown kind of row": (
        "kind_unknown",
        ["UPDATE log SET kind = 99 WHERE kind = 2"],
    ),
    "a batch stored twice": (
        "producer_repeats",
        [f"UPDATE log SET producer_seq = 3 WHERE stream = {of('json')} AND producer_seq = 4"],
    ),
    "a batch that was never stored": (
        "producer_gap",
        [
            "UPDATE log SET producer_seq = producer_seq + 1"
            f" WHERE stream = {of('json')} AND producer_seq > 7"
        ],
    ),
    "an epoch that goes back": (
        "epoch_backwards",
        [f"UPDATE log SET epoch = 5 WHERE stream = {of('bytes')} AND epoch = 0"],
    ),
    "a producer's state behind its messages": (
        "producer_wrong",
        ["UPDATE producers SET seq = seq - 1 WHERE id = 'a'"],
    ),
    "a producer's state ahead of its messages": (
        "producer_wrong",
        ["UPDATE producers SET seq = seq + 1 WHERE id = 'a'"],
    ),
    "a forgotten producer": (
        "producer_missing",
        ["DELETE FROM producers WHERE id = 'b'"],
    ),
    "a producer without messages": (
        "producer_without_batch",
        [
            "UPDATE producers SET id = 'ghost' WHERE id = 'a'",
        ],
    ),
    "a producer of no stream": (
        "producer_without_stream",
        ["UPDATE producers SET stream = 4711 WHERE id = 'a'"],
    ),
    "a chain that names the wrong batch": (
        "previous_wrong",
        [f"UPDATE log SET previous = 0 WHERE stream = {of('json')} AND producer_seq = 7"],
    ),
    "another claim than was made": (
        "producer_first_wrong",
        ["UPDATE producers SET first = x'" + "00" * 40 + "' WHERE id = 'a'"],
    ),
    "half a producer": (
        "producer_incomplete",
        [f"UPDATE log SET epoch = NULL WHERE stream = {of('json')} AND producer_seq = 7"],
    ),
    "messages after the end of a closed stream": (
        "message_after_close",
        [
            f"UPDATE log SET stream = {of('closed')}"
            f" WHERE position = {first_row('json', 'position DESC')}"
        ],
    ),
    "a closed stream that is open": (
        "closed_wrong",
        ["UPDATE streams SET closed = FALSE WHERE path = 'closed'"],
    ),
    "messages in closed books": (
        "message_in_closed_books",
        ["UPDATE streams SET books_closed_at = books_closed_at - 1 WHERE path = 'books'"],
    ),
    "books that were closed in the future": (
        "books_wrong",
        ["UPDATE streams SET books_closed_at = 1000000 WHERE path = 'books'"],
    ),
    "an end that was not written down": (
        "close_marker_missing",
        [f"DELETE FROM log WHERE kind = 1 AND stream = {of('closed')}"],
    ),
    "a deleted stream that is back": (
        "state_wrong",
        ["UPDATE streams SET state = 0, ended_ms = NULL WHERE path = 'gone'"],
    ),
    "a deletion that was not written down": (
        "delete_marker_missing",
        [f"DELETE FROM log WHERE kind = 2 AND stream = {of('gone')}"],
    ),
    "a first offset without a truncation": (
        "first_wrong",
        ["UPDATE streams SET first_messages = 1, first_bytes = 5 WHERE path = 'bytes'"],
    ),
    "a wrong number of forks": (
        "forks_count_wrong",
        ["UPDATE streams SET forks_count = 0 WHERE path = 'bytes'"],
    ),
    "a fork without its source": (
        "fork_source_missing",
        ["DELETE FROM streams WHERE path = 'kept-for-its-fork'"],
    ),
    "a fork without what it inherits": (
        "fork_rows_missing",
        [f"DELETE FROM log WHERE stream = {of('kept-for-its-fork')} AND kind = 0"],
    ),
    "a fork between two places": (
        "fork_point_wrong",
        [
            "UPDATE streams SET fork = replace(fork, ', 2, 6]', ', 2, 5]'),"
            " segments = replace(segments, '[2, 6]', '[2, 5]') WHERE path = 'fork'"
        ],
    ),
    "a fork whose parts do not add up": (
        "segments_wrong",
        ["UPDATE streams SET segments = '[]' WHERE path = 'heir'"],
    ),
    "a deadline that comes too early": (
        "deadline_wrong",
        ["UPDATE streams SET deadline_ms = created_ms WHERE path = 'short'"],
    ),
    "a deadline of its own": (
        "deadline_wrong",
        ["UPDATE streams SET deadline_ms = 1 WHERE path = 'dated'"],
    ),
    "a key without its messages": (
        "key_without_messages",
        ["UPDATE keys SET start_bytes = 4711, tail_bytes = 4712 WHERE key = 'k1'"],
    ),
    "a key with other messages": (
        "key_wrong",
        ["UPDATE keys SET tail_messages = tail_messages + 1 WHERE key = 'k1'"],
    ),
    "a key of no stream": (
        "key_without_stream",
        ["UPDATE keys SET stream = 4711 WHERE key = 'k1'"],
    ),
    "two keys for one append": (
        "keys_share_messages",
        [
            "INSERT INTO keys (stream, principal, key, digest, start_messages, start_bytes,"
            " tail_messages, tail_bytes, closed, position, created_ms)"
            " SELECT stream, principal, 'again', digest, start_messages, start_bytes,"
            " tail_messages, tail_bytes, closed, position, created_ms FROM keys WHERE key = 'k1'"
        ],
    ),
    "a staged chunk that is gone": (
        "chunk_missing",
        ["DELETE FROM chunks WHERE part = 'one' AND ordinal = 1"],
    ),
    "a staged chunk that is another": (
        "chunk_wrong",
        ["UPDATE chunks SET size = size + 1 WHERE part = 'one' AND ordinal = 1"],
    ),
    "a staged chunk without data that no commit used": (
        "chunk_wrong",
        ["UPDATE chunks SET data = x'', lengths = NULL WHERE part = 'waiting'"],
    ),
    "a staged chunk without data that is messages": (
        "lengths_wrong",
        ["UPDATE chunks SET data = x'', lengths = NULL WHERE part = 'one' AND ordinal = 1"],
    ),
    "a part that is messages and was not committed": (
        "part_wrong",
        ["UPDATE parts SET committed = NULL WHERE part = 'one'"],
    ),
    "a part that was committed and is no messages": (
        "part_wrong",
        ["UPDATE parts SET committed = 1 WHERE part = 'waiting'"],
    ),
    "a writer of no run": (
        "writer_wrong",
        ["UPDATE writers SET epoch = 0 WHERE name = 'busy'"],
    ),
    "a digest of no batch": (
        "writer_wrong",
        ["UPDATE writers SET batch = NULL WHERE name = 'busy'"],
    ),
    "a writer from the future": (
        "writer_time_wrong",
        ["UPDATE writers SET updated_ms = updated_ms + 10000000000 WHERE name = 'busy'"],
    ),
    "a writer that is ahead of its history": (
        "writer_history_wrong",
        ["UPDATE writers SET batch = batch + 10 WHERE name = 'busy'"],
    ),
    "a writer that is behind its history": (
        "writer_history_wrong",
        ["UPDATE writers SET batch = batch - 1 WHERE name = 'busy'"],
    ),
    "a writer with another digest than its history": (
        "writer_history_wrong",
        ["UPDATE writers SET digest = 'other' WHERE name = 'busy'"],
    ),
    "a history without its writer": (
        "writer_history_wrong",
        ["DELETE FROM writers WHERE name = 'busy'"],
    ),
    "a history without its newest batch": (
        "writer_history_wrong",
        ["DELETE FROM writer_history WHERE name = 'busy' AND batch = 2"],
    ),
    "a batch that was read from a range that ends before it begins": (
        "writer_history_wrong",
        ["UPDATE writer_history SET range_after = 10 WHERE name = 'busy' AND batch = 2"],
    ),
    "a batch that was read from a range without an end": (
        "writer_history_wrong",
        ["UPDATE writer_history SET range_until = NULL WHERE name = 'busy' AND batch = 2"],
    ),
    "a batch from the future": (
        "writer_history_wrong",
        ["UPDATE writer_history SET published_ms = published_ms + 10000000000 WHERE batch = 0"],
    ),
    "a large commit of an unknown kind": (
        "large_commit_wrong",
        ["INSERT INTO large_commits VALUES (1, 2, 7)"],
    ),
    "a large commit beyond the log": (
        "large_commit_wrong",
        ["INSERT INTO large_commits VALUES (1, 1000000, 0)"],
    ),
    "two large commits at once": (
        "large_commit_wrong",
        ["INSERT INTO large_commits VALUES (1, 2, 0), (3, 4, 0)"],
    ),
    "a large commit without its slices": (
        "slice_missing",
        ["INSERT INTO large_commits VALUES (1, 2, 1)"],
    ),
    "a slice that cannot be read": (
        "slice_unreadable",
        [
            "INSERT INTO large_commits VALUES (1, 2, 1)",
            "INSERT INTO large_slices VALUES (1, 0, 0, x'c1')",
        ],
    ),
    "a cursor in a stream that is gone": (
        "link_without_stream",
        [f"UPDATE links SET stream = {of('gone')}"],
    ),
    "a cursor without a subscription": (
        "link_without_subscription",
        ["DELETE FROM subscriptions"],
    ),
    "a cursor ahead of its stream": (
        "cursor_wrong",
        ["UPDATE links SET acked_bytes = acked_bytes + 1"],
    ),
    "an empty secret": (
        "secret_empty",
        ["UPDATE secrets SET value = x''"],
    ),
    "two streams at one path": (
        "path_taken_twice",
        [
            "DROP INDEX streams_by_path",
            "UPDATE streams SET path = 'json' WHERE path = 'bytes'",
        ],
    ),
    "a time that has not come yet": (
        "time_wrong",
        ["UPDATE streams SET updated_ms = updated_ms + 10000000000 WHERE path = 'json'"],
    ),
    "a truncation without its marker": (
        "truncation_wrong",
        ["UPDATE truncations SET position = position + 1000000"],
    ),
    "a truncation to another place": (
        "first_wrong",
        ["UPDATE streams SET first_messages = 2, first_bytes = 2 WHERE path = 'cut'"],
    ),
    "a beginning that is lost": (
        "messages_missing",
        [
            "UPDATE streams SET first_messages = 0, first_bytes = 0 WHERE path = 'kept'",
            f"DELETE FROM log WHERE kind = 4 AND stream = {of('kept')}",
        ],
    ),
    "a purge of rows that are there": (
        "purge_record_wrong",
        [f"UPDATE purges SET stream = {of('json')}, first = 0, runs = x'00'"],
    ),
    "memories of another producer": (
        "remembered_wrong",
        ["UPDATE remembered SET producer = 'somebody'"],
    ),
    "memories cut short": (
        "remembered_wrong",
        ["UPDATE remembered SET batches = substr(batches, 2)"],
    ),
    "a retention of nothing": (
        "retention_wrong",
        ["UPDATE streams SET retention = '[0, null, null]' WHERE path = 'kept'"],
    ),
    "a stretch that weighs too much": (
        "weight_wrong",
        ["UPDATE log_buckets SET bytes = bytes + 1"],
    ),
    "a stream that cannot be read": (
        "stream_unreadable",
        ["UPDATE streams SET fork = '[' WHERE path = 'fork'"],
    ),
    "a staged chunk that is messages twice": (
        "chunk_used_twice",
        [
            "UPDATE log SET chunk = (SELECT min(chunk) FROM log)"
            " WHERE chunk = (SELECT max(chunk) FROM log)"
        ],
    ),
    "a batch whose first row is another's": (
        "producer_unlinked",
        ["UPDATE log SET digest = NULL WHERE producer_seq = 1 AND producer = 'a'"],
    ),
    "messages without a place": (
        "place_missing",
        [f"UPDATE log SET version = NULL WHERE position = {first_row('bytes')}"],
    ),
    "a row of no messages": (
        "count_wrong",
        [f"UPDATE log SET count = 0 WHERE position = {first_row('bytes')}"],
    ),
    "messages after a deletion": (
        "message_after_delete",
        [
            f"UPDATE log SET stream = {of('gone')}"
            f" WHERE position = {first_row('json', 'position DESC')}"
        ],
    ),
    "a stream that was closed twice": (
        "closed_twice",
        [
            f"UPDATE log SET kind = 1, stream = {of('closed')}"
            f" WHERE position = {first_row('json', 'position DESC')}"
        ],
    ),
    "a stream that was deleted twice": (
        "deleted_twice",
        [
            f"UPDATE log SET kind = 2, stream = {of('gone')}"
            f" WHERE position = {first_row('json', 'position DESC')}"
        ],
    ),
    "an end at another place": (
        "marker_wrong",
        [f"UPDATE log SET version = version + 1 WHERE kind = 1 AND stream = {of('closed')}"],
    ),
    "a payload that rotted": (
        "checksum_wrong",
        [f"UPDATE log SET checksum = checksum + 1 WHERE position = {first_row('json')}"],
    ),
    "a count of what a principal holds that is wrong": (
        "usage_wrong",
        ["INSERT INTO principal_usage (principal, resource, amount) VALUES ('x', 'streams', 4711)"],
    ),
    "a slice that is half in the log": (
        "slice_half_carried",
        [
            "INSERT INTO large_commits VALUES (1, 2, 1)",
            f"INSERT INTO large_slices VALUES (1, 0, 0, x'{SLICE.hex()}')",
        ],
    ),
    "a cursor in another stream": (
        "link_wrong",
        ["UPDATE links SET path = 'other'"],
    ),
    "a subscription that cannot be read": (
        "subscription_unreadable",
        ["UPDATE subscriptions SET config = '{'"],
    ),
}
