-- The queries of the embedded store, in the same order of columns and values, for PostgreSQL.
-- A statement that unnests its values takes a column of them for each: a batch is one statement. What
-- is inserted is unnested in the list of columns, side by side; as a table in FROM, PostgreSQL would
-- first write all of it down once more.

-- name: save_counters
UPDATE counters SET next_position = $1, next_stream = $2, last_ms = $3

-- name: find_stream
-- The incarnation that a path names now, soft-deleted ones included.
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams WHERE path = $1 AND state < 2

-- name: find_stream_by_id
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams WHERE id = $1 AND state < 2

-- name: insert_stream
INSERT INTO streams (
    state, updated_ms, deadline_ms, tail_messages, tail_bytes, first_messages, first_bytes, closed,
    closed_by, seq, forks_count, ended_ms, id, path, content_type, created_ms, ttl_s, expires_at_ms,
    fork, segments, retention, owner
)
SELECT
    unnest($1::bigint[]), unnest($2::bigint[]), unnest($3::bigint[]), unnest($4::bigint[]),
    unnest($5::bigint[]), unnest($6::bigint[]), unnest($7::bigint[]), unnest($8::boolean[]),
    unnest($9::text[]), unnest($10::text[]), unnest($11::bigint[]), unnest($12::bigint[]),
    unnest($13::bigint[]), unnest($14::text[]), unnest($15::text[]), unnest($16::bigint[]),
    unnest($17::bigint[]), unnest($18::bigint[]), unnest($19::text[]), unnest($20::text[]),
    unnest($21::text[]), unnest($22::text[])

-- name: update_stream
UPDATE streams AS s SET
    state = n.state, updated_ms = n.updated_ms, deadline_ms = n.deadline_ms,
    tail_messages = n.tail_messages, tail_bytes = n.tail_bytes, first_messages = n.first_messages,
    first_bytes = n.first_bytes, closed = n.closed, closed_by = n.closed_by, seq = n.seq,
    forks_count = n.forks_count, ended_ms = n.ended_ms
FROM unnest(
    $1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
    $8::boolean[], $9::text[], $10::text[], $11::bigint[], $12::bigint[], $13::bigint[]
) AS n (
    state, updated_ms, deadline_ms, tail_messages, tail_bytes, first_messages, first_bytes, closed,
    closed_by, seq, forks_count, ended_ms, id
)
WHERE s.id = n.id

-- name: move_tail
-- Streams got messages, and nothing else of them changed.
UPDATE streams AS s SET
    updated_ms = n.updated_ms, tail_messages = n.tail_messages, tail_bytes = n.tail_bytes
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS n (
    updated_ms, tail_messages, tail_bytes, id
)
WHERE s.id = n.id

-- name: insert_log
INSERT INTO log (
    position, stream, kind, start_bytes, version, count, size, at_ms, producer, epoch, producer_seq,
    previous, digest, chunk, lengths, data, checksum
)
SELECT
    unnest($1::bigint[]), unnest($2::bigint[]), unnest($3::bigint[]), unnest($4::bigint[]),
    unnest($5::bigint[]), unnest($6::bigint[]), unnest($7::bigint[]), unnest($8::bigint[]),
    unnest($9::text[]), unnest($10::bigint[]), unnest($11::bigint[]), unnest($12::bigint[]),
    unnest($13::bytea[]), unnest($14::bigint[]), unnest($15::bytea[]), unnest($16::bytea[]),
    unnest($17::bigint[])

-- name: find_key
SELECT digest, start_messages, start_bytes, tail_messages, tail_bytes, closed, position, created_ms,
       answer
FROM keys WHERE stream = $1 AND principal = $2 AND key = $3

-- name: save_key
INSERT INTO keys (
    stream, principal, key, digest, start_messages, start_bytes, tail_messages, tail_bytes, closed,
    position, created_ms, expires_ms, answer
)
SELECT
    unnest($1::bigint[]), unnest($2::text[]), unnest($3::text[]), unnest($4::bytea[]),
    unnest($5::bigint[]), unnest($6::bigint[]), unnest($7::bigint[]), unnest($8::bigint[]),
    unnest($9::boolean[]), unnest($10::bigint[]), unnest($11::bigint[]), unnest($12::bigint[]),
    unnest($13::bytea[])

-- name: key_places_after
SELECT stream, principal, key FROM keys
WHERE (stream, principal, key) > ($1, $2, $3) ORDER BY stream, principal, key LIMIT $4

-- name: find_part
SELECT media_type, committed FROM parts WHERE txn = $1 AND part = $2

-- name: part_chunks
SELECT id, ordinal, count, size, digest FROM chunks WHERE txn = $1 AND part = $2 ORDER BY ordinal

-- name: find_chunk
SELECT digest FROM chunks WHERE txn = $1 AND part = $2 AND ordinal = $3

-- name: find_chunks
-- Find those of the given chunks (part and number) that were uploaded before.
SELECT c.txn, c.part, c.ordinal, c.digest
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS n (txn, part, ordinal)
JOIN chunks c ON c.txn = n.txn AND c.part = n.part AND c.ordinal = n.ordinal

-- name: save_part
INSERT INTO parts (txn, part, media_type, staged_ms)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[])

-- name: save_chunk
INSERT INTO chunks (
    id, txn, part, ordinal, count, size, staged_ms, lengths, data, digest, checksum
)
SELECT
    unnest($1::bigint[]), unnest($2::text[]), unnest($3::text[]), unnest($4::bigint[]),
    unnest($5::bigint[]), unnest($6::bigint[]), unnest($7::bigint[]), unnest($8::bytea[]),
    unnest($9::bytea[]), unnest($10::bytea[]), unnest($11::bigint[])

-- name: commit_part
UPDATE parts AS p SET committed = n.committed
FROM unnest($1::bigint[], $2::text[], $3::text[]) AS n (committed, txn, part)
WHERE p.txn = n.txn AND p.part = n.part AND p.committed IS NULL

-- name: abandoned_parts
-- Parts that no commit used in time.
SELECT txn, part FROM parts WHERE committed IS NULL AND staged_ms <= $1 ORDER BY staged_ms LIMIT $2

-- name: drop_part
DELETE FROM parts AS p USING unnest($1::text[], $2::text[]) AS n (txn, part)
WHERE p.txn = n.txn AND p.part = n.part AND p.committed IS NULL

-- name: drop_chunks
DELETE FROM chunks AS c USING unnest($1::text[], $2::text[]) AS n (txn, part)
WHERE c.txn = n.txn AND c.part = n.part

-- name: used_parts_after
-- Some parts that were committed, in the order of their table.
SELECT txn, part, staged_ms FROM parts
WHERE committed IS NOT NULL AND (txn, part) > ($1, $2) ORDER BY txn, part LIMIT $3

-- name: forget_chunks
-- What is left of the chunks of parts between two places that were staged long ago and committed,
-- where the data of all of them is gone.
DELETE FROM chunks
WHERE (txn, part) > ($1, $2) AND (txn, part) <= ($3, $4)
  AND EXISTS (
    SELECT 1 FROM parts p
    WHERE p.txn = chunks.txn AND p.part = chunks.part AND p.committed IS NOT NULL AND p.staged_ms <= $5
  )
  AND NOT EXISTS (
    SELECT 1 FROM chunks c
    WHERE c.txn = chunks.txn AND c.part = chunks.part AND octet_length(c.data) > 0
  )

-- name: forget_parts
-- Delete those parts themselves: nothing is left of their chunks.
DELETE FROM parts
WHERE (txn, part) > ($1, $2) AND (txn, part) <= ($3, $4) AND committed IS NOT NULL AND staged_ms <= $5
  AND NOT EXISTS (SELECT 1 FROM chunks c WHERE c.txn = parts.txn AND c.part = parts.part)

-- name: next_chunk
-- Chunks in the table count as well, whichever node numbered them.
SELECT greatest(next_chunk, (SELECT COALESCE(max(id), 0) + 1 FROM chunks)) FROM counters

-- name: find_writer
SELECT name, principal, query, epoch, batch, digest, opened_ms, updated_ms
FROM writers WHERE name = $1

-- name: save_writer
INSERT INTO writers (name, principal, query, epoch, batch, digest, opened_ms, updated_ms)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (name) DO UPDATE SET
    principal = excluded.principal, query = excluded.query, epoch = excluded.epoch,
    batch = excluded.batch, digest = excluded.digest, opened_ms = excluded.opened_ms,
    updated_ms = excluded.updated_ms

-- name: forget_writer
DELETE FROM writers WHERE name = $1

-- name: find_writer_batch
SELECT batch, range_after, range_until, digest, published_ms
FROM writer_history WHERE name = $1 AND batch = $2

-- name: save_writer_batch
INSERT INTO writer_history (name, batch, range_after, range_until, digest, published_ms)
VALUES ($1, $2, $3, $4, $5, $6)

-- name: trim_writer_history
-- So many of the newest batches stay.
DELETE FROM writer_history
WHERE name = $1 AND batch <= (
    SELECT batch FROM writer_history WHERE name = $1 ORDER BY batch DESC LIMIT 1 OFFSET $2
)

-- name: drop_writer_history
DELETE FROM writer_history WHERE name = $1

-- name: find_streams
-- Several streams at once, by their paths.
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams WHERE state < 2 AND path = ANY (:paths::text[])

-- name: forks_of
-- The streams that were forked from some of these.
SELECT path FROM streams
WHERE fork IS NOT NULL AND state < 2 AND (fork::json ->> 0)::bigint = ANY (:streams::bigint[])

-- name: find_parts
-- Several parts at once: a column of their transactions, and one of their names.
SELECT p.txn, p.part, p.media_type, p.committed
FROM unnest($1::text[], $2::text[]) AS n (txn, part)
JOIN parts p ON p.txn = n.txn AND p.part = n.part

-- name: chunks_of_parts
SELECT c.txn, c.part, c.id, c.ordinal, c.count, c.size, c.digest
FROM unnest($1::text[], $2::text[]) AS n (txn, part)
JOIN chunks c ON c.txn = n.txn AND c.part = n.part

-- name: count_staged_messages
SELECT COALESCE(sum(c.count), 0)::bigint
FROM unnest($1::text[], $2::text[]) AS n (txn, part)
JOIN chunks c ON c.txn = n.txn AND c.part = n.part

-- name: large_state
SELECT state FROM large_commits WHERE first = $1

-- name: begin_large
INSERT INTO large_commits (first, last, state) VALUES ($1, $2, 0)

-- name: turn_large
UPDATE large_commits SET state = $1 WHERE first = $2

-- name: end_large
DELETE FROM large_commits WHERE first = $1

-- name: save_slice
INSERT INTO large_slices (first, number, carried, content) VALUES ($1, $2, 0, $3)

-- name: next_slice
SELECT number, content FROM large_slices WHERE first = $1 AND carried = $2
ORDER BY number LIMIT 1

-- name: some_slices
SELECT number FROM large_slices WHERE first = $1 ORDER BY number LIMIT $2

-- name: slice_at
SELECT content FROM large_slices WHERE first = $1 AND number = $2

-- name: mark_slice
UPDATE large_slices SET carried = 1 WHERE first = $1 AND number = $2

-- name: drop_slice
DELETE FROM large_slices WHERE first = $1 AND number = $2

-- name: drop_stray_slices
DELETE FROM large_slices AS s
WHERE NOT EXISTS (SELECT 1 FROM large_commits c WHERE c.first = s.first)

-- name: drop_slices
DELETE FROM large_slices WHERE first = $1

-- name: purge_keys
DELETE FROM keys WHERE stream = $1

-- name: find_producer
-- With its recent batches, after what the embedded store has.
SELECT epoch, seq, first, position, updated_ms, principal, claim, recent
FROM producers WHERE stream = $1 AND id = $2

-- name: open_claims_of
SELECT id, principal FROM producers WHERE stream = $1 AND claim = 1

-- name: recent_batches
-- A producer's newest batches, the oldest of them first: each row of the log names the one before.
WITH RECURSIVE chain (depth, previous, version, start_bytes, digest) AS (
    SELECT 1, previous, version, start_bytes, digest FROM log WHERE position = $1
    UNION ALL
    SELECT chain.depth + 1, log.previous, log.version, log.start_bytes, log.digest
    FROM chain JOIN log ON log.position = chain.previous
    WHERE chain.depth < $2
)
SELECT version, start_bytes, digest FROM chain ORDER BY depth DESC

-- name: find_remembered
-- Read what a purge kept of a producer's recent batches when it removed their rows.
SELECT epoch, seq, batches FROM remembered WHERE stream = $1 AND producer = $2

-- name: insert_truncation
INSERT INTO truncations (position, stream, at_ms)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[])

-- name: save_producer
-- The recent batches come last, after what the embedded store has.
INSERT INTO producers (stream, id, epoch, seq, first, position, updated_ms, principal, claim, recent)
SELECT
    unnest($1::bigint[]), unnest($2::text[]), unnest($3::bigint[]), unnest($4::bigint[]),
    unnest($5::bytea[]), unnest($6::bigint[]), unnest($7::bigint[]), unnest($8::text[]),
    unnest($9::bigint[]), unnest($10::bytea[])
ON CONFLICT (stream, id) DO UPDATE SET
    epoch = excluded.epoch, seq = excluded.seq, first = excluded.first,
    position = excluded.position, updated_ms = excluded.updated_ms,
    principal = excluded.principal, claim = excluded.claim, recent = excluded.recent

-- name: expired_streams
-- Streams whose stored deadline has passed; the true one may have been moved in memory since.
SELECT path FROM streams
WHERE state = 0 AND deadline_ms IS NOT NULL AND deadline_ms <= $1 ORDER BY deadline_ms LIMIT $2

-- name: row_at
-- The row that holds the byte at a place of a stream: the last one that starts at or before it.
SELECT l.version, l.start_bytes, l.count, l.size, COALESCE(l.lengths, c.lengths),
       COALESCE(l.data, c.data), CASE WHEN l.chunk IS NULL THEN l.checksum ELSE c.checksum END
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
WHERE l.stream = $1 AND l.kind = 0 AND l.start_bytes <= $2
ORDER BY l.start_bytes DESC LIMIT 1

-- name: joined_rows
-- Whole rows of a stream from one place up to another, joined as they go on the wire.
SELECT sum(size)::bigint, string_agg(data, convert_to($4, 'UTF8'))
FROM (
    SELECT l.size, COALESCE(l.data, (SELECT c.data FROM chunks c WHERE c.id = l.chunk)) AS data
    FROM log l
    WHERE l.stream = $1 AND l.kind = 0 AND l.start_bytes >= $2 AND l.start_bytes < $3
    ORDER BY l.start_bytes
) AS piece

-- name: last_start_below
-- Find where the last row that starts between two places starts and ends, in messages and bytes; and
-- which message the row at the first of these places begins with, if one starts there.
SELECT version, start_bytes, version + count, start_bytes + size, (
    SELECT version FROM log WHERE stream = $1 AND kind = 0 AND start_bytes = $2
)
FROM log
WHERE stream = $1 AND kind = 0 AND start_bytes >= $2 AND start_bytes < $3
ORDER BY start_bytes DESC LIMIT 1

-- name: purgeable_streams
-- Deleted streams whose rows the log no longer has to return.
SELECT id FROM streams WHERE state = 2 AND ended_ms <= $1 ORDER BY ended_ms LIMIT $2

-- name: purge_producers
DELETE FROM producers WHERE stream = $1

-- name: purge_remembered
DELETE FROM remembered WHERE stream = $1

-- name: purge_truncations
DELETE FROM truncations WHERE stream = $1

-- name: purge_stream
DELETE FROM streams WHERE id = $1

-- name: find_secret
SELECT value FROM secrets WHERE name = $1

-- name: save_secret
-- The first one to store a secret wins; the caller reads back which it was.
INSERT INTO secrets (name, value, created_ms) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
