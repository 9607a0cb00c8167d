-- Dedupe rows and meshes, many at once.

-- name: find_send
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends WHERE mesh = $1 AND sender = $2 AND client_id = $3

-- name: find_sends
-- Find those of the given sends that have a row.
SELECT s.mesh, s.sender, s.client_id, s.fingerprint, s.kind, s.ref, s.stream, s.messages, s.bytes,
       s.first_seen_ms, s.expires_ms
FROM unnest($1::bigint[], $2::text[], $3::text[]) AS asked (mesh, sender, client_id)
JOIN sends s ON s.mesh = asked.mesh AND s.sender = asked.sender AND s.client_id = asked.client_id

-- name: save_send
INSERT INTO sends (
    mesh, sender, client_id, fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
)
SELECT
    unnest($1::bigint[]), unnest($2::text[]), unnest($3::text[]), unnest($4::bytea[]),
    unnest($5::text[]), unnest($6::text[]), unnest($7::bigint[]), unnest($8::bigint[]),
    unnest($9::bigint[]), unnest($10::bigint[]), unnest($11::bigint[])

-- name: find_meshes
SELECT id, name, state, settings, created_ms FROM meshes
WHERE name = ANY ($1::text[]) AND state < 2

-- name: find_topic_members
SELECT m.mesh, m.topic, m.member
FROM unnest($1::bigint[], $2::text[]) AS asked (mesh, topic)
JOIN topic_members m ON m.mesh = asked.mesh AND m.topic = asked.topic
ORDER BY m.mesh, m.topic, m.member

-- name: sends_after
-- A page of a mesh's rows.
SELECT sender, client_id, fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends WHERE mesh = :mesh AND (sender, client_id) > (:sender, :client_id)
ORDER BY sender, client_id LIMIT :limit

-- name: sweep_sends
-- Some rows whose time is over. Until it is swept a row counts, whatever the time.
DELETE FROM sends WHERE (mesh, sender, client_id) IN (
    SELECT mesh, sender, client_id FROM sends
    WHERE expires_ms IS NOT NULL AND expires_ms <= $1 ORDER BY expires_ms LIMIT $2
)

-- name: purge_sends
-- Some rows of a mesh that is being deleted.
DELETE FROM sends WHERE (mesh, sender, client_id) IN (
    SELECT mesh, sender, client_id FROM sends WHERE mesh = $1 LIMIT $2
)

-- name: find_any_send
-- A row, wherever it is found: for the orphan check.
SELECT fingerprint, kind, ref, stream, messages, bytes, first_seen_ms, expires_ms
FROM sends WHERE mesh = $1 AND sender = $2 AND client_id = $3

-- name: streams_between_paths
SELECT path, id, created_ms, tail_messages, tail_bytes, first_messages, first_bytes FROM streams
WHERE state < 2 AND state = 0 AND path > :after AND path < :last ORDER BY path LIMIT :limit

-- name: stream_at_path
SELECT path, id, created_ms, tail_messages, tail_bytes, first_messages, first_bytes FROM streams
WHERE path = :path AND state < 2 AND state = 0
