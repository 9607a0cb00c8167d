-- Rows of streams and producers that are written behind the log, in the embedded store.

-- name: advance_producer
-- A producer only sent its next batch: no trigger has these columns, and no index.
UPDATE producers SET seq = ?, position = ?, updated_ms = ? WHERE stream = ? AND id = ?

-- name: load_written_to
SELECT written_to, next_position FROM behind CROSS JOIN counters

-- name: save_written_to
UPDATE behind SET written_to = ?

-- name: all_is_written
-- Nothing is behind any more: the tables say all that the log says.
UPDATE behind SET written_to = (SELECT next_position FROM counters)

-- name: tails_behind
-- Tails that only the log has, in the order of `move_tail`.
SELECT updated_ms, tail_messages, tail_bytes, stream FROM tails_behind

-- name: producers_behind
-- Producers whose newest batch only the log has, as far as their own rows go.
SELECT p.stream, p.id, p.epoch, b.seq, p.first, b.position, b.at_ms, p.principal, p.claim
FROM batches_behind b
CROSS JOIN producers p ON p.stream = b.stream AND p.id = b.producer
WHERE p.epoch = b.epoch AND p.seq < b.seq
