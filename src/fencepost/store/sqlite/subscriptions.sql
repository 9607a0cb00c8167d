-- Every query of the embedded store about subscriptions.

-- name: last_subscription
-- The highest number that an incarnation ever had.
SELECT seq FROM sqlite_sequence WHERE name = 'subscriptions'

-- name: insert_subscription
INSERT INTO subscriptions (
    id, name, config, base_url, created_ms, generation, wake_id, holder, lease_until_ms, attempts,
    next_attempt_ms, snapshot, principal
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: save_wake
UPDATE subscriptions SET
    generation = ?, wake_id = ?, holder = ?, lease_until_ms = ?, attempts = ?, next_attempt_ms = ?,
    snapshot = ?
WHERE id = ?

-- name: delete_subscription
DELETE FROM subscriptions WHERE id = ?

-- name: delete_links
DELETE FROM links WHERE subscription = ?

-- name: begin_partial
INSERT INTO partial_subscriptions (id) VALUES (?) ON CONFLICT DO NOTHING

-- name: end_partial
DELETE FROM partial_subscriptions WHERE id = ?

-- name: has_links
SELECT 1 FROM links WHERE subscription = ? LIMIT 1

-- name: delete_some_links
DELETE FROM links WHERE subscription = ?1
    AND path IN (SELECT path FROM links WHERE subscription = ?1 ORDER BY path LIMIT ?2)

-- name: save_link
INSERT INTO links (subscription, path, explicit, glob, stream, acked_messages, acked_bytes)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    explicit = excluded.explicit, glob = excluded.glob, stream = excluded.stream,
    acked_messages = excluded.acked_messages, acked_bytes = excluded.acked_bytes

-- name: delete_link
DELETE FROM links WHERE subscription = ? AND path = ?

-- name: live_streams
-- Live streams whose path lies between two bounds. The index of paths covers all states below 2.
SELECT path, id, tail_messages, tail_bytes FROM streams_now
WHERE state < 2 AND state = 0 AND path >= ?1 AND (?2 IS NULL OR path < ?2)

-- name: load_links
-- All cursors with the tails of their streams. A link whose stream has gone has no tail.
SELECT l.subscription, l.path, l.explicit, l.glob, l.acked_messages, l.acked_bytes, s.id,
       max(s.tail_messages, COALESCE(b.tail_messages, 0)),
       max(s.tail_bytes, COALESCE(b.tail_bytes, 0))
FROM links l
JOIN subscriptions u ON u.id = l.subscription
LEFT JOIN streams s ON s.id = l.stream AND s.state = 0
LEFT JOIN tails_behind b ON b.stream = s.id
ORDER BY l.subscription, l.path
