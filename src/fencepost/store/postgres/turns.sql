-- What only servers that share a database need: turns to write, loading many records at once,
-- and following each other's turns.

-- name: take_turn
-- Waits for the lock. The clock is read outside, where the lock is held already.
SELECT turn, next_position, next_stream, last_ms, next_chunk,
       (extract(epoch FROM clock_timestamp()) * 1000)::bigint, leader, large
FROM (
    SELECT turn, next_position, next_stream, last_ms, next_chunk, leader, large
    FROM counters FOR UPDATE
) AS locked

-- name: end_turn
-- The numbers after a turn, and what it changed: turn, next position, next stream, last time, next
-- chunk; then node, streams changed, streams created, streams removed, whether that is all it changed.
WITH ended AS (
    UPDATE counters
    SET turn = $1, next_position = $2, next_stream = $3, last_ms = $4, next_chunk = $5
)
INSERT INTO turns (turn, node, at_ms, head, streams, created, removed, listed)
VALUES ($1, $6, $4, $2 - 1, $7::bigint[], $8::bigint[], $9::bigint[], $10)

-- name: turns_after
-- Some turns in order, up to so many changed streams: at least one turn, if there is any.
SELECT turn, node, at_ms, head, streams, created, removed, since
FROM (
    SELECT *, sum(cardinality(streams)) OVER (ORDER BY turn) - cardinality(streams) AS before
    FROM (SELECT * FROM turns WHERE turn > $1 ORDER BY turn LIMIT $2) AS next
) AS counted
WHERE before < $3 ORDER BY turn

-- name: last_turn
SELECT turn, next_position - 1 FROM counters

-- name: clock_ms
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- name: look_stream
-- Find the stream that a path names now, and the time.
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at,
       (extract(epoch FROM clock_timestamp()) * 1000)::bigint
FROM streams WHERE path = $1 AND state < 2

-- name: find_streams_by_ids
SELECT s.id, s.path, s.state, s.content_type, s.created_ms, s.updated_ms, s.ttl_s, s.expires_at_ms,
       s.deadline_ms, s.tail_messages, s.tail_bytes, s.first_messages, s.first_bytes, s.closed,
       s.closed_by, s.seq, s.fork, s.segments, s.forks_count, s.retention, s.books_closed_at
FROM streams s WHERE s.id = ANY ($1::bigint[]) AND s.state < 2

-- name: streams_of_turns
-- Streams by their incarnations, deleted ones included.
SELECT s.id, s.path, s.state, s.content_type, s.created_ms, s.updated_ms, s.ttl_s, s.expires_at_ms,
       s.deadline_ms, s.tail_messages, s.tail_bytes, s.first_messages, s.first_bytes, s.closed,
       s.closed_by, s.seq, s.fork, s.segments, s.forks_count, s.retention, s.books_closed_at
FROM streams s WHERE s.id = ANY ($1::bigint[])

-- name: find_producers
-- Find those of the given producers (stream and id) that exist, with their recent batches.
SELECT p.stream, p.id, p.epoch, p.seq, p.first, p.position, p.updated_ms, p.principal, p.claim,
       p.recent
FROM unnest($1::bigint[], $2::text[]) AS n (stream, id)
JOIN producers p ON p.stream = n.stream AND p.id = n.id

-- name: find_keys
SELECT k.stream, k.principal, k.key, k.digest, k.start_messages, k.start_bytes, k.tail_messages,
       k.tail_bytes, k.closed, k.position, k.created_ms, k.answer
FROM unnest($1::bigint[], $2::text[], $3::text[]) AS n (stream, principal, key)
JOIN keys k ON k.stream = n.stream AND k.principal = n.principal AND k.key = n.key

-- name: notify
SELECT pg_notify($1, $2)

-- name: find_chunks
-- Find those of the given chunks (part and number) that were uploaded before.
SELECT c.txn, c.part, c.ordinal, c.digest
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS n (txn, part, ordinal)
JOIN chunks c ON c.txn = n.txn AND c.part = n.part AND c.ordinal = n.ordinal
