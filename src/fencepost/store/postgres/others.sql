-- What other nodes did between two turns of one node. A node asks these while it holds the
-- lock, so that they see everything that was written before.

-- name: others_turns
SELECT turn, listed, streams FROM turns WHERE turn > $1 ORDER BY turn LIMIT $2

-- name: others_producers
-- The producers of rows from a position on.
SELECT stream, producer FROM log WHERE position >= $1 AND producer IS NOT NULL
ORDER BY position LIMIT $2

-- name: others_streams
-- Some of the streams that changed, as they are now.
SELECT s.id, s.path, s.state, s.content_type, s.created_ms, s.updated_ms, s.ttl_s, s.expires_at_ms,
       s.deadline_ms, s.tail_messages, s.tail_bytes, s.first_messages, s.first_bytes, s.closed,
       s.closed_by, s.seq, s.fork, s.segments, s.forks_count, s.retention, s.books_closed_at
FROM streams s
WHERE s.state < 2 AND s.id = ANY (ARRAY(
    SELECT DISTINCT stream
    FROM (SELECT streams FROM turns WHERE turn > $1 ORDER BY turn LIMIT $2) AS next,
         unnest(next.streams) AS changed (stream)
    LIMIT $3
))
