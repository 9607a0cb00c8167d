-- Every query about subscriptions.

-- name: last_subscription
-- The highest number that an incarnation ever had.
SELECT last_subscription FROM counters WHERE last_subscription > 0

-- name: insert_subscription
-- The number is noted as well: that of a deleted incarnation never comes back.
WITH noted AS (UPDATE counters SET last_subscription = greatest(last_subscription, $1))
INSERT INTO subscriptions (
    id, name, config, base_url, created_ms, generation, wake_id, holder, lease_until_ms, attempts,
    next_attempt_ms, snapshot, principal
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)

-- name: save_wake
UPDATE subscriptions SET
    generation = $1, wake_id = $2, holder = $3, lease_until_ms = $4, attempts = $5,
    next_attempt_ms = $6, snapshot = $7
WHERE id = $8

-- name: delete_subscription
DELETE FROM subscriptions WHERE id = $1

-- name: delete_links
DELETE FROM links WHERE subscription = $1

-- name: begin_partial
-- The number is noted as well, as that of a whole one is.
WITH noted AS (UPDATE counters SET last_subscription = greatest(last_subscription, $1))
INSERT INTO partial_subscriptions (id) VALUES ($1) ON CONFLICT DO NOTHING

-- name: end_partial
DELETE FROM partial_subscriptions WHERE id = $1

-- name: has_links
SELECT 1 FROM links WHERE subscription = $1 LIMIT 1

-- name: delete_some_links
DELETE FROM links WHERE subscription = $1
    AND path IN (SELECT path FROM links WHERE subscription = $1 ORDER BY path LIMIT $2)

-- name: save_link
-- When a link is given several times, the last one counts.
INSERT INTO links (subscription, path, explicit, glob, stream, acked_messages, acked_bytes)
SELECT DISTINCT ON (subscription, path COLLATE "C")
       subscription, path, explicit, glob, stream, acked_messages, acked_bytes
FROM unnest(
    $1::bigint[], $2::text[], $3::boolean[], $4::boolean[], $5::bigint[], $6::bigint[], $7::bigint[]
) WITH ORDINALITY
    AS n (subscription, path, explicit, glob, stream, acked_messages, acked_bytes, ordinal)
ORDER BY subscription, path COLLATE "C", ordinal DESC
ON CONFLICT (subscription, path) DO UPDATE SET
    explicit = excluded.explicit, glob = excluded.glob, stream = excluded.stream,
    acked_messages = excluded.acked_messages, acked_bytes = excluded.acked_bytes

-- name: delete_link
DELETE FROM links WHERE subscription = $1 AND path = $2

-- name: live_streams
-- Live streams whose path lies between two bounds. The index of paths covers all states below 2.
SELECT path, id, tail_messages, tail_bytes FROM streams
WHERE state < 2 AND state = 0 AND path >= $1 AND ($2::text IS NULL OR path < $2)

-- name: load_links
-- All cursors with the tails of their streams. A link whose stream has gone has no tail.
SELECT l.subscription, l.path, l.explicit, l.glob, l.acked_messages, l.acked_bytes, s.id,
       s.tail_messages, s.tail_bytes
FROM links l JOIN subscriptions u ON u.id = l.subscription
LEFT JOIN streams s ON s.id = l.stream AND s.state = 0
ORDER BY l.subscription, l.path
