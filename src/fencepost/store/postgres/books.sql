-- Books of streams: closing and opening them, and what groups have left to do on a source.

-- name: save_books
UPDATE streams SET books_closed_at = $1 WHERE id = $2

-- name: last_append_before
-- The last append of a stream that begins before a place.
SELECT l.position, l.version, l.start_bytes, l.count, l.size, COALESCE(l.lengths, c.lengths)
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
WHERE l.stream = $1 AND l.kind = 0 AND l.start_bytes < $2
ORDER BY l.start_bytes DESC LIMIT 1

-- name: every_group
SELECT id, name, settings, start_position, watermark, created_ms, owner, targets_count, parked_count, lanes,
       token_floor
FROM groups WHERE state = 0 ORDER BY name

-- name: leases_of_target
-- The rows of all groups for a target.
SELECT l.group_id, l.target, l.source, l.lane, l.priority, l.at_position, l.work_to, l.waits_from, l.token,
       l.worker, l.lease_until_ms, l.retry, l.lost, l.blocked, l.error, l.failed, l.deferred_until_ms,
       l.replaying, l.updated_ms
FROM groups g JOIN leases l ON l.group_id = g.id AND l.target = $1
WHERE g.state = 0

-- name: waiting_on_source
-- Targets with another name that wait for events of a source, the oldest first.
SELECT l.group_id, l.target, l.source, l.waits_from FROM leases l
WHERE l.source = $1 AND l.at_position < l.work_to AND l.target <> l.source
  AND EXISTS (SELECT 1 FROM groups g WHERE g.id = l.group_id AND g.state = 0)
ORDER BY l.waits_from LIMIT $2

-- name: waiting_on_patterns
-- Between two texts, each source with the oldest wait of each group.
SELECT l.group_id, '', l.source, min(l.waits_from) FROM leases l
WHERE l.source >= $1 AND l.source < $2 AND l.at_position < l.work_to AND l.target <> l.source
  AND EXISTS (SELECT 1 FROM groups g WHERE g.id = l.group_id AND g.state = 0)
GROUP BY l.source, l.group_id

-- name: last_appends_before
-- The same for several streams, each with its place.
SELECT n.stream, n.place, l.position, l.version, l.start_bytes, l.count, l.size, l.lengths
FROM unnest($1::bigint[], $2::bigint[]) AS n (stream, place)
CROSS JOIN LATERAL (
    SELECT r.position, r.version, r.start_bytes, r.count, r.size, COALESCE(r.lengths, c.lengths) AS lengths
    FROM log r LEFT JOIN chunks c ON c.id = r.chunk
    WHERE r.stream = n.stream AND r.kind = 0 AND r.start_bytes < n.place
    ORDER BY r.start_bytes DESC LIMIT 1
) AS l

-- name: leases_of_targets
SELECT l.group_id, l.target, l.source, l.lane, l.priority, l.at_position, l.work_to, l.waits_from, l.token,
       l.worker, l.lease_until_ms, l.retry, l.lost, l.blocked, l.error, l.failed, l.deferred_until_ms,
       l.replaying, l.updated_ms
FROM groups g CROSS JOIN unnest($1::text[]) AS n (target)
JOIN leases l ON l.group_id = g.id AND l.target = n.target
WHERE g.state = 0

-- name: waiting_on_sources
-- So many of each source.
SELECT l.group_id, l.target, l.source, l.waits_from
FROM unnest($1::text[]) AS n (source)
CROSS JOIN LATERAL (
    SELECT r.group_id, r.target, r.source, r.waits_from FROM leases r
    WHERE r.source = n.source AND r.at_position < r.work_to AND r.target <> r.source
      AND EXISTS (SELECT 1 FROM groups g WHERE g.id = r.group_id AND g.state = 0)
    ORDER BY r.waits_from LIMIT $2
) AS l

-- name: waiting_on_all_patterns
-- The same for several pairs of texts.
SELECT l.group_id, '', l.source, min(l.waits_from)
FROM unnest($1::text[], $2::text[]) AS n (low, high)
JOIN leases l ON l.source >= n.low AND l.source < n.high
WHERE l.at_position < l.work_to AND l.target <> l.source
  AND EXISTS (SELECT 1 FROM groups g WHERE g.id = l.group_id AND g.state = 0)
GROUP BY l.source, l.group_id
