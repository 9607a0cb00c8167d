-- Queries that both databases understand word for word. What differs lies with each store.

-- Writing and counting

-- name: load_counters
SELECT next_position, next_stream, last_ms FROM counters

-- name: count_keys
SELECT count(*) FROM keys

-- name: staged_data
-- The bytes of a chunk that was staged.
SELECT data FROM chunks WHERE id = :id AND txn = :txn AND part = :part

-- name: count_waiting_parts
SELECT count(*) FROM parts WHERE committed IS NULL

-- name: usage_of
-- What a principal holds of each thing.
SELECT resource, CAST(sum(amount) AS bigint) FROM principal_usage WHERE principal = :principal GROUP BY resource
UNION ALL
SELECT resource, CAST(sum(amount) AS bigint) FROM told_usage WHERE principal = :principal GROUP BY resource

-- name: usage
SELECT principal, resource, CAST(sum(amount) AS bigint) FROM (SELECT * FROM principal_usage UNION ALL SELECT * FROM told_usage) AS held
GROUP BY principal, resource HAVING sum(amount) <> 0 ORDER BY principal, resource

-- name: own_mesh
-- Say whose a new mesh is.
UPDATE meshes SET owner = :owner WHERE id = :id

-- name: count_writers
SELECT count(*) FROM writers

-- name: writer_history_before
SELECT batch, range_after, range_until, digest, published_ms FROM writer_history
WHERE name = :name AND batch < :before ORDER BY batch DESC LIMIT :limit

-- name: large_commits
SELECT first, last, state FROM large_commits ORDER BY first

-- name: open_claims
-- How many claims each principal has open; those of deleted streams are over.
SELECT p.principal, count(*) FROM producers p JOIN streams s ON s.id = p.stream
WHERE p.claim = 1 AND s.state = 0 GROUP BY p.principal

-- name: count_live_streams
SELECT count(*) FROM streams WHERE state = 0

-- name: stir
-- A change of no consequence, for the sake of a commit.
UPDATE counters SET id = id

-- Subscriptions

-- name: load_subscriptions
SELECT id, name, config, base_url, created_ms, generation, wake_id, holder, lease_until_ms, attempts,
       next_attempt_ms, snapshot, principal
FROM subscriptions ORDER BY id

-- name: load_partial
SELECT id FROM partial_subscriptions ORDER BY id

-- Lists

-- name: candidate_paths
SELECT path FROM streams
WHERE state < 2 AND path >= :first AND path < :last
ORDER BY path LIMIT :limit

-- name: candidate_streams
-- Streams whose producers come next; the one that the last page ended in comes again.
SELECT path, id FROM streams
WHERE state < 2 AND path >= :first AND path < :last
ORDER BY path LIMIT :limit

-- The log

-- name: head
-- The newest position that may be read, and the newest there is: a large commit holds back what comes
-- behind its first position until it is complete.
SELECT COALESCE((SELECT min(first) FROM large_commits WHERE state < 2), next_position) - 1,
       next_position - 1
FROM counters

-- name: row_over
-- Find where the row starts that a position may lie in.
SELECT position FROM log WHERE position <= :position ORDER BY position DESC LIMIT 1

-- name: one_row
SELECT position, count, size, COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk))
FROM log WHERE position = :position

-- name: distinct_streams
SELECT s.id, s.path, s.content_type FROM streams s
WHERE s.id IN (SELECT DISTINCT stream FROM /*rows*/)

-- name: live_ids
-- Incarnations whose path lies in a range; two queries, because each has an index of its own. The
-- last range ends behind every text (`Connection.after_every_text`).
SELECT id, path FROM streams WHERE state < 2 AND path >= :first AND path < :last LIMIT :limit

-- name: deleted_ids
SELECT id, path FROM streams WHERE state = 2 AND path >= :first AND path < :last LIMIT :limit

-- name: first_row_from
SELECT position, at_ms FROM log WHERE position >= :position ORDER BY position LIMIT 1

-- name: weighed_rows
SELECT position, count, size, COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk))
FROM /*rows*/ ORDER BY position

-- name: buckets
SELECT bucket, rows, bytes FROM log_buckets WHERE bucket BETWEEN :first AND :last ORDER BY bucket

-- name: last_bucket
SELECT COALESCE(max(bucket), -1) FROM log_buckets

-- name: purges_between
SELECT stream, path, first, last, runs FROM purges
WHERE last >= :low AND first <= :high ORDER BY last DESC

-- name: any_purge
-- Whether anything may be gone from a range of the log.
SELECT 1 FROM purges WHERE last >= :low AND first <= :high LIMIT 1

-- Retention

-- name: oldest_truncation
SELECT stream, at_ms FROM truncations ORDER BY position LIMIT 1

-- name: forks
-- All forks that may be read, with what they inherit.
SELECT first_bytes, segments FROM streams WHERE fork IS NOT NULL AND state < 2

-- Consumer groups

-- name: count_groups
SELECT count(*) FROM groups WHERE state = 0 AND name NOT LIKE 'mesh:%'

-- name: deleted_groups
SELECT id FROM groups WHERE state = 1 ORDER BY id LIMIT 1

-- Meshes

-- name: find_mesh
SELECT id, name, state, settings, created_ms FROM meshes
WHERE name = :name AND state < 2

-- name: meshes_after
SELECT id, name, state, settings, created_ms FROM meshes
WHERE state = 0 AND name > :after ORDER BY name LIMIT :limit

-- name: meshes_to_drop
SELECT id, name, state, settings, created_ms FROM meshes WHERE state > 0 ORDER BY id LIMIT 1

-- name: count_meshes
SELECT count(*) FROM meshes WHERE state < 2

-- name: save_mesh
INSERT INTO meshes (id, name, state, settings, created_ms)
VALUES (:id, :name, :state, :settings, :created_ms)
ON CONFLICT (id) DO UPDATE SET state = excluded.state

-- name: drop_mesh
DELETE FROM meshes WHERE id = :id

-- name: members_of_topic
SELECT member FROM topic_members WHERE mesh = :mesh AND topic = :topic ORDER BY member

-- name: topic_members_after
SELECT member, created_ms FROM topic_members
WHERE mesh = :mesh AND topic = :topic AND member > :after ORDER BY member LIMIT :limit

-- name: find_topic_member
SELECT created_ms FROM topic_members WHERE mesh = :mesh AND topic = :topic AND member = :member

-- name: topics_of_member
SELECT topic FROM topic_members WHERE mesh = :mesh AND member = :member ORDER BY topic

-- name: save_topic_member
INSERT INTO topic_members (mesh, topic, member, created_ms)
VALUES (:mesh, :topic, :member, :created_ms)

-- name: drop_topic_member
DELETE FROM topic_members WHERE mesh = :mesh AND topic = :topic AND member = :member

-- name: drop_topic_members
DELETE FROM topic_members WHERE mesh = :mesh AND topic = :topic

-- name: count_streams_between
SELECT count(*) FROM streams WHERE state < 2 AND path >= :first AND path < :last

-- name: count_sends
SELECT count(*) FROM sends

-- name: any_expired_send
SELECT 1 FROM sends WHERE expires_ms IS NOT NULL AND expires_ms <= :now_ms LIMIT 1
