-- Keys of the embedded store: their index, which is written behind them, and the sweep.

-- name: unindexed_keys
-- The keys that the server keeps in memory, because the index does not have them yet.
SELECT id, stream, principal, key FROM keys
WHERE id > (SELECT indexed_to FROM key_index) ORDER BY id

-- name: find_key_by_id
SELECT digest, start_messages, start_bytes, tail_messages, tail_bytes, closed, position, created_ms,
       answer
FROM keys WHERE id = ? AND stream = ? AND principal = ? AND key = ?

-- name: find_unindexed_key
SELECT digest, start_messages, start_bytes, tail_messages, tail_bytes, closed, position, created_ms,
       answer
FROM keys
WHERE id > (SELECT indexed_to FROM key_index) AND stream = ? AND principal = ? AND key = ?

-- name: last_to_index
-- The last of so many keys that are not in the index yet, null when all are.
SELECT max(id) FROM (
    SELECT id FROM keys WHERE id > (SELECT indexed_to FROM key_index) ORDER BY id LIMIT ?
)

-- name: index_keys
-- Keys go in in the order of the index, so that each of its pages is written once.
INSERT INTO key_places (stream, principal, key, id)
SELECT stream, principal, key, id FROM keys
WHERE id > (SELECT indexed_to FROM key_index) AND id <= ? ORDER BY stream, principal, key

-- name: mark_indexed
UPDATE key_index SET indexed_to = ?

-- name: oldest_key_after
SELECT created_ms, expires_ms FROM keys WHERE id > ? ORDER BY id LIMIT 1

-- name: last_of_keys_after
SELECT max(id) FROM (SELECT id FROM keys WHERE id > ? ORDER BY id LIMIT ?)

-- name: expired_keys_between
SELECT id FROM keys WHERE id > ? AND id <= ? AND expires_ms <= ?

-- name: forget_key
-- A key counts until it is swept, whatever the time.
DELETE FROM keys WHERE id = ? AND expires_ms <= ?
