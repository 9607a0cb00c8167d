-- Every query of `fencepost check`: those of the embedded store, with the same columns and values, and
-- what only servers that share a database have. None of them writes, and all see the same moment.

-- name: tables
SELECT tablename FROM pg_tables WHERE schemaname = ANY (current_schemas(false))

-- name: columns_of
SELECT column_name::text FROM information_schema.columns
WHERE table_name = $1::text AND table_schema = ANY (current_schemas(false))

-- name: rows_in_runs
-- Rows of a stream in some runs of positions, each its first and the one after its last.
SELECT found.position
FROM json_array_elements($2::json) AS r (value)
CROSS JOIN LATERAL (
    SELECT position FROM log
    WHERE position >= (r.value ->> 0)::bigint AND position < (r.value ->> 1)::bigint AND stream = $1
    ORDER BY position LIMIT 1
) AS found

-- name: weights_wrong
-- Stretches of the log that weigh something else than was written down.
SELECT bucket, rows, bytes, rows_found, bytes_found
FROM log_buckets CROSS JOIN LATERAL (
    SELECT COALESCE(sum(count), 0)::bigint AS rows_found,
           COALESCE(sum(size), 0)::bigint AS bytes_found
    FROM log WHERE position >= bucket * $1::bigint AND position < (bucket + 1) * $1::bigint
) AS weighed
WHERE rows_found <> rows OR bytes_found <> bytes

-- name: producers
-- With its recent batches, after what the embedded store has.
SELECT stream, id, epoch, seq, first, position, updated_ms, recent FROM producers ORDER BY stream, id

-- name: remembered
SELECT r.stream, r.producer, r.epoch, r.seq, octet_length(r.batches), p.epoch, p.seq
FROM remembered r LEFT JOIN producers p ON p.stream = r.stream AND p.id = r.producer

-- name: row_before
-- The row of a stream that holds the last byte before a place.
SELECT l.version, l.start_bytes, l.count, l.size, COALESCE(l.lengths, c.lengths)
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
WHERE l.stream = $1 AND l.kind = 0 AND l.start_bytes < $2
ORDER BY l.start_bytes DESC LIMIT 1

-- name: keys
-- Each key with the row that its append began with, the last one before its end, and its marker.
SELECT k.stream, k.key, k.start_messages, k.start_bytes, k.tail_messages, k.tail_bytes, k.closed,
       k.position, first.position, first.version, last.position + last.count - 1,
       last.version + last.count, last.start_bytes + last.size
FROM keys k
LEFT JOIN log first
       ON first.stream = k.stream AND first.kind = 0 AND first.start_bytes = k.start_bytes
LEFT JOIN LATERAL (
    SELECT position, version, count, start_bytes, size FROM log
    WHERE stream = k.stream AND kind = 0 AND start_bytes < k.tail_bytes
    ORDER BY start_bytes DESC LIMIT 1
) AS last ON true
WHERE k.stream <> 0

-- name: chunks
-- Read the rows that have data: a purge leaves only the digest of a row.
SELECT id, txn, part, ordinal, count, size, lengths, data FROM chunks
WHERE octet_length(data) > 0 ORDER BY id

-- name: chunks_used
-- Chunks that are messages: of a part that no commit took, or used more than once.
SELECT c.id, c.txn, c.part, used.rows, p.committed
FROM (SELECT chunk, count(*) AS rows FROM log WHERE chunk IS NOT NULL GROUP BY chunk) AS used
JOIN chunks c ON c.id = used.chunk LEFT JOIN parts p ON p.txn = c.txn AND p.part = c.part
WHERE used.rows > 1 OR p.committed IS NULL

-- name: parts_without_rows
-- Parts that were committed while some of their chunks belong to no message.
SELECT p.txn, p.part, c.id FROM parts p JOIN chunks c ON c.txn = p.txn AND c.part = p.part
WHERE p.committed IS NOT NULL AND octet_length(c.data) > 0
  AND NOT EXISTS (SELECT FROM log WHERE log.chunk = c.id)

-- name: chunks_emptied
-- Chunks whose data is gone although no commit took their part.
SELECT c.id, c.txn, c.part FROM chunks c LEFT JOIN parts p ON p.txn = c.txn AND p.part = c.part
WHERE octet_length(c.data) = 0 AND p.committed IS NULL

-- name: links
-- Cursors with the stream that they belong to, if it is still there. Of the end of a stream the
-- subscriptions hear by following the turns: as long as they have not, the cursor may name it.
WITH unheard AS (
    SELECT DISTINCT unnest(removed) AS stream FROM turns WHERE turn > (SELECT turn FROM followed)
)
SELECT l.subscription, u.id, l.path, CASE WHEN unheard.stream IS NULL THEN l.stream END, s.state,
       s.path, l.acked_messages, l.acked_bytes, s.tail_messages, s.tail_bytes
FROM links l
LEFT JOIN streams s ON s.id = l.stream
LEFT JOIN subscriptions u ON u.id = l.subscription
LEFT JOIN unheard ON unheard.stream = l.stream

-- name: secrets
SELECT name, octet_length(value) FROM secrets

-- name: slices_of
SELECT number, carried, content FROM large_slices WHERE first = $1 ORDER BY number

-- name: rows_at
SELECT count(*) FROM log WHERE position = ANY ($1::bigint[])

-- name: numbers_behind
-- Turns and subscriptions that would be given out again, turns that the subscriptions would never hear of.
SELECT 'turn', counters.turn, newest.turn
FROM counters, (SELECT max(turn) AS turn FROM turns) AS newest WHERE newest.turn > counters.turn
UNION ALL
SELECT 'turn', counters.turn, followed.turn FROM counters, followed WHERE followed.turn > counters.turn
UNION ALL
SELECT 'last_subscription', last_subscription, newest.id
FROM counters, (SELECT max(id) AS id FROM subscriptions) AS newest WHERE newest.id > last_subscription

-- name: large_commits_of_nobody
-- Positions that still hold readers back although the commit that took them is over.
SELECT first, last FROM large_commits
WHERE (SELECT large FROM counters) IS NULL AND state = 0
  AND NOT EXISTS (SELECT FROM large_slices WHERE large_slices.first = large_commits.first)

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
    SELECT split_part(p.txn, chr(31), 1), 'parts', 0, 1 FROM parts p
    WHERE committed IS NULL AND strpos(p.txn, chr(31)) > 0
    UNION ALL
    SELECT split_part(p.txn, chr(31), 1), 'staged_bytes', 0, c.size
    FROM parts p JOIN chunks c ON c.txn = p.txn AND c.part = p.part
    WHERE p.committed IS NULL AND strpos(p.txn, chr(31)) > 0
) AS counted
GROUP BY principal, resource HAVING sum(noted) <> sum(found)
