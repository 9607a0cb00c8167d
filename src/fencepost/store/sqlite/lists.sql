-- Lists: pages by key, so that a page costs the same wherever it is. `:last` of a range without an end is
-- a blob, which comes after every text.

-- name: streams_at
-- The first condition is the index's own: without it the planner cannot know that it may be used.
SELECT path, id, content_type, tail_messages, tail_bytes, first_messages, first_bytes, closed,
       created_ms, updated_ms, ttl_s, expires_at_ms, fork ->> 1,
       books_closed_at IS NOT NULL
FROM streams_now
WHERE state < 2 AND state = 0 AND path IN (SELECT value FROM json_each(:paths)) ORDER BY path

-- name: producers_of
-- Producers of some streams, stream by stream and in the order of their ids: that is the order in
-- which the two loops of a CROSS JOIN go, and without a sort the limit ends them early. The newest
-- batch of a producer tells where it is; its row is gone when it was truncated away.
SELECT s.key, p.id, p.epoch, COALESCE(b.seq, p.seq), l.version, l.start_bytes,
       COALESCE(b.at_ms, p.updated_ms)
FROM json_each(:streams) s
CROSS JOIN producers p ON p.stream = s.value
LEFT JOIN batches_behind b
       ON b.stream = p.stream AND b.producer = p.id AND b.epoch = p.epoch AND b.seq > p.seq
LEFT JOIN log l ON l.position = COALESCE(b.position, p.position)
WHERE p.id >= :first AND p.id < :last AND (s.key > 0 OR p.id > :after)
LIMIT :limit

-- name: writers_after
SELECT name, principal, query, epoch, batch, digest, opened_ms, updated_ms FROM writers
WHERE name >= :first AND name < :last AND (:owner IS NULL OR principal = :owner)
ORDER BY name LIMIT :limit

-- name: keys_after
-- The next ones of the index, and the few that are not in it yet.
SELECT s.path, k.stream, k.principal, k.key, k.start_messages, k.start_bytes, k.position,
       k.created_ms, k.expires_ms
FROM (
    SELECT id, stream, principal, key FROM (
        SELECT id, stream, principal, key FROM key_places
        WHERE (stream, principal, key) > (:stream, :principal, :key)
          AND (:owner IS NULL OR principal = :owner)
        ORDER BY stream, principal, key LIMIT :limit
    )
    UNION ALL
    SELECT id, stream, principal, key FROM keys
    WHERE id > (SELECT indexed_to FROM key_index)
      AND (stream, principal, key) > (:stream, :principal, :key)
      AND (:owner IS NULL OR principal = :owner)
    ORDER BY stream, principal, key LIMIT :limit
) n
JOIN keys k ON k.id = n.id
LEFT JOIN streams s ON s.id = k.stream
ORDER BY k.stream, k.principal, k.key
