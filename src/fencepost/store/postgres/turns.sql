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

-- name: quick_turn
-- Take the turn that follows turn $10, and end it, as `end_turn` does; the database's time. When
-- another node has had that turn, or a large commit is under way, or the time that was decided by is
-- of more than a second ago, the text that should be a number is an error, which undoes what leaves
-- together with this. The clock is read where the lock is held already.
WITH ended AS (
    UPDATE counters SET turn = $1, next_position = $2, next_stream = $3, last_ms = $4
    WHERE turn = $10 AND large IS NULL
    RETURNING turn
)
INSERT INTO turns (turn, node, at_ms, head, streams, created, removed, listed)
SELECT
    coalesce(
        (SELECT turn FROM ended WHERE extract(epoch FROM clock_timestamp()) * 1000 < $4 + 1000),
        ('this comes too late for turn ' || (SELECT turn + 1 FROM counters))::bigint
    ),
    $5, $4, $2 - 1, $6::bigint[], $7::bigint[], $8::bigint[], $9
RETURNING (extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- name: still_last_turn
-- Whether no node has had a turn since, and it is not more than a second later than $2.
SELECT 1 FROM counters
WHERE turn = $1 AND large IS NULL AND extract(epoch FROM clock_timestamp()) * 1000 < $2 + 1000

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

-- name: follow_turns
-- Show all nodes that this session follows the turns, as long as there is this session.
SELECT pg_advisory_lock_shared($1::int, 0)

-- name: another_follows
SELECT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND classid = $1::oid AND objsubid = 2 AND pid <> pg_backend_pid()
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)

-- name: notify
SELECT pg_notify($1, $2)
