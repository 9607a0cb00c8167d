-- Every query of the embedded store.

-- name: save_counters
UPDATE counters SET next_position = ?, next_stream = ?, last_ms = ?

-- name: find_stream
-- The incarnation that a path names now, soft-deleted ones included.
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams WHERE path = ? AND state < 2

-- name: find_stream_by_id
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams WHERE id = ? AND state < 2

-- name: insert_stream
INSERT INTO streams (
    state, updated_ms, deadline_ms, tail_messages, tail_bytes, first_messages, first_bytes, closed,
    closed_by, seq, forks_count, ended_ms, id, path, content_type, created_ms, ttl_s, expires_at_ms,
    fork, segments, retention, owner
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: update_stream
UPDATE streams SET
    state = ?, updated_ms = ?, deadline_ms = ?, tail_messages = ?, tail_bytes = ?, first_messages = ?,
    first_bytes = ?, closed = ?, closed_by = ?, seq = ?, forks_count = ?, ended_ms = ?
WHERE id = ?

-- name: move_tail
-- A stream got messages, and nothing else of it changed: no index and no trigger has these columns.
UPDATE streams SET updated_ms = ?, tail_messages = ?, tail_bytes = ? WHERE id = ?

-- name: insert_log
INSERT INTO log (
    position, stream, kind, start_bytes, version, count, size, at_ms, producer, epoch, producer_seq,
    previous, digest, chunk, lengths, data, checksum
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: find_key
-- A key that is in the index; the newest ones are not, and are known without it.
SELECT digest, start_messages, start_bytes, tail_messages, tail_bytes, closed, position, created_ms,
       answer
FROM keys WHERE id = (
    SELECT id FROM key_places WHERE stream = ? AND principal = ? AND key = ?
)

-- name: save_key
INSERT INTO keys (
    stream, principal, key, digest, start_messages, start_bytes, tail_messages, tail_bytes, closed,
    position, created_ms, expires_ms, answer
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: key_places_after
SELECT stream, principal, key FROM key_places
WHERE (stream, principal, key) > (?, ?, ?) ORDER BY stream, principal, key LIMIT ?

-- name: find_part
SELECT media_type, committed FROM parts WHERE txn = ? AND part = ?

-- name: part_chunks
SELECT id, ordinal, count, size, digest FROM chunks WHERE txn = ? AND part = ? ORDER BY ordinal

-- name: find_chunk
SELECT digest FROM chunks WHERE txn = ? AND part = ? AND ordinal = ?

-- name: find_chunks
SELECT c.txn, c.part, c.ordinal, c.digest
FROM json_each(:chunks) n
CROSS JOIN chunks c
    ON c.txn = n.value ->> 0 AND c.part = n.value ->> 1 AND c.ordinal = n.value ->> 2

-- name: save_part
INSERT INTO parts (txn, part, media_type, staged_ms) VALUES (?, ?, ?, ?)

-- name: save_chunk
INSERT INTO chunks (
    id, txn, part, ordinal, count, size, staged_ms, lengths, data, digest, checksum
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: commit_part
UPDATE parts SET committed = ? WHERE txn = ? AND part = ? AND committed IS NULL

-- name: abandoned_parts
-- Parts that were not committed in time.
SELECT txn, part FROM parts WHERE committed IS NULL AND staged_ms <= ? ORDER BY staged_ms LIMIT ?

-- name: drop_part
DELETE FROM parts WHERE txn = ? AND part = ? AND committed IS NULL

-- name: drop_chunks
DELETE FROM chunks WHERE txn = ? AND part = ?

-- name: used_parts_after
-- Some parts that were committed, in the order of their table.
SELECT txn, part, staged_ms FROM parts
WHERE committed IS NOT NULL AND (txn, part) > (?, ?) ORDER BY txn, part LIMIT ?

-- name: forget_chunks
-- What is left of the chunks of parts between two places that were staged long ago and committed,
-- where the data of all of them is gone.
DELETE FROM chunks
WHERE (txn, part) > (?, ?) AND (txn, part) <= (?, ?)
  AND EXISTS (
    SELECT 1 FROM parts p
    WHERE p.txn = chunks.txn AND p.part = chunks.part AND p.committed IS NOT NULL AND p.staged_ms <= ?
  )
  AND NOT EXISTS (
    SELECT 1 FROM chunks c
    WHERE c.txn = chunks.txn AND c.part = chunks.part AND length(c.data) > 0
  )

-- name: forget_parts
-- Delete those parts themselves: nothing is left of their chunks.
DELETE FROM parts
WHERE (txn, part) > (?, ?) AND (txn, part) <= (?, ?) AND committed IS NOT NULL AND staged_ms <= ?
  AND NOT EXISTS (SELECT 1 FROM chunks c WHERE c.txn = parts.txn AND c.part = parts.part)

-- name: next_chunk
-- Numbers of chunks that are gone may come back: nothing refers to those.
SELECT COALESCE(max(id), 0) + 1 FROM chunks

-- name: find_writer
SELECT name, principal, query, epoch, batch, digest, opened_ms, updated_ms
FROM writers WHERE name = ?

-- name: save_writer
INSERT INTO writers (name, principal, query, epoch, batch, digest, opened_ms, updated_ms)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET
    principal = excluded.principal, query = excluded.query, epoch = excluded.epoch,
    batch = excluded.batch, digest = excluded.digest, opened_ms = excluded.opened_ms,
    updated_ms = excluded.updated_ms

-- name: forget_writer
DELETE FROM writers WHERE name = ?

-- name: find_writer_batch
SELECT batch, range_after, range_until, digest, published_ms
FROM writer_history WHERE name = ?1 AND batch = ?2

-- name: save_writer_batch
INSERT INTO writer_history (name, batch, range_after, range_until, digest, published_ms)
VALUES (?1, ?2, ?3, ?4, ?5, ?6)

-- name: trim_writer_history
-- So many of the newest batches stay.
DELETE FROM writer_history
WHERE name = ?1 AND batch <= (
    SELECT batch FROM writer_history WHERE name = ?1 ORDER BY batch DESC LIMIT 1 OFFSET ?2
)

-- name: drop_writer_history
DELETE FROM writer_history WHERE name = ?1

-- name: find_streams
-- Several streams at once, by their paths.
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams_now WHERE state < 2 AND path IN (SELECT value FROM json_each(:paths))

-- name: forks_of
-- The streams that were forked from some of these.
SELECT path FROM streams
WHERE fork IS NOT NULL AND state < 2 AND fork ->> 0 IN (SELECT value FROM json_each(:streams))

-- name: find_parts
-- Several parts at once, each named by its transaction and itself.
SELECT p.txn, p.part, p.media_type, p.committed
FROM json_each(:parts) n
CROSS JOIN parts p ON p.txn = n.value ->> 0 AND p.part = n.value ->> 1

-- name: chunks_of_parts
SELECT c.txn, c.part, c.id, c.ordinal, c.count, c.size, c.digest
FROM json_each(:parts) n
CROSS JOIN chunks c ON c.txn = n.value ->> 0 AND c.part = n.value ->> 1

-- name: count_staged_messages
SELECT COALESCE(sum(c.count), 0)
FROM json_each(:parts) n
CROSS JOIN chunks c ON c.txn = n.value ->> 0 AND c.part = n.value ->> 1

-- name: large_state
SELECT state FROM large_commits WHERE first = ?

-- name: begin_large
INSERT INTO large_commits (first, last, state) VALUES (?, ?, 0)

-- name: turn_large
UPDATE large_commits SET state = ? WHERE first = ?

-- name: end_large
DELETE FROM large_commits WHERE first = ?

-- name: save_slice
INSERT INTO large_slices (first, number, carried, content) VALUES (?, ?, 0, ?)

-- name: next_slice
SELECT number, content FROM large_slices WHERE first = ? AND carried = ?
ORDER BY number LIMIT 1

-- name: some_slices
SELECT number FROM large_slices WHERE first = ? ORDER BY number LIMIT ?

-- name: slice_at
SELECT content FROM large_slices WHERE first = ? AND number = ?

-- name: mark_slice
UPDATE large_slices SET carried = 1 WHERE first = ? AND number = ?

-- name: drop_slice
DELETE FROM large_slices WHERE first = ? AND number = ?

-- name: drop_stray_slices
DELETE FROM large_slices WHERE first NOT IN (SELECT first FROM large_commits)

-- name: drop_slices
DELETE FROM large_slices WHERE first = ?

-- name: purge_keys
DELETE FROM keys WHERE id IN (SELECT id FROM key_places WHERE stream = ?1)
    OR (id > (SELECT indexed_to FROM key_index) AND stream = ?1)

-- name: find_producer
SELECT epoch, seq, first, position, updated_ms, principal, claim
FROM producers WHERE stream = ? AND id = ?

-- name: open_claims_of
SELECT id, principal FROM producers WHERE stream = ? AND claim = 1

-- name: recent_batches
-- A producer's newest batches, the oldest of them first: each row of the log names the one before.
WITH RECURSIVE chain (depth, previous, version, start_bytes, digest) AS (
    SELECT 1, previous, version, start_bytes, digest FROM log WHERE position = ?1
    UNION ALL
    SELECT chain.depth + 1, log.previous, log.version, log.start_bytes, log.digest
    FROM chain JOIN log ON log.position = chain.previous
    WHERE chain.depth < ?2
)
SELECT version, start_bytes, digest FROM chain ORDER BY depth DESC

-- name: find_remembered
-- Read what a purge kept of a producer's recent batches when it removed their rows.
SELECT epoch, seq, batches FROM remembered WHERE stream = ? AND producer = ?

-- name: insert_truncation
INSERT INTO truncations (position, stream, at_ms) VALUES (?, ?, ?)

-- name: save_producer
INSERT INTO producers (stream, id, epoch, seq, first, position, updated_ms, principal, claim)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    epoch = excluded.epoch, seq = excluded.seq, first = excluded.first,
    position = excluded.position, updated_ms = excluded.updated_ms,
    principal = excluded.principal, claim = excluded.claim

-- name: expired_streams
-- Streams whose stored deadline has passed; the true one may have been moved in memory since.
SELECT path FROM streams
WHERE state = 0 AND deadline_ms IS NOT NULL AND deadline_ms <= ? ORDER BY deadline_ms LIMIT ?

-- name: row_at
-- The row that holds the byte at a place of a stream: the last one that starts at or before it.
SELECT l.version, l.start_bytes, l.count, l.size, COALESCE(l.lengths, c.lengths),
       COALESCE(l.data, c.data), CASE WHEN l.chunk IS NULL THEN l.checksum ELSE c.checksum END
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
WHERE l.stream = ? AND l.kind = 0 AND l.start_bytes <= ?
ORDER BY l.start_bytes DESC LIMIT 1

-- name: joined_rows
-- Whole rows of a stream from one place up to another, joined as they go on the wire. The join happens
-- in C with the interpreter's lock released, which is most of the speed of a catch-up read. Each
-- aggregate costs a tenth of that, and joining the table of chunks as much.
SELECT sum(size), CAST(group_concat(data, ?4) AS BLOB)
FROM (
    SELECT l.size, COALESCE(l.data, (SELECT c.data FROM chunks c WHERE c.id = l.chunk)) AS data
    FROM log l
    WHERE l.stream = ?1 AND l.kind = 0 AND l.start_bytes >= ?2 AND l.start_bytes < ?3
    ORDER BY l.start_bytes
)

-- name: last_start_below
-- Find where the last row that starts between two places starts and ends, in messages and bytes; and
-- which message the row at the first of these places begins with, if one starts there.
SELECT version, start_bytes, version + count, start_bytes + size, (
    SELECT version FROM log WHERE stream = ?1 AND kind = 0 AND start_bytes = ?2
)
FROM log
WHERE stream = ?1 AND kind = 0 AND start_bytes >= ?2 AND start_bytes < ?3
ORDER BY start_bytes DESC LIMIT 1

-- name: purgeable_streams
-- Deleted streams whose rows the log need not keep any more.
SELECT id FROM streams WHERE state = 2 AND ended_ms <= ? ORDER BY ended_ms LIMIT ?

-- name: purge_producers
DELETE FROM producers WHERE stream = ?

-- name: purge_remembered
DELETE FROM remembered WHERE stream = ?

-- name: purge_truncations
DELETE FROM truncations WHERE stream = ?

-- name: purge_stream
DELETE FROM streams WHERE id = ?

-- name: find_secret
SELECT value FROM secrets WHERE name = ?

-- name: save_secret
-- The first one to store a secret wins; the caller reads back which it was.
INSERT INTO secrets (name, value, created_ms) VALUES (?, ?, ?) ON CONFLICT DO NOTHING
