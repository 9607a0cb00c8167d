-- Lists: pages by key, so that a page costs the same wherever it is. `:last` of a range without an end
-- is a text above all that we keep.

-- name: streams_at
-- The first condition is the index's own: without it the planner cannot know that it may be used.
SELECT path, id, content_type, tail_messages, tail_bytes, first_messages, first_bytes, closed,
       created_ms, updated_ms, ttl_s, expires_at_ms, fork::json ->> 1,
       books_closed_at IS NOT NULL
FROM streams
WHERE state < 2 AND state = 0
  AND path = ANY (ARRAY(SELECT json_array_elements_text(:paths::json)))
ORDER BY path

-- name: producers_of
-- Producers of some streams, stream by stream and in the order of their ids. What is lateral and has
-- a limit of its own can only be gone through for one stream after the other, so they come in the
-- order of the array, and without a sort the limit ends them early. The newest batch of a producer
-- tells where it is; its row is gone when it was truncated away.
SELECT s.ordinal - 1, p.id, p.epoch, p.seq, p.version, p.start_bytes, p.updated_ms
FROM json_array_elements_text(:streams::json) WITH ORDINALITY AS s (stream, ordinal)
CROSS JOIN LATERAL (
    SELECT o.id, o.epoch, o.seq, l.version, l.start_bytes, o.updated_ms
    FROM producers o LEFT JOIN log l ON l.position = o.position
    WHERE o.stream = s.stream::bigint AND o.id >= :first AND o.id < :last
      AND (s.ordinal > 1 OR o.id > :after)
    ORDER BY o.id LIMIT :limit
) AS p
LIMIT :limit

-- name: keys_after
SELECT s.path, k.stream, k.principal, k.key, k.start_messages, k.start_bytes, k.position,
       k.created_ms, k.expires_ms
FROM keys k LEFT JOIN streams s ON s.id = k.stream
WHERE (k.stream, k.principal, k.key) > (:stream, :principal, :key)
  AND (:owner::text IS NULL OR k.principal = :owner)
ORDER BY k.stream, k.principal, k.key LIMIT :limit

-- name: writers_after
SELECT name, principal, query, epoch, batch, digest, opened_ms, updated_ms FROM writers
WHERE name >= :first AND name < :last AND (:owner::text IS NULL OR principal = :owner)
ORDER BY name LIMIT :limit
