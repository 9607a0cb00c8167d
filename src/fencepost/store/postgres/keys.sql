-- The sweep of keys: here they have an index by which they expire, which the embedded store has not.

-- name: any_expired_key
SELECT 1 FROM keys WHERE expires_ms IS NOT NULL AND expires_ms <= $1 LIMIT 1

-- name: sweep_keys
-- Some keys whose time is over. Until it is swept a key counts, whatever the time.
DELETE FROM keys WHERE (stream, principal, key) IN (
    SELECT stream, principal, key FROM keys
    WHERE expires_ms IS NOT NULL AND expires_ms <= $1 ORDER BY expires_ms LIMIT $2
)
