-- Every query of retention: finding what to drop, and dropping it in pieces.

-- name: streams_to_look_at
-- Some live streams that hold something, after a number.
SELECT id, path, retention, tail_messages, tail_bytes, first_messages, first_bytes, segments
FROM streams_now WHERE state = 0 AND id > ? AND tail_bytes > first_bytes ORDER BY id LIMIT ?

-- name: retained_streams_to_look_at
-- The same, only those with a retention of their own.
SELECT id, path, retention, tail_messages, tail_bytes, first_messages, first_bytes, segments
FROM streams_now
WHERE state = 0 AND retention IS NOT NULL AND id > ? AND tail_bytes > first_bytes
ORDER BY id LIMIT ?

-- name: last_row_before
-- The last append of a stream that starts before a byte.
SELECT version, start_bytes, at_ms FROM log
WHERE stream = ? AND kind = 0 AND start_bytes < ? ORDER BY start_bytes DESC LIMIT 1

-- name: first_row_between
-- The first append of a stream that starts from one byte on and before another.
SELECT version, start_bytes, at_ms FROM log
WHERE stream = ? AND kind = 0 AND start_bytes >= ? AND start_bytes < ? ORDER BY start_bytes LIMIT 1

-- name: last_due_truncation
SELECT position FROM truncations WHERE stream = ? AND at_ms <= ? ORDER BY position DESC LIMIT 1

-- name: forget_truncations
DELETE FROM truncations WHERE stream = ? AND position <= ?

-- name: stream_to_purge
SELECT state, tail_bytes, forks_count, segments FROM streams WHERE id = ?

-- name: due_marker
-- The newest truncation (4) or end (2, 3) of a stream that is old enough.
SELECT kind, start_bytes FROM log
WHERE stream = ? AND kind <> 0 AND kind IN (2, 3, 4) AND at_ms <= ? ORDER BY position DESC LIMIT 1

-- name: rows_to_purge
SELECT position, count, size, chunk, start_bytes FROM log
WHERE stream = ? AND kind = 0 AND start_bytes < ? ORDER BY start_bytes LIMIT ?

-- name: superseded_markers
SELECT position, count, size, chunk FROM log
WHERE stream = ? AND kind <> 0 AND kind = 4 AND position < ? ORDER BY position LIMIT ?

-- name: producers_of_rows
-- Producers whose recent batches are among a stream's appends before a byte.
SELECT DISTINCT p.id, p.epoch, p.seq, p.position
FROM log l JOIN producers p ON p.stream = l.stream AND p.id = l.producer AND p.epoch = l.epoch
WHERE l.stream = ?1 AND l.kind = 0 AND l.start_bytes < ?2 AND l.digest IS NOT NULL
  AND l.producer_seq > p.seq - ?3

-- name: save_remembered
INSERT INTO remembered (stream, producer, epoch, seq, batches) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET epoch = excluded.epoch, seq = excluded.seq, batches = excluded.batches

-- name: producers_after
-- Some producers in the order of their table; the time since their last append comes along.
SELECT stream, id, updated_ms FROM producers WHERE (stream, id) > (?, ?) ORDER BY stream, id LIMIT ?

-- name: forget_producer
-- Forget a producer, unless it has sent something since.
DELETE FROM producers WHERE stream = ? AND id = ? AND updated_ms <= ?

-- name: forget_remembered
DELETE FROM remembered WHERE stream = ?1 AND producer = ?2
  AND NOT EXISTS (SELECT 1 FROM producers WHERE stream = ?1 AND id = ?2)

-- name: note_forgetting
UPDATE forgetting SET shortest_ms = min(coalesce(shortest_ms, ?1), ?1)
