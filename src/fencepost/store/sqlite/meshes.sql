-- Dedupe rows of the embedded store: their index, which is written behind them, and the sweep.

-- name: find_send
-- A row that is in the index; the newest ones are not, and are known without it.
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends WHERE id = (
    SELECT id FROM send_places WHERE mesh = ? AND sender = ? AND client_id = ?
)

-- name: save_send
INSERT INTO sends (
    mesh, sender, client_id, fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: unindexed_sends
SELECT id, mesh, sender, client_id FROM sends
WHERE id > (SELECT indexed_to FROM send_index) ORDER BY id

-- name: find_send_by_id
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends WHERE id = ? AND mesh = ? AND sender = ? AND client_id = ?

-- name: find_unindexed_send
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends
WHERE id > (SELECT indexed_to FROM send_index) AND mesh = ? AND sender = ? AND client_id = ?

-- name: send_places_after
SELECT mesh, sender, client_id FROM send_places
WHERE (mesh, sender, client_id) > (?, ?, ?) ORDER BY mesh, sender, client_id LIMIT ?

-- name: last_send_to_index
SELECT max(id) FROM (
    SELECT id FROM sends WHERE id > (SELECT indexed_to FROM send_index) ORDER BY id LIMIT ?
)

-- name: index_sends
INSERT INTO send_places (mesh, sender, client_id, id)
SELECT mesh, sender, client_id, id FROM sends
WHERE id > (SELECT indexed_to FROM send_index) AND id <= ? ORDER BY mesh, sender, client_id

-- name: mark_sends_indexed
UPDATE send_index SET indexed_to = ?

-- name: sends_after
-- A page of a mesh's rows: the next ones of the index, and the few that are not in it yet.
SELECT k.sender, k.client_id, k.fingerprint, k.kind, k.ref, k.stream, k.messages, k.bytes,
       k.first_seen_ms, k.expires_ms
FROM (
    SELECT id, sender, client_id FROM (
        SELECT id, sender, client_id FROM send_places
        WHERE mesh = :mesh AND (sender, client_id) > (:sender, :client_id)
        ORDER BY sender, client_id LIMIT :limit
    )
    UNION ALL
    SELECT id, sender, client_id FROM sends
    WHERE id > (SELECT indexed_to FROM send_index) AND mesh = :mesh
      AND (sender, client_id) > (:sender, :client_id)
    ORDER BY sender, client_id LIMIT :limit
) n
JOIN sends k ON k.id = n.id
ORDER BY k.sender, k.client_id

-- name: sweep_sends
-- Some rows whose time is over. Until it is swept a row counts, whatever the time.
DELETE FROM sends WHERE id IN (
    SELECT id FROM sends WHERE expires_ms IS NOT NULL AND expires_ms <= ? ORDER BY expires_ms LIMIT ?
)

-- name: purge_sends
-- Some rows of a mesh that is being deleted.
DELETE FROM sends WHERE id IN (
    SELECT id FROM (SELECT id FROM send_places WHERE mesh = ?1 LIMIT ?2)
    UNION ALL
    SELECT id FROM (
        SELECT id FROM sends WHERE id > (SELECT indexed_to FROM send_index) AND mesh = ?1 LIMIT ?2
    )
)

-- name: find_any_send
-- A row, in the index or not: for the orphan check.
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends WHERE id = (
    SELECT id FROM send_places WHERE mesh = ?1 AND sender = ?2 AND client_id = ?3
)
UNION ALL
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends
WHERE id > (SELECT indexed_to FROM send_index) AND mesh = ?1 AND sender = ?2 AND client_id = ?3

-- name: streams_between_paths
SELECT path, id, created_ms, tail_messages, tail_bytes, first_messages, first_bytes FROM streams_now
WHERE state < 2 AND state = 0 AND path > :after AND path < :last ORDER BY path LIMIT :limit

-- name: stream_at_path
-- The tail is that of the row, or the end of the last append, which may be newer.
SELECT path, id, created_ms, max(tail_messages, COALESCE((
           SELECT l.version + l.count FROM log l WHERE l.stream = s.id AND l.kind = 0
           ORDER BY l.start_bytes DESC LIMIT 1
       ), 0)), max(tail_bytes, COALESCE((
           SELECT l.start_bytes + l.size FROM log l WHERE l.stream = s.id AND l.kind = 0
           ORDER BY l.start_bytes DESC LIMIT 1
       ), 0)), first_messages, first_bytes
FROM streams s
WHERE path = :path AND state < 2 AND state = 0
