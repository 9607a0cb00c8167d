-- Every query of `fencepost check`. They only read, and each walks its tables once.

-- name: tables
SELECT name FROM sqlite_schema WHERE type = 'table'

-- name: columns_of
SELECT name FROM pragma_table_info(?1)

-- name: rows_in_runs
-- Rows of a stream in some runs of positions, each its first and the one after its last.
SELECT l.position
FROM json_each(?2) AS r CROSS JOIN log AS l
WHERE l.position >= r.value ->> 0 AND l.position < r.value ->> 1 AND l.stream = ?1

-- name: weights_wrong
-- Stretches of the log that weigh something else than was written down.
SELECT b.bucket, b.rows, b.bytes, COALESCE(sum(l.count), 0) AS rows_found,
       COALESCE(sum(l.size), 0) AS bytes_found
FROM log_buckets b
LEFT JOIN log l ON l.position >= b.bucket * ?1 AND l.position < (b.bucket + 1) * ?1
GROUP BY b.bucket HAVING rows_found <> b.rows OR bytes_found <> b.bytes

-- name: producers
SELECT stream, id, epoch, seq, first, position, updated_ms FROM producers ORDER BY stream, id

-- name: written_to
SELECT written_to FROM behind

-- name: tails_behind
SELECT stream, tail_messages, tail_bytes FROM tails_behind

-- name: batches_behind
SELECT stream, producer, epoch, seq, position, at_ms FROM batches_behind

-- name: remembered
SELECT r.stream, r.producer, r.epoch, r.seq, length(r.batches), p.epoch, p.seq
FROM remembered r LEFT JOIN producers p ON p.stream = r.stream AND p.id = r.producer

-- name: row_before
-- The row of a stream that holds the last byte before a place.
SELECT l.version, l.start_bytes, l.count, l.size, COALESCE(l.lengths, c.lengths)
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
WHERE l.stream = ? AND l.kind = 0 AND l.start_bytes < ?
ORDER BY l.start_bytes DESC LIMIT 1

-- name: keys
-- Each key with the row that its append began with, the last one before its end, and its marker.
SELECT k.stream, k.key, k.start_messages, k.start_bytes, k.tail_messages, k.tail_bytes, k.closed,
       k.position, first.position, first.version, last.position + last.count - 1,
       last.version + last.count, last.start_bytes + last.size
FROM keys k
LEFT JOIN log first
       ON first.stream = k.stream AND first.kind = 0 AND first.start_bytes = k.start_bytes
LEFT JOIN log last
       ON last.stream = k.stream AND last.kind = 0 AND last.start_bytes = (
           SELECT max(start_bytes) FROM log
           WHERE stream = k.stream AND kind = 0 AND start_bytes < k.tail_bytes
       )
WHERE k.stream <> 0

-- name: keys_used_twice
SELECT stream, key, count(*) FROM keys GROUP BY stream, principal, key HAVING count(*) > 1

-- name: keys_without_place
-- Keys that their index should show, by the number to which it is written, and does not.
SELECT k.stream, k.key FROM keys k
LEFT JOIN key_places p ON p.stream = k.stream AND p.principal = k.principal AND p.key = k.key
WHERE k.id <= (SELECT indexed_to FROM key_index) AND p.id IS NOT k.id

-- name: places_without_key
SELECT p.stream, p.key, p.id FROM key_places p LEFT JOIN keys k ON k.id = p.id
WHERE k.id IS NULL OR p.id > (SELECT indexed_to FROM key_index)
   OR (k.stream, k.principal, k.key) <> (p.stream, p.principal, p.key)

-- name: sends_used_twice
SELECT mesh, sender, client_id, count(*) FROM sends GROUP BY mesh, sender, client_id HAVING count(*) > 1

-- name: sends_without_place
-- Dedupe rows that their index should show, by the number to which it is written, and does not.
SELECT s.mesh, s.sender, s.client_id FROM sends s
LEFT JOIN send_places p ON p.mesh = s.mesh AND p.sender = s.sender AND p.client_id = s.client_id
WHERE s.id <= (SELECT indexed_to FROM send_index) AND p.id IS NOT s.id

-- name: places_without_send
SELECT p.mesh, p.sender, p.client_id, p.id FROM send_places p LEFT JOIN sends s ON s.id = p.id
WHERE s.id IS NULL OR p.id > (SELECT indexed_to FROM send_index)
   OR (s.mesh, s.sender, s.client_id) <> (p.mesh, p.sender, p.client_id)

-- name: chunks
-- Read the rows that have data: a purge leaves only the digest of a row.
SELECT id, txn, part, ordinal, count, size, lengths, data FROM chunks
WHERE length(data) > 0 ORDER BY id

-- name: chunks_used
-- Chunks that are messages: of a part that no commit took, or used more than once.
SELECT c.id, c.txn, c.part, count(*), p.committed
FROM log l JOIN chunks c ON c.id = l.chunk LEFT JOIN parts p ON p.txn = c.txn AND p.part = c.part
WHERE l.chunk IS NOT NULL
GROUP BY c.id HAVING count(*) > 1 OR p.committed IS NULL

-- name: parts_without_rows
-- Parts that were committed while some of their chunks are in no row of the log.
SELECT p.txn, p.part, c.id FROM parts p JOIN chunks c ON c.txn = p.txn AND c.part = p.part
WHERE p.committed IS NOT NULL AND length(c.data) > 0
  AND c.id NOT IN (SELECT chunk FROM log WHERE chunk IS NOT NULL)

-- name: chunks_emptied
-- Chunks whose data is gone although no commit took their part.
SELECT c.id, c.txn, c.part FROM chunks c LEFT JOIN parts p ON p.txn = c.txn AND p.part = c.part
WHERE length(c.data) = 0 AND p.committed IS NULL

-- name: links
-- Cursors with the stream that they belong to, if it is still there.
SELECT l.subscription, u.id, l.path, l.stream, s.state, s.path, l.acked_messages, l.acked_bytes,
       s.tail_messages, s.tail_bytes
FROM links l
LEFT JOIN streams s ON s.id = l.stream
LEFT JOIN subscriptions u ON u.id = l.subscription

-- name: secrets
SELECT name, length(value) FROM secrets

-- name: slices_of
SELECT number, carried, content FROM large_slices WHERE first = ? ORDER BY number

-- name: rows_at
SELECT count(*) FROM log WHERE position IN (SELECT value FROM json_each(?))

-- name: usage_wrong
-- What principals hold by the counts of the triggers, and by the rows.
SELECT principal, resource, sum(noted), sum(found) FROM (
    SELECT principal, resource, amount AS noted, 0 AS found FROM principal_usage
    UNION ALL SELECT owner, 'streams', 0, 1 FROM streams WHERE owner <> '' AND state < 2
    UNION ALL SELECT principal, 'producers', 0, 1 FROM producers WHERE principal <> ''
    UNION ALL SELECT principal, 'keys', 0, 1 FROM keys WHERE principal <> ''
    UNION ALL SELECT principal, 'writers', 0, 1 FROM writers WHERE principal <> ''
    UNION ALL SELECT principal, 'subscriptions', 0, 1 FROM subscriptions WHERE principal <> ''
    UNION ALL SELECT owner, 'meshes', 0, 1 FROM meshes WHERE owner <> ''
    UNION ALL
    SELECT owner, 'groups', 0, 1 FROM groups
    WHERE owner <> '' AND state = 0 AND name NOT LIKE 'mesh:%'
    UNION ALL
    SELECT owner, 'targets', 0, targets_count FROM groups
    WHERE owner <> '' AND state = 0 AND name NOT LIKE 'mesh:%'
    UNION ALL
    SELECT owner, 'parked_events', 0, parked_count FROM groups
    WHERE owner <> '' AND state = 0 AND name NOT LIKE 'mesh:%'
    UNION ALL
    SELECT substr(p.txn, 1, instr(p.txn, char(31)) - 1), 'parts', 0, 1 FROM parts p
    WHERE committed IS NULL AND instr(p.txn, char(31)) > 0
    UNION ALL
    SELECT substr(p.txn, 1, instr(p.txn, char(31)) - 1), 'staged_bytes', 0, c.size
    FROM parts p JOIN chunks c ON c.txn = p.txn AND c.part = p.part
    WHERE p.committed IS NULL AND instr(p.txn, char(31)) > 0
) AS counted
GROUP BY principal, resource HAVING sum(noted) <> sum(found)
