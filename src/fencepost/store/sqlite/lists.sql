-- Lists: pages by key, so that a page costs the same wherever it is.

-- name: candidate_paths
-- Answered from the index alone.
SELECT path FROM streams
WHERE state < 2 AND path > :after AND path >= :first AND (:last IS NULL OR path < :last)
ORDER BY path LIMIT :limit

-- name: streams_at
SELECT path, id, content_type, tail_messages, tail_bytes, first_messages, first_bytes, closed,
       created_ms, updated_ms, ttl_s, expires_at_ms, fork ->> 1
FROM streams
WHERE state = 0 AND path IN (SELECT value FROM json_each(:paths)) ORDER BY path

-- name: candidate_streams
-- Streams whose producers come next; the one that the last page ended in comes again.
SELECT path, id FROM streams
WHERE state < 2 AND path >= :after AND path >= :first AND (:last IS NULL OR path < :last)
ORDER BY path LIMIT :limit

-- name: producers_of
-- The newest batch of a producer tells where it is; its row is gone when it was truncated away.
SELECT p.id, p.epoch, p.seq, l.version, l.start_bytes, p.updated_ms
FROM producers p LEFT JOIN log l ON l.position = p.position
WHERE p.stream = :stream AND p.id > :after AND p.id >= :first AND (:last IS NULL OR p.id < :last)
ORDER BY p.id LIMIT :limit

-- name: streams_with_producers
SELECT value FROM json_each(:streams)
WHERE EXISTS (SELECT 1 FROM producers WHERE stream = value)

-- name: keys_after
SELECT s.path, k.stream, k.principal, k.key, k.start_messages, k.start_bytes, k.position,
       k.created_ms, k.expires_ms
FROM keys k LEFT JOIN streams s ON s.id = k.stream
WHERE (k.stream, k.principal, k.key) > (:stream, :principal, :key)
ORDER BY k.stream, k.principal, k.key LIMIT :limit
